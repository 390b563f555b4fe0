/* NCCL's profiler interface, version 3: it tells neither rank nor number of ranks, so nothing can be tagged. */
#include "profiler.h"
#include "tag.h"

CKM_PROFILER_START(v3)

static nccl_result_t init(void **context, int *mask)
{
    return ckm_profiler_init(context, mask, 0, 0, 0, NULL);
}

__attribute__((visibility("default"))) const struct nccl_profiler_v3 ncclProfiler_v3 = {
    .name = CKM_PROFILER_NAME,
    .init = init,
    .startEvent = start_event,
    .stopEvent = ckm_profiler_stop,
    .recordEventState = ckm_profiler_record,
    .finalize = ckm_profiler_finalize,
};
