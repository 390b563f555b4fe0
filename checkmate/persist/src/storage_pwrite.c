/* Direct I/O by pwrite, one thread for each write in flight; durable by fdatasync. */
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "storage.h"

static int write_all(int fd, uint64_t offset, const uint8_t *data, uint64_t bytes)
{
    while (bytes) {
        ssize_t n = pwrite(fd, data, bytes, (off_t)offset);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return -errno;
        data += n;
        offset += (uint64_t)n;
        bytes -= (uint64_t)n;
    }
    return 0;
}

static void file_write(struct ckp_storage *storage, struct ckp_io *io)
{
    io->result = write_all(storage->fd, io->offset, io->data, io->bytes);
    io->done(io);
}

int ckp_file_read(struct ckp_storage *storage, uint64_t offset, uint8_t *data, uint64_t bytes)
{
    while (bytes) {
        ssize_t n = pread(storage->fd, data, bytes, (off_t)offset);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return -errno;
        if (n == 0)
            return -EIO; /* the file became shorter */
        data += n;
        offset += (uint64_t)n;
        bytes -= (uint64_t)n;
    }
    return 0;
}

int ckp_file_flush(struct ckp_storage *storage)
{
    return fdatasync(storage->fd) ? -errno : 0;
}

static void file_close(struct ckp_storage *storage)
{
    close(storage->fd);
    free(storage);
}

static const struct ckp_storage_ops ops = {
    .backend = CKP_PWRITE,
    .write = file_write,
    .read = ckp_file_read,
    .flush = ckp_file_flush,
    .close = file_close,
};

struct ckp_storage *ckp_storage_pwrite(int fd, uint64_t bytes)
{
    struct ckp_storage *storage = malloc(sizeof *storage);

    if (storage)
        *storage = (struct ckp_storage){.ops = &ops, .bytes = bytes, .fd = fd};
    return storage;
}
