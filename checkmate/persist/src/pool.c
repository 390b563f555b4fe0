#include "pool.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>

int ckp_pool_open(struct ckp_pool *pool, uint32_t chunks, uint64_t chunk_bytes)
{
    *pool = (struct ckp_pool){.bytes = chunks * chunk_bytes, .free = calloc(chunks, sizeof *pool->free)};
    if (!pool->free)
        return -ENOMEM;
    pool->memory = mmap(NULL, pool->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pool->memory == MAP_FAILED) {
        free(pool->free);
        *pool = (struct ckp_pool){0};
        return -ENOMEM;
    }
    madvise(pool->memory, pool->bytes,
            MADV_HUGEPAGE); /* fewer pages to pin for each write; where there are none, fine */
    for (uint32_t i = chunks; i-- > 0;)
        ckp_pool_put(pool, pool->memory + i * chunk_bytes);
    return 0;
}

void ckp_pool_close(struct ckp_pool *pool)
{
    if (pool->memory)
        munmap(pool->memory, pool->bytes);
    free(pool->free);
    *pool = (struct ckp_pool){0};
}
