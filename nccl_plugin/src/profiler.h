/* The profiler's side of the plugin, the same for every version of NCCL's interface. */
#ifndef CHECKMATE_PROFILER_H
#define CHECKMATE_PROFILER_H

#include "nccl/profiler_abi.h"

#define CKM_PROFILER_NAME "Checkmate"

/* `mask` gets the event types to be told. With `nranks` 0, for versions that do not tell it, nothing is tagged. */
nccl_result_t ckm_profiler_init(void **context, int *mask, uint64_t comm_id, int nranks, int rank,
                                nccl_logger_t logger);
nccl_result_t ckm_profiler_stop(void *handle);
nccl_result_t ckm_profiler_record(void *handle, nccl_profiler_state_t state, union nccl_prof_state_args *args);
nccl_result_t ckm_profiler_finalize(void *context);

/* Defines startEvent for one version: the fields read have the same names in every version. */
#define CKM_PROFILER_START(version)                                                                                    \
    static nccl_result_t start_event(void *context, void **handle, struct nccl_prof_event_##version *event)            \
    {                                                                                                                  \
        *handle = NULL;                                                                                                \
        switch (event->type) {                                                                                         \
        case NCCL_PROFILE_GROUP:                                                                                       \
            *handle = ckm_tag_group();                                                                                 \
            break;                                                                                                     \
        case NCCL_PROFILE_COLL:                                                                                        \
            *handle = ckm_tag_coll(context, &(struct ckm_coll){.seq = event->coll.seqNumber,                           \
                                                               .send_buffer = event->coll.sendBuff,                    \
                                                               .count = event->coll.count,                             \
                                                               .func = event->coll.func,                               \
                                                               .datatype = event->coll.datatype,                       \
                                                               .algo = event->coll.algo,                               \
                                                               .proto = event->coll.proto,                             \
                                                               .channels = event->coll.nChannels});                    \
            break;                                                                                                     \
        case NCCL_PROFILE_PROXY_OP:                                                                                    \
            *handle = ckm_tag_op(context, event->parentObj,                                                            \
                                 &(struct ckm_op){.pid = event->proxyOp.pid,                                           \
                                                  .peer = event->proxyOp.peer,                                         \
                                                  .steps = event->proxyOp.nSteps,                                      \
                                                  .is_send = event->proxyOp.isSend,                                    \
                                                  .channel = event->proxyOp.channelId});                               \
            break;                                                                                                     \
        case NCCL_PROFILE_PROXY_STEP:                                                                                  \
            *handle = ckm_tag_step(event->parentObj, event->proxyStep.step);                                           \
            break;                                                                                                     \
        default:                                                                                                       \
            break;                                                                                                     \
        }                                                                                                              \
        return NCCL_SUCCESS;                                                                                           \
    }

#endif
