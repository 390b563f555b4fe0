/* How fast a folder takes plain writes of a given size and number in flight: what tuning compares. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "draft.h"
#include "engine.h"
#include "error.h"

struct probe {
    struct ckp_storage *storage;
    const uint8_t *chunk;
    uint64_t chunk_bytes;
    uint64_t count;
    atomic_ulong next; /* chunk to be written */
    atomic_int result; /* of a write that failed */
};

static void *write_chunks(void *arg)
{
    struct probe *probe = arg;

    for (uint64_t i; (i = atomic_fetch_add(&probe->next, 1)) < probe->count && !atomic_load(&probe->result);) {
        int result = ckp_write_now(probe->storage, i * probe->chunk_bytes, probe->chunk, probe->chunk_bytes);
        if (result)
            atomic_store(&probe->result, result);
    }
    return NULL;
}

/* Write the whole file once and flush. */
static int pass(struct probe *probe, uint32_t writers)
{
    pthread_t threads[CKP_MAX_WRITERS];
    uint32_t started = 0;
    int result = 0;

    atomic_store(&probe->next, 0);
    while (started < writers && !(result = -pthread_create(&threads[started], NULL, write_chunks, probe)))
        started++;
    for (uint32_t i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
    if (!result)
        result = atomic_load(&probe->result);
    return result ? result : probe->storage->ops->flush(probe->storage);
}

static double now(void)
{
    struct timespec time;

    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

/* The first pass lays the file out, the second is what a file in use is like. */
static int measure(struct probe *probe, uint32_t writers, double *rate, struct ckp_error *error)
{
    double start;
    int result = pass(probe, writers);

    start = now();
    if (!result)
        result = pass(probe, writers);
    if (result)
        return ckp_fail_errno(error, -result, "probing");
    *rate = (double)(probe->count * probe->chunk_bytes) / (now() - start);
    return 0;
}

static int open_probe(struct probe *probe, const char *folder, const struct ckp_options *options,
                      struct ckp_error *error)
{
    struct ckp_draft draft;
    int result = ckp_draft_open(&draft, folder, probe->count * probe->chunk_bytes, error);

    if (result)
        return result;
    ckp_draft_drop(&draft); /* it stays without a name */
    probe->storage = ckp_storage_open(draft.fd, options->backend, options->writers, 0, error);
    return probe->storage ? 0 : error->code;
}

int ckp_probe(const char *folder, const struct ckp_options *options, uint64_t bytes, double *rate,
              struct ckp_error *error)
{
    struct ckp_options used;
    struct probe probe = {0};
    uint8_t *chunk;
    int result = ckp_options_check(options, &used, error);

    if (result)
        return result;
    probe.chunk_bytes = used.chunk_bytes;
    probe.count = bytes < used.chunk_bytes ? 1 : bytes / used.chunk_bytes;
    probe.chunk = chunk = aligned_alloc(CKP_BLOCK, used.chunk_bytes);
    if (!chunk)
        return ckp_fail(error, ENOMEM, "no memory for a chunk of %" PRIu64 " bytes", used.chunk_bytes);
    memset(chunk, 0xa5, used.chunk_bytes);
    result = open_probe(&probe, folder, &used, error);
    if (!result) {
        result = measure(&probe, used.writers, rate, error);
        probe.storage->ops->close(probe.storage);
    }
    free(chunk);
    return result;
}
