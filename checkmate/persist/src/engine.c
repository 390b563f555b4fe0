/* Start and end of an engine. */
#include "engine.h"

#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "error.h"

#define DEFAULT_WRITERS     4u
#define DEFAULT_POOL_CHUNKS 16u
#define DEFAULT_CHUNK_BYTES (4ull << 20)
#define MAX_CHUNK_BYTES     (1ull << 30)
#define MAX_POOL_CHUNKS     (1u << 20)

int ckp_options_check(const struct ckp_options *given, struct ckp_options *options, struct ckp_error *error)
{
    *options = *given;
    if (!options->writers)
        options->writers = DEFAULT_WRITERS;
    if (!options->pool_chunks)
        options->pool_chunks = DEFAULT_POOL_CHUNKS;
    if (!options->chunk_bytes)
        options->chunk_bytes = DEFAULT_CHUNK_BYTES;
    if (options->writers > CKP_MAX_WRITERS)
        return ckp_fail(error, EINVAL, "writers is %" PRIu32 ": it must be 1 to %u, or 0 for the default",
                        options->writers, CKP_MAX_WRITERS);
    if (options->pool_chunks > MAX_POOL_CHUNKS)
        return ckp_fail(error, EINVAL, "pool_chunks is %" PRIu32 ": it must be 1 to %u, or 0 for the default",
                        options->pool_chunks, MAX_POOL_CHUNKS);
    if (options->chunk_bytes % CKP_BLOCK || options->chunk_bytes > MAX_CHUNK_BYTES)
        return ckp_fail(error, EINVAL, "chunk_bytes is %" PRIu64 ": it must be a multiple of %u up to %llu",
                        options->chunk_bytes, CKP_BLOCK, MAX_CHUNK_BYTES);
    return 0;
}

static int start_thread(struct ckp_engine *engine, void *(*run)(void *), const char *name, struct ckp_error *error)
{
    int result = pthread_create(&engine->threads[engine->thread_count], NULL, run, engine);

    if (result)
        return ckp_fail_errno(error, result, "starting thread %s", name);
    pthread_setname_np(engine->threads[engine->thread_count++], name);
    return 0;
}

/* Signals are for the application's threads. */
static int start_threads(struct ckp_engine *engine, struct ckp_error *error)
{
    uint32_t writers = engine->storage->ops->asynchronous ? 1 : engine->options.writers;
    sigset_t all, before;
    int result = 0;

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (uint32_t i = 0; i < CKP_STAGERS && !result; i++)
        result = start_thread(engine, ckp_stager, "persist-stage", error);
    for (uint32_t i = 0; i < writers && !result; i++)
        result = start_thread(engine, ckp_writer, "persist-write", error);
    if (!result)
        result = start_thread(engine, ckp_committer, "persist-commit", error);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return result;
}

static void stop_threads(struct ckp_engine *engine)
{
    pthread_mutex_lock(&engine->lock);
    engine->stop = 1;
    pthread_cond_broadcast(&engine->stage);
    pthread_cond_broadcast(&engine->write);
    pthread_cond_broadcast(&engine->commit);
    pthread_mutex_unlock(&engine->lock);
    for (uint32_t i = 0; i < engine->thread_count; i++)
        pthread_join(engine->threads[i], NULL);
    engine->thread_count = 0;
}

static struct ckp_engine *make(struct ckp_storage *storage, const struct ckp_options *options)
{
    struct ckp_engine *engine = calloc(1, sizeof *engine);

    if (!engine)
        return NULL;
    engine->storage = storage;
    engine->options = *options;
    engine->options.backend = storage->ops->backend;
    engine->ready.end = &engine->ready.first;
    engine->staged.end = &engine->staged.first;
    pthread_mutex_init(&engine->commit_lock, NULL);
    pthread_mutex_init(&engine->lock, NULL);
    ckp_cond_init(&engine->stage);
    ckp_cond_init(&engine->write);
    ckp_cond_init(&engine->commit);
    ckp_cond_init(&engine->change);
    return engine;
}

void ckp_free(struct ckp_engine *engine)
{
    while (engine->tickets)
        ckp_ticket_free(engine, engine->tickets);
    ckp_found_free(&engine->file);
    ckp_pool_close(&engine->pool);
    pthread_cond_destroy(&engine->change);
    pthread_cond_destroy(&engine->commit);
    pthread_cond_destroy(&engine->write);
    pthread_cond_destroy(&engine->stage);
    pthread_mutex_destroy(&engine->lock);
    pthread_mutex_destroy(&engine->commit_lock);
    free(engine);
}

static int set_up(struct ckp_engine *engine, struct ckp_error *error)
{
    const struct ckp_options *options = &engine->options;
    int result = 0;

    /* A process that was killed leaves writes that can be read, but might still be lost: build on nothing like that. */
    if (!options->read_only && (result = engine->storage->ops->flush(engine->storage)))
        return ckp_fail_errno(error, -result, "flushing what an earlier process wrote");
    result = ckp_recover(engine->storage, &engine->file, error);
    if (result || options->read_only)
        return result;
    if (ckp_pool_open(&engine->pool, options->pool_chunks, options->chunk_bytes))
        return ckp_fail(error, ENOMEM, "no memory for %" PRIu32 " staging buffers of %" PRIu64 " bytes",
                        options->pool_chunks, options->chunk_bytes);
    if ((result = start_threads(engine, error)))
        stop_threads(engine);
    return result;
}

struct ckp_engine *ckp_start(struct ckp_storage *storage, const struct ckp_options *options, struct ckp_error *error)
{
    struct ckp_engine *engine = make(storage, options);

    if (!engine) {
        ckp_fail(error, ENOMEM, "no memory for the engine");
    } else if (set_up(engine, error)) {
        ckp_free(engine);
    } else {
        ckp_register(engine);
        return engine;
    }
    storage->ops->close(storage);
    return NULL;
}

void ckp_describe(struct ckp_engine *engine, struct ckp_about *about)
{
    const struct ckp_superblock *super = &engine->file.super;

    pthread_mutex_lock(&engine->lock);
    *about = (struct ckp_about){
        .geometry = {.slots = super->slots, .data_bytes = super->data_bytes, .meta_bytes = super->meta_bytes},
        .options = engine->options,
        .file_bytes = super->file_bytes,
        .latest = engine->file.latest,
        .committed = engine->file.committed,
        .warnings = engine->file.warnings,
        .pool = engine->pool.memory,
        .pool_bytes = engine->pool.bytes,
        .commits = engine->commits,
        .failures = engine->failures,
        .bytes_written = engine->bytes_written,
    };
    memcpy(about->warning, engine->file.warning, sizeof about->warning);
    pthread_mutex_unlock(&engine->lock);
}

static void abort_open_tickets(struct ckp_engine *engine)
{
    struct ckp_error error;

    for (struct ckp_ticket *ticket = engine->tickets, *next; ticket; ticket = next) {
        next = ticket->next;
        if (ticket->state != TICKET_OPEN)
            continue;
        ckp_fail(&error, CKP_ABORTED, "checkpoint %" PRIu64 " was given up: the file is being closed", ticket->counter);
        ckp_ticket_fail(engine, ticket, &error);
        ckp_ticket_settle(engine, ticket);
    }
}

/* The first error that nobody has heard of, and nobody waits for. */
static int unheard(struct ckp_engine *engine, struct ckp_error *error)
{
    for (struct ckp_ticket *ticket = engine->tickets; ticket; ticket = ticket->next)
        if (ticket->error.code && ticket->error.code != -CKP_ABORTED && !ticket->waiters) {
            *error = ticket->error;
            return error->code;
        }
    return 0;
}

int ckp_close(struct ckp_engine *engine, int64_t timeout_ms, struct ckp_error *error)
{
    struct timespec deadline = ckp_deadline(timeout_ms);
    int result = ckp_enter(engine, error), late = 0;

    if (result)
        return result;
    engine->closing = 1;
    abort_open_tickets(engine);
    pthread_cond_broadcast(&engine->change);
    while (engine->in_flight && !late)
        late = ckp_wait_change(engine, &deadline);
    if (engine->in_flight) {
        engine->closing = 0;
        result = ckp_fail(error, ETIMEDOUT, "%" PRIu32 " checkpoints are still being written", engine->in_flight);
        pthread_mutex_unlock(&engine->lock);
        return result;
    }
    engine->closed = 1;
    result = unheard(engine, error);
    pthread_cond_broadcast(&engine->change);
    pthread_mutex_unlock(&engine->lock);
    stop_threads(engine);
    pthread_mutex_lock(&engine->commit_lock); /* a publish or discard that began before */
    ckp_unregister(engine);
    engine->storage->ops->close(engine->storage);
    pthread_mutex_unlock(&engine->commit_lock);
    return result;
}
