/* What persist_write.py compares the engine with: threads that write a file by direct I/O and nothing else. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MAX_WRITERS 64

struct job {
    int fd;
    const uint8_t *data;
    uint64_t start, bytes, chunk;
    atomic_ulong next;
    atomic_int error;
};

static void *write_chunks(void *arg)
{
    struct job *job = arg;

    for (uint64_t at; (at = atomic_fetch_add(&job->next, job->chunk)) < job->bytes;)
        if (pwrite(job->fd, job->data + at, job->chunk, (off_t)(job->start + at)) != (ssize_t)job->chunk)
            atomic_store(&job->error, errno ? errno : EIO);
    return NULL;
}

static double seconds(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* Write `bytes` of `data` `times` times, each time to the next of `slots` places, and flush it: seconds, or -errno. */
double plain_writes(const char *path, const uint8_t *data, uint64_t bytes, uint64_t chunk, uint32_t writers,
                    uint32_t slots, uint32_t times)
{
    pthread_t threads[MAX_WRITERS];
    struct job job = {.fd = open(path, O_WRONLY | O_DIRECT), .data = data, .bytes = bytes, .chunk = chunk};
    double start = seconds();

    if (job.fd < 0)
        return -errno;
    for (uint32_t i = 0; i < times && !job.error; i++) {
        job.start = i % slots * bytes;
        atomic_store(&job.next, 0);
        for (uint32_t t = 0; t < writers; t++)
            pthread_create(&threads[t], NULL, write_chunks, &job);
        for (uint32_t t = 0; t < writers; t++)
            pthread_join(threads[t], NULL);
        if (fdatasync(job.fd))
            job.error = errno;
    }
    close(job.fd);
    return job.error ? -job.error : seconds() - start;
}
