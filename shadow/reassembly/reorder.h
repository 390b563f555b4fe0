/* Bytes of a stream that arrived ahead of a hole: copies, sorted by offset, without overlaps. */
#ifndef CHECKMATE_REASSEMBLY_REORDER_H
#define CHECKMATE_REASSEMBLY_REORDER_H

#include <stddef.h>
#include <stdint.h>

struct ckm_piece {
    struct ckm_piece *prev, *next;
    uint64_t offset;
    uint64_t arrived_us;
    uint32_t length;
    uint8_t data[];
};

/* All zero is empty. */
struct ckm_reorder {
    struct ckm_piece *first, *last;
    uint64_t bytes; /* allocated, bookkeeping included: what a bound must count */
};

/* Keeps the bytes that are not held yet. Returns how many those were; what can't be allocated is left out. */
uint32_t ckm_reorder_insert(struct ckm_reorder *held, uint64_t offset, const uint8_t *data, uint32_t length,
                            uint64_t now_us);
void ckm_reorder_pop(struct ckm_reorder *held);
void ckm_reorder_clear(struct ckm_reorder *held);

#endif
