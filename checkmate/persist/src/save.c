/* What callers do with tickets. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "engine.h"
#include "error.h"

static int reserved(const struct ckp_slot *slot)
{
    return slot->busy || slot->prepared;
}

/* The slot to overwrite next: an empty one, else the oldest; never the newest committed. NULL when N are taken. */
static struct ckp_slot *free_slot(struct ckp_engine *engine)
{
    struct ckp_slot *best = NULL;
    uint32_t taken = 0;

    for (uint32_t i = 0; i < engine->file.super.slots; i++) {
        struct ckp_slot *slot = &engine->file.slots[i];
        taken += (uint32_t)reserved(slot);
        if (reserved(slot) || slot->holds || (slot->complete && slot->info.counter == engine->file.latest))
            continue;
        if (!best || (best->complete && (!slot->complete || slot->info.counter < best->info.counter)))
            best = slot;
    }
    return taken < engine->file.super.slots - 1 ? best : NULL;
}

static void empty(struct ckp_slot *slot)
{
    slot->complete = 0;
    free(slot->table);
    slot->table = NULL;
}

/* What was complete but never committed belongs to a history that ends here. */
static void drop_unpublished(struct ckp_engine *engine)
{
    for (uint32_t i = 0; i < engine->file.super.slots; i++) {
        struct ckp_slot *slot = &engine->file.slots[i];
        if (slot->complete && !slot->info.published && !reserved(slot) && !slot->holds)
            empty(slot);
    }
}

static void enlist(struct ckp_engine *engine, struct ckp_ticket *ticket, struct ckp_slot *slot)
{
    struct ckp_ticket **link = &engine->tickets;

    empty(slot);
    slot->busy = 1;
    ticket->slot = slot;
    ticket->counter = ++engine->file.issued;
    while (*link)
        link = &(*link)->next;
    *link = ticket;
    engine->in_flight++;
    pthread_cond_signal(&engine->commit);
}

static int check_sizes(const struct ckp_engine *engine, uint64_t data_bytes, uint64_t meta_bytes,
                       struct ckp_error *error)
{
    const struct ckp_superblock *super = &engine->file.super;

    if (data_bytes > super->data_bytes)
        return ckp_fail(error, EFBIG,
                        "the checkpoint has %" PRIu64 " bytes, a slot of this file holds %" PRIu64
                        ": make a new file for it",
                        data_bytes, super->data_bytes);
    if (meta_bytes > super->meta_bytes)
        return ckp_fail(error, EFBIG,
                        "the metadata has %" PRIu64 " bytes, a slot of this file holds %" PRIu64
                        ": make a new file for it",
                        meta_bytes, super->meta_bytes);
    return 0;
}

static int wait_for_slot(struct ckp_engine *engine, int64_t timeout_ms, struct ckp_slot **slot, struct ckp_error *error)
{
    struct timespec deadline = ckp_deadline(timeout_ms);
    int late = 0;

    while (!engine->closing && !(*slot = free_slot(engine)) && !late)
        late = ckp_wait_change(engine, &deadline);
    if (engine->closing)
        return ckp_fail(error, CKP_CLOSED, "the checkpoint file is being closed");
    if (!*slot)
        return ckp_fail(error, ETIMEDOUT, "%" PRIu32 " checkpoints are in flight or held, no slot became free",
                        engine->file.super.slots - 1);
    return 0;
}

int ckp_begin(struct ckp_engine *engine, uint64_t step, uint64_t data_bytes, uint64_t meta_bytes, int64_t timeout_ms,
              uint64_t *ticket, struct ckp_error *error)
{
    struct ckp_ticket *made = NULL;
    struct ckp_slot *slot;
    int result = ckp_enter_write(engine, error);

    if (result)
        return result;
    result = check_sizes(engine, data_bytes, meta_bytes, error);
    if (!result)
        result = wait_for_slot(engine, timeout_ms, &slot, error);
    if (!result && !(made = ckp_ticket_new(engine, step, data_bytes, meta_bytes)))
        result = ckp_fail(error, ENOMEM, "no memory for a checkpoint of %" PRIu64 " bytes", data_bytes);
    if (!result) {
        drop_unpublished(engine);
        enlist(engine, made, slot);
        *ticket = made->counter;
    }
    pthread_mutex_unlock(&engine->lock);
    return result;
}

static int range_fits(const struct ckp_ticket *ticket, uint64_t offset, uint64_t bytes, struct ckp_error *error)
{
    if (offset <= ticket->data_bytes && bytes <= ticket->data_bytes - offset)
        return 0;
    return ckp_fail(error, EINVAL, "bytes %" PRIu64 " to %" PRIu64 " lie outside of the checkpoint's %" PRIu64, offset,
                    offset + bytes, ticket->data_bytes);
}

/* Bytes that were given before fail the ticket: a part of the write may have been noted already. */
static int give(struct ckp_engine *engine, struct ckp_ticket *ticket, struct ckp_part part, struct ckp_error *error)
{
    uint64_t size = engine->options.chunk_bytes;
    const uint8_t *data = part.data;
    int result = range_fits(ticket, part.offset, part.bytes, error);

    if (result)
        return result;
    while (part.bytes) {
        uint64_t in_chunk = part.offset % size;
        uint64_t bytes = part.bytes < size - in_chunk ? part.bytes : size - in_chunk;
        result = ckp_chunk_give(&ticket->chunks[part.offset / size], in_chunk, data, bytes, error);
        if (result) {
            ckp_ticket_fail(engine, ticket, error);
            ckp_ticket_settle(engine, ticket);
            return result;
        }
        data += bytes;
        part.offset += bytes;
        part.bytes -= bytes;
    }
    return 0;
}

int ckp_write(struct ckp_engine *engine, uint64_t ticket, const struct ckp_part *parts, uint64_t count,
              struct ckp_error *error)
{
    struct ckp_ticket *found;
    int result = ckp_enter_write(engine, error);

    if (result)
        return result;
    result = ckp_ticket_usable(engine, ticket, &found, error);
    for (uint64_t i = 0; i < count && !result; i++)
        result = give(engine, found, parts[i], error);
    pthread_mutex_unlock(&engine->lock);
    return result;
}

static int chunk_of(struct ckp_engine *engine, uint64_t ticket, uint64_t index, enum ckp_chunk_state state,
                    struct ckp_chunk **chunk, struct ckp_error *error)
{
    struct ckp_ticket *found;
    int result = ckp_ticket_usable(engine, ticket, &found, error);

    if (result)
        return result;
    if (index >= found->count)
        return ckp_fail(error, EINVAL, "chunk is %" PRIu64 ": checkpoint %" PRIu64 " has %" PRIu64, index, ticket,
                        found->count);
    *chunk = &found->chunks[index];
    if ((*chunk)->state != state || (state == CHUNK_OPEN && (*chunk)->given))
        return ckp_fail(error, EINVAL, "chunk %" PRIu64 " of checkpoint %" PRIu64 " is not %s", index, ticket,
                        state == CHUNK_OPEN ? "untouched" : "lent");
    return 0;
}

int ckp_lease(struct ckp_engine *engine, uint64_t ticket, uint64_t chunk, int64_t timeout_ms, uint8_t **buffer,
              uint64_t *bytes, struct ckp_error *error)
{
    struct timespec deadline = ckp_deadline(timeout_ms);
    struct ckp_chunk *found;
    int result = ckp_enter_write(engine, error), late = 0;

    if (result)
        return result;
    while (!(result = chunk_of(engine, ticket, chunk, CHUNK_OPEN, &found, error)) && !engine->pool.available) {
        if (late) {
            result = ckp_fail(error, ETIMEDOUT, "no staging buffer became free");
            break;
        }
        late = ckp_wait_change(engine, &deadline);
    }
    if (!result) {
        found->buffer = *buffer = ckp_pool_take(&engine->pool);
        found->state = CHUNK_LENT;
        found->filled_by_caller = 1;
        *bytes = ckp_chunk_bytes(found);
    }
    pthread_mutex_unlock(&engine->lock);
    return result;
}

int ckp_submit(struct ckp_engine *engine, uint64_t ticket, uint64_t chunk, struct ckp_error *error)
{
    struct ckp_chunk *found;
    int result = ckp_enter_write(engine, error);

    if (result)
        return result;
    result = chunk_of(engine, ticket, chunk, CHUNK_LENT, &found, error);
    if (!result) {
        uint64_t bytes = ckp_chunk_bytes(found);
        memset(found->buffer + bytes, 0, ckp_round_up(bytes) - bytes);
        found->given = bytes;
        ckp_chunk_staged(found);
        pthread_cond_broadcast(&engine->change);
    }
    pthread_mutex_unlock(&engine->lock);
    return result;
}

/* 0: all copied, 1: not yet, else the ticket's error, once its sources are not read any more. */
static int copied(struct ckp_engine *engine, uint64_t ticket, uint64_t offset, uint64_t bytes, struct ckp_error *error)
{
    struct ckp_ticket *found = ckp_ticket_find(engine, ticket);
    int result;

    if (!found)
        return ckp_fail(error, CKP_NOT_FOUND, "there is no checkpoint %" PRIu64 " in flight", ticket);
    if ((result = range_fits(found, offset, bytes, error)))
        return result;
    if (found->error.code) {
        *error = found->error;
        return found->staging ? 1 : error->code;
    }
    if (bytes)
        for (uint64_t i = offset / engine->options.chunk_bytes; i <= (offset + bytes - 1) / engine->options.chunk_bytes;
             i++)
            if (found->chunks[i].state != CHUNK_STAGED)
                return 1;
    return 0;
}

int ckp_wait_copied(struct ckp_engine *engine, uint64_t ticket, uint64_t offset, uint64_t bytes, int64_t timeout_ms,
                    struct ckp_error *error)
{
    struct timespec deadline = ckp_deadline(timeout_ms);
    int result = ckp_enter(engine, error), late = 0;

    if (result)
        return result;
    while ((result = copied(engine, ticket, offset, bytes, error)) > 0 && !late)
        late = ckp_wait_change(engine, &deadline);
    if (result > 0)
        result = ckp_fail(error, ETIMEDOUT, "checkpoint %" PRIu64 " is not copied yet", ticket);
    pthread_mutex_unlock(&engine->lock);
    return result;
}

static int all_given(const struct ckp_engine *engine, const struct ckp_ticket *ticket, struct ckp_error *error)
{
    for (uint64_t i = 0; i < ticket->count; i++)
        if (ticket->chunks[i].state == CHUNK_OPEN || ticket->chunks[i].state == CHUNK_LENT)
            return ckp_fail(error, CKP_GAP,
                            "checkpoint %" PRIu64 " can not be finished: not all bytes of chunk %" PRIu64
                            ", from offset %" PRIu64 " on, were given",
                            ticket->counter, i, i * engine->options.chunk_bytes);
    return 0;
}

int ckp_finish(struct ckp_engine *engine, uint64_t ticket, const void *meta, uint64_t meta_bytes, uint32_t publish,
               struct ckp_error *error)
{
    struct ckp_ticket *found;
    int result = ckp_enter_write(engine, error);

    if (result)
        return result;
    result = ckp_ticket_usable(engine, ticket, &found, error);
    if (!result && meta_bytes > found->meta_room)
        result = ckp_fail(error, EFBIG, "the metadata has %" PRIu64 " bytes, %" PRIu64 " were reserved", meta_bytes,
                          found->meta_room);
    if (!result)
        result = all_given(engine, found, error);
    if (!result && meta_bytes && !(found->meta = malloc(meta_bytes)))
        result = ckp_fail(error, ENOMEM, "no memory for %" PRIu64 " bytes of metadata", meta_bytes);
    if (!result) {
        if (meta_bytes)
            memcpy(found->meta, meta, meta_bytes);
        found->meta_bytes = meta_bytes;
        found->publish = publish;
        found->state = TICKET_FINISHED;
        ckp_ticket_settle(engine, found);
    }
    pthread_mutex_unlock(&engine->lock);
    return result;
}

int ckp_wait(struct ckp_engine *engine, uint64_t ticket, int64_t timeout_ms, uint32_t *state, struct ckp_error *error)
{
    struct timespec deadline = ckp_deadline(timeout_ms);
    struct ckp_ticket *found;
    int late = 0, result;

    if (atomic_load(&engine->forked))
        return ckp_fail(error, CKP_CLOSED, "the checkpoint file was opened by the parent of this process");
    pthread_mutex_lock(&engine->lock);
    while ((found = ckp_ticket_find(engine, ticket)) && found->state != TICKET_ENDED && !late) {
        found->waiters++;
        late = ckp_wait_change(engine, &deadline);
        if ((found = ckp_ticket_find(engine, ticket)))
            found->waiters--;
    }
    if (!found) {
        result = ckp_fail(error, CKP_NOT_FOUND, "there is no checkpoint %" PRIu64 " in flight", ticket);
    } else if (found->state != TICKET_ENDED) {
        result = ckp_fail(error, ETIMEDOUT, "checkpoint %" PRIu64 " is not durable yet", ticket);
    } else {
        *state = found->outcome;
        *error = found->error;
        result = error->code;
        ckp_ticket_free(engine, found);
    }
    pthread_mutex_unlock(&engine->lock);
    return result;
}

int ckp_abort(struct ckp_engine *engine, uint64_t ticket, struct ckp_error *error)
{
    struct ckp_ticket *found;
    int result = ckp_enter_write(engine, error);

    if (result)
        return result;
    found = ckp_ticket_find(engine, ticket);
    if (found && !found->error.code && found->state >= TICKET_COMMITTING) {
        result = ckp_fail(error, EBUSY, "checkpoint %" PRIu64 " is already being committed", ticket);
    } else if (found) {
        ckp_fail(error, CKP_ABORTED, "checkpoint %" PRIu64 " was aborted", ticket);
        ckp_ticket_fail(engine, found, error);
        found->abandoned = 1;
        found->busy++; /* it stays until its sources are not read any more */
        while (found->staging)
            pthread_cond_wait(&engine->change, &engine->lock);
        found->busy--;
        if (found->state == TICKET_ENDED)
            ckp_ticket_free(engine, found);
        else
            ckp_ticket_settle(engine, found);
    }
    pthread_mutex_unlock(&engine->lock);
    return result;
}
