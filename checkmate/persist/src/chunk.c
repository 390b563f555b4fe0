/* A chunk collects the pieces that callers gave until all its bytes are there. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>

#include "engine.h"
#include "error.h"

void ckp_queue_add(struct ckp_queue *queue, struct ckp_chunk *chunk)
{
    chunk->next = NULL;
    *queue->end = chunk;
    queue->end = &chunk->next;
}

static struct ckp_chunk *take_at(struct ckp_queue *queue, struct ckp_chunk **link)
{
    struct ckp_chunk *chunk = *link;

    *link = chunk->next;
    if (!*link)
        queue->end = link;
    return chunk;
}

struct ckp_chunk *ckp_queue_take(struct ckp_queue *queue)
{
    return queue->first ? take_at(queue, &queue->first) : NULL;
}

struct ckp_chunk *ckp_queue_take_cleared(struct ckp_queue *queue)
{
    for (struct ckp_chunk **link = &queue->first; *link; link = &(*link)->next)
        if ((*link)->ticket->cleared)
            return take_at(queue, link);
    return NULL;
}

struct ckp_chunk *ckp_queue_take_of(struct ckp_queue *queue, const struct ckp_ticket *ticket)
{
    for (struct ckp_chunk **link = &queue->first; *link; link = &(*link)->next)
        if ((*link)->ticket == ticket)
            return take_at(queue, link);
    return NULL;
}

uint64_t ckp_chunk_bytes(const struct ckp_chunk *chunk)
{
    return ckp_chunk_size(chunk->ticket->data_bytes, chunk->engine->options.chunk_bytes, chunk->index);
}

int ckp_chunk_give(struct ckp_chunk *chunk, uint64_t offset, const uint8_t *data, uint64_t bytes,
                   struct ckp_error *error)
{
    struct ckp_piece **link = &chunk->pieces, *above = NULL, *piece;

    for (; *link && (*link)->offset > offset; link = &(*link)->below)
        above = *link;
    if (chunk->state != CHUNK_OPEN || (above && offset + bytes > above->offset) ||
        (*link && (*link)->offset + (*link)->bytes > offset))
        return ckp_fail(error, EINVAL, "bytes at %" PRIu64 " of checkpoint %" PRIu64 " were given twice",
                        chunk->index * chunk->engine->options.chunk_bytes + offset, chunk->ticket->counter);
    piece = malloc(sizeof *piece);
    if (!piece)
        return ckp_fail(error, ENOMEM, "no memory to note a write");
    *piece = (struct ckp_piece){.below = *link, .data = data, .offset = offset, .bytes = bytes};
    *link = piece;
    chunk->given += bytes;
    if (chunk->given == ckp_chunk_bytes(chunk)) {
        chunk->state = CHUNK_READY;
        ckp_queue_add(&chunk->engine->ready, chunk);
        pthread_cond_signal(&chunk->engine->stage);
    }
    return 0;
}

void ckp_chunk_forget(struct ckp_chunk *chunk)
{
    for (struct ckp_piece *below; chunk->pieces; chunk->pieces = below) {
        below = chunk->pieces->below;
        free(chunk->pieces);
    }
}

void ckp_chunk_unstage(struct ckp_chunk *chunk)
{
    ckp_pool_put(&chunk->engine->pool, chunk->buffer);
    chunk->buffer = NULL;
    pthread_cond_signal(&chunk->engine->stage);
    pthread_cond_broadcast(&chunk->engine->change);
}

void ckp_chunk_staged(struct ckp_chunk *chunk)
{
    chunk->state = CHUNK_STAGED;
    ckp_queue_add(&chunk->engine->staged, chunk);
    pthread_cond_signal(&chunk->engine->write);
}
