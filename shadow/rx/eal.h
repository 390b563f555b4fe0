/* DPDK's environment: set up once in a process, by whichever receive thread comes first. */
#ifndef CHECKMATE_RX_EAL_H
#define CHECKMATE_RX_EAL_H

#include "api.h"

/* Call from a receive thread: sets up DPDK, or registers the thread when that was done before. -1 with the reason
 * in error. */
int ckm_eal_enter(const struct ckm_port_config *ports, uint32_t n, uint32_t memory_mb, int huge_pages, char *error,
                  size_t error_size);
void ckm_eal_leave(void);

#endif
