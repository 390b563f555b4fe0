/* Operations: their memory, their share for each channel, where their slices live. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine.h"

static bool is_p2p(const struct ckm_ring_op *op)
{
    return op->task.func >= CKM_RING_SEND;
}

static uint32_t count_in(const struct ckm_ring *ring, int func)
{
    return func == CKM_RING_REDUCESCATTER ? ring->config.nranks : func == CKM_RING_RECV ? 0 : 1;
}

static uint32_t count_out(const struct ckm_ring *ring, const struct ckm_ring_task *task)
{
    if (task->func == CKM_RING_ALLGATHER)
        return ring->config.nranks;
    bool none =
        task->func == CKM_RING_SEND || (task->func == CKM_RING_REDUCE && (uint32_t)task->root != ring->config.rank);
    return none ? 0 : 1;
}

static void add_region(struct ckm_ring_op *op, const void *base, size_t bytes)
{
    op->regions[op->nregions++] = (struct ckm_region){base, bytes};
}

/* Partial sums of a reduce-scatter and of a reduce cannot go to the caller's buffers. */
static int add_scratch(struct ckm_ring_op *op)
{
    bool relay = op->task.func == CKM_RING_REDUCE && (uint32_t)op->task.root != op->ring->config.rank;
    if (op->task.func != CKM_RING_REDUCESCATTER && !relay)
        return 0;
    size_t bytes = op->task.count * op->elem * (relay ? 1 : op->ring->config.nranks);
    op->scratch = malloc(bytes);
    if (!op->scratch)
        return -1;
    add_region(op, op->scratch, bytes);
    return 0;
}

static int copy_pointers(struct ckm_ring_op *op)
{
    uint32_t nin = count_in(op->ring, op->task.func), nout = count_out(op->ring, &op->task);
    size_t bytes = op->task.count * op->elem;
    op->in = calloc(nin + 1, sizeof(*op->in)); /* one more: [0] is always readable */
    op->out = calloc(nout + 1, sizeof(*op->out));
    op->regions = calloc(nin + nout + 1, sizeof(*op->regions));
    if (!op->in || !op->out || !op->regions)
        return -1;
    for (uint32_t i = 0; i < nin; i++)
        add_region(op, op->in[i] = op->task.in[i], bytes);
    for (uint32_t i = 0; i < nout; i++) {
        op->out[i] = op->task.out[i];
        if (op->out[i] != op->in[0])
            add_region(op, op->out[i], bytes);
    }
    return add_scratch(op);
}

static enum ckm_pattern pattern_of(int func)
{
    switch (func) {
    case CKM_RING_BROADCAST:
        return CKM_PATTERN_PIPELINE_FROM;
    case CKM_RING_REDUCE:
        return CKM_PATTERN_PIPELINE_TO;
    case CKM_RING_ALLGATHER:
        return CKM_PATTERN_ALLGATHER;
    case CKM_RING_REDUCESCATTER:
        return CKM_PATTERN_REDUCESCATTER;
    case CKM_RING_ALLREDUCE:
        return CKM_PATTERN_ALLREDUCE;
    default:
        return CKM_PATTERN_P2P;
    }
}

static uint32_t position_of(const uint32_t *order, uint32_t nranks, uint32_t rank)
{
    uint32_t i = 0;
    while (i < nranks && order[i] != rank)
        i++;
    return i;
}

static int add_sub(struct ckm_ring_op *op, struct ckm_link *link, const struct ckm_schedule *schedule, uint32_t channel)
{
    struct ckm_sub *sub = &op->subs[op->nsubs];
    uint32_t nsteps = link->send ? ckm_schedule_sends(schedule) : ckm_schedule_recvs(schedule);
    if (nsteps == 0)
        return 0;
    sub->op = op;
    sub->link = link;
    sub->schedule = *schedule;
    sub->channel = channel;
    sub->order = op->ring->channels[channel].order;
    sub->nsteps = nsteps;
    sub->mr = calloc(op->nregions, sizeof(*sub->mr));
    if (!sub->mr)
        return -1;
    op->nsubs++;
    return 0;
}

static int add_p2p(struct ckm_ring_op *op)
{
    struct ckm_ring *ring = op->ring;
    struct ckm_schedule s = {.pattern = CKM_PATTERN_P2P,
                             .nranks = ring->config.nranks,
                             .elem = op->elem,
                             .count = op->task.count,
                             .chunk = (size_t)ring->config.slice_bytes * CKM_RING_SLICES / op->elem};
    op->nchannels = 1;
    bool send = op->task.func == CKM_RING_SEND;
    return add_sub(op, send ? &ring->p2p_send[op->task.root] : &ring->p2p_recv[op->task.root], &s, 0);
}

static int add_channels(struct ckm_ring_op *op)
{
    struct ckm_ring *ring = op->ring;
    size_t offsets[CKM_RING_MAX_CHANNELS], counts[CKM_RING_MAX_CHANNELS];
    op->nchannels = ckm_ring_split(op->task.count, op->elem, ring->config.nchannels, offsets, counts);
    for (uint32_t c = 0; c < op->nchannels; c++) {
        struct ckm_channel *channel = &ring->channels[c];
        struct ckm_schedule s = {.pattern = pattern_of(op->task.func),
                                 .nranks = ring->config.nranks,
                                 .index = channel->index,
                                 .root_index =
                                     position_of(channel->order, ring->config.nranks, (uint32_t)op->task.root),
                                 .elem = op->elem,
                                 .offset = offsets[c],
                                 .count = counts[c],
                                 .chunk = (size_t)ring->config.slice_bytes * CKM_RING_SLICES / op->elem};
        uint32_t before = op->nsubs;
        if (add_sub(op, &channel->recv, &s, c) || add_sub(op, &channel->send, &s, c))
            return -1;
        if (op->nsubs == before + 2) {
            op->subs[before].peer_sub = &op->subs[before + 1];
            op->subs[before + 1].peer_sub = &op->subs[before];
        }
    }
    return 0;
}

static int fill(struct ckm_ring_op *op)
{
    if (copy_pointers(op))
        return -1;
    op->subs = calloc((size_t)op->ring->config.nchannels * 2, sizeof(*op->subs));
    if (!op->subs)
        return -1;
    if (op->task.func == CKM_RING_ALLGATHER && op->in[0] != op->out[op->ring->config.rank])
        memcpy(op->out[op->ring->config.rank], op->in[0], op->task.count * op->elem);
    if (op->ring->config.nranks == 1)
        return 0;
    return is_p2p(op) ? add_p2p(op) : add_channels(op);
}

static void op_free(struct ckm_ring_op *op)
{
    for (uint32_t i = 0; i < op->nsubs; i++)
        free(op->subs[i].mr);
    free(op->subs);
    free(op->regions);
    free(op->in);
    free(op->out);
    free(op->scratch);
    free(op->error);
    free(op);
}

struct ckm_ring_op *ckm_op_create(struct ckm_ring *ring, const struct ckm_ring_task *task)
{
    struct ckm_ring_op *op = calloc(1, sizeof(*op));
    if (!op)
        return NULL;
    op->ring = ring;
    op->task = *task;
    op->elem = ckm_dtype_bytes(task->dtype);
    op->deadline_ms = task->timeout_ms < 0 ? -1 : ckm_now_ms() + task->timeout_ms;
    op->refs = 2;
    if (fill(op)) {
        op_free(op);
        return NULL;
    }
    op->open_subs = op->nsubs;
    pthread_mutex_lock(&ring->lock);
    ring->refs++;
    pthread_mutex_unlock(&ring->lock);
    return op;
}

void ckm_op_unref(struct ckm_ring_op *op)
{
    struct ckm_ring *ring = op->ring;
    pthread_mutex_lock(&ring->lock);
    if (--op->refs > 0) {
        pthread_mutex_unlock(&ring->lock);
        return;
    }
    op_free(op);
    ckm_ring_unref_locked(ring);
}

void ckm_op_finish(struct ckm_ring_op *op, enum ckm_op_state state, const char *error)
{
    struct ckm_ring *ring = op->ring;
    free(op->scratch);
    op->scratch = NULL;
    pthread_mutex_lock(&ring->lock);
    op->error = error ? strdup(error) : NULL;
    op->state = state;
    if (op->notify) {
        op->refs++;
        op->next = NULL;
        if (ring->finished.tail)
            ring->finished.tail->next = op;
        else
            ring->finished.head = op;
        ring->finished.tail = op;
    }
    pthread_cond_broadcast(&ring->change);
    pthread_mutex_unlock(&ring->lock);
    ckm_op_unref(op);
}

static uint32_t owner(const struct ckm_sub *sub, const struct ckm_slice *slice)
{
    return sub->order[slice->block];
}

const void *ckm_op_source(const struct ckm_sub *sub, const struct ckm_slice *slice)
{
    const struct ckm_ring_op *op = sub->op;
    const uint8_t *base;
    size_t block = 0;
    if (op->task.func == CKM_RING_ALLGATHER) {
        base = op->out[owner(sub, slice)];
    } else if (slice->source == CKM_FROM_INPUT) {
        base = op->in[op->task.func == CKM_RING_REDUCESCATTER ? owner(sub, slice) : 0];
    } else if (op->scratch) {
        base = op->scratch;
        block = op->task.func == CKM_RING_REDUCESCATTER ? owner(sub, slice) * op->task.count : 0;
    } else {
        base = op->out[0];
    }
    return base + (block + slice->offset) * op->elem;
}

void *ckm_op_target(const struct ckm_sub *sub, const struct ckm_slice *slice)
{
    const struct ckm_ring_op *op = sub->op;
    uint8_t *base = op->out[0];
    size_t block = 0;
    if (op->task.func == CKM_RING_ALLGATHER) {
        base = op->out[owner(sub, slice)];
    } else if (op->scratch && slice->sink == CKM_TO_REDUCE) {
        base = op->scratch;
        block = op->task.func == CKM_RING_REDUCESCATTER ? owner(sub, slice) * op->task.count : 0;
    }
    return base + (block + slice->offset) * op->elem;
}

const void *ckm_op_local(const struct ckm_sub *sub, const struct ckm_slice *slice)
{
    const struct ckm_ring_op *op = sub->op;
    const uint8_t *base = op->in[op->task.func == CKM_RING_REDUCESCATTER ? owner(sub, slice) : 0];
    return base + slice->offset * op->elem;
}

void ckm_op_describe(const struct ckm_ring_op *op, char *text, size_t bytes)
{
    static const char *const names[CKM_RING_NFUNCS] = {"broadcast",  "reduce", "all-gather", "reduce-scatter",
                                                       "all-reduce", "",       "send",       "receive"};
    int n = snprintf(text, bytes, "%s %llu", names[op->task.func], (unsigned long long)op->seq);
    for (uint32_t i = 0; i < op->nsubs && n > 0 && (size_t)n < bytes; i++) {
        const struct ckm_sub *sub = &op->subs[i];
        if (sub->done < sub->nsteps && !sub->link->send) {
            snprintf(text + n, bytes - (size_t)n, " waits for rank %u (channel %u, slice %u of %u)", sub->link->peer,
                     sub->channel, sub->done, sub->nsteps);
            return;
        }
    }
    if (n > 0 && (size_t)n < bytes && op->nsubs && op->subs[0].link->send)
        snprintf(text + n, bytes - (size_t)n, " waits for rank %u to receive", op->subs[0].link->peer);
}
