/* The engine from within. Data flow: ckp_write → ready chunks → the stager copies them into the pool → staged chunks →
 * writers → storage; when all chunks of a finished ticket are written, the committer makes it durable.
 *
 * `lock` guards everything but metadata on storage, which `commit_lock` guards; commit_lock is taken first.
 */
#ifndef CHECKMATE_PERSIST_ENGINE_H
#define CHECKMATE_PERSIST_ENGINE_H

#include <pthread.h>
#include <stdatomic.h>

#include "api.h"
#include "pool.h"
#include "recover.h"
#include "storage.h"

#define CKP_MAX_WRITERS 64u
#define CKP_STAGERS     2u /* one alone can not keep a fast drive busy */

/* Bytes of a chunk that were given by one call. */
struct ckp_piece {
    struct ckp_piece *below; /* the pieces of a chunk, highest first */
    const uint8_t *data;
    uint64_t offset; /* in the chunk */
    uint64_t bytes;
};

enum ckp_chunk_state { CHUNK_OPEN, CHUNK_READY, CHUNK_STAGING, CHUNK_LENT, CHUNK_STAGED };

struct ckp_chunk {
    struct ckp_io io; /* first: a finished write is turned back into its chunk */
    struct ckp_engine *engine;
    struct ckp_ticket *ticket;
    struct ckp_chunk *next; /* in the queue that it waits in */
    struct ckp_piece *pieces;
    uint8_t *buffer; /* of the pool */
    uint64_t given;
    uint64_t index;
    enum ckp_chunk_state state; /* STAGED also after it was written */
    int filled_by_caller;       /* it was lent: no checksum was taken on the way */
};

struct ckp_queue {
    struct ckp_chunk *first, **end;
};

enum ckp_ticket_state { TICKET_OPEN, TICKET_FINISHED, TICKET_COMMITTING, TICKET_ENDED };

struct ckp_ticket {
    struct ckp_ticket *next; /* by counter */
    struct ckp_slot *slot;   /* NULL when ended */
    uint64_t counter;
    uint64_t step;
    uint64_t data_bytes;
    uint64_t meta_room;
    uint64_t count;   /* chunks */
    uint64_t written; /* chunks on storage, not yet flushed */
    struct ckp_chunk *chunks;
    uint32_t *table; /* their checksums */
    uint8_t *meta;
    uint64_t meta_bytes;
    uint32_t publish;
    enum ckp_ticket_state state;
    int cleared; /* the slot's old header is gone: data may be overwritten */
    int busy;    /* engine threads that work for it, and writes under way */
    int staging; /* of those, the ones that read the caller's memory */
    int waiters;
    int abandoned;          /* aborted: goes when it has ended */
    uint32_t outcome;       /* enum ckp_state; counts when it ended without error */
    struct ckp_error error; /* code 0: none */
};

struct ckp_engine {
    struct ckp_engine *next; /* in the registry of this process */
    atomic_int forked;       /* this process is a child of the one that opened it */
    struct ckp_storage *storage;
    struct ckp_found file;
    struct ckp_options options;
    pthread_mutex_t commit_lock;
    pthread_mutex_t lock;
    pthread_cond_t stage;  /* a chunk is ready, or a buffer is free */
    pthread_cond_t write;  /* a chunk is staged, or may be written now */
    pthread_cond_t commit; /* a ticket needs its slot cleared, or is all written */
    pthread_cond_t change; /* for callers */
    struct ckp_pool pool;
    struct ckp_queue ready, staged;
    struct ckp_ticket *tickets;
    uint32_t in_flight;
    pthread_t threads[CKP_STAGERS + CKP_MAX_WRITERS + 1];
    uint32_t thread_count;
    int closing, closed, stop;
    uint64_t commits, failures, bytes_written;
};

/* An engine over any storage, which it owns from now on, also when it fails. */
struct ckp_engine *ckp_start(struct ckp_storage *storage, const struct ckp_options *options, struct ckp_error *error);

/* What ckp_open and ckp_probe make of the caller's options. */
int ckp_options_check(const struct ckp_options *given, struct ckp_options *options, struct ckp_error *error);

/* Make storage of the right size, all zeros, a checkpoint file. */
int ckp_format(struct ckp_storage *storage, const struct ckp_superblock *super, struct ckp_error *error);

/* registry.c: engines of this process; a forked child closes their files, so that the lock dies with the parent. */
void ckp_register(struct ckp_engine *engine);
void ckp_unregister(struct ckp_engine *engine);

/* wait.c */
struct timespec ckp_deadline(int64_t timeout_ms);
void ckp_cond_init(pthread_cond_t *cond);
int ckp_wait_change(struct ckp_engine *engine, const struct timespec *deadline); /* 0 or ETIMEDOUT */
/* Lock, and refuse a closed or forked engine. */
int ckp_enter(struct ckp_engine *engine, struct ckp_error *error);
/* The same for what writes. */
int ckp_enter_write(struct ckp_engine *engine, struct ckp_error *error);

/* ticket.c; all under the lock */
struct ckp_ticket *ckp_ticket_new(struct ckp_engine *engine, uint64_t step, uint64_t data_bytes, uint64_t meta_bytes);
struct ckp_ticket *ckp_ticket_find(struct ckp_engine *engine, uint64_t counter);
void ckp_ticket_free(struct ckp_engine *engine, struct ckp_ticket *ticket);
/* The first error counts. Nothing more is copied or written for it; it ends when no thread works for it any more. */
void ckp_ticket_fail(struct ckp_engine *engine, struct ckp_ticket *ticket, const struct ckp_error *error);
/* Look what a ticket can do next after something happened to it; it may be gone afterwards. */
void ckp_ticket_settle(struct ckp_engine *engine, struct ckp_ticket *ticket);
void ckp_ticket_end(struct ckp_engine *engine, struct ckp_ticket *ticket); /* it may be gone afterwards */
int ckp_ticket_usable(struct ckp_engine *engine, uint64_t counter, struct ckp_ticket **ticket, struct ckp_error *error);

/* chunk.c; all under the lock */
void ckp_queue_add(struct ckp_queue *queue, struct ckp_chunk *chunk);
struct ckp_chunk *ckp_queue_take(struct ckp_queue *queue);
struct ckp_chunk *ckp_queue_take_cleared(struct ckp_queue *queue); /* the first that may be written */
struct ckp_chunk *ckp_queue_take_of(struct ckp_queue *queue, const struct ckp_ticket *ticket);
uint64_t ckp_chunk_bytes(const struct ckp_chunk *chunk);
int ckp_chunk_give(struct ckp_chunk *chunk, uint64_t offset, const uint8_t *data, uint64_t bytes,
                   struct ckp_error *error);
void ckp_chunk_forget(struct ckp_chunk *chunk);  /* its pieces */
void ckp_chunk_staged(struct ckp_chunk *chunk);  /* its buffer is full */
void ckp_chunk_unstage(struct ckp_chunk *chunk); /* its buffer goes back to the pool */

/* Threads. */
void *ckp_stager(void *engine);
void *ckp_writer(void *engine);
void *ckp_committer(void *engine);

/* checkpoints.c, under the lock: the slot of a complete checkpoint, or NULL and an error */
struct ckp_slot *ckp_slot_find(struct ckp_engine *engine, uint64_t counter, struct ckp_error *error);

#endif
