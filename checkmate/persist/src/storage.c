#include "storage.h"

#include <errno.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include "error.h"

struct wait {
    struct ckp_io io;
    pthread_mutex_t lock;
    pthread_cond_t ended;
    int done;
};

static void end_wait(struct ckp_io *io)
{
    struct wait *wait = (struct wait *)io;

    pthread_mutex_lock(&wait->lock);
    wait->done = 1;
    pthread_cond_signal(&wait->ended);
    pthread_mutex_unlock(&wait->lock);
}

int ckp_write_now(struct ckp_storage *storage, uint64_t offset, const uint8_t *data, uint64_t bytes)
{
    struct wait wait = {.io = {.offset = offset, .data = data, .bytes = bytes, .done = end_wait}};

    pthread_mutex_init(&wait.lock, NULL);
    pthread_cond_init(&wait.ended, NULL);
    storage->ops->write(storage, &wait.io);
    pthread_mutex_lock(&wait.lock);
    while (!wait.done)
        pthread_cond_wait(&wait.ended, &wait.lock);
    pthread_mutex_unlock(&wait.lock);
    pthread_cond_destroy(&wait.ended);
    pthread_mutex_destroy(&wait.lock);
    return wait.io.result;
}

static struct ckp_storage *choose(int fd, uint64_t bytes, uint32_t backend, uint32_t depth, int read_only)
{
    struct ckp_storage *storage;

    switch (backend) {
    case CKP_PWRITE:
        return ckp_storage_pwrite(fd, bytes);
    case CKP_URING:
        return ckp_storage_uring(fd, bytes, depth);
    case CKP_PMEM:
        return ckp_storage_pmem(fd, bytes, read_only, 0);
    case CKP_AUTO:
        if ((storage = ckp_storage_pmem(fd, bytes, read_only, 1)))
            return storage;
        if (!read_only && (storage = ckp_storage_uring(fd, bytes, depth)))
            return storage;
        return ckp_storage_pwrite(fd, bytes);
    default:
        errno = EINVAL;
        return NULL;
    }
}

struct ckp_storage *ckp_storage_open(int fd, uint32_t backend, uint32_t depth, int read_only, struct ckp_error *error)
{
    static const char *const names[] = {"automatic", "pwrite", "uring", "pmem"};
    struct ckp_storage *storage;
    struct stat file;

    if (backend > CKP_PMEM) {
        ckp_fail(error, EINVAL, "backend is %u: it must be 0 to %u", backend, CKP_PMEM);
        close(fd);
        return NULL;
    }
    if (fstat(fd, &file) == 0 && (storage = choose(fd, (uint64_t)file.st_size, backend, depth, read_only)))
        return storage;
    ckp_fail_errno(error, errno, "the back end %s can not be used here (let it be chosen automatically)",
                   names[backend]);
    close(fd);
    return NULL;
}
