#include "events.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#define MAX_DAMAGES 1024u

int ckm_events_put(struct ckm_events *events, const struct ckm_event *event)
{
    int damage = event->kind == CKM_EVENT_DAMAGE;
    struct ckm_event_node *node = damage && events->damages >= MAX_DAMAGES ? NULL : malloc(sizeof *node);
    if (!node) {
        events->lost++;
        events->lost_incarnation = event->incarnation;
        return -1;
    }
    *node = (struct ckm_event_node){.event = *event};
    if (!events->first)
        events->end = &events->first;
    *events->end = node;
    events->end = &node->next;
    events->damages += damage;
    return 0;
}

static void describe_lost(struct ckm_events *events, struct ckm_event *out)
{
    *out = (struct ckm_event){.kind = CKM_EVENT_DAMAGE, .incarnation = events->lost_incarnation};
    snprintf(out->reason, sizeof out->reason, "%" PRIu64 " events were dropped: they were not polled for in time",
             events->lost);
    snprintf(out->where, sizeof out->where, "unknown");
    events->lost = 0;
}

int ckm_events_get(struct ckm_events *events, struct ckm_event *out)
{
    struct ckm_event_node *node = events->first;
    if (!node) {
        if (!events->lost)
            return 0;
        describe_lost(events, out);
        return 1;
    }
    *out = node->event;
    events->first = node->next;
    events->damages -= out->kind == CKM_EVENT_DAMAGE;
    free(node);
    return 1;
}

int ckm_events_waiting(const struct ckm_events *events)
{
    return events->first || events->lost;
}

void ckm_events_clear(struct ckm_events *events)
{
    struct ckm_event event;
    while (ckm_events_get(events, &event))
        ;
}
