/* Persistent memory: the file is mapped and written with stores.
 *
 * On a DAX file system (the kernel grants MAP_SYNC) bytes are durable when non-temporal stores have passed a fence.
 * Each write ends with its own, because a fence orders only the stores of its thread; so there is nothing to flush.
 * Any other file can be forced: then stores go to the page cache and msync makes them durable.
 */
#include "storage.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef void *copy_function(void *to, const void *from, size_t bytes);

struct pmem {
    struct ckp_storage storage;
    uint8_t *memory;
    copy_function *copy; /* durable on return, on DAX */
    int dax;
};

static copy_function *copy;
static pthread_once_t once = PTHREAD_ONCE_INIT;

#if defined(__SSE2__)
#include <emmintrin.h>

/* `to` is aligned to blocks and `bytes` are whole blocks. */
static void *copy_streaming(void *to, const void *from, size_t bytes)
{
    __m128i *out = to;
    const __m128i *in = from;

    for (size_t i = 0; i < bytes / sizeof *out; i++)
        _mm_stream_si128(out + i, _mm_loadu_si128(in + i));
    _mm_sfence();
    return to;
}
#else
#define copy_streaming NULL
#endif

/* libpmem knows more processors and better stores than we do. */
static void choose_copy(void)
{
    void *library = dlopen("libpmem.so.1", RTLD_NOW | RTLD_LOCAL);

    copy = copy_streaming;
    if (library) {
        void *symbol = dlsym(library, "pmem_memcpy_persist");
        if (symbol)
            memcpy(&copy, &symbol, sizeof copy);
    }
}

static void pmem_write(struct ckp_storage *storage, struct ckp_io *io)
{
    struct pmem *pmem = (struct pmem *)storage;

    pmem->copy(pmem->memory + io->offset, io->data, io->bytes);
    io->result = 0;
    io->done(io);
}

static int pmem_read(struct ckp_storage *storage, uint64_t offset, uint8_t *data, uint64_t bytes)
{
    struct pmem *pmem = (struct pmem *)storage;

    memcpy(data, pmem->memory + offset, bytes);
    return 0;
}

static int pmem_flush(struct ckp_storage *storage)
{
    struct pmem *pmem = (struct pmem *)storage;

    if (pmem->dax)
        return 0;
    return msync(pmem->memory, storage->bytes, MS_SYNC) ? -errno : 0;
}

static void pmem_close(struct ckp_storage *storage)
{
    struct pmem *pmem = (struct pmem *)storage;

    munmap(pmem->memory, storage->bytes);
    close(storage->fd);
    free(pmem);
}

static const struct ckp_storage_ops ops = {
    .backend = CKP_PMEM,
    .write = pmem_write,
    .read = pmem_read,
    .flush = pmem_flush,
    .close = pmem_close,
};

struct ckp_storage *ckp_storage_pmem(int fd, uint64_t bytes, int read_only, int dax_only)
{
    int protection = read_only ? PROT_READ : PROT_READ | PROT_WRITE;
    struct pmem *pmem;
    uint8_t *memory;
    int dax = 1;

    memory = mmap(NULL, bytes, protection, MAP_SHARED_VALIDATE | MAP_SYNC, fd, 0);
    if (memory == MAP_FAILED && !dax_only) {
        dax = 0;
        memory = mmap(NULL, bytes, protection, MAP_SHARED, fd, 0);
    }
    if (memory == MAP_FAILED)
        return NULL;
    pthread_once(&once, choose_copy);
    pmem = malloc(sizeof *pmem);
    if (!pmem || (dax && !copy)) {
        munmap(memory, bytes);
        free(pmem);
        errno = dax && !copy ? ENOSYS : ENOMEM;
        return NULL;
    }
    madvise(memory, bytes, MADV_DONTFORK); /* a child must not keep the file, and so its lock */
    *pmem = (struct pmem){
        .storage = {.ops = &ops, .bytes = bytes, .fd = fd}, .memory = memory, .copy = dax ? copy : memcpy, .dax = dax};
    return &pmem->storage;
}
