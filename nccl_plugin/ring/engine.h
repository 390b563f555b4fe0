/* Internals of the ring engine. Who may touch what:
 *   proxy thread     links, subs, every call of the net plugin but init and listen
 *   submitting thread  the profiler's events of an operation, under submit_lock
 *   any              state of operations, queues, error: under lock
 */
#ifndef CHECKMATE_RING_ENGINE_H
#define CHECKMATE_RING_ENGINE_H

#include <pthread.h>
#include <stdatomic.h>

#include "nccl/net_abi.h"
#include "nccl/profiler_abi.h"
#include "reduce.h"
#include "ring.h"
#include "schedule.h"

#define CKM_RING_DEPTH     8u /* slices in flight on a connection, and profiler handles: NCCL_STEPS */
#define CKM_RING_NFUNCS    8
#define CKM_RING_ERROR_MAX 512

struct ckm_plugin {
    const struct nccl_net_v11 *net;
    const struct nccl_profiler_v5 *profiler; /* NULL: the library has none */
    int (*net_wait)(void *const *requests, int n, int timeout_us);
};

/* One direction of one connection. */
struct ckm_link {
    bool send;
    uint32_t peer;
    int dev;
    void *listen;                          /* receiving side, until accepted */
    uint8_t handle[NCCL_NET_HANDLE_BYTES]; /* sending side: the peer's; the plugin may keep its progress in it */
    void *comm;                            /* NULL until connected */
    uint8_t *staging;                      /* ring receives: CKM_RING_DEPTH slices that wait for their reduction */
    void *staging_mr;
    struct ckm_sub *head, *tail; /* operations in order: only the head moves */
};

/* What NCCL's proxy hands to isend: the plugin reads the first word. */
struct ckm_phandle {
    void *step_event;
    void *sub;
};

/* One direction of one channel of one operation. */
struct ckm_sub {
    struct ckm_ring_op *op;
    struct ckm_link *link;
    struct ckm_sub *peer_sub; /* the other direction of the same channel, or NULL */
    struct ckm_sub *next;     /* on the link */
    struct ckm_schedule schedule;
    uint32_t channel;
    const uint32_t *order; /* rank at each ring position */
    uint32_t nsteps, posted, sent, done;
    bool step_open; /* receives: the step event of `posted` has started */
    bool refused;   /* the plugin took no request just now */
    void *op_event;
    void *requests[CKM_RING_DEPTH];
    struct ckm_phandle phandles[CKM_RING_DEPTH];
    void **mr; /* by region of the operation; NULL: not registered yet */
};

struct ckm_region {
    const void *base;
    size_t bytes;
};

enum ckm_op_state { CKM_OP_PENDING, CKM_OP_DONE, CKM_OP_FAILED };

struct ckm_ring_op {
    struct ckm_ring *ring;
    int refs; /* proxy and user */
    enum ckm_op_state state;
    struct ckm_ring_task task;
    const void **in;
    void **out;
    uint8_t *scratch; /* partial sums that have no place in the caller's buffers */
    struct ckm_region *regions;
    uint32_t nregions;
    size_t elem;
    uint64_t seq;
    int64_t deadline_ms; /* CLOCK_MONOTONIC, negative: none */
    void *event;         /* the profiler's Coll or P2p */
    struct ckm_sub *subs;
    uint32_t nsubs, open_subs, nchannels;
    bool started, notify;
    uint64_t cookie;
    char *error;
    struct ckm_ring_op *next;
};

struct ckm_queue {
    struct ckm_ring_op *head, *tail;
};

struct ckm_channel {
    uint32_t *order;
    uint32_t index;
    struct ckm_link send, recv;
};

struct ckm_ring {
    struct ckm_ring_config config;
    char *name;
    struct ckm_plugin plugin;
    void *net_ctx, *prof_ctx;
    int mask;
    struct ckm_channel *channels;
    struct ckm_link *p2p_send, *p2p_recv; /* by peer; connected at their first operation */
    uint8_t *handles;                     /* of this rank: nchannels, then nranks for point-to-point */
    uint64_t seq[CKM_RING_NFUNCS];
    struct ckm_ring_op *active; /* proxy thread only */
    long pause_us;              /* proxy thread only: the last pause in a row */
    bool gave_up;               /* proxy thread only: connections are closed after a failure */

    pthread_mutex_t submit_lock;
    pthread_mutex_t lock;
    pthread_cond_t work, change; /* for the proxy thread; for everybody else */
    pthread_t thread;
    bool thread_runs, stop, connected, closed;
    atomic_bool failed, connecting, p2p_used;
    struct ckm_queue submitted, finished;
    int refs; /* user and operations */
    char error[CKM_RING_ERROR_MAX];
};

/* plugin.c */
int ckm_plugin_load(struct ckm_plugin *plugin, const char *path, char *error, size_t error_bytes);
int ckm_plugin_open(struct ckm_ring *ring, char *error, size_t error_bytes);

/* events.c: the profiler's events, silent without a profiler. */
void ckm_event_op(struct ckm_ring_op *op);
void ckm_event_proxy_start(struct ckm_sub *sub);
void ckm_event_step_start(struct ckm_sub *sub, uint32_t step);
void ckm_event_step_state(struct ckm_sub *sub, uint32_t step, nccl_profiler_state_t state, size_t size);
void ckm_event_step_stop(struct ckm_sub *sub, uint32_t step);
void ckm_event_proxy_stop(struct ckm_sub *sub);

/* op.c */
struct ckm_ring_op *ckm_op_create(struct ckm_ring *ring, const struct ckm_ring_task *task);
void ckm_op_unref(struct ckm_ring_op *op);
void ckm_op_finish(struct ckm_ring_op *op, enum ckm_op_state state, const char *error);
const void *ckm_op_source(const struct ckm_sub *sub, const struct ckm_slice *slice);
void *ckm_op_target(const struct ckm_sub *sub, const struct ckm_slice *slice);
const void *ckm_op_local(const struct ckm_sub *sub, const struct ckm_slice *slice);
void ckm_op_describe(const struct ckm_ring_op *op, char *text, size_t bytes);

/* link.c; progress returns 1 when the connection stands, 0 when not yet, -1 after ckm_ring_fail. */
int ckm_link_listen(struct ckm_ring *ring, struct ckm_link *link, uint8_t *handle, char *error, size_t error_bytes);
int ckm_link_progress(struct ckm_ring *ring, struct ckm_link *link);
void ckm_link_close(struct ckm_ring *ring, struct ckm_link *link);

/* proxy.c */
void *ckm_proxy_main(void *ring);

/* ring.c */
void ckm_ring_fail(struct ckm_ring *ring, const char *format, ...) __attribute__((format(printf, 2, 3)));
void ckm_ring_unref_locked(struct ckm_ring *ring);
int64_t ckm_now_ms(void);
struct timespec ckm_deadline_us(long us); /* CLOCK_MONOTONIC, from now */
const char *ckm_result_text(nccl_result_t result);

#endif
