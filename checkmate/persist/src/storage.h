/* What the engine needs of storage. Offsets, sizes and memory are multiples of CKP_BLOCK. */
#ifndef CHECKMATE_PERSIST_STORAGE_H
#define CHECKMATE_PERSIST_STORAGE_H

#include <stdint.h>

#include "api.h"

struct ckp_io {
    uint64_t offset;
    const uint8_t *data;
    uint64_t bytes;
    int result; /* 0 or -errno, set when `done` is called */
    void (*done)(struct ckp_io *io);
};

struct ckp_storage;

struct ckp_storage_ops {
    enum ckp_backend backend;
    int asynchronous; /* write returns before it is done, so that one thread can keep many in flight */
    /* Calls io->done exactly once, from any thread, perhaps before it returns. */
    void (*write)(struct ckp_storage *storage, struct ckp_io *io);
    int (*read)(struct ckp_storage *storage, uint64_t offset, uint8_t *data, uint64_t bytes);
    /* Every write whose `done` was called before is durable when this returns 0. */
    int (*flush)(struct ckp_storage *storage);
    void (*close)(struct ckp_storage *storage);
};

struct ckp_storage {
    const struct ckp_storage_ops *ops;
    uint64_t bytes;
    int fd; /* -1: none */
};

/* Storage over an open file, which it owns from now on, also when it fails. `depth`: writes in flight. CKP_AUTO probes.
 */
struct ckp_storage *ckp_storage_open(int fd, uint32_t backend, uint32_t depth, int read_only, struct ckp_error *error);

/* The back ends; NULL and errno when this kernel, processor or file can not. They own `fd` only when they succeed. */
struct ckp_storage *ckp_storage_pwrite(int fd, uint64_t bytes);
struct ckp_storage *ckp_storage_uring(int fd, uint64_t bytes, uint32_t depth);
struct ckp_storage *ckp_storage_pmem(int fd, uint64_t bytes, int read_only, int dax_only);

/* Parts that several back ends share. */
int ckp_file_read(struct ckp_storage *storage, uint64_t offset, uint8_t *data, uint64_t bytes);
int ckp_file_flush(struct ckp_storage *storage);

/* Write and wait for the end: 0 or -errno. */
int ckp_write_now(struct ckp_storage *storage, uint64_t offset, const uint8_t *data, uint64_t bytes);

#endif
