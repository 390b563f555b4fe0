/* Storage in memory that notes every write and flush, and fails or waits on request. */
#ifndef CHECKMATE_PERSIST_MEMORY_H
#define CHECKMATE_PERSIST_MEMORY_H

#include "check.h"
#include "format.h"
#include "storage.h"

enum event_kind { EVENT_WRITE, EVENT_WRITTEN, EVENT_FLUSH, EVENT_FLUSHED, EVENT_NOTE };

struct event {
    enum event_kind kind;
    uint64_t id; /* of the write or flush; of a note: its number */
    uint64_t value;
    uint64_t offset;
    uint64_t bytes;
    uint8_t *data;
};

/* Outlives the storage that writes to it. */
struct history {
    pthread_mutex_t lock;
    struct event *events;
    uint64_t count, room, ids;
};

struct memory {
    struct ckp_storage storage;
    uint8_t *bytes;
    pthread_rwlock_t whole;  /* writes share it, so that it orders none of them; who copies the bytes has it alone */
    struct history *history; /* NULL: not noted */
    /* Called before a write (`io`) or a flush (NULL); may wait; its result, 0 or -errno, is what becomes of it. */
    int (*hook)(void *context, const struct ckp_io *io);
    void *context;
};

void history_open(struct history *history);
void history_close(struct history *history);
uint64_t history_add(struct history *history, struct event event); /* returns its place */

/* A file of this geometry, formatted. */
struct memory *memory_new(const struct ckp_geometry *geometry);
struct memory *memory_copy(const uint8_t *bytes, uint64_t count);
/* A copy of another while an engine may be writing to it. */
struct memory *memory_snapshot(struct memory *memory);

/* Start an engine over it, which owns it from then on. */
struct ckp_engine *memory_start(struct memory *memory, const struct ckp_options *options);

#endif
