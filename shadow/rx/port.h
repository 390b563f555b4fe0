/* One DPDK receive port with one queue. Use from a receive thread that entered EAL. */
#ifndef CHECKMATE_RX_PORT_H
#define CHECKMATE_RX_PORT_H

#include <rte_mempool.h>

#include "api.h"

struct ckm_port {
    uint16_t id;
    int is_open;
    char name[64];    /* as configured */
    char device[32];  /* of a virtual device; empty for PCI */
    int fd;           /* of the driver's packet socket; -1: can't be waited on */
    uint64_t imissed; /* the driver's drop counter when last read */
};

/* Bytes of packet data that a buffer must have room for at this MTU. */
uint32_t ckm_port_room(uint32_t mtu);
/* Opens and starts; -1 with the reason in error. */
int ckm_port_open(struct ckm_port *port, const struct ckm_port_config *config, struct rte_mempool *pool, char *error,
                  size_t error_size);
void ckm_port_close(struct ckm_port *port);
/* Packets dropped for want of room since the last call. */
uint64_t ckm_port_drops(struct ckm_port *port);

#endif
