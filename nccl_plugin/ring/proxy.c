/* The proxy thread: posts, tests and reduces slices, emitting the profiler's events in NCCL's order:
 *   send   step start, SendGPUWait | SendPeerWait, isend, SendWait | test, step stop
 *   recv   step start, irecv, RecvWait | test, RecvFlushWait, RecvGPUWait, reduction, step stop
 */
#include <errno.h>
#include <stdlib.h>
#include <time.h>

#include "engine.h"

/* How long the thread may sleep in the plugin, which nothing but its requests wakes: an abort is noticed after so
 * long, and a point-to-point operation may start only then. */
#define WAIT_US     50000
#define WAIT_P2P_US 2000
/* When there is nothing to wait for but time: a peer that has not connected, a plugin that took no request. */
#define PAUSE_MIN_US 100
#define PAUSE_MAX_US 5000
#define MAX_WAITED   256

static void *region_mr(struct ckm_sub *sub, const void *ptr, size_t bytes)
{
    const uint8_t *p = ptr;
    for (uint32_t i = 0; i < sub->op->nregions; i++) {
        const struct ckm_region *region = &sub->op->regions[i];
        const uint8_t *base = region->base;
        if (p < base || p + bytes > base + region->bytes)
            continue;
        if (!sub->mr[i]) {
            nccl_result_t result = sub->op->ring->plugin.net->regMr(sub->link->comm, (void *)base, region->bytes,
                                                                    NCCL_PTR_HOST, &sub->mr[i]);
            if (result != NCCL_SUCCESS)
                ckm_ring_fail(sub->op->ring, "cannot register a buffer: %s", ckm_result_text(result));
        }
        return sub->mr[i];
    }
    return NULL;
}

static void lost_peer(struct ckm_sub *sub, nccl_result_t result)
{
    char what[160];
    ckm_op_describe(sub->op, what, sizeof(what));
    ckm_ring_fail(sub->op->ring, "connection %s rank %u failed (%s) during %s", sub->link->send ? "to" : "from",
                  sub->link->peer, ckm_result_text(result), what);
}

static void deregister(struct ckm_sub *sub)
{
    for (uint32_t i = 0; i < sub->op->nregions; i++) {
        if (sub->mr[i])
            sub->op->ring->plugin.net->deregMr(sub->link->comm, sub->mr[i]);
        sub->mr[i] = NULL;
    }
}

static void sub_end(struct ckm_sub *sub)
{
    struct ckm_ring_op *op = sub->op;
    deregister(sub);
    ckm_event_proxy_stop(sub);
    sub->link->head = sub->next;
    if (!sub->next)
        sub->link->tail = NULL;
    op->open_subs--;
}

/* May the slice be sent, that is, has what it needs been received and reduced? */
static bool ready(const struct ckm_sub *sub, const struct ckm_slice *slice)
{
    return slice->source == CKM_FROM_INPUT || sub->peer_sub->done > slice->needs;
}

static bool send_post(struct ckm_sub *sub)
{
    if (sub->posted == sub->nsteps || sub->posted == sub->done + CKM_RING_DEPTH)
        return false;
    ckm_event_step_start(sub, sub->posted);
    ckm_event_step_state(sub, sub->posted, NCCL_STATE_SEND_GPU_WAIT, 0);
    sub->posted++;
    return true;
}

static bool send_transmit(struct ckm_sub *sub)
{
    if (sub->sent == sub->posted)
        return false;
    struct ckm_slice slice = ckm_schedule_send(&sub->schedule, sub->sent);
    if (!ready(sub, &slice))
        return false;
    struct ckm_ring *ring = sub->op->ring;
    uint32_t slot = sub->sent % CKM_RING_DEPTH;
    size_t bytes = slice.count * sub->schedule.elem;
    void *data = (void *)ckm_op_source(sub, &slice);
    void *mr = region_mr(sub, data, bytes);
    ckm_event_step_state(sub, sub->sent, NCCL_STATE_SEND_PEER_WAIT, bytes);
    nccl_result_t result = ring->plugin.net->isend(sub->link->comm, data, bytes, (int)ring->config.rank, mr,
                                                   &sub->phandles[slot], &sub->requests[slot]);
    if (result != NCCL_SUCCESS)
        lost_peer(sub, result);
    sub->refused = !sub->requests[slot];
    if (sub->refused)
        return false;
    ckm_event_step_state(sub, sub->sent, NCCL_STATE_SEND_WAIT, bytes);
    sub->sent++;
    return true;
}

static bool send_complete(struct ckm_sub *sub)
{
    if (sub->done == sub->sent)
        return false;
    int done = 0, size = 0;
    void **request = &sub->requests[sub->done % CKM_RING_DEPTH];
    nccl_result_t result = sub->op->ring->plugin.net->test(*request, &done, &size);
    if (result != NCCL_SUCCESS)
        lost_peer(sub, result);
    if (!done)
        return false;
    *request = NULL;
    ckm_event_step_stop(sub, sub->done);
    sub->done++;
    return true;
}

static bool recv_post(struct ckm_sub *sub)
{
    if (sub->posted == sub->nsteps || sub->posted == sub->done + CKM_RING_DEPTH)
        return false;
    struct ckm_ring *ring = sub->op->ring;
    struct ckm_slice slice = ckm_schedule_recv(&sub->schedule, sub->posted);
    uint32_t slot = sub->posted % CKM_RING_DEPTH;
    size_t bytes = slice.count * sub->schedule.elem;
    bool direct = slice.sink == CKM_TO_OUTPUT;
    void *data =
        direct ? ckm_op_target(sub, &slice) : (void *)(sub->link->staging + (size_t)slot * ring->config.slice_bytes);
    void *mr = direct ? region_mr(sub, data, bytes) : sub->link->staging_mr;
    void *phandle = &sub->phandles[slot];
    int tag = (int)sub->link->peer;
    if (!sub->step_open)
        ckm_event_step_start(sub, sub->posted);
    sub->step_open = true;
    nccl_result_t result =
        ring->plugin.net->irecv(sub->link->comm, 1, &data, &bytes, &tag, &mr, &phandle, &sub->requests[slot]);
    if (result != NCCL_SUCCESS)
        lost_peer(sub, result);
    sub->refused = !sub->requests[slot];
    if (sub->refused)
        return false;
    sub->step_open = false;
    ckm_event_step_state(sub, sub->posted, NCCL_STATE_RECV_WAIT, bytes);
    sub->posted++;
    return true;
}

static void consume(struct ckm_sub *sub, const struct ckm_slice *slice, uint32_t slot)
{
    if (slice->sink == CKM_TO_OUTPUT)
        return;
    const struct ckm_ring_op *op = sub->op;
    const uint8_t *arrived = sub->link->staging + (size_t)slot * op->ring->config.slice_bytes;
    uint32_t divisor = slice->sink == CKM_TO_REDUCE_LAST ? op->ring->config.nranks : 1;
    ckm_reduce(ckm_op_target(sub, slice), arrived, ckm_op_local(sub, slice), slice->count, op->task.dtype,
               op->task.redop, divisor);
}

static bool recv_complete(struct ckm_sub *sub)
{
    if (sub->done == sub->posted)
        return false;
    struct ckm_ring *ring = sub->op->ring;
    uint32_t slot = sub->done % CKM_RING_DEPTH;
    int done = 0, size = 0;
    nccl_result_t result = ring->plugin.net->test(sub->requests[slot], &done, &size);
    if (result != NCCL_SUCCESS)
        lost_peer(sub, result);
    if (!done)
        return false;
    struct ckm_slice slice = ckm_schedule_recv(&sub->schedule, sub->done);
    if ((size_t)size != slice.count * sub->schedule.elem) {
        char what[160];
        ckm_op_describe(sub->op, what, sizeof(what));
        ckm_ring_fail(ring, "rank %u sent %d bytes where %zu were expected: %s; do all ranks call it alike?",
                      sub->link->peer, size, slice.count * sub->schedule.elem, what);
        return false;
    }
    ckm_event_step_state(sub, sub->done, NCCL_STATE_RECV_FLUSH_WAIT, (size_t)size);
    ckm_event_step_state(sub, sub->done, NCCL_STATE_RECV_GPU_WAIT, (size_t)size);
    consume(sub, &slice, slot);
    if (ring->plugin.net->irecvConsumed)
        ring->plugin.net->irecvConsumed(sub->link->comm, 1, sub->requests[slot]);
    sub->requests[slot] = NULL;
    ckm_event_step_stop(sub, sub->done);
    sub->done++;
    return true;
}

/* Does what can be done now. Returns whether anything was. */
static bool sub_progress(struct ckm_ring *ring, struct ckm_sub *sub)
{
    if (sub->done == sub->nsteps || sub->link->head != sub || ckm_link_progress(ring, sub->link) <= 0)
        return false;
    bool (*const send[])(struct ckm_sub *) = {send_post, send_transmit, send_complete};
    bool (*const recv[])(struct ckm_sub *) = {recv_post, recv_complete};
    bool moved = false;
    for (size_t i = 0; i < (sub->link->send ? 3 : 2); i++)
        while (!ring->failed && (sub->link->send ? send[i] : recv[i])(sub))
            moved = true;
    if (sub->done == sub->nsteps)
        sub_end(sub);
    return moved;
}

static void start_op(struct ckm_ring_op *op)
{
    op->started = true;
    for (uint32_t i = 0; i < op->nsubs; i++) {
        struct ckm_sub *sub = &op->subs[i];
        if (sub->link->tail)
            sub->link->tail->next = sub;
        else
            sub->link->head = sub;
        sub->link->tail = sub;
        ckm_event_proxy_start(sub);
    }
}

/* Collectives run one after the other, as on a stream; point-to-point operations at any time. */
static bool ops_progress(struct ckm_ring *ring)
{
    bool moved = false, collective = false;
    struct ckm_ring_op **at = &ring->active;
    while (*at && !ring->failed) {
        struct ckm_ring_op *op = *at;
        bool p2p = op->task.func >= CKM_RING_SEND;
        if (p2p || !collective) {
            if (!op->started)
                start_op(op);
            for (uint32_t i = 0; i < op->nsubs; i++)
                moved |= sub_progress(ring, &op->subs[i]);
        }
        collective |= !p2p;
        if (op->started && op->open_subs == 0) {
            *at = op->next;
            ckm_op_finish(op, CKM_OP_DONE, NULL);
            moved = true;
        } else {
            at = &op->next;
        }
    }
    return moved;
}

static bool ring_links_progress(struct ckm_ring *ring)
{
    bool all = true;
    for (uint32_t c = 0; c < ring->config.nchannels; c++) {
        all &= ckm_link_progress(ring, &ring->channels[c].send) > 0;
        all &= ckm_link_progress(ring, &ring->channels[c].recv) > 0;
    }
    return all;
}

/* Sleeps for a while, longer each time in a row, but not past a new operation or an abort. */
static void pause_thread(struct ckm_ring *ring)
{
    ring->pause_us = ring->pause_us ? ring->pause_us * 2 : PAUSE_MIN_US;
    if (ring->pause_us > PAUSE_MAX_US)
        ring->pause_us = PAUSE_MAX_US;
    struct timespec until = ckm_deadline_us(ring->pause_us);
    pthread_mutex_lock(&ring->lock);
    if (!ring->stop && !ring->failed && !ring->submitted.head)
        pthread_cond_timedwait(&ring->work, &ring->lock, &until);
    pthread_mutex_unlock(&ring->lock);
}

/* Sleeps until the oldest request of one of the connections may progress. */
static void sleep_on_requests(struct ckm_ring *ring)
{
    void *requests[MAX_WAITED];
    int n = 0;
    bool poll = false;
    for (struct ckm_ring_op *op = ring->active; op; op = op->next) {
        for (uint32_t i = 0; op->started && i < op->nsubs; i++) {
            struct ckm_sub *sub = &op->subs[i];
            if (sub->done == sub->nsteps || sub->link->head != sub)
                continue;
            poll |= !sub->link->comm || sub->refused;
            void *oldest = sub->requests[sub->done % CKM_RING_DEPTH];
            if (oldest && n < MAX_WAITED)
                requests[n++] = oldest;
        }
    }
    if (poll || n == 0)
        pause_thread(ring);
    else
        ring->plugin.net_wait(requests, n, ring->p2p_used ? WAIT_P2P_US : WAIT_US);
}

static void check_deadlines(struct ckm_ring *ring)
{
    int64_t now = ckm_now_ms();
    for (struct ckm_ring_op *op = ring->active; op; op = op->next) {
        if (op->deadline_ms < 0 || now < op->deadline_ms)
            continue;
        char what[160];
        ckm_op_describe(op, what, sizeof(what));
        ckm_ring_fail(ring, "time-out of %lld ms: %s", (long long)op->task.timeout_ms, what);
        return;
    }
}

static void take_submitted(struct ckm_ring *ring)
{
    struct ckm_ring_op **at = &ring->active;
    while (*at)
        at = &(*at)->next;
    *at = ring->submitted.head;
    ring->submitted = (struct ckm_queue){0};
}

/* Closes every connection, so that the neighbours notice at once and nothing touches the callers' buffers any more,
 * then ends every operation. */
static void give_up(struct ckm_ring *ring)
{
    ring->gave_up = true;
    for (struct ckm_ring_op *op = ring->active; op; op = op->next)
        for (uint32_t i = 0; i < op->nsubs; i++)
            deregister(&op->subs[i]);
    for (uint32_t c = 0; c < ring->config.nchannels; c++) {
        ckm_link_close(ring, &ring->channels[c].send);
        ckm_link_close(ring, &ring->channels[c].recv);
    }
    for (uint32_t r = 0; r < ring->config.nranks; r++) {
        ckm_link_close(ring, &ring->p2p_send[r]);
        ckm_link_close(ring, &ring->p2p_recv[r]);
    }
    while (ring->active) {
        struct ckm_ring_op *op = ring->active;
        ring->active = op->next;
        ckm_op_finish(op, CKM_OP_FAILED, ring->error);
    }
}

static bool has_work(const struct ckm_ring *ring)
{
    bool to_close = ring->failed && !ring->gave_up;
    bool to_connect = ring->connecting && !ring->failed;
    return ring->stop || ring->submitted.head || ring->active || to_close || to_connect;
}

/* Waits for something to do. Returns false when the thread is to end. */
static bool next_turn(struct ckm_ring *ring)
{
    pthread_mutex_lock(&ring->lock);
    while (!has_work(ring))
        pthread_cond_wait(&ring->work, &ring->lock);
    take_submitted(ring);
    bool stop = ring->stop;
    pthread_mutex_unlock(&ring->lock);
    return !stop;
}

static void connect_turn(struct ckm_ring *ring)
{
    if (!ring_links_progress(ring)) {
        if (!ring->failed)
            pause_thread(ring);
        return;
    }
    pthread_mutex_lock(&ring->lock);
    ring->connecting = false;
    ring->connected = true;
    pthread_cond_broadcast(&ring->change);
    pthread_mutex_unlock(&ring->lock);
}

void *ckm_proxy_main(void *arg)
{
    struct ckm_ring *ring = arg;
    pthread_setname_np(pthread_self(), "ckm-ring-proxy");
    while (next_turn(ring)) {
        if (ring->failed) {
            give_up(ring);
        } else if (ring->connecting) {
            connect_turn(ring);
        } else if (ops_progress(ring)) {
            ring->pause_us = 0;
        } else if (ring->active && !ring->failed) {
            check_deadlines(ring);
            sleep_on_requests(ring);
        }
    }
    if (ring->active)
        ckm_ring_fail(ring, "the process group was closed");
    give_up(ring);
    return NULL;
}
