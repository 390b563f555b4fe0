/* SIGKILL at random moments, many times, on one file: nothing that was acknowledged is lost. */
#include <errno.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "folder.h"

#define RUNS       500u
#define DATA_BYTES (10 * 4096u + 12)
#define LONGEST_US 30000u

static const uint32_t backends[] = {CKP_PWRITE, CKP_AUTO, CKP_PMEM};

/* Shared with the children. */
struct acknowledged {
    atomic_ulong counter;
    atomic_ulong saves;
    atomic_ulong opened; /* children that began to save */
};

static struct ckp_options options(uint64_t run)
{
    return (struct ckp_options){
        .backend = backends[run % 3], .writers = 4, .pool_chunks = 8, .chunk_bytes = (1 + run % 4) * 4096u};
}

struct saver {
    struct ckp_engine *engine;
    struct acknowledged *acknowledged;
    uint64_t seed;
};

static void acknowledge(struct acknowledged *acknowledged, uint64_t counter)
{
    unsigned long before = atomic_load(&acknowledged->counter);

    while (before < counter && !atomic_compare_exchange_weak(&acknowledged->counter, &before, counter))
        ;
    atomic_fetch_add(&acknowledged->saves, 1);
}

static void *save_for_ever(void *arg)
{
    struct saver *saver = arg;
    uint64_t counter;
    uint32_t state;

    for (;;) {
        OK(save(saver->engine, random_next(&saver->seed) % 10000, DATA_BYTES, 1, &counter, &state, &error));
        acknowledge(saver->acknowledged, counter);
    }
    return NULL;
}

static void child(const char *path, struct acknowledged *acknowledged, uint64_t run)
{
    struct ckp_options used = options(run);
    struct ckp_engine *engine = open_file(path, &used);
    struct saver savers[2] = {{engine, acknowledged, 2 * run + 1}, {engine, acknowledged, 2 * run + 2}};
    pthread_t other;

    atomic_fetch_add(&acknowledged->opened, 1);
    CHECK(!pthread_create(&other, NULL, save_for_ever, &savers[0]));
    save_for_ever(&savers[1]);
}

/* All that is listed is intact, and the newest is the acknowledged one or a newer one. */
static void check_file(const char *path, struct acknowledged *acknowledged)
{
    struct ckp_engine *engine = open_file(path, &(struct ckp_options){.read_only = 1});
    struct ckp_checkpoint found[4];
    int count = ckp_list(engine, found, 4);

    CHECK(engine->file.latest >= atomic_load(&acknowledged->counter));
    CHECK_EQ(engine->file.latest, engine->file.committed);
    for (int i = 0; i < count; i++)
        CHECK(is_intact(engine, &found[i]));
    close_engine(engine);
}

/* Most children are killed while they save, some at any time from their start on. */
static void let_live(struct acknowledged *acknowledged, uint64_t run, unsigned long before, uint64_t *seed)
{
    for (int i = 0; run % 5 && i < 100000 && atomic_load(&acknowledged->opened) == before; i++)
        usleep(100);
    usleep((useconds_t)(random_next(seed) % LONGEST_US));
}

int main(void)
{
    const struct ckp_geometry geometry = {.slots = 3, .data_bytes = DATA_BYTES, .meta_bytes = 8};
    struct acknowledged *acknowledged =
        mmap(NULL, sizeof *acknowledged, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    uint64_t seed = 4711;
    int status;

    folder_make();
    CHECK(acknowledged != MAP_FAILED);
    OK(ckp_create(folder_path(1, "killed"), &geometry, &error));
    for (uint64_t run = 0; run < RUNS; run++) {
        unsigned long opened = atomic_load(&acknowledged->opened);
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (!pid)
            child(folder_path(1, "killed"), acknowledged, run);
        let_live(acknowledged, run, opened, &seed);
        kill(pid, SIGKILL);
        CHECK(waitpid(pid, &status, 0) == pid && WIFSIGNALED(status));
        check_file(folder_path(1, "killed"), acknowledged);
    }
    printf("%u kills, %lu saves acknowledged, none lost\n", RUNS, atomic_load(&acknowledged->saves));
    CHECK(atomic_load(&acknowledged->saves) > RUNS / 10); /* they did not all die too early */
    return 0;
}
