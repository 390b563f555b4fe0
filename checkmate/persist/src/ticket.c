/* A ticket is a checkpoint on its way to storage. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>

#include "engine.h"
#include "error.h"

static void release(struct ckp_ticket *ticket)
{
    free(ticket->chunks);
    free(ticket->table);
    free(ticket->meta);
    free(ticket);
}

struct ckp_ticket *ckp_ticket_new(struct ckp_engine *engine, uint64_t step, uint64_t data_bytes, uint64_t meta_bytes)
{
    struct ckp_ticket *ticket = calloc(1, sizeof *ticket);

    if (!ticket)
        return NULL;
    ticket->step = step;
    ticket->data_bytes = data_bytes;
    ticket->meta_room = meta_bytes;
    ticket->count = ckp_chunks(data_bytes, engine->options.chunk_bytes);
    ticket->chunks = calloc(ticket->count + 1, sizeof *ticket->chunks); /* never of size 0 */
    ticket->table = calloc(ticket->count + 1, sizeof *ticket->table);
    if (!ticket->chunks || !ticket->table) {
        release(ticket);
        return NULL;
    }
    for (uint64_t i = 0; i < ticket->count; i++) {
        ticket->chunks[i].engine = engine;
        ticket->chunks[i].ticket = ticket;
        ticket->chunks[i].index = i;
    }
    return ticket;
}

struct ckp_ticket *ckp_ticket_find(struct ckp_engine *engine, uint64_t counter)
{
    struct ckp_ticket *ticket = engine->tickets;

    while (ticket && (ticket->counter != counter || ticket->abandoned))
        ticket = ticket->next;
    return ticket;
}

void ckp_ticket_free(struct ckp_engine *engine, struct ckp_ticket *ticket)
{
    struct ckp_ticket **link = &engine->tickets;

    while (*link != ticket)
        link = &(*link)->next;
    *link = ticket->next;
    for (uint64_t i = 0; i < ticket->count; i++)
        if (ticket->chunks[i].state == CHUNK_LENT)
            ckp_chunk_unstage(&ticket->chunks[i]);
    release(ticket);
}

void ckp_ticket_fail(struct ckp_engine *engine, struct ckp_ticket *ticket, const struct ckp_error *error)
{
    struct ckp_chunk *chunk;

    if (ticket->error.code || ticket->state == TICKET_ENDED)
        return;
    ticket->error = *error;
    if (error->code != -CKP_ABORTED)
        engine->failures++;
    while (ckp_queue_take_of(&engine->ready, ticket))
        ;
    while ((chunk = ckp_queue_take_of(&engine->staged, ticket)))
        ckp_chunk_unstage(chunk);
    for (uint64_t i = 0; i < ticket->count; i++)
        if (ticket->chunks[i].state == CHUNK_OPEN || ticket->chunks[i].state == CHUNK_READY)
            ckp_chunk_forget(&ticket->chunks[i]);
    pthread_cond_broadcast(&engine->change);
}

void ckp_ticket_end(struct ckp_engine *engine, struct ckp_ticket *ticket)
{
    ticket->slot->busy = 0;
    ticket->slot = NULL;
    ticket->state = TICKET_ENDED;
    engine->in_flight--;
    pthread_cond_broadcast(&engine->change);
    if (ticket->abandoned)
        ckp_ticket_free(engine, ticket);
}

void ckp_ticket_settle(struct ckp_engine *engine, struct ckp_ticket *ticket)
{
    if (ticket->error.code) {
        if (!ticket->busy && ticket->state != TICKET_ENDED)
            ckp_ticket_end(engine, ticket);
    } else if (ticket->state == TICKET_FINISHED && ticket->written == ticket->count) {
        pthread_cond_signal(&engine->commit);
    }
}

int ckp_ticket_usable(struct ckp_engine *engine, uint64_t counter, struct ckp_ticket **ticket, struct ckp_error *error)
{
    *ticket = ckp_ticket_find(engine, counter);
    if (!*ticket)
        return ckp_fail(error, CKP_NOT_FOUND, "there is no checkpoint %" PRIu64 " in flight", counter);
    if ((*ticket)->error.code) {
        *error = (*ticket)->error;
        return error->code;
    }
    if ((*ticket)->state != TICKET_OPEN)
        return ckp_fail(error, EINVAL, "checkpoint %" PRIu64 " is finished: nothing can be added", counter);
    return 0;
}
