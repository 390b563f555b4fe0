/* The profiler's events, each where NCCL emits it: GroupApi, CollApi, KernelLaunch, Group and Coll on the submitting
 * thread, all stopped before the proxy thread starts ProxyOp and ProxyStep. */
#include <unistd.h>

#include "engine.h"

#define PROXY_BITS (NCCL_PROFILE_PROXY_OP | NCCL_PROFILE_PROXY_STEP | NCCL_PROFILE_NET_PLUGIN)

static const char *func_name(int func)
{
    static const char *const names[CKM_RING_NFUNCS] = {"Broadcast", "Reduce",   "AllGather", "ReduceScatter",
                                                       "AllReduce", "SendRecv", "Send",      "Recv"};
    return names[func];
}

static const char *dtype_name(int dtype)
{
    static const char *const names[CKM_NDTYPES] = {"ncclInt8",    "ncclUint8",   "ncclInt32",   "ncclUint32",
                                                   "ncclInt64",   "ncclUint64",  "ncclFloat16", "ncclFloat32",
                                                   "ncclFloat64", "ncclBfloat16"};
    return names[dtype];
}

/* Starts an event if the plugin asked for any of `bits`. */
static void *start(struct ckm_ring *ring, int bits, struct nccl_prof_event_v5 *event)
{
    void *handle = NULL;
    if (ring->plugin.profiler && ring->mask & bits)
        ring->plugin.profiler->startEvent(ring->prof_ctx, &handle, event);
    return handle;
}

static void stop(struct ckm_ring *ring, void *handle)
{
    if (handle)
        ring->plugin.profiler->stopEvent(handle);
}

static void *start_api(struct ckm_ring_op *op, void *group)
{
    struct nccl_prof_event_v5 event = {.parentObj = group};
    if (op->task.func >= CKM_RING_SEND) {
        event.type = NCCL_PROFILE_P2P_API;
        event.p2pApi = (struct nccl_prof_p2p_api){
            .func = func_name(op->task.func), .count = op->task.count, .datatype = dtype_name(op->task.dtype)};
        return start(op->ring, NCCL_PROFILE_P2P_API | NCCL_PROFILE_P2P | PROXY_BITS, &event);
    }
    event.type = NCCL_PROFILE_COLL_API;
    event.collApi = (struct nccl_prof_coll_api){.func = func_name(op->task.func),
                                                .count = op->task.count,
                                                .datatype = dtype_name(op->task.dtype),
                                                .root = op->task.root};
    return start(op->ring, NCCL_PROFILE_COLL_API | NCCL_PROFILE_COLL | PROXY_BITS, &event);
}

static void *start_p2p(struct ckm_ring_op *op, void *api, void *group)
{
    struct nccl_prof_event_v5 event = {.type = NCCL_PROFILE_P2P, .parentObj = api, .rank = (int)op->ring->config.rank};
    bool send = op->task.func == CKM_RING_SEND;
    event.p2p = (struct nccl_prof_p2p_v5){.func = func_name(op->task.func),
                                          .buff = send ? (void *)op->in[0] : op->out[0],
                                          .datatype = dtype_name(op->task.dtype),
                                          .count = op->task.count,
                                          .peer = op->task.root,
                                          .nChannels = 1,
                                          .parentGroup = group};
    return start(op->ring, NCCL_PROFILE_P2P | PROXY_BITS, &event);
}

static void *start_coll(struct ckm_ring_op *op, void *api, void *group)
{
    struct nccl_prof_event_v5 event = {.type = NCCL_PROFILE_COLL, .parentObj = api, .rank = (int)op->ring->config.rank};
    event.coll = (struct nccl_prof_coll_v5){.seqNumber = op->seq,
                                            .func = func_name(op->task.func),
                                            .sendBuff = op->in[0],
                                            .recvBuff = op->out[0],
                                            .count = op->task.count,
                                            .root = op->task.root,
                                            .datatype = dtype_name(op->task.dtype),
                                            .nChannels = (uint8_t)op->nchannels,
                                            .nWarps = 1,
                                            .algo = "RING",
                                            .proto = "SIMPLE",
                                            .parentGroup = group};
    return start(op->ring, NCCL_PROFILE_COLL | PROXY_BITS, &event);
}

void ckm_event_op(struct ckm_ring_op *op)
{
    struct ckm_ring *ring = op->ring;
    if (!ring->plugin.profiler)
        return;
    int any = NCCL_PROFILE_COLL | NCCL_PROFILE_P2P | PROXY_BITS;
    struct nccl_prof_event_v5 event = {.type = NCCL_PROFILE_GROUP_API};
    void *group_api = start(ring, any | NCCL_PROFILE_GROUP_API | NCCL_PROFILE_COLL_API | NCCL_PROFILE_P2P_API, &event);
    void *api = start_api(op, group_api);
    event = (struct nccl_prof_event_v5){.type = NCCL_PROFILE_KERNEL_LAUNCH, .parentObj = group_api};
    void *launch = start(ring, NCCL_PROFILE_KERNEL_LAUNCH, &event);
    event = (struct nccl_prof_event_v5){.type = NCCL_PROFILE_GROUP};
    void *group = start(ring, any | NCCL_PROFILE_GROUP, &event);
    op->event = op->task.func >= CKM_RING_SEND ? start_p2p(op, api, group) : start_coll(op, api, group);
    stop(ring, launch);
    stop(ring, op->event);
    stop(ring, group);
    stop(ring, api);
    stop(ring, group_api);
}

void ckm_event_proxy_start(struct ckm_sub *sub)
{
    struct ckm_ring *ring = sub->op->ring;
    struct nccl_prof_event_v5 event = {
        .type = NCCL_PROFILE_PROXY_OP, .parentObj = sub->op->event, .rank = (int)ring->config.rank};
    size_t chunk_bytes = sub->schedule.chunk * sub->schedule.elem;
    event.proxyOp = (struct nccl_prof_proxy_op){.pid = getpid(),
                                                .channelId = (uint8_t)sub->channel,
                                                .peer = (int)sub->link->peer,
                                                .nSteps = (int)sub->nsteps,
                                                .chunkSize = (int)(chunk_bytes * 2), /* times slice steps, as NCCL */
                                                .isSend = sub->link->send};
    sub->op_event = start(ring, PROXY_BITS, &event);
    if (sub->op_event) {
        union nccl_prof_state_args args = {0};
        ring->plugin.profiler->recordEventState(sub->op_event, NCCL_STATE_PROXY_OP_IN_PROGRESS, &args);
    }
}

void ckm_event_step_start(struct ckm_sub *sub, uint32_t step)
{
    struct ckm_ring *ring = sub->op->ring;
    struct nccl_prof_event_v5 event = {
        .type = NCCL_PROFILE_PROXY_STEP, .parentObj = sub->op_event, .rank = (int)ring->config.rank};
    event.proxyStep.step = (int)step;
    struct ckm_phandle *phandle = &sub->phandles[step % CKM_RING_DEPTH];
    phandle->step_event = start(ring, NCCL_PROFILE_PROXY_STEP | NCCL_PROFILE_NET_PLUGIN, &event);
    phandle->sub = sub;
}

void ckm_event_step_state(struct ckm_sub *sub, uint32_t step, nccl_profiler_state_t state, size_t size)
{
    void *handle = sub->phandles[step % CKM_RING_DEPTH].step_event;
    if (!handle)
        return;
    union nccl_prof_state_args args = {.proxyStep = {.transSize = size}};
    sub->op->ring->plugin.profiler->recordEventState(handle, state, &args);
}

void ckm_event_step_stop(struct ckm_sub *sub, uint32_t step)
{
    struct ckm_phandle *phandle = &sub->phandles[step % CKM_RING_DEPTH];
    stop(sub->op->ring, phandle->step_event);
    phandle->step_event = NULL;
}

void ckm_event_proxy_stop(struct ckm_sub *sub)
{
    stop(sub->op->ring, sub->op_event);
    sub->op_event = NULL;
}
