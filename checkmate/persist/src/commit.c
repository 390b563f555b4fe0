#include "commit.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "checkmate/crc32c.h"
#include "error.h"

static uint32_t number(const struct ckp_engine *engine, const struct ckp_slot *slot)
{
    return (uint32_t)(slot - engine->file.slots);
}

int ckp_flush(struct ckp_engine *engine, const char *what, struct ckp_error *error)
{
    int result = engine->storage->ops->flush(engine->storage);

    if (!result)
        return 0;
    ckp_fail_errno(error, -result, "flushing %s", what);
    pthread_mutex_lock(&engine->lock);
    for (struct ckp_ticket *ticket = engine->tickets, *next; ticket; ticket = next) {
        next = ticket->next;
        if (ticket->written || ticket->busy) {
            ckp_ticket_fail(engine, ticket, error);
            ckp_ticket_settle(engine, ticket);
        }
    }
    pthread_mutex_unlock(&engine->lock);
    return result;
}

static int write_durably(struct ckp_engine *engine, uint64_t offset, const uint8_t *data, uint64_t bytes,
                         const char *what, struct ckp_error *error)
{
    int result = ckp_write_now(engine->storage, offset, data, bytes);

    if (result)
        return ckp_fail_errno(error, -result, "writing %s", what);
    return ckp_flush(engine, what, error);
}

int ckp_clear_headers(struct ckp_engine *engine, struct ckp_slot *const *slots, uint32_t count, struct ckp_error *error)
{
    static const union ckp_block zeros;

    for (uint32_t i = 0; i < count; i++) {
        uint64_t start = ckp_slot_start(&engine->file.super, number(engine, slots[i]));
        int result = ckp_write_now(engine->storage, start, zeros.bytes, sizeof zeros.bytes);
        if (result)
            return ckp_fail_errno(error, -result, "clearing slot %" PRIu32, number(engine, slots[i]));
    }
    return ckp_flush(engine, "cleared slots", error);
}

int ckp_write_record(struct ckp_engine *engine, const struct ckp_slot *slot, struct ckp_error *error)
{
    struct ckp_found *file = &engine->file;
    uint32_t place = file->sequence ? (file->record + 1) % CKP_RECORDS : 0;
    union ckp_block block = {0};
    int result;

    block.record.sequence = file->sequence + 1;
    pthread_mutex_lock(&engine->lock);
    block.record.issued = file->issued;
    block.record.counter = slot ? slot->info.counter : 0;
    block.record.slot = slot ? number(engine, slot) : 0;
    pthread_mutex_unlock(&engine->lock);
    ckp_seal(&block, CKP_RECORD_MAGIC, file->super.prefix.file);
    result = write_durably(engine, CKP_RECORDS_START + place * (uint64_t)CKP_BLOCK, block.bytes, sizeof block.bytes,
                           "a commit record", error);
    if (result)
        return result; /* the same place is written next: the other record is the one that is known to be good */
    file->sequence++;
    file->record = place;
    return 0;
}

int ckp_commit_slot(struct ckp_engine *engine, struct ckp_slot *slot, uint32_t *state, struct ckp_error *error)
{
    struct ckp_found *file = &engine->file;
    int result;

    *state = CKP_SUPERSEDED;
    if (slot->info.counter > file->latest) {
        if ((result = ckp_write_record(engine, slot, error)))
            return result;
        *state = CKP_COMMITTED;
    }
    pthread_mutex_lock(&engine->lock);
    slot->info.published = 1;
    slot->prepared = 0;
    if (*state == CKP_COMMITTED)
        file->latest = slot->info.counter;
    engine->commits++;
    pthread_cond_broadcast(&engine->change);
    pthread_mutex_unlock(&engine->lock);
    return 0;
}

static struct ckp_slot_header *describe(struct ckp_engine *engine, const struct ckp_ticket *ticket,
                                        union ckp_block *block, uint64_t table_bytes)
{
    struct timespec now;

    clock_gettime(CLOCK_REALTIME, &now);
    block->slot = (struct ckp_slot_header){
        .counter = ticket->counter,
        .step = ticket->step,
        .data_bytes = ticket->data_bytes,
        .meta_bytes = ticket->meta_bytes,
        .chunk_bytes = engine->options.chunk_bytes,
        .time_ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec,
        .table_offset = CKP_BLOCK,
        .meta_offset = CKP_BLOCK + ckp_round_up(table_bytes),
        .table_crc = ckm_crc32c(0, ticket->table, table_bytes),
        .meta_crc = ckm_crc32c(0, ticket->meta, ticket->meta_bytes),
        .slot = number(engine, ticket->slot),
    };
    ckp_seal(block, CKP_SLOT_MAGIC, engine->file.super.prefix.file);
    return &block->slot;
}

static void complete(struct ckp_engine *engine, struct ckp_ticket *ticket, const struct ckp_slot_header *header)
{
    struct ckp_slot *slot = ticket->slot;

    pthread_mutex_lock(&engine->lock);
    ckp_slot_fill(slot, header);
    slot->table = ticket->table;
    ticket->table = NULL;
    slot->prepared = !ticket->publish;
    pthread_mutex_unlock(&engine->lock);
}

/* Header, checksums and metadata lie side by side: one write. */
static int write_metadata(struct ckp_engine *engine, struct ckp_ticket *ticket, struct ckp_error *error)
{
    uint64_t table_bytes = ticket->count * sizeof *ticket->table;
    uint64_t table_room = ckp_round_up(table_bytes);
    uint64_t bytes = CKP_BLOCK + table_room + ckp_round_up(ticket->meta_bytes);
    union ckp_block *area = aligned_alloc(CKP_BLOCK, bytes);
    int result;

    if (!area)
        return ckp_fail(error, ENOMEM, "no memory for the metadata of checkpoint %" PRIu64, ticket->counter);
    memset(area, 0, bytes);
    memcpy(area->bytes + CKP_BLOCK, ticket->table, table_bytes);
    if (ticket->meta_bytes)
        memcpy(area->bytes + CKP_BLOCK + table_room, ticket->meta, ticket->meta_bytes);
    struct ckp_slot_header *header = describe(engine, ticket, area, table_bytes);
    ticket->slot->dirty = 1;
    result = write_durably(engine, ckp_slot_start(&engine->file.super, header->slot), area->bytes, bytes,
                           "a slot's metadata", error);
    if (!result)
        complete(engine, ticket, header);
    free(area);
    return result;
}

/* The order that everything hangs on: data, then metadata, then the commit record; each durable before the next. */
static int commit(struct ckp_engine *engine, struct ckp_ticket *ticket, struct ckp_error *error)
{
    int result;

    ticket->outcome = CKP_PREPARED;
    if ((result = ckp_flush(engine, "chunks", error)) || (result = write_metadata(engine, ticket, error)))
        return result;
    if (!ticket->publish || !(result = ckp_commit_slot(engine, ticket->slot, &ticket->outcome, error)))
        return 0;
    pthread_mutex_lock(&engine->lock);
    ticket->slot->complete = 0; /* it may or may not be named on storage: recovery copes with both */
    pthread_mutex_unlock(&engine->lock);
    return result;
}

/* The ticket's slot, and all others that hold no checkpoint any more. */
static int clear(struct ckp_engine *engine, struct ckp_ticket *ticket, struct ckp_error *error)
{
    struct ckp_slot *slots[CKP_MAX_SLOTS];
    uint32_t count = 0;
    int result;

    pthread_mutex_lock(&engine->lock);
    for (uint32_t i = 0; i < engine->file.super.slots; i++) {
        struct ckp_slot *slot = &engine->file.slots[i];
        if (slot->dirty && !slot->complete && (!slot->busy || slot == ticket->slot))
            slots[count++] = slot;
    }
    pthread_mutex_unlock(&engine->lock);
    result = count ? ckp_clear_headers(engine, slots, count, error) : 0;
    if (result)
        return result;
    pthread_mutex_lock(&engine->lock);
    for (uint32_t i = 0; i < count; i++)
        slots[i]->dirty = 0;
    ticket->cleared = 1;
    pthread_cond_broadcast(&engine->write);
    pthread_mutex_unlock(&engine->lock);
    return 0;
}

typedef int job_function(struct ckp_engine *engine, struct ckp_ticket *ticket, struct ckp_error *error);

static struct ckp_ticket *next_job(struct ckp_engine *engine, job_function **job)
{
    struct ckp_ticket *ticket;

    *job = clear; /* first: writers wait for it */
    for (ticket = engine->tickets; ticket; ticket = ticket->next)
        if (ticket->state != TICKET_ENDED && !ticket->error.code && !ticket->cleared)
            return ticket;
    *job = commit;
    for (ticket = engine->tickets; ticket; ticket = ticket->next)
        if (ticket->state == TICKET_FINISHED && !ticket->error.code && ticket->written == ticket->count)
            return ticket;
    return NULL;
}

static void run(struct ckp_engine *engine, job_function *job, struct ckp_ticket *ticket)
{
    struct ckp_error error;

    ticket->busy++;
    if (job == commit)
        ticket->state = TICKET_COMMITTING;
    pthread_mutex_unlock(&engine->lock);
    pthread_mutex_lock(&engine->commit_lock);
    int result = job(engine, ticket, &error);
    pthread_mutex_unlock(&engine->commit_lock);
    pthread_mutex_lock(&engine->lock);
    ticket->busy--;
    if (result)
        ckp_ticket_fail(engine, ticket, &error);
    if (ticket->state == TICKET_COMMITTING && !ticket->error.code)
        ckp_ticket_end(engine, ticket);
    else
        ckp_ticket_settle(engine, ticket);
}

void *ckp_committer(void *arg)
{
    struct ckp_engine *engine = arg;
    struct ckp_ticket *ticket;
    job_function *job;

    pthread_mutex_lock(&engine->lock);
    while (!engine->stop) {
        ticket = next_job(engine, &job);
        if (ticket)
            run(engine, job, ticket);
        else
            pthread_cond_wait(&engine->commit, &engine->lock);
    }
    pthread_mutex_unlock(&engine->lock);
    return NULL;
}
