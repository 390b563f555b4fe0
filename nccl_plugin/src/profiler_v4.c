/* NCCL's profiler interface, version 4. */
#include "profiler.h"
#include "tag.h"

CKM_PROFILER_START(v4)

static nccl_result_t init(void **context, int *mask, const char *name, uint64_t comm_id, int nodes, int nranks,
                          int rank, nccl_logger_t logger)
{
    (void)name, (void)nodes;
    return ckm_profiler_init(context, mask, comm_id, nranks, rank, logger);
}

__attribute__((visibility("default"))) const struct nccl_profiler_v4 ncclProfiler_v4 = {
    .name = CKM_PROFILER_NAME,
    .init = init,
    .startEvent = start_event,
    .stopEvent = ckm_profiler_stop,
    .recordEventState = ckm_profiler_record,
    .finalize = ckm_profiler_finalize,
};
