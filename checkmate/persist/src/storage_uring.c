/* Direct I/O through io_uring: any thread submits, one thread collects completions; durable by fdatasync. */
#include "storage.h"

#include <errno.h>
#include <stdlib.h>

#ifdef CKP_HAVE_URING
#include <liburing.h>
#include <pthread.h>
#include <unistd.h>

struct uring {
    struct ckp_storage storage;
    struct io_uring ring;
    pthread_t collector;
    pthread_mutex_t lock; /* of the submission queue and of `free` */
    pthread_cond_t freed;
    unsigned free; /* writes that may still be submitted */
};

/* `io` NULL stops the collector. The queue has room: `free` counts it. */
static void submit(struct uring *uring, struct ckp_io *io)
{
    struct io_uring_sqe *sqe = io_uring_get_sqe(&uring->ring);

    if (io)
        io_uring_prep_write(sqe, uring->storage.fd, io->data, (unsigned)io->bytes, io->offset);
    else
        io_uring_prep_nop(sqe);
    io_uring_sqe_set_data(sqe, io);
    while (io_uring_submit(&uring->ring) < 0)
        ; /* EINTR, or EAGAIN while the kernel frees memory: the entry stays in the queue */
}

/* A write that the kernel ended early goes on where it stopped: then this returns 0. */
static int ended(struct uring *uring, struct ckp_io *io, int result)
{
    if (result >= 0 && (uint64_t)result == io->bytes) {
        io->result = 0;
        return 1;
    }
    if (result < 0 && result != -EINTR && result != -EAGAIN) {
        io->result = result;
        return 1;
    }
    if (result > 0) {
        io->data += result;
        io->offset += (uint64_t)result;
        io->bytes -= (uint64_t)result;
    }
    submit(uring, io);
    return 0;
}

static void completed(struct uring *uring, struct ckp_io *io, int result)
{
    int done;

    pthread_mutex_lock(&uring->lock);
    done = ended(uring, io, result);
    if (done) {
        uring->free++;
        pthread_cond_signal(&uring->freed);
    }
    pthread_mutex_unlock(&uring->lock);
    if (done)
        io->done(io);
}

static void *collect(void *arg)
{
    struct uring *uring = arg;
    struct io_uring_cqe *cqe;

    for (;;) {
        if (io_uring_wait_cqe(&uring->ring, &cqe) < 0)
            continue; /* EINTR */
        struct ckp_io *io = io_uring_cqe_get_data(cqe);
        int result = cqe->res;
        io_uring_cqe_seen(&uring->ring, cqe);
        if (!io)
            return NULL;
        completed(uring, io, result);
    }
}

static void uring_write(struct ckp_storage *storage, struct ckp_io *io)
{
    struct uring *uring = (struct uring *)storage;

    pthread_mutex_lock(&uring->lock);
    while (!uring->free)
        pthread_cond_wait(&uring->freed, &uring->lock);
    uring->free--;
    submit(uring, io);
    pthread_mutex_unlock(&uring->lock);
}

static void uring_close(struct ckp_storage *storage)
{
    struct uring *uring = (struct uring *)storage;

    pthread_mutex_lock(&uring->lock);
    submit(uring, NULL);
    pthread_mutex_unlock(&uring->lock);
    pthread_join(uring->collector, NULL);
    io_uring_queue_exit(&uring->ring);
    pthread_cond_destroy(&uring->freed);
    pthread_mutex_destroy(&uring->lock);
    close(storage->fd);
    free(uring);
}

static const struct ckp_storage_ops ops = {
    .backend = CKP_URING,
    .asynchronous = 1,
    .write = uring_write,
    .read = ckp_file_read,
    .flush = ckp_file_flush,
    .close = uring_close,
};

struct ckp_storage *ckp_storage_uring(int fd, uint64_t bytes, uint32_t depth)
{
    struct uring *uring = calloc(1, sizeof *uring);
    int error;

    if (!uring)
        return NULL;
    /* One entry more than writes, for the stop. */
    error = -io_uring_queue_init(depth + 1, &uring->ring, 0);
    if (error) {
        free(uring);
        errno = error;
        return NULL;
    }
    uring->storage = (struct ckp_storage){.ops = &ops, .bytes = bytes, .fd = fd};
    uring->free = depth;
    pthread_mutex_init(&uring->lock, NULL);
    pthread_cond_init(&uring->freed, NULL);
    error = pthread_create(&uring->collector, NULL, collect, uring);
    if (error) {
        io_uring_queue_exit(&uring->ring);
        free(uring);
        errno = error;
        return NULL;
    }
    return &uring->storage;
}
#else
struct ckp_storage *ckp_storage_uring(int fd, uint64_t bytes, uint32_t depth)
{
    (void)fd, (void)bytes, (void)depth;
    errno = ENOSYS;
    return NULL;
}
#endif
