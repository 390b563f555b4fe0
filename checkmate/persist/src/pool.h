/* The staging buffers: a fixed number of chunks in one piece of memory. Not locked: the engine is. */
#ifndef CHECKMATE_PERSIST_POOL_H
#define CHECKMATE_PERSIST_POOL_H

#include <stdint.h>

struct ckp_pool {
    uint8_t *memory; /* aligned to pages */
    uint64_t bytes;
    uint8_t **free; /* a stack */
    uint32_t available;
};

/* 0 or -ENOMEM. */
int ckp_pool_open(struct ckp_pool *pool, uint32_t chunks, uint64_t chunk_bytes);
void ckp_pool_close(struct ckp_pool *pool);

static inline uint8_t *ckp_pool_take(struct ckp_pool *pool)
{
    return pool->available ? pool->free[--pool->available] : 0;
}

static inline void ckp_pool_put(struct ckp_pool *pool, uint8_t *buffer)
{
    pool->free[pool->available++] = buffer;
}

#endif
