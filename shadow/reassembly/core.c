#include "core.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define CACHE_LINE 64u

uint64_t ckm_now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000u + (uint64_t)now.tv_nsec / 1000u;
}

static void init_group(struct ckm_group *group, struct ckm_core *core, uint16_t number)
{
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&group->event, &monotonic);
    pthread_condattr_destroy(&monotonic);
    group->core = core;
    group->number = number;
    group->horizon = UINT64_MAX;
}

struct ckm_core *ckm_core_create(const struct ckm_core_config *config, const uint16_t *numbers, uint32_t ngroups)
{
    struct ckm_core *core = calloc(1, sizeof *core + ngroups * sizeof *core->groups);
    if (!core)
        return NULL;
    pthread_mutex_init(&core->lock, NULL);
    core->config = *config;
    core->pool.limit = config->pool_bytes;
    core->ngroups = ngroups;
    for (uint32_t i = 0; i < ngroups; i++)
        init_group(&core->groups[i], core, numbers[i]);
    return core;
}

void ckm_core_destroy(struct ckm_core *core)
{
    ckm_flows_free(core);
    for (struct ckm_group *group = core->groups; group < core->groups + core->ngroups; group++) {
        ckm_ops_free(group);
        ckm_layouts_clear(&group->layouts);
        ckm_events_clear(&group->events);
        pthread_cond_destroy(&group->event);
    }
    ckm_pool_free(&core->pool);
    pthread_mutex_destroy(&core->lock);
    free(core);
}

struct ckm_group *ckm_core_group(struct ckm_core *core, uint32_t index)
{
    return &core->groups[index];
}

/* After anything that may have freed a set or raised an event; unlocks. */
static void settle_and_unlock(struct ckm_core *core, uint64_t now_us)
{
    ckm_flows_retry(core, now_us);
    for (struct ckm_group *group = core->groups; group < core->groups + core->ngroups; group++)
        if (ckm_events_waiting(&group->events))
            pthread_cond_signal(&group->event);
    pthread_mutex_unlock(&core->lock);
}

static void feed_one(struct ckm_core *core, const uint8_t *packet, uint32_t length, uint64_t now_us)
{
    struct ckm_segment segment;
    switch (ckm_packet_parse(packet, length, core->config.dscp, &segment)) {
    case CKM_PACKET_COPY:
        core->counters.packets++;
        core->counters.bytes += segment.length;
        ckm_flows_segment(core, &segment, now_us);
        return;
    case CKM_PACKET_OTHER:
        core->counters.other++;
        return;
    case CKM_PACKET_MALFORMED:
        core->counters.malformed++;
        return;
    case CKM_PACKET_TRUNCATED:
        core->counters.truncated++;
        return;
    }
}

/* Brings the next packet in while the present one is worked on. */
static void prefetch(const uint8_t *packet, uint32_t length)
{
    for (uint32_t at = 0; at < length; at += CACHE_LINE)
        __builtin_prefetch(packet + at);
}

void ckm_core_feed(struct ckm_core *core, const uint8_t *const *packets, const uint32_t *lengths, uint32_t n,
                   uint64_t now_us)
{
    pthread_mutex_lock(&core->lock);
    for (uint32_t i = 0; i < n; i++) {
        if (i + 1 < n)
            prefetch(packets[i + 1], lengths[i + 1]);
        feed_one(core, packets[i], lengths[i], now_us);
    }
    settle_and_unlock(core, now_us);
}

uint64_t ckm_core_tick(struct ckm_core *core, uint64_t now_us)
{
    pthread_mutex_lock(&core->lock);
    uint64_t next = ckm_flows_tick(core, now_us);
    settle_and_unlock(core, now_us);
    return next;
}

void ckm_core_note_idle(struct ckm_core *core, uint64_t drops)
{
    pthread_mutex_lock(&core->lock);
    core->counters.driver_drops += drops;
    core->counters.wakeups++;
    pthread_mutex_unlock(&core->lock);
}

void ckm_core_report(struct ckm_core *core, const char *reason, const char *where)
{
    pthread_mutex_lock(&core->lock);
    for (struct ckm_group *group = core->groups; group < core->groups + core->ngroups; group++)
        ckm_damage(group, group->incarnation, NULL, NULL, reason, where);
    settle_and_unlock(core, ckm_now_us());
}

static struct timespec deadline_after(uint64_t timeout_us)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    uint64_t ns = (uint64_t)at.tv_nsec + timeout_us % 1000000u * 1000u;
    at.tv_sec += (time_t)(timeout_us / 1000000u + ns / 1000000000u);
    at.tv_nsec = (long)(ns % 1000000000u);
    return at;
}

int ckm_group_poll(struct ckm_group *group, struct ckm_event *out, int max, uint64_t timeout_us)
{
    struct timespec deadline = deadline_after(timeout_us);
    int n = 0;
    pthread_mutex_lock(&group->core->lock);
    while (!ckm_events_waiting(&group->events))
        if (pthread_cond_timedwait(&group->event, &group->core->lock, &deadline))
            break;
    while (n < max && ckm_events_get(&group->events, &out[n]))
        n++;
    pthread_mutex_unlock(&group->core->lock);
    return n;
}

int ckm_group_release(struct ckm_group *group, uint64_t op)
{
    pthread_mutex_lock(&group->core->lock);
    int result = ckm_ops_release(group, op);
    settle_and_unlock(group->core, ckm_now_us());
    return result;
}

void ckm_group_set_incarnation(struct ckm_group *group, uint32_t incarnation)
{
    pthread_mutex_lock(&group->core->lock);
    if (incarnation != group->incarnation) {
        ckm_ops_reset(group);
        ckm_flows_reset(group);
        group->incarnation = incarnation;
        group->late_iteration = 0;
    }
    settle_and_unlock(group->core, ckm_now_us());
}

void ckm_group_expect(struct ckm_group *group, uint64_t iteration)
{
    pthread_mutex_lock(&group->core->lock);
    group->horizon = iteration;
    pthread_mutex_unlock(&group->core->lock);
}

void ckm_group_discard(struct ckm_group *group, uint64_t iteration)
{
    pthread_mutex_lock(&group->core->lock);
    ckm_ops_discard(group, iteration);
    settle_and_unlock(group->core, ckm_now_us());
}

static size_t describe_incomplete(const struct ckm_group *group, uint64_t iteration, char *out, size_t size)
{
    size_t used = 0;
    int seen = 0;
    for (const struct ckm_op *op = group->ops.first; op; op = op->next) {
        if (op->incarnation != group->incarnation || op->iteration != iteration)
            continue;
        seen = 1;
        if (op->state != CKM_OP_FILLING && op->state != CKM_OP_DAMAGED)
            continue;
        ckm_append(out, size, &used, "%s", used ? "\n" : "");
        ckm_op_describe_missing(op, out, size, &used);
    }
    if (!seen && iteration + group->core->config.sets > group->ops.newest)
        ckm_append(out, size, &used, "iteration %" PRIu64 ": nothing has arrived", iteration);
    if (used)
        ckm_flows_describe(group, out, size, &used);
    return used;
}

int ckm_group_incomplete(struct ckm_group *group, uint32_t incarnation, uint64_t iteration, char *out, size_t size)
{
    if (size)
        out[0] = 0;
    pthread_mutex_lock(&group->core->lock);
    size_t used = incarnation == group->incarnation ? describe_incomplete(group, iteration, out, size) : 0;
    pthread_mutex_unlock(&group->core->lock);
    return (int)used;
}

void ckm_core_counters(struct ckm_core *core, struct ckm_counters *out)
{
    pthread_mutex_lock(&core->lock);
    *out = core->counters;
    out->pool_used = core->pool.used;
    pthread_mutex_unlock(&core->lock);
}
