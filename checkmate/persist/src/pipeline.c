/* The two stages between callers and storage: copy a chunk into the pool, write it. */
#include <inttypes.h>
#include <string.h>

#include "checkmate/crc32c.h"
#include "engine.h"
#include "error.h"

#define AT_ONCE 65536u /* copied and summed while it is in the processor's cache */

static struct ckp_piece *lowest_first(struct ckp_piece *pieces)
{
    struct ckp_piece *reversed = NULL;

    for (struct ckp_piece *below; pieces; pieces = below) {
        below = pieces->below;
        pieces->below = reversed;
        reversed = pieces;
    }
    return reversed;
}

static uint32_t copy_piece(uint8_t *to, const uint8_t *from, uint64_t bytes, uint32_t crc)
{
    for (uint64_t part; bytes; to += part, from += part, bytes -= part) {
        part = bytes < AT_ONCE ? bytes : AT_ONCE;
        memcpy(to, from, part);
        crc = ckm_crc32c(crc, to, part);
    }
    return crc;
}

static void copy(struct ckp_chunk *chunk)
{
    uint64_t bytes = ckp_chunk_bytes(chunk), padding = ckp_round_up(bytes) - bytes;
    uint32_t crc = 0;

    chunk->pieces = lowest_first(chunk->pieces);
    for (const struct ckp_piece *piece = chunk->pieces; piece; piece = piece->below)
        crc = copy_piece(chunk->buffer + piece->offset, piece->data, piece->bytes, crc);
    memset(chunk->buffer + bytes, 0, padding);
    chunk->ticket->table[chunk->index] = ckm_crc32c(crc, chunk->buffer + bytes, padding);
}

static void stage(struct ckp_engine *engine, struct ckp_chunk *chunk)
{
    struct ckp_ticket *ticket = chunk->ticket;

    chunk->buffer = ckp_pool_take(&engine->pool);
    chunk->state = CHUNK_STAGING; /* its pieces are this thread's */
    ticket->busy++;
    ticket->staging++;
    pthread_mutex_unlock(&engine->lock);
    copy(chunk);
    pthread_mutex_lock(&engine->lock);
    ticket->staging--;
    ticket->busy--;
    ckp_chunk_forget(chunk);
    if (ticket->error.code)
        ckp_chunk_unstage(chunk);
    else
        ckp_chunk_staged(chunk);
    pthread_cond_broadcast(&engine->change);
    ckp_ticket_settle(engine, ticket);
}

void *ckp_stager(void *arg)
{
    struct ckp_engine *engine = arg;

    pthread_mutex_lock(&engine->lock);
    while (!engine->stop) {
        if (engine->ready.first && engine->pool.available)
            stage(engine, ckp_queue_take(&engine->ready));
        else
            pthread_cond_wait(&engine->stage, &engine->lock);
    }
    pthread_mutex_unlock(&engine->lock);
    return NULL;
}

static void written(struct ckp_io *io)
{
    struct ckp_chunk *chunk = (struct ckp_chunk *)io;
    struct ckp_engine *engine = chunk->engine;
    struct ckp_ticket *ticket = chunk->ticket;
    struct ckp_error error;

    pthread_mutex_lock(&engine->lock);
    ckp_chunk_unstage(chunk);
    ticket->busy--;
    if (io->result) {
        ckp_fail_errno(&error, -io->result, "writing chunk %" PRIu64 " of checkpoint %" PRIu64 " of step %" PRIu64,
                       chunk->index, ticket->counter, ticket->step);
        ckp_ticket_fail(engine, ticket, &error);
    } else {
        ticket->written++;
        engine->bytes_written += ckp_chunk_bytes(chunk);
    }
    ckp_ticket_settle(engine, ticket);
    pthread_mutex_unlock(&engine->lock);
}

static void write_chunk(struct ckp_engine *engine, struct ckp_chunk *chunk)
{
    struct ckp_ticket *ticket = chunk->ticket;
    uint64_t bytes = ckp_round_up(ckp_chunk_bytes(chunk));

    chunk->io.offset = ckp_slot_start(&engine->file.super, (uint32_t)(ticket->slot - engine->file.slots)) +
                       engine->file.super.data_offset + chunk->index * engine->options.chunk_bytes;
    chunk->io.data = chunk->buffer;
    chunk->io.bytes = bytes;
    chunk->io.done = written;
    ticket->busy++;
    pthread_mutex_unlock(&engine->lock);
    if (chunk->filled_by_caller)
        ticket->table[chunk->index] = ckm_crc32c(0, chunk->buffer, bytes);
    engine->storage->ops->write(engine->storage, &chunk->io);
    pthread_mutex_lock(&engine->lock);
}

void *ckp_writer(void *arg)
{
    struct ckp_engine *engine = arg;
    struct ckp_chunk *chunk;

    pthread_mutex_lock(&engine->lock);
    while (!engine->stop) {
        chunk = ckp_queue_take_cleared(&engine->staged);
        if (chunk)
            write_chunk(engine, chunk);
        else
            pthread_cond_wait(&engine->write, &engine->lock);
    }
    pthread_mutex_unlock(&engine->lock);
    return NULL;
}
