/* Gradient buffers: bounded in total, 64-byte aligned, kept for the next operation of about that size. */
#ifndef CHECKMATE_REASSEMBLY_POOL_H
#define CHECKMATE_REASSEMBLY_POOL_H

#include <stdint.h>

struct ckm_buffer {
    struct ckm_buffer *next; /* while free */
    uint8_t *data;
    uint64_t size;
};

struct ckm_pool {
    struct ckm_buffer *free;
    uint64_t limit;
    uint64_t allocated; /* bytes, free buffers included */
    uint64_t used;      /* bytes, free buffers excluded */
};

/* NULL when the bound or the memory is exhausted. The contents are whatever was there before. */
struct ckm_buffer *ckm_pool_take(struct ckm_pool *pool, uint64_t size);
void ckm_pool_give(struct ckm_pool *pool, struct ckm_buffer *buffer);
void ckm_pool_free(struct ckm_pool *pool);

#endif
