/* Reading back: every chunk is verified before a byte of it is handed out. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "checkmate/crc32c.h"
#include "engine.h"
#include "error.h"

/* A checkpoint while it is read: its slot is held, so what is here stays. */
struct source {
    struct ckp_engine *engine;
    const struct ckp_slot *slot;
    struct ckp_checkpoint info;
    uint8_t *buffer; /* a chunk */
};

static int open_source(struct source *source, struct ckp_engine *engine, uint64_t counter, struct ckp_error *error)
{
    struct ckp_slot *slot;
    int result = ckp_enter(engine, error);

    if (result)
        return result;
    if ((slot = ckp_slot_find(engine, counter, error))) {
        slot->holds++;
        *source = (struct source){.engine = engine, .slot = slot, .info = slot->info};
    }
    pthread_mutex_unlock(&engine->lock);
    return slot ? 0 : error->code;
}

static void close_source(struct source *source)
{
    free(source->buffer);
    ckp_release(source->engine, source->info.counter);
}

static int read_at(const struct source *source, uint64_t offset, uint8_t *data, uint64_t bytes, struct ckp_error *error)
{
    struct ckp_storage *storage = source->engine->storage;
    uint64_t start = ckp_slot_start(&source->engine->file.super, source->info.slot);
    int result = storage->ops->read(storage, start + offset, data, bytes);

    if (result)
        return ckp_fail_errno(error, -result, "reading checkpoint %" PRIu64 " of step %" PRIu64, source->info.counter,
                              source->info.step);
    return 0;
}

static int need_buffer(struct source *source, uint64_t bytes, struct ckp_error *error)
{
    if (source->buffer || (source->buffer = aligned_alloc(CKP_BLOCK, ckp_round_up(bytes))))
        return 0;
    return ckp_fail(error, ENOMEM, "no memory for %" PRIu64 " bytes", bytes);
}

static int read_chunk(struct source *source, uint64_t index, struct ckp_error *error)
{
    const struct ckp_checkpoint *info = &source->info;
    uint64_t bytes = ckp_round_up(ckp_chunk_size(info->data_bytes, info->chunk_bytes, index));
    int result = need_buffer(source, info->chunk_bytes, error);

    if (!result)
        result = read_at(source, source->engine->file.super.data_offset + index * info->chunk_bytes, source->buffer,
                         bytes, error);
    if (result || ckm_crc32c(0, source->buffer, bytes) == source->slot->table[index])
        return result;
    return ckp_fail(error, CKP_DAMAGED,
                    "checkpoint %" PRIu64 " of step %" PRIu64 " is damaged: the checksum of chunk %" PRIu64 " (%" PRIu64
                    " bytes from offset %" PRIu64 ", slot %" PRIu32 ") does not match",
                    info->counter, info->step, index, bytes, index * info->chunk_bytes, info->slot);
}

static int read_range(struct source *source, uint64_t offset, uint8_t *data, uint64_t bytes, struct ckp_error *error)
{
    uint64_t size = source->info.chunk_bytes;

    if (offset > source->info.data_bytes || bytes > source->info.data_bytes - offset)
        return ckp_fail(error, EINVAL, "bytes %" PRIu64 " to %" PRIu64 " lie outside of the checkpoint's %" PRIu64,
                        offset, offset + bytes, source->info.data_bytes);
    while (bytes) {
        uint64_t in_chunk = offset % size;
        uint64_t part = bytes < size - in_chunk ? bytes : size - in_chunk;
        int result = read_chunk(source, offset / size, error);
        if (result)
            return result;
        memcpy(data, source->buffer + in_chunk, part);
        data += part;
        offset += part;
        bytes -= part;
    }
    return 0;
}

int ckp_read(struct ckp_engine *engine, uint64_t counter, uint64_t offset, void *data, uint64_t bytes,
             struct ckp_error *error)
{
    struct source source;
    int result = open_source(&source, engine, counter, error);

    if (result)
        return result;
    result = read_range(&source, offset, data, bytes, error);
    close_source(&source);
    return result;
}

int ckp_read_meta(struct ckp_engine *engine, uint64_t counter, void *meta, uint64_t bytes, struct ckp_error *error)
{
    struct source source;
    int result = open_source(&source, engine, counter, error);

    if (result)
        return result;
    if (bytes != source.info.meta_bytes)
        result = ckp_fail(error, EINVAL, "the metadata of checkpoint %" PRIu64 " has %" PRIu64 " bytes, not %" PRIu64,
                          counter, source.info.meta_bytes, bytes);
    else if (bytes && !(result = need_buffer(&source, bytes, error)))
        result = read_at(&source, source.slot->meta_offset, source.buffer, ckp_round_up(bytes), error);
    if (!result && bytes && ckm_crc32c(0, source.buffer, bytes) != source.slot->meta_crc)
        result = ckp_fail(error, CKP_DAMAGED, "the metadata of checkpoint %" PRIu64 " of step %" PRIu64 " is damaged",
                          counter, source.info.step);
    if (!result && bytes)
        memcpy(meta, source.buffer, bytes);
    close_source(&source);
    return result;
}

int ckp_verify(struct ckp_engine *engine, uint64_t counter, uint64_t *chunk, struct ckp_error *error)
{
    struct source source;
    uint64_t chunks;
    int result = open_source(&source, engine, counter, error);

    if (result)
        return result;
    chunks = ckp_chunks(source.info.data_bytes, source.info.chunk_bytes);
    for (*chunk = 0; *chunk < chunks && !(result = read_chunk(&source, *chunk, error));)
        ++*chunk;
    close_source(&source);
    return result;
}
