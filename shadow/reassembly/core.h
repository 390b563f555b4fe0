/* The receive core's state; everything in it is guarded by its lock. */
#ifndef CHECKMATE_REASSEMBLY_CORE_H
#define CHECKMATE_REASSEMBLY_CORE_H

#include <pthread.h>

#include "flow.h"

struct ckm_group {
    struct ckm_core *core;
    uint16_t number; /* ckm_frame.group */
    uint32_t incarnation;
    uint64_t horizon;        /* newest iteration that may be seen */
    uint64_t late_iteration; /* that damage was last raised for because it came too late */
    struct ckm_events events;
    struct ckm_ops ops;
    struct ckm_layout *layouts; /* groups may cut operations of the same signature differently */
    pthread_cond_t event;
};

struct ckm_core {
    pthread_mutex_t lock;
    struct ckm_core_config config;
    struct ckm_counters counters;
    struct ckm_pool pool;
    struct ckm_flows flows;
    int freed; /* a buffer or a set became free since the flows were last looked at */
    uint32_t ngroups;
    struct ckm_group groups[];
};

#endif
