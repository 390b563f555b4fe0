#include "mock_plugin.h"

#include <pthread.h>
#include <stdbool.h>
#include <string.h>
#include <time.h>

#include "check.h"
#include "nccl/net_abi.h"
#include "nccl/profiler_abi.h"

#define EXPORT        __attribute__((visibility("default")))
#define MAX_IN_FLIGHT 8
#define REFUSE_EVERY  7 /* every so often a call is refused, as a plugin may */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t keep_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t moved = PTHREAD_COND_INITIALIZER;
static struct mock_counts counts;
static mock_send_hook send_hook;
static void *hook_context;
static unsigned calls;

/* Objects live to the end of the process: events refer to their parents, and requests cut off to their connections. */
static void *keep(size_t bytes)
{
    static struct kept {
        struct kept *next;
        max_align_t object[];
    } * all;
    struct kept *kept = calloc(1, sizeof(*kept) + bytes);
    pthread_mutex_lock(&keep_lock);
    kept->next = all;
    all = kept;
    pthread_mutex_unlock(&keep_lock);
    return kept->object;
}

/* ---- network ---- */

enum { KIND_CONTEXT = 0x11, KIND_LISTEN, KIND_SEND, KIND_RECV };

struct net_context {
    uint64_t comm_id;
};

struct request {
    struct request *next;
    struct comm *comm;
    uint8_t *data;
    size_t bytes;
    bool done, failed;
};

struct pipe {
    struct comm *ends[2]; /* sender, receiver */
    bool broken;
    struct request *sends, *recvs; /* not matched yet, oldest first */
};

struct comm {
    int kind;
    struct net_context *context;
    struct pipe *pipe;
    struct comm *peer_listen;
    pthread_t thread;
    bool used;
    int in_flight, registrations;
    int rank; /* of the process that sends on it; -1 until known */
    unsigned attempts;
};

struct memory {
    struct comm *comm;
    uint8_t *base;
    size_t bytes;
};

static void object(int delta)
{
    counts.open_objects += (uint64_t)delta;
}

static nccl_result_t net_init(void **ctx, uint64_t comm_id, struct nccl_net_config_v10 *config, nccl_logger_t logger,
                              nccl_net_profile_fn profile)
{
    CHECK(config && logger && profile, "init gets a configuration, a logger and a callback");
    struct net_context *context = keep(sizeof(*context));
    context->comm_id = comm_id;
    *ctx = context;
    pthread_mutex_lock(&lock);
    object(1);
    pthread_mutex_unlock(&lock);
    return NCCL_SUCCESS;
}

static nccl_result_t net_devices(int *ndev)
{
    *ndev = 2;
    return NCCL_SUCCESS;
}

static nccl_result_t net_properties(int dev, struct nccl_net_properties_v11 *props)
{
    CHECK(dev == 0 || dev == 1, "device %d", dev);
    *props = (struct nccl_net_properties_v11){.name = (char *)"mock", .ptrSupport = NCCL_PTR_HOST, .maxRecvs = 1};
    return NCCL_SUCCESS;
}

static struct comm *new_comm(int kind, struct net_context *context)
{
    struct comm *comm = keep(sizeof(*comm));
    comm->kind = kind;
    comm->context = context;
    comm->rank = -1;
    object(1);
    return comm;
}

static nccl_result_t net_listen(void *ctx, int dev, void *handle, void **listen)
{
    CHECK(dev == 0 || dev == 1, "device %d", dev);
    pthread_mutex_lock(&lock);
    struct comm *comm = new_comm(KIND_LISTEN, ctx);
    memset(handle, 0, NCCL_NET_HANDLE_BYTES);
    memcpy(handle, &comm, sizeof(comm));
    *listen = comm;
    pthread_mutex_unlock(&lock);
    return NCCL_SUCCESS;
}

static nccl_result_t net_connect(void *ctx, int dev, void *handle, void **send, struct nccl_net_device_handle **device)
{
    (void)dev, (void)device;
    uint64_t *words = handle;
    *send = NULL;
    if (words[1]++ < 2) /* the plugin may keep its progress in the handle */
        return NCCL_SUCCESS;
    pthread_mutex_lock(&lock);
    struct comm *listen;
    memcpy(&listen, handle, sizeof(listen));
    CHECK(listen->kind == KIND_LISTEN && !listen->pipe, "the handle is not that of a free listener");
    struct comm *comm = new_comm(KIND_SEND, ctx);
    CHECK(comm->context->comm_id == listen->context->comm_id, "connected to another communicator");
    comm->pipe = listen->pipe = keep(sizeof(*comm->pipe));
    comm->pipe->ends[0] = comm;
    *send = comm;
    pthread_mutex_unlock(&lock);
    return NCCL_SUCCESS;
}

static nccl_result_t net_accept(void *listen_comm, void **recv, struct nccl_net_device_handle **device)
{
    (void)device;
    struct comm *listen = listen_comm;
    pthread_mutex_lock(&lock);
    *recv = NULL;
    if (listen->pipe) {
        struct comm *comm = new_comm(KIND_RECV, listen->context);
        comm->pipe = listen->pipe;
        comm->pipe->ends[1] = comm;
        *recv = comm;
    }
    pthread_mutex_unlock(&lock);
    return NCCL_SUCCESS;
}

static nccl_result_t net_reg(void *comm_, void *data, size_t size, int type, void **mhandle)
{
    struct comm *comm = comm_;
    CHECK(type == NCCL_PTR_HOST, "pointer type %d", type);
    struct memory *memory = keep(sizeof(*memory));
    *memory = (struct memory){comm, data, size};
    pthread_mutex_lock(&lock);
    comm->registrations++;
    pthread_mutex_unlock(&lock);
    *mhandle = memory;
    return NCCL_SUCCESS;
}

static nccl_result_t net_dereg(void *comm_, void *mhandle)
{
    struct memory *memory = mhandle;
    CHECK(memory->comm == comm_, "deregistered on another connection");
    pthread_mutex_lock(&lock);
    memory->comm->registrations--;
    pthread_mutex_unlock(&lock);
    return NCCL_SUCCESS;
}

static void check_call(struct comm *comm, const void *data, size_t bytes, const struct memory *memory)
{
    if (!comm->used)
        comm->thread = pthread_self();
    comm->used = true;
    CHECK(pthread_equal(comm->thread, pthread_self()), "one thread drives a connection");
    CHECK(memory && memory->comm == comm, "memory is not registered on this connection");
    CHECK((const uint8_t *)data >= memory->base && (const uint8_t *)data + bytes <= memory->base + memory->bytes,
          "%zu bytes lie outside the registered memory", bytes);
    CHECK(comm->in_flight < MAX_IN_FLIGHT, "more than %d requests in flight", MAX_IN_FLIGHT);
}

static void match(struct pipe *pipe)
{
    while (pipe->sends && pipe->recvs) {
        struct request *send = pipe->sends, *recv = pipe->recvs;
        pipe->sends = send->next;
        pipe->recvs = recv->next;
        if (send->bytes <= recv->bytes && send->bytes)
            memcpy(recv->data, send->data, send->bytes);
        recv->failed = send->bytes > recv->bytes;
        recv->bytes = send->bytes;
        send->done = recv->done = true;
    }
    pthread_cond_broadcast(&moved);
}

static void append(struct request **at, struct request *request)
{
    while (*at)
        at = &(*at)->next;
    *at = request;
}

static nccl_result_t post(struct comm *comm, void *data, size_t bytes, void **request)
{
    *request = NULL;
    if (comm->pipe->broken)
        return NCCL_REMOTE_ERROR;
    if (++calls % REFUSE_EVERY == 0)
        return NCCL_SUCCESS;
    struct request *r = keep(sizeof(*r));
    *r = (struct request){.comm = comm, .data = data, .bytes = bytes};
    append(comm->kind == KIND_SEND ? &comm->pipe->sends : &comm->pipe->recvs, r);
    comm->in_flight++;
    match(comm->pipe);
    *request = r;
    return NCCL_SUCCESS;
}

static void check_send(struct comm *comm, void *phandle, const void *data, size_t bytes, bool posted);

static nccl_result_t net_isend(void *comm_, void *data, size_t size, int tag, void *mhandle, void *phandle,
                               void **request)
{
    struct comm *comm = comm_;
    pthread_mutex_lock(&lock);
    check_call(comm, data, size, mhandle);
    comm->rank = tag;
    nccl_result_t result = post(comm, data, size, request);
    if (result == NCCL_SUCCESS)
        check_send(comm, phandle, data, size, *request != NULL);
    pthread_mutex_unlock(&lock);
    return result;
}

static nccl_result_t net_irecv(void *comm_, int n, void **data, size_t *sizes, int *tags, void **mhandles,
                               void **phandles, void **request)
{
    struct comm *comm = comm_;
    CHECK(n == 1 && tags && phandles, "%d grouped receives", n);
    pthread_mutex_lock(&lock);
    check_call(comm, data[0], sizes[0], mhandles[0]);
    nccl_result_t result = post(comm, data[0], sizes[0], request);
    counts.recvs += *request != NULL;
    pthread_mutex_unlock(&lock);
    return result;
}

static nccl_result_t net_flush(void *comm, int n, void **data, int *sizes, void **mhandles, void **request)
{
    (void)comm, (void)n, (void)data, (void)sizes, (void)mhandles;
    *request = NULL;
    return NCCL_SUCCESS;
}

static nccl_result_t net_test(void *request, int *done, int *size)
{
    struct request *r = request;
    pthread_mutex_lock(&lock);
    nccl_result_t result = r->failed || (!r->done && r->comm->pipe->broken) ? NCCL_REMOTE_ERROR : NCCL_SUCCESS;
    *done = r->done && result == NCCL_SUCCESS;
    if (*done) {
        *size = (int)r->bytes;
        r->comm->in_flight--;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

static void break_pipe(struct pipe *pipe)
{
    pipe->broken = true;
    pthread_cond_broadcast(&moved);
}

static nccl_result_t net_close(void *comm_)
{
    struct comm *comm = comm_;
    pthread_mutex_lock(&lock);
    CHECK(comm->registrations == 0 || comm->in_flight > 0, "closed with registered memory");
    if (comm->pipe)
        break_pipe(comm->pipe);
    object(-1);
    pthread_mutex_unlock(&lock);
    return NCCL_SUCCESS;
}

static nccl_result_t net_close_listen(void *comm)
{
    (void)comm;
    pthread_mutex_lock(&lock);
    object(-1);
    pthread_mutex_unlock(&lock);
    return NCCL_SUCCESS;
}

static nccl_result_t net_finalize(void *ctx)
{
    CHECK(ctx, "finalize without a context");
    pthread_mutex_lock(&lock);
    object(-1);
    pthread_mutex_unlock(&lock);
    return NCCL_SUCCESS;
}

EXPORT const struct nccl_net_v11 ncclNetPlugin_v11 = {
    .name = "mock",
    .init = net_init,
    .devices = net_devices,
    .getProperties = net_properties,
    .listen = net_listen,
    .connect = net_connect,
    .accept = net_accept,
    .regMr = net_reg,
    .deregMr = net_dereg,
    .isend = net_isend,
    .irecv = net_irecv,
    .iflush = net_flush,
    .test = net_test,
    .closeSend = net_close,
    .closeRecv = net_close,
    .closeListen = net_close_listen,
    .finalize = net_finalize,
};

static bool may_progress(void *const *requests, int n)
{
    for (int i = 0; i < n; i++) {
        const struct request *r = requests[i];
        if (r->done || r->failed || r->comm->pipe->broken)
            return true;
    }
    return false;
}

EXPORT int checkmate_net_wait(void *const *requests, int n, int timeout_us)
{
    CHECK(n > 0, "waits for %d requests", n);
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += timeout_us * 1000L;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_mutex_lock(&lock);
    int late = 0;
    while (!may_progress(requests, n) && !late)
        late = pthread_cond_timedwait(&moved, &lock, &until);
    int result = may_progress(requests, n);
    pthread_mutex_unlock(&lock);
    return result;
}

/* ---- profiler ---- */

struct context {
    uint64_t comm_id;
    int rank, nranks;
};

enum step_state { POSTED, WAITS_GPU, WAITS_PEER, SENT, WAITS_SEND, WAITS_RECV, FLUSHED, CONSUMED };

struct event {
    uint64_t type;
    struct context *context;
    struct event *parent;
    bool stopped;
    char func[16];
    const void *send_buffer;
    uint64_t seq;
    int nchannels;
    struct nccl_prof_proxy_op op;
    pthread_t thread;
    int next_step, open_steps;
    int step;
    enum step_state state;
};

static void check_send(struct comm *comm, void *phandle, const void *data, size_t bytes, bool posted)
{
    struct event *step = *(void **)phandle;
    CHECK(step && step->type == NCCL_PROFILE_PROXY_STEP && !step->stopped, "isend without its step's handle");
    CHECK(step->state == WAITS_PEER, "isend in state %d", step->state);
    struct event *op = step->parent;
    CHECK(op->op.isSend && op->context->comm_id == comm->context->comm_id, "isend with the handle of another op");
    CHECK(pthread_equal(op->thread, pthread_self()), "isend on another thread than the events");
    if (!posted)
        return;
    step->state = SENT;
    counts.sends++;
    counts.empty_sends += bytes == 0;
    struct event *task = op->parent;
    struct mock_send send = {.func = task->func,
                             .send_buffer = task->send_buffer,
                             .seq = task->seq,
                             .rank = op->context->rank,
                             .nranks = op->context->nranks,
                             .peer = op->op.peer,
                             .channel = op->op.channelId,
                             .nchannels = task->nchannels,
                             .step = step->step,
                             .nsteps = op->op.nSteps,
                             .data = data,
                             .bytes = bytes};
    if (send_hook)
        send_hook(&send, hook_context);
}

static nccl_result_t prof_init(void **context, uint64_t comm_id, int *mask, const char *name, int nnodes, int nranks,
                               int rank, nccl_logger_t logger)
{
    CHECK(name && nnodes >= 1 && logger, "profiler init");
    struct context *c = keep(sizeof(*c));
    *c = (struct context){comm_id, rank, nranks};
    *context = c;
    *mask = 0xfff & ~NCCL_PROFILE_KERNEL_CH;
    return NCCL_SUCCESS;
}

static bool is_task(const struct event *event)
{
    return event && (event->type == NCCL_PROFILE_COLL || event->type == NCCL_PROFILE_P2P);
}

static void start_proxy_op(struct event *event, const struct nccl_prof_event_v5 *from)
{
    CHECK(is_task(event->parent) && event->parent->stopped, "a proxy op starts after its collective's event stopped");
    CHECK(from->proxyOp.channelId < event->parent->nchannels, "channel %d", from->proxyOp.channelId);
    event->op = from->proxyOp;
    event->thread = pthread_self();
    counts.proxy_ops++;
}

static void start_proxy_step(struct event *event, const struct nccl_prof_event_v5 *from)
{
    struct event *op = event->parent;
    CHECK(op && op->type == NCCL_PROFILE_PROXY_OP && !op->stopped, "a step without its op");
    CHECK(from->proxyStep.step == op->next_step && op->next_step < op->op.nSteps, "step %d after %d",
          from->proxyStep.step, op->next_step - 1);
    CHECK(op->open_steps < MAX_IN_FLIGHT, "%d steps in flight", op->open_steps);
    CHECK(pthread_equal(op->thread, pthread_self()), "a step on another thread than its op");
    op->next_step++;
    op->open_steps++;
    event->step = from->proxyStep.step;
    event->state = POSTED;
    counts.steps++;
}

static void start_task(struct event *event, const char *func, const void *buffer, uint64_t seq, int nchannels)
{
    CHECK(event->parent && !event->parent->stopped, "a collective's event outside its API event");
    snprintf(event->func, sizeof(event->func), "%s", func);
    event->send_buffer = buffer;
    event->seq = seq;
    event->nchannels = nchannels;
}

static nccl_result_t prof_start(void *context, void **handle, struct nccl_prof_event_v5 *from)
{
    struct event *event = keep(sizeof(*event));
    event->type = from->type;
    event->context = context;
    event->parent = from->parentObj;
    pthread_mutex_lock(&lock);
    if (from->type == NCCL_PROFILE_PROXY_OP)
        start_proxy_op(event, from);
    else if (from->type == NCCL_PROFILE_PROXY_STEP)
        start_proxy_step(event, from);
    else if (from->type == NCCL_PROFILE_COLL)
        start_task(event, from->coll.func, from->coll.sendBuff, from->coll.seqNumber, from->coll.nChannels);
    else if (from->type == NCCL_PROFILE_P2P)
        start_task(event, from->p2p.func, from->p2p.buff, 0, from->p2p.nChannels);
    pthread_mutex_unlock(&lock);
    *handle = event;
    return NCCL_SUCCESS;
}

static nccl_result_t prof_stop(void *handle)
{
    struct event *event = handle;
    pthread_mutex_lock(&lock);
    CHECK(!event->stopped, "event of type %#llx stopped twice", (unsigned long long)event->type);
    event->stopped = true;
    if (event->type == NCCL_PROFILE_PROXY_STEP) {
        bool send = event->parent->op.isSend;
        CHECK(event->state == (send ? WAITS_SEND : CONSUMED), "step stopped in state %d", event->state);
        event->parent->open_steps--;
    }
    if (event->type == NCCL_PROFILE_PROXY_OP)
        CHECK(event->next_step == event->op.nSteps && event->open_steps == 0, "op stopped after step %d of %d",
              event->next_step, event->op.nSteps);
    pthread_mutex_unlock(&lock);
    return NCCL_SUCCESS;
}

static void change_state(struct event *event, enum step_state from, enum step_state also, enum step_state to)
{
    CHECK(event->state == from || event->state == also, "state %d after %d", to, event->state);
    event->state = to;
}

static nccl_result_t prof_state(void *handle, nccl_profiler_state_t state, union nccl_prof_state_args *args)
{
    struct event *event = handle;
    pthread_mutex_lock(&lock);
    CHECK(args && !event->stopped, "state %d of a stopped event", state);
    switch (state) {
    case NCCL_STATE_PROXY_OP_IN_PROGRESS:
        CHECK(event->type == NCCL_PROFILE_PROXY_OP, "in progress");
        break;
    case NCCL_STATE_SEND_GPU_WAIT:
        change_state(event, POSTED, POSTED, WAITS_GPU);
        break;
    case NCCL_STATE_SEND_PEER_WAIT:
        change_state(event, WAITS_GPU, WAITS_PEER, WAITS_PEER);
        break;
    case NCCL_STATE_SEND_WAIT:
        change_state(event, SENT, SENT, WAITS_SEND);
        break;
    case NCCL_STATE_RECV_WAIT:
        change_state(event, POSTED, POSTED, WAITS_RECV);
        break;
    case NCCL_STATE_RECV_FLUSH_WAIT:
        change_state(event, WAITS_RECV, WAITS_RECV, FLUSHED);
        break;
    case NCCL_STATE_RECV_GPU_WAIT:
        change_state(event, FLUSHED, FLUSHED, CONSUMED);
        break;
    }
    pthread_mutex_unlock(&lock);
    return NCCL_SUCCESS;
}

static nccl_result_t prof_finalize(void *context)
{
    (void)context;
    return NCCL_SUCCESS;
}

EXPORT const struct nccl_profiler_v5 ncclProfiler_v5 = {
    .name = "mock",
    .init = prof_init,
    .startEvent = prof_start,
    .stopEvent = prof_stop,
    .recordEventState = prof_state,
    .finalize = prof_finalize,
};

/* ---- for the tests ---- */

EXPORT void mock_set_hook(mock_send_hook hook, void *context)
{
    pthread_mutex_lock(&lock);
    send_hook = hook;
    hook_context = context;
    pthread_mutex_unlock(&lock);
}

EXPORT void mock_get_counts(struct mock_counts *out)
{
    pthread_mutex_lock(&lock);
    *out = counts;
    pthread_mutex_unlock(&lock);
}
