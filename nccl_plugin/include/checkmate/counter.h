/* One entry of the socket map: what the plugin and the BPF program that writes the counter option tell each
 * other about a tagged connection. Both sides include this file.
 */
#ifndef CHECKMATE_COUNTER_H
#define CHECKMATE_COUNTER_H

#include <stdint.h>

enum ckm_counter_state {
    CKM_COUNTER_WANTED = 1, /* set by the plugin, before connect() */
    CKM_COUNTER_ARMED = 2,  /* set by the program once connected: every payload packet has the option */
};

struct ckm_counter {
    uint32_t base;  /* counter of the first payload byte */
    uint32_t value; /* what the option carries: counter = TCP sequence number + value (mod 2^32) */
    uint32_t state; /* enum ckm_counter_state */
};

#endif
