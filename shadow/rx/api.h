/* Receive ports: DPDK ethdev ports that feed a receive core from a thread of their own.
 *
 * Python reads this file too (cffi), after reassembly/api.h: only plain declarations.
 */
#ifndef CHECKMATE_RX_API_H
#define CHECKMATE_RX_API_H

#include "../reassembly/api.h"

#pragma GCC visibility push(default)

struct ckm_ports;

struct ckm_port_config {
    const char *name;  /* network interface, or PCI address with devargs */
    const char *netns; /* path of the network namespace that the interface is in; NULL: this process's */
    uint32_t mtu;      /* largest IP packet that the port must take */
    uint32_t ring_frames;
    uint8_t pci; /* name is devargs of a PCI device (for example mlx5), not an interface */
};

/* Opens the ports and starts the receive thread. NULL with the reason in error. EAL is set up at the first call
 * in a process and stays; memory_mb and huge_pages count then only. */
struct ckm_ports *ckm_ports_open(struct ckm_core *core, const struct ckm_port_config *ports, uint32_t n,
                                 uint32_t memory_mb, int huge_pages, char *error, size_t error_size);
void ckm_ports_close(struct ckm_ports *ports);

#pragma GCC visibility pop

#endif
