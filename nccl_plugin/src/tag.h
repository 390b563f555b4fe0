/* Which sends are tagged: the registry of buckets, the collectives and proxy operations that the profiler
 * reports, and the rule that picks the sends of final chunks at the two boundary ranks. */
#ifndef CHECKMATE_TAG_H
#define CHECKMATE_TAG_H

#include <stdbool.h>
#include <stdint.h>

#include "checkmate/api.h"
#include "checkmate/wire.h"

/* Slices of a chunk in NCCL's ring all-reduce with the Simple protocol (chunk steps / slice steps). */
#define CKM_SLICES_PER_CHUNK 2u

/* What a handle stands for. Handles are numbers made to look like no address: whatever finds its way into a
 * profiler slot, it is recognised without following a pointer. */
enum ckm_handle_kind { CKM_HANDLE_GROUP = 1, CKM_HANDLE_CONTEXT, CKM_HANDLE_COLL, CKM_HANDLE_OP, CKM_HANDLE_STEP };

enum ckm_handle_kind ckm_handle_kind(const void *handle); /* 0 for anything that is not one of ours */

/* For events that only have to have a handle. */
void *ckm_tag_group(void);

/* A communicator, as the profiler's init is told. Returns its handle, NULL when there is no room. */
void *ckm_tag_context(uint64_t comm_id, uint32_t rank, uint32_t nranks);
void ckm_tag_context_free(void *context);
bool ckm_tag_profiled(void); /* is there any context? */

/* One collective, as the profiler is told at its start. Names are NCCL's. */
struct ckm_coll {
    uint64_t seq;
    const void *send_buffer;
    size_t count;
    const char *func, *datatype, *algo, *proto;
    uint32_t channels;
};

/* Returns a handle when the collective is a ring all-reduce of a registered bucket, else NULL after counting
 * why it is not. */
void *ckm_tag_coll(void *context, const struct ckm_coll *coll);

/* One proxy operation of a collective: a channel's sends to, or receives from, one peer. */
struct ckm_op {
    int pid, peer, steps, is_send;
    uint32_t channel;
};

/* Returns a handle when this rank tags sends of the operation, else NULL. */
void *ckm_tag_op(void *context, void *coll, const struct ckm_op *op);
void ckm_tag_op_free(void *op);

/* Returns a handle when slice `step` of the operation is to be tagged, else NULL. O(1), no lock. */
void *ckm_tag_step(void *op, int step);

/* Fills the fields of a tagged frame from what the profiler left in NCCL's slot. False, frame untouched: the
 * message is not tagged. O(1), and for buckets without lock; nothing but *phandle is read through pointers from
 * outside, and of a probe's message its first element. */
bool ckm_tag_message(void *const *phandle, const void *data, size_t size, struct ckm_frame *frame);

/* Is a message that cannot be tagged one that perhaps should have been? Counts it if the profiler is missing. */
void ckm_tag_missing(void);

#endif
