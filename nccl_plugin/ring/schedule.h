/* What each rank sends and receives, step by step: pure functions, no state.
 *
 * The same arithmetic as NCCL's ring algorithms with the Simple protocol: a channel works on a contiguous part
 * of the buffer, in loops; a loop moves chunks; a chunk travels as CKM_RING_SLICES slices. A step is one slice.
 * Offsets and counts are in elements.
 */
#ifndef CHECKMATE_RING_SCHEDULE_H
#define CHECKMATE_RING_SCHEDULE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define CKM_RING_SLICES       2u /* slices per chunk: NCCL's ring with Simple (chunk steps / slice steps) */
#define CKM_RING_MAX_CHANNELS 32u

enum ckm_pattern {
    CKM_PATTERN_ALLREDUCE,
    CKM_PATTERN_ALLGATHER,
    CKM_PATTERN_REDUCESCATTER,
    CKM_PATTERN_PIPELINE_FROM, /* broadcast: root first, the rank before it last */
    CKM_PATTERN_PIPELINE_TO,   /* reduce: the rank after root first, root last */
    CKM_PATTERN_P2P,
};

/* One channel's share of one operation. */
struct ckm_schedule {
    enum ckm_pattern pattern;
    uint32_t nranks;
    uint32_t index;      /* this rank's position in the channel's ring; rank 0 stands at 0 */
    uint32_t root_index; /* pipelines only */
    size_t elem;         /* bytes of an element */
    size_t offset;       /* first element of the channel's part */
    size_t count;        /* elements of the channel's part (of each rank's block for all-gather, reduce-scatter) */
    size_t chunk;        /* elements of a full chunk: CKM_RING_SLICES full slices */
};

enum ckm_source {
    CKM_FROM_INPUT, /* nothing has to be received first */
    CKM_FROM_WORK,  /* what the receive step `needs` left behind */
};

enum ckm_sink {
    CKM_TO_OUTPUT,      /* the final value: straight to its place */
    CKM_TO_REDUCE,      /* a partial sum: reduce with the input, leave it for a send */
    CKM_TO_REDUCE_LAST, /* reduce with the input: the final value */
};

struct ckm_slice {
    uint32_t block;         /* ring position that owns the chunk (all-gather, reduce-scatter), else 0 */
    size_t offset;          /* first element, from the start of the buffer (of the block) */
    size_t count;           /* elements; 0 is a message like any other */
    enum ckm_source source; /* sends */
    uint32_t needs;         /* sends from CKM_FROM_WORK: the receive step that comes before */
    enum ckm_sink sink;     /* receives */
};

/* order[i] = rank at position i of this channel's ring, rank 0 at 0. Each host, of which host_ranks[h] ranks follow
 * those of the hosts before, is passed once. Channels differ: see README. */
void ckm_ring_order(const uint32_t *host_ranks, uint32_t nhosts, uint32_t channel, uint32_t *order);

/* Splits `count` elements over at most `nchannels` channels, contiguous, in channel order; fills offsets[i] and
 * counts[i]. Returns the number of channels used: 0 when count is 0. */
uint32_t ckm_ring_split(size_t count, size_t elem, uint32_t nchannels, size_t *offsets, size_t *counts);

uint32_t ckm_schedule_sends(const struct ckm_schedule *s);
uint32_t ckm_schedule_recvs(const struct ckm_schedule *s);
struct ckm_slice ckm_schedule_send(const struct ckm_schedule *s, uint32_t step);
struct ckm_slice ckm_schedule_recv(const struct ckm_schedule *s, uint32_t step);

#endif
