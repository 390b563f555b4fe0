/* How the ranks of the data-parallel communicator are spread over hosts: CHECKMATE_HOST_RANKS. */
#ifndef CHECKMATE_HOSTS_H
#define CHECKMATE_HOSTS_H

#include <stdint.h>

/* Ranks on the host of rank 0 in a communicator of `nranks`: those below this number, at most UINT8_MAX or all. 0, not
 * known: the variable adds up to another number of ranks, or is not usable, which is logged. */
uint32_t ckm_first_host_ranks(uint32_t nranks);

#endif
