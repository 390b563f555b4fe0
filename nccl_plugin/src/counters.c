#include "counters.h"

#include "log.h"

struct ckm_counters ckm_counters;

static const struct {
    const char *name, *text;
} reasons[CHECKMATE_REASONS] = {
    [CHECKMATE_NO_PROFILER] = {"no_profiler", "the profiler is not loaded; set NCCL_PROFILER_PLUGIN to this library"},
    [CHECKMATE_OLD_PROFILER] = {"old_profiler", "this NCCL does not tell the profiler its rank; use 2.27 or later"},
    [CHECKMATE_NOT_ALLREDUCE] = {"not_allreduce", "a collective other than all-reduce on a registered bucket"},
    [CHECKMATE_NOT_REGISTERED] = {"not_registered", "collectives on buffers that are not registered buckets"},
    [CHECKMATE_SIZE_MISMATCH] = {"size_mismatch", "an all-reduce of a size other than its bucket was registered with"},
    [CHECKMATE_NOT_RING] = {"not_ring", "the algorithm is not ring; set NCCL_ALGO=Ring"},
    [CHECKMATE_NOT_SIMPLE] = {"not_simple", "the protocol is not Simple; set NCCL_PROTO=Simple"},
    [CHECKMATE_BAD_DATATYPE] = {"bad_datatype", "the datatype is not fp32, fp64, fp16 or bf16"},
    [CHECKMATE_NO_INCARNATION] = {"no_incarnation", "the job's incarnation is not set"},
    [CHECKMATE_OTHER_PROCESS] = {"other_process", "the operation is another process's (PXN); set NCCL_PXN_DISABLE=1"},
    [CHECKMATE_BAD_STEPS] = {"bad_steps", "the number of steps is not a whole number of ring loops"},
    [CHECKMATE_NO_ROOM] = {"no_room", "more operations at once than there is room for"},
    [CHECKMATE_OTHER_HOSTS] = {"other_hosts", "CHECKMATE_HOST_RANKS does not describe this communicator"},
    [CHECKMATE_ONE_HOST] = {"one_host", "all ranks are on one host: nothing crosses the switch"},
    [CHECKMATE_NO_POSITION] = {"no_position", "several ranks share a host, and no probe told the ring position"},
    [CHECKMATE_TORN_RING] = {"torn_ring", "a ring enters the host of rank 0 more than once"},
    [CHECKMATE_NO_OPTION] = {"no_option", "the connection has no tagged flow; see CHECKMATE_COUNTER_MAP"},
};

const char *checkmate_reason_name(int reason)
{
    return reason >= 0 && reason < CHECKMATE_REASONS ? reasons[reason].name : NULL;
}

void ckm_untagged(enum checkmate_reason reason)
{
    if (CKM_COUNT(untagged[reason], 1) != 0)
        return;
    if (reason == CHECKMATE_NOT_REGISTERED)
        CKM_INFO("not tagged: %s", reasons[reason].text);
    else
        CKM_WARN("not tagged: %s (said once, counted as %s)", reasons[reason].text, reasons[reason].name);
}

int checkmate_get_counters(struct checkmate_counters *out)
{
    *out = (struct checkmate_counters){
        .tagged_frames = ckm_counters.tagged_frames,
        .tagged_bytes = ckm_counters.tagged_bytes,
        .plain_frames = ckm_counters.plain_frames,
        .plain_bytes = ckm_counters.plain_bytes,
        .received_frames = ckm_counters.received_frames,
        .received_bytes = ckm_counters.received_bytes,
        .tagged_ops = ckm_counters.tagged_ops,
        .tagged_connections = ckm_counters.tagged_connections,
        .plain_connections = ckm_counters.plain_connections,
        .errors = ckm_counters.errors,
    };
    for (int i = 0; i < CHECKMATE_REASONS; i++)
        out->untagged[i] = ckm_counters.untagged[i];
    return 0;
}
