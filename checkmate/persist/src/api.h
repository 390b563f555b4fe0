/* The persistence engine: checkpoints from memory to a file of N+1 slots, N of them in flight at once.
 *
 * Python reads this file too (cffi): only plain declarations, no macros with arguments. Every function may be called
 * from any thread of the process that opened the file. Functions return 0, or a negative code: -errno, or -CKP_… of
 * enum ckp_code; then `error` (never NULL) holds that code and a text for people. Time-outs are milliseconds; 0 means
 * "do not wait", and a wait that ends without its event returns -ETIMEDOUT. Sizes and offsets are bytes.
 */
#ifndef CHECKMATE_PERSIST_API_H
#define CHECKMATE_PERSIST_API_H

#include <stdint.h>

struct ckp_engine;

enum ckp_code {
    CKP_FOREIGN = 1001,   /* not a checkpoint file, or put together from several */
    CKP_VERSION = 1002,   /* written by a newer Checkmate */
    CKP_TRUNCATED = 1003, /* shorter or longer than it says */
    CKP_DAMAGED = 1004,   /* a checksum does not match */
    CKP_LOCKED = 1005,    /* another process, or another engine of this one, has it open */
    CKP_NOT_FOUND = 1006, /* no such checkpoint, or no such ticket */
    CKP_GAP = 1007,       /* finished before every byte was given */
    CKP_ABORTED = 1008,   /* the ticket was aborted */
    CKP_READ_ONLY = 1009, /* the file was opened for reading */
    CKP_CLOSED = 1010     /* the engine was closed, or this process is a fork of the one that opened it */
};

enum ckp_backend {
    CKP_AUTO = 0,   /* pmem on a DAX file system; else io_uring, or pwrite where the kernel allows none */
    CKP_PWRITE = 1, /* O_DIRECT and fdatasync, one thread per write */
    CKP_URING = 2,  /* O_DIRECT and fdatasync through io_uring */
    CKP_PMEM = 3    /* mapped; durable by non-temporal stores and fence, or by msync where the file is not on DAX */
};

struct ckp_error {
    int32_t code; /* as returned */
    char text[508];
};

struct ckp_geometry {
    uint32_t slots;      /* N + 1; at least 2 */
    uint64_t data_bytes; /* largest checkpoint; rounded up to whole blocks */
    uint64_t meta_bytes; /* largest metadata of a checkpoint; rounded up to whole blocks */
};

struct ckp_options {
    uint32_t backend;     /* enum ckp_backend */
    uint32_t writers;     /* writes in flight; 0: default */
    uint32_t pool_chunks; /* staging buffers; 0: default */
    uint32_t read_only;   /* list, read and verify only; several readers may share a file */
    uint64_t chunk_bytes; /* a multiple of 4096; 0: default */
};

struct ckp_about {
    struct ckp_geometry geometry;
    struct ckp_options options; /* as in force; backend is never CKP_AUTO */
    uint64_t file_bytes;
    uint64_t latest;    /* counter of the newest committed checkpoint; 0: none */
    uint64_t committed; /* the same as it was recorded when the file was opened: maybe it is not there any more */
    uint64_t warnings;  /* of recovery: records or slots that were passed over */
    char warning[512];  /* the first of them */
    uint8_t *pool;      /* staging memory, for registration with a device driver */
    uint64_t pool_bytes;
    uint64_t commits; /* since the file was opened */
    uint64_t failures;
    uint64_t bytes_written; /* chunk data */
};

/* One complete checkpoint on storage. */
struct ckp_checkpoint {
    uint64_t counter; /* 1, 2, …: order of begin; no two in a file have the same */
    uint64_t step;
    uint64_t data_bytes;
    uint64_t meta_bytes;
    uint64_t chunk_bytes;
    uint64_t time_ns; /* wall clock when it became complete */
    uint32_t slot;
    uint32_t published; /* 0: complete, but never committed */
};

/* Bytes that a checkpoint holds at an offset. */
struct ckp_part {
    uint64_t offset;
    const void *data;
    uint64_t bytes;
};

enum ckp_state {
    CKP_COMMITTED = 1,  /* durable, and the newest */
    CKP_SUPERSEDED = 2, /* durable and readable; a newer one had been committed before it */
    CKP_PREPARED = 3    /* durable; waits for ckp_publish or ckp_discard */
};

#pragma GCC visibility push(default)

/* Make a new file; it appears under its name only when whole. Refuses any existing path. */
int ckp_create(const char *path, const struct ckp_geometry *geometry, struct ckp_error *error);

/* Open a file; never truncates or formats. NULL on error. */
struct ckp_engine *ckp_open(const char *path, const struct ckp_options *options, struct ckp_error *error);

/* Finish tickets that were finished by the caller, abort the others, stop all threads, close the file. Returns the
 * first error of a ticket that nobody had waited for. When writes do not end in time: -ETIMEDOUT, and the engine stays
 * open. Afterwards every other call returns -CKP_CLOSED at once. */
int ckp_close(struct ckp_engine *engine, int64_t timeout_ms, struct ckp_error *error);

/* After ckp_close, and after the last other call returned. */
void ckp_free(struct ckp_engine *engine);

void ckp_describe(struct ckp_engine *engine, struct ckp_about *about);

/* Reserve a slot, waiting for one when N checkpoints are in flight. `ticket` is the checkpoint's counter. */
int ckp_begin(struct ckp_engine *engine, uint64_t step, uint64_t data_bytes, uint64_t meta_bytes, int64_t timeout_ms,
              uint64_t *ticket, struct ckp_error *error);

/* Give bytes of a checkpoint, in any order, each byte once. Returns at once; the memory is read later, when all bytes
 * of a chunk were given, and must stay unchanged until ckp_wait_copied says so, or until ckp_abort returned. */
int ckp_write(struct ckp_engine *engine, uint64_t ticket, const struct ckp_part *parts, uint64_t count,
              struct ckp_error *error);

/* Instead of ckp_write, for one whole chunk: lend its staging buffer to be filled in place, then give it back. */
int ckp_lease(struct ckp_engine *engine, uint64_t ticket, uint64_t chunk, int64_t timeout_ms, uint8_t **buffer,
              uint64_t *bytes, struct ckp_error *error);
int ckp_submit(struct ckp_engine *engine, uint64_t ticket, uint64_t chunk, struct ckp_error *error);

/* Wait until all chunks that hold a byte of the range are in staging buffers: their sources may change now. */
int ckp_wait_copied(struct ckp_engine *engine, uint64_t ticket, uint64_t offset, uint64_t bytes, int64_t timeout_ms,
                    struct ckp_error *error);

/* All bytes were given: make the checkpoint durable in the background. `publish` 0: it stays prepared. */
int ckp_finish(struct ckp_engine *engine, uint64_t ticket, const void *meta, uint64_t meta_bytes, uint32_t publish,
               struct ckp_error *error);

/* Wait for the end of a ticket: its state, or its error. Must be called once for every finished ticket: the ticket
 * is gone when this returns anything but -ETIMEDOUT. */
int ckp_wait(struct ckp_engine *engine, uint64_t ticket, int64_t timeout_ms, uint32_t *state, struct ckp_error *error);

/* Give up a ticket, finished or not: when this returns the source memory is free. A commit under way ends first, and
 * then -EBUSY is returned: ckp_wait has the state. */
int ckp_abort(struct ckp_engine *engine, uint64_t ticket, struct ckp_error *error);

/* Commit a checkpoint that is prepared; `state` says whether it is the newest. Returns when that is durable. */
int ckp_publish(struct ckp_engine *engine, uint64_t counter, uint32_t *state, struct ckp_error *error);

/* Remove a complete checkpoint, durably. */
int ckp_discard(struct ckp_engine *engine, uint64_t counter, struct ckp_error *error);

/* Complete checkpoints, newest first; returns how many there are, of which at most `room` are stored. */
int ckp_list(struct ckp_engine *engine, struct ckp_checkpoint *checkpoints, uint32_t room);

/* Keep a checkpoint's slot from being reused; counted. */
int ckp_hold(struct ckp_engine *engine, uint64_t counter, struct ckp_error *error);
void ckp_release(struct ckp_engine *engine, uint64_t counter);

/* Read and verify; the text of CKP_DAMAGED names chunk and offset. Cheapest in order and by whole chunks. */
int ckp_read(struct ckp_engine *engine, uint64_t counter, uint64_t offset, void *data, uint64_t bytes,
             struct ckp_error *error);
int ckp_read_meta(struct ckp_engine *engine, uint64_t counter, void *meta, uint64_t bytes, struct ckp_error *error);

/* Read all of a checkpoint and compare checksums. `chunk`: the first damaged one. */
int ckp_verify(struct ckp_engine *engine, uint64_t counter, uint64_t *chunk, struct ckp_error *error);

/* Write `bytes` to an unnamed file in a folder, `writers` chunks at a time, then flush: bytes/s. */
int ckp_probe(const char *folder, const struct ckp_options *options, uint64_t bytes, double *rate,
              struct ckp_error *error);

#pragma GCC visibility pop

#endif
