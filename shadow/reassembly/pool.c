#include "pool.h"

#include <stdlib.h>
#include <sys/mman.h>

#define ALIGNMENT 64u
#define HUGE_PAGE (2u << 20)

static void destroy(struct ckm_pool *pool, struct ckm_buffer *buffer)
{
    pool->allocated -= buffer->size;
    free(buffer->data);
    free(buffer);
}

static struct ckm_buffer *unlink_free(struct ckm_buffer **link)
{
    struct ckm_buffer *buffer = *link;
    *link = buffer->next;
    return buffer;
}

/* The smallest free buffer that fits and wastes at most a quarter. */
static struct ckm_buffer *take_free(struct ckm_pool *pool, uint64_t size)
{
    struct ckm_buffer **best = NULL;
    for (struct ckm_buffer **link = &pool->free; *link; link = &(*link)->next)
        if ((*link)->size >= size && (*link)->size - size <= size / 4 && (!best || (*link)->size < (*best)->size))
            best = link;
    return best ? unlink_free(best) : NULL;
}

/* Large buffers in huge pages, where the kernel grants them: they are written all over, a slice here and there. */
static uint8_t *allocate(uint64_t size)
{
    void *data;
    if (posix_memalign(&data, size < HUGE_PAGE ? ALIGNMENT : HUGE_PAGE, size))
        return NULL;
    if (size >= HUGE_PAGE)
        madvise(data, size, MADV_HUGEPAGE);
    return data;
}

static struct ckm_buffer *create(struct ckm_pool *pool, uint64_t size)
{
    while (pool->free && pool->allocated + size > pool->limit)
        destroy(pool, unlink_free(&pool->free));
    if (size > pool->limit || pool->allocated > pool->limit - size)
        return NULL;
    struct ckm_buffer *buffer = malloc(sizeof *buffer);
    uint8_t *data = allocate(size);
    if (!buffer || !data) {
        free(buffer);
        free(data);
        return NULL;
    }
    *buffer = (struct ckm_buffer){.data = data, .size = size};
    pool->allocated += size;
    return buffer;
}

struct ckm_buffer *ckm_pool_take(struct ckm_pool *pool, uint64_t size)
{
    size = (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    struct ckm_buffer *buffer = take_free(pool, size);
    if (!buffer)
        buffer = create(pool, size);
    if (buffer)
        pool->used += buffer->size;
    return buffer;
}

void ckm_pool_give(struct ckm_pool *pool, struct ckm_buffer *buffer)
{
    pool->used -= buffer->size;
    buffer->next = pool->free;
    pool->free = buffer;
}

void ckm_pool_free(struct ckm_pool *pool)
{
    while (pool->free)
        destroy(pool, unlink_free(&pool->free));
}
