/* What the receive core has to say, in order, until it is polled for. Bounded: damage beyond the bound is told of
 * as one event that names nothing. */
#ifndef CHECKMATE_REASSEMBLY_EVENTS_H
#define CHECKMATE_REASSEMBLY_EVENTS_H

#include "api.h"

struct ckm_event_node {
    struct ckm_event_node *next;
    struct ckm_event event;
};

struct ckm_events {
    struct ckm_event_node *first, **end; /* end: NULL in an empty, never used queue */
    uint32_t damages;                    /* queued */
    uint64_t lost;
    uint32_t lost_incarnation;
};

/* Queues a copy. Returns -1 when it had to be dropped (and was counted as lost). */
int ckm_events_put(struct ckm_events *events, const struct ckm_event *event);
/* 1 when out was filled in. */
int ckm_events_get(struct ckm_events *events, struct ckm_event *out);
int ckm_events_waiting(const struct ckm_events *events);
void ckm_events_clear(struct ckm_events *events);

#endif
