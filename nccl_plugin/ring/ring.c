/* The engine's interface: communicators and the submission of operations. */
#include "ring.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine.h"

int64_t ckm_now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

struct timespec ckm_deadline_us(long us)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    int64_t ns = t.tv_nsec + (int64_t)us * 1000;
    t.tv_sec += ns / 1000000000;
    t.tv_nsec = ns % 1000000000;
    return t;
}

const char *ckm_result_text(nccl_result_t result)
{
    static const char *const texts[] = {"success",          "unhandled CUDA error", "system error", "internal error",
                                        "invalid argument", "invalid usage",        "remote error", "in progress"};
    return (size_t)result < sizeof(texts) / sizeof(texts[0]) ? texts[result] : "unknown error";
}

void ckm_ring_fail(struct ckm_ring *ring, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    pthread_mutex_lock(&ring->lock);
    if (!ring->failed)
        vsnprintf(ring->error, sizeof(ring->error), format, args);
    ring->failed = true;
    pthread_cond_broadcast(&ring->work);
    pthread_cond_broadcast(&ring->change);
    pthread_mutex_unlock(&ring->lock);
    va_end(args);
}

/* ---- life of a communicator ---- */

static void ring_free(struct ckm_ring *ring)
{
    for (uint32_t c = 0; ring->channels && c < ring->config.nchannels; c++)
        free(ring->channels[c].order);
    free(ring->channels);
    free(ring->p2p_send);
    free(ring->p2p_recv);
    free(ring->handles);
    free(ring->name);
    pthread_cond_destroy(&ring->work);
    pthread_cond_destroy(&ring->change);
    pthread_mutex_destroy(&ring->lock);
    pthread_mutex_destroy(&ring->submit_lock);
    free(ring);
}

void ckm_ring_unref_locked(struct ckm_ring *ring)
{
    bool last = --ring->refs == 0;
    pthread_mutex_unlock(&ring->lock);
    if (last)
        ring_free(ring);
}

static void init_locks(struct ckm_ring *ring)
{
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&ring->lock, NULL);
    pthread_mutex_init(&ring->submit_lock, NULL);
    pthread_cond_init(&ring->work, &monotonic);
    pthread_cond_init(&ring->change, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

static int init_channel(struct ckm_ring *ring, uint32_t c)
{
    uint32_t n = ring->config.nranks, rank = ring->config.rank;
    struct ckm_channel *channel = &ring->channels[c];
    channel->order = calloc(n, sizeof(*channel->order));
    if (!channel->order)
        return -1;
    ckm_ring_order(ring->config.host_ranks, ring->config.nhosts, c, channel->order);
    while (channel->order[channel->index] != rank)
        channel->index++;
    channel->send = (struct ckm_link){.send = true, .peer = channel->order[(channel->index + 1) % n]};
    channel->recv = (struct ckm_link){.peer = channel->order[(channel->index + n - 1) % n]};
    return 0;
}

static int init_tables(struct ckm_ring *ring)
{
    const struct ckm_ring_config *config = &ring->config;
    ring->name = strdup(config->name);
    ring->channels = calloc(config->nchannels, sizeof(*ring->channels));
    ring->p2p_send = calloc(config->nranks, sizeof(*ring->p2p_send));
    ring->p2p_recv = calloc(config->nranks, sizeof(*ring->p2p_recv));
    ring->handles = calloc(1, ckm_ring_handle_bytes(ring));
    if (!ring->name || !ring->channels || !ring->p2p_send || !ring->p2p_recv || !ring->handles)
        return -1;
    for (uint32_t c = 0; c < config->nchannels; c++)
        if (init_channel(ring, c))
            return -1;
    for (uint32_t r = 0; r < config->nranks; r++) {
        ring->p2p_send[r] = (struct ckm_link){.send = true, .peer = r};
        ring->p2p_recv[r] = (struct ckm_link){.peer = r};
    }
    return 0;
}

static uint8_t *handle_at(uint8_t *handles, uint32_t index)
{
    return handles + (size_t)index * NCCL_NET_HANDLE_BYTES;
}

static int listen_all(struct ckm_ring *ring, char *error, size_t error_bytes)
{
    uint32_t nchannels = ring->config.nchannels;
    for (uint32_t c = 0; c < nchannels; c++)
        if (ckm_link_listen(ring, &ring->channels[c].recv, handle_at(ring->handles, c), error, error_bytes))
            return -1;
    for (uint32_t r = 0; r < ring->config.nranks; r++)
        if (r != ring->config.rank &&
            ckm_link_listen(ring, &ring->p2p_recv[r], handle_at(ring->handles, nchannels + r), error, error_bytes))
            return -1;
    return 0;
}

static int start(struct ckm_ring *ring, char *error, size_t error_bytes)
{
    if (init_tables(ring)) {
        snprintf(error, error_bytes, "out of memory");
        return -1;
    }
    if (ring->config.nranks == 1) { /* nothing to send, no plugin to load */
        ring->connected = true;
        return 0;
    }
    if (ckm_plugin_open(ring, error, error_bytes) || listen_all(ring, error, error_bytes))
        return -1;
    int failed = pthread_create(&ring->thread, NULL, ckm_proxy_main, ring);
    if (failed)
        snprintf(error, error_bytes, "cannot start the proxy thread: %s", strerror(failed));
    ring->thread_runs = !failed;
    return failed;
}

static uint64_t ranks_on_hosts(const struct ckm_ring_config *config)
{
    uint64_t ranks = 0;
    for (uint32_t h = 0; h < config->nhosts; h++)
        ranks += config->host_ranks[h];
    return ranks;
}

struct ckm_ring *ckm_ring_create(const struct ckm_ring_config *config, char *error, size_t error_bytes)
{
    if (config->nranks < 1 || config->rank >= config->nranks || config->nchannels < 1 ||
        config->nchannels > CKM_RING_MAX_CHANNELS || config->slice_bytes < 4096 || config->slice_bytes % 4096) {
        snprintf(error, error_bytes,
                 "rank %u of %u, %u channels, slices of %u bytes: allowed are rank < ranks, 1 to %u channels and a "
                 "multiple of 4096 bytes",
                 config->rank, config->nranks, config->nchannels, config->slice_bytes, CKM_RING_MAX_CHANNELS);
        return NULL;
    }
    if (ranks_on_hosts(config) != config->nranks) {
        snprintf(error, error_bytes, "hosts of %" PRIu64 " ranks in all, but there are %u", ranks_on_hosts(config),
                 config->nranks);
        return NULL;
    }
    struct ckm_ring *ring = calloc(1, sizeof(*ring));
    if (!ring) {
        snprintf(error, error_bytes, "out of memory");
        return NULL;
    }
    ring->config = *config;
    ring->refs = 1;
    init_locks(ring);
    int failed = start(ring, error, error_bytes);
    ring->config.host_ranks = NULL; /* the caller's */
    if (failed) {
        ckm_ring_destroy(ring);
        return NULL;
    }
    return ring;
}

size_t ckm_ring_handle_bytes(const struct ckm_ring *ring)
{
    return (size_t)(ring->config.nchannels + ring->config.nranks) * NCCL_NET_HANDLE_BYTES;
}

void ckm_ring_handles(const struct ckm_ring *ring, void *out)
{
    memcpy(out, ring->handles, ckm_ring_handle_bytes(ring));
}

void ckm_ring_connect(struct ckm_ring *ring, const void *handles)
{
    size_t bytes = ckm_ring_handle_bytes(ring);
    uint32_t nchannels = ring->config.nchannels;
    pthread_mutex_lock(&ring->lock);
    for (uint32_t c = 0; c < nchannels; c++) {
        struct ckm_link *link = &ring->channels[c].send;
        memcpy(link->handle, handle_at((uint8_t *)handles + link->peer * bytes, c), sizeof(link->handle));
    }
    for (uint32_t r = 0; r < ring->config.nranks; r++)
        memcpy(ring->p2p_send[r].handle, handle_at((uint8_t *)handles + r * bytes, nchannels + ring->config.rank),
               NCCL_NET_HANDLE_BYTES);
    ring->connecting = !ring->connected;
    pthread_cond_broadcast(&ring->work);
    pthread_mutex_unlock(&ring->lock);
}

static bool wait_change(struct ckm_ring *ring, const struct timespec *until)
{
    return pthread_cond_timedwait(&ring->change, &ring->lock, until) != ETIMEDOUT;
}

int ckm_ring_connected(struct ckm_ring *ring, int timeout_ms)
{
    struct timespec until = ckm_deadline_us((long)timeout_ms * 1000);
    pthread_mutex_lock(&ring->lock);
    while (!ring->connected && !ring->failed && wait_change(ring, &until))
        ;
    int result = ring->failed ? -1 : ring->connected;
    pthread_mutex_unlock(&ring->lock);
    return result;
}

const char *ckm_ring_error(const struct ckm_ring *ring)
{
    return ring->error;
}

void ckm_ring_abort(struct ckm_ring *ring, const char *reason)
{
    ckm_ring_fail(ring, "%s", reason);
}

void ckm_ring_close(struct ckm_ring *ring)
{
    pthread_mutex_lock(&ring->lock);
    bool join = ring->thread_runs && !ring->stop;
    ring->stop = true;
    pthread_cond_broadcast(&ring->work);
    pthread_mutex_unlock(&ring->lock);
    if (join) {
        pthread_join(ring->thread, NULL);
        if (ring->plugin.profiler)
            ring->plugin.profiler->finalize(ring->prof_ctx);
        ring->plugin.net->finalize(ring->net_ctx);
    }
    pthread_mutex_lock(&ring->lock);
    ring->closed = true;
    pthread_cond_broadcast(&ring->change);
    pthread_mutex_unlock(&ring->lock);
}

void ckm_ring_destroy(struct ckm_ring *ring)
{
    ckm_ring_close(ring);
    pthread_mutex_lock(&ring->lock);
    ckm_ring_unref_locked(ring);
}

/* ---- operations ---- */

static int check_task(const struct ckm_ring *ring, const struct ckm_ring_task *task, char *error, size_t error_bytes)
{
    bool p2p = task->func == CKM_RING_SEND || task->func == CKM_RING_RECV;
    if ((task->func < CKM_RING_BROADCAST || task->func > CKM_RING_ALLREDUCE) && !p2p)
        snprintf(error, error_bytes, "unknown operation %d", task->func);
    else if (task->dtype < 0 || task->dtype >= CKM_NDTYPES || task->redop < 0 || task->redop >= CKM_NREDOPS)
        snprintf(error, error_bytes, "unknown datatype %d or reduction %d", task->dtype, task->redop);
    else if (task->root < 0 || (uint32_t)task->root >= ring->config.nranks)
        snprintf(error, error_bytes, "rank %d is not one of 0 to %u", task->root, ring->config.nranks - 1);
    else if (p2p && (uint32_t)task->root == ring->config.rank)
        snprintf(error, error_bytes, "rank %d cannot send to itself", task->root);
    else
        return 0;
    return -1;
}

static int check_open(struct ckm_ring *ring, char *error, size_t error_bytes)
{
    pthread_mutex_lock(&ring->lock);
    const char *refusal = NULL;
    if (ring->failed)
        refusal = ring->error;
    else if (ring->stop)
        refusal = "the process group was closed";
    else if (!ring->connected)
        refusal = "the communicator is not connected";
    if (refusal)
        snprintf(error, error_bytes, "%s", refusal);
    pthread_mutex_unlock(&ring->lock);
    return refusal ? -1 : 0;
}

/* One rank alone: every collective is a copy. */
static void copy_alone(const struct ckm_ring_op *op)
{
    if (op->out[0] != op->in[0] && op->task.count)
        memmove(op->out[0], op->in[0], op->task.count * op->elem);
}

/* Hands the operation to the proxy thread. */
static void enqueue(struct ckm_ring *ring, struct ckm_ring_op *op)
{
    pthread_mutex_lock(&ring->lock);
    bool stop = ring->stop;
    if (!stop) {
        if (ring->submitted.tail)
            ring->submitted.tail->next = op;
        else
            ring->submitted.head = op;
        ring->submitted.tail = op;
        ring->p2p_used = ring->p2p_used || op->task.func >= CKM_RING_SEND;
        pthread_cond_signal(&ring->work);
    }
    pthread_mutex_unlock(&ring->lock);
    if (stop)
        ckm_op_finish(op, CKM_OP_FAILED, "the process group was closed");
}

struct ckm_ring_op *ckm_ring_submit(struct ckm_ring *ring, const struct ckm_ring_task *task, char *error,
                                    size_t error_bytes)
{
    if (check_task(ring, task, error, error_bytes) || check_open(ring, error, error_bytes))
        return NULL;
    struct ckm_ring_op *op = ckm_op_create(ring, task);
    if (!op) {
        snprintf(error, error_bytes, "out of memory");
        return NULL;
    }
    if (op->nsubs == 0) {
        copy_alone(op);
        ckm_op_finish(op, CKM_OP_DONE, NULL);
        return op;
    }
    pthread_mutex_lock(&ring->submit_lock); /* sequence numbers and queue in the same order */
    op->seq = ring->seq[task->func]++;
    ckm_event_op(op);
    enqueue(ring, op);
    pthread_mutex_unlock(&ring->submit_lock);
    return op;
}

int ckm_ring_op_wait(struct ckm_ring_op *op, int timeout_ms)
{
    struct ckm_ring *ring = op->ring;
    struct timespec until = ckm_deadline_us((long)timeout_ms * 1000);
    pthread_mutex_lock(&ring->lock);
    while (op->state == CKM_OP_PENDING && wait_change(ring, &until))
        ;
    int result = op->state == CKM_OP_DONE ? 1 : op->state == CKM_OP_FAILED ? -1 : 0;
    pthread_mutex_unlock(&ring->lock);
    return result;
}

const char *ckm_ring_op_error(const struct ckm_ring_op *op)
{
    return op->error ? op->error : "";
}

int ckm_ring_op_notify(struct ckm_ring_op *op, uint64_t cookie)
{
    struct ckm_ring *ring = op->ring;
    pthread_mutex_lock(&ring->lock);
    bool ended = op->state != CKM_OP_PENDING;
    op->notify = !ended;
    op->cookie = cookie;
    pthread_mutex_unlock(&ring->lock);
    return ended;
}

void ckm_ring_op_free(struct ckm_ring_op *op)
{
    ckm_op_unref(op);
}

int ckm_ring_next_done(struct ckm_ring *ring, int timeout_ms, uint64_t *cookie)
{
    struct timespec until = ckm_deadline_us((long)timeout_ms * 1000);
    pthread_mutex_lock(&ring->lock);
    while (!ring->finished.head && !ring->closed && wait_change(ring, &until))
        ;
    struct ckm_ring_op *op = ring->finished.head;
    int result = op ? 1 : ring->closed ? -1 : 0;
    if (op) {
        *cookie = op->cookie;
        ring->finished.head = op->next;
        if (!op->next)
            ring->finished.tail = NULL;
    }
    pthread_mutex_unlock(&ring->lock);
    if (op)
        ckm_op_unref(op);
    return result;
}
