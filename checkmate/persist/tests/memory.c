#include "memory.h"

#include <errno.h>

void history_open(struct history *history)
{
    *history = (struct history){0};
    pthread_mutex_init(&history->lock, NULL);
}

void history_close(struct history *history)
{
    for (uint64_t i = 0; i < history->count; i++)
        free(history->events[i].data);
    free(history->events);
    pthread_mutex_destroy(&history->lock);
}

static uint64_t add(struct history *history, struct event event)
{
    if (history->count == history->room) {
        history->room = history->room ? 2 * history->room : 256;
        history->events = realloc(history->events, history->room * sizeof event);
        CHECK(history->events);
    }
    history->events[history->count] = event;
    return history->count++;
}

uint64_t history_add(struct history *history, struct event event)
{
    pthread_mutex_lock(&history->lock);
    uint64_t place = add(history, event);
    pthread_mutex_unlock(&history->lock);
    return place;
}

static int ask_hook(const struct memory *memory, const struct ckp_io *io)
{
    return memory->hook ? memory->hook(memory->context, io) : 0;
}

/* Returns its number. */
static uint64_t note_write(struct history *history, const struct ckp_io *io)
{
    struct event event = {.kind = EVENT_WRITE, .offset = io->offset, .bytes = io->bytes, .data = malloc(io->bytes)};

    CHECK(event.data);
    memcpy(event.data, io->data, io->bytes);
    pthread_mutex_lock(&history->lock);
    event.id = history->ids++;
    add(history, event);
    pthread_mutex_unlock(&history->lock);
    return event.id;
}

static void memory_write(struct ckp_storage *storage, struct ckp_io *io)
{
    struct memory *memory = (struct memory *)storage;
    uint64_t id = 0;

    CHECK(io->offset % CKP_BLOCK == 0 && io->bytes % CKP_BLOCK == 0 && (uintptr_t)io->data % CKP_BLOCK == 0);
    CHECK(io->offset + io->bytes <= storage->bytes);
    io->result = ask_hook(memory, io);
    if (!io->result) {
        if (memory->history)
            id = note_write(memory->history, io);
        pthread_rwlock_rdlock(&memory->whole);
        memcpy(memory->bytes + io->offset, io->data, io->bytes);
        pthread_rwlock_unlock(&memory->whole);
        if (memory->history)
            history_add(memory->history, (struct event){.kind = EVENT_WRITTEN, .id = id});
    }
    io->done(io);
}

static int memory_read(struct ckp_storage *storage, uint64_t offset, uint8_t *data, uint64_t bytes)
{
    struct memory *memory = (struct memory *)storage;

    CHECK(offset + bytes <= storage->bytes);
    memcpy(data, memory->bytes + offset, bytes);
    return 0;
}

static int memory_flush(struct ckp_storage *storage)
{
    struct memory *memory = (struct memory *)storage;
    uint64_t start = 0;
    int result;

    if (memory->history)
        start = history_add(memory->history, (struct event){.kind = EVENT_FLUSH});
    result = ask_hook(memory, NULL);
    if (!result && memory->history)
        history_add(memory->history, (struct event){.kind = EVENT_FLUSHED, .value = start});
    return result > 0 ? 0 : result;
}

static void memory_close(struct ckp_storage *storage)
{
    struct memory *memory = (struct memory *)storage;

    pthread_rwlock_destroy(&memory->whole);
    free(memory->bytes);
    free(memory);
}

static const struct ckp_storage_ops ops = {
    .backend = CKP_PWRITE,
    .write = memory_write,
    .read = memory_read,
    .flush = memory_flush,
    .close = memory_close,
};

static struct memory *make(uint64_t bytes)
{
    struct memory *memory = calloc(1, sizeof *memory);

    CHECK(memory);
    memory->storage = (struct ckp_storage){.ops = &ops, .bytes = bytes, .fd = -1};
    memory->bytes = calloc(1, bytes);
    CHECK(memory->bytes);
    pthread_rwlock_init(&memory->whole, NULL);
    return memory;
}

struct memory *memory_new(const struct ckp_geometry *geometry)
{
    struct ckp_superblock super = {0};
    struct memory *memory;

    OK(ckp_plan_file(&super, geometry, &error));
    memory = make(super.file_bytes);
    OK(ckp_format(&memory->storage, &super, &error));
    return memory;
}

struct memory *memory_copy(const uint8_t *bytes, uint64_t count)
{
    struct memory *memory = make(count);

    memcpy(memory->bytes, bytes, count);
    return memory;
}

struct memory *memory_snapshot(struct memory *memory)
{
    pthread_rwlock_wrlock(&memory->whole);
    struct memory *copy = memory_copy(memory->bytes, memory->storage.bytes);
    pthread_rwlock_unlock(&memory->whole);
    return copy;
}

struct ckp_engine *memory_start(struct memory *memory, const struct ckp_options *options)
{
    struct ckp_options used;
    struct ckp_engine *engine;
    struct ckp_error error;

    CHECK(!ckp_options_check(options, &used, &error));
    engine = ckp_start(&memory->storage, &used, &error);
    if (!engine)
        fprintf(stderr, "%s\n", error.text);
    CHECK(engine);
    return engine;
}
