/* Storage that fails: at every write and every flush of a save once, with EIO and ENOSPC, one checkpoint and several.
 */
#include <errno.h>
#include <stdatomic.h>

#include "memory.h"

#define DATA_BYTES (3 * CKP_BLOCK + 12)

static const struct ckp_options options = {.writers = 2, .pool_chunks = 4, .chunk_bytes = CKP_BLOCK};

struct fault {
    atomic_int left; /* operations until it fails; below 0: never */
    int error;
    int flushes; /* count flushes, else writes */
};

static int fail_once(void *context, const struct ckp_io *io)
{
    struct fault *fault = context;

    if ((io == NULL) != fault->flushes)
        return 0;
    return atomic_fetch_sub(&fault->left, 1) == 0 ? -fault->error : 0;
}

static struct ckp_engine *start(struct fault *fault, uint64_t *first)
{
    struct memory *memory = memory_new(&(struct ckp_geometry){.slots = 3, .data_bytes = DATA_BYTES, .meta_bytes = 64});
    struct ckp_engine *engine;
    uint32_t state;

    atomic_store(&fault->left, -1);
    memory->context = fault;
    memory->hook = fail_once;
    engine = memory_start(memory, &options);
    for (uint64_t step = 1; step <= 4; step++) /* from now on a save overwrites an older one */
        OK(save(engine, step, DATA_BYTES, 1, first, &state, &error));
    return engine;
}

/* What a reader finds on storage right now. */
static void check_stored(struct ckp_engine *engine, uint64_t at_least)
{
    struct memory *memory = (struct memory *)engine->storage;
    struct ckp_engine *reader = memory_start(memory_snapshot(memory), &options);
    struct ckp_checkpoint found[3];
    int count = ckp_list(reader, found, 3);

    CHECK(count > 0 && found[0].counter >= at_least);
    for (int i = 0; i < count; i++)
        CHECK(is_intact(reader, &found[i]));
    close_engine(reader);
}

/* The save fails, says how, and the next one works. Returns 0 when no operation was left to fail. */
static int fails_cleanly(int number, int flushes, uint64_t place)
{
    struct fault fault = {.error = number, .flushes = flushes};
    struct ckp_about about;
    uint64_t first, counter;
    uint32_t state;
    struct ckp_error error = {0};
    struct ckp_engine *engine = start(&fault, &first);

    atomic_store(&fault.left, (int)place);
    int result = save(engine, 50, DATA_BYTES, 1, &counter, &state, &error);
    int failed = atomic_load(&fault.left) < 0;
    ckp_describe(engine, &about);
    CHECK_EQ(result, failed ? -number : 0);
    CHECK_EQ(about.failures, failed);
    if (failed) {
        CHECK(strstr(error.text, strerrordesc_np(number)));
        CHECK_EQ(about.latest, first);
    }
    check_stored(engine, first);
    atomic_store(&fault.left, -1);
    OK(save(engine, 51, DATA_BYTES, 1, &counter, &state, &error));
    CHECK_EQ(state, CKP_COMMITTED);
    check_stored(engine, counter);
    close_engine(engine);
    return failed;
}

static void test_each_operation_fails_once(void)
{
    for (int flushes = 0; flushes < 2; flushes++)
        for (int i = 0; i < 2; i++) {
            uint64_t place = 0;
            while (fails_cleanly(i ? ENOSPC : EIO, flushes, place))
                place++;
            CHECK_EQ(place, flushes ? 4 : 7); /* clear, chunks (4), metadata, record */
        }
}

/* A failed flush may have lost what another checkpoint in flight wrote: that one must not be committed either. */
static void test_a_failed_flush_fails_all_that_wrote(void)
{
    struct fault fault = {.error = EIO, .flushes = 1};
    uint64_t first, other, counter, step = 60;
    uint8_t data[DATA_BYTES];
    uint32_t state;
    struct ckp_engine *engine = start(&fault, &first);

    fill_content(data, step, sizeof data);
    OK(ckp_begin(engine, step, sizeof data, 8, WAIT_MS, &other, &error));
    OK(give(engine, other, 0, data, sizeof data, &error));
    pthread_mutex_lock(&engine->lock);
    while (engine->tickets->written < engine->tickets->count)
        pthread_cond_wait(&engine->change, &engine->lock);
    pthread_mutex_unlock(&engine->lock);
    atomic_store(&fault.left, 1); /* not when its slot is cleared, but when its data is flushed */
    REFUSED(EIO, save(engine, 61, DATA_BYTES, 1, &counter, &state, &error));
    REFUSED(EIO, ckp_finish(engine, other, &step, sizeof step, 1, &error));
    REFUSED(EIO, ckp_wait(engine, other, WAIT_MS, &state, &error));
    CHECK_EQ(engine->file.latest, first);
    OK(save(engine, 62, DATA_BYTES, 1, &counter, &state, &error));
    check_stored(engine, counter);
    close_engine(engine);
}

/* The error of the last save reaches who closes; one that was waited for does not come again. */
static void test_the_last_save_fails_while_closing(void)
{
    struct fault fault = {.error = ENOSPC};
    uint64_t first, counter, step = 70;
    uint8_t data[DATA_BYTES];
    uint32_t state;
    struct ckp_engine *engine = start(&fault, &first);

    atomic_store(&fault.left, 2);
    REFUSED(ENOSPC, save(engine, 69, DATA_BYTES, 1, &counter, &state, &error));
    fill_content(data, step, sizeof data);
    OK(ckp_begin(engine, step, sizeof data, 8, WAIT_MS, &counter, &error));
    atomic_store(&fault.left, 2);
    OK(give(engine, counter, 0, data, sizeof data, &error));
    (void)ckp_finish(engine, counter, &step, sizeof step, 1, &(struct ckp_error){0}); /* it may have failed by now */
    check_stored(engine, first);
    REFUSED(ENOSPC, ckp_close(engine, WAIT_MS, &error));
    ckp_free(engine);
}

static void test_metadata_operations_fail_once(void)
{
    struct fault fault = {.error = EIO};
    uint64_t first, counter;
    uint32_t state;
    struct ckp_engine *engine = start(&fault, &first);

    OK(save(engine, 80, DATA_BYTES, 0, &counter, &state, &error));
    for (fault.flushes = 0; fault.flushes < 2; fault.flushes++) {
        atomic_store(&fault.left, 0);
        REFUSED(EIO, ckp_publish(engine, counter, &state, &error));
        CHECK_EQ(engine->file.latest, first);
        check_stored(engine, first);
    }
    OK(ckp_publish(engine, counter, &state, &error));
    CHECK_EQ(state, CKP_COMMITTED);
    for (fault.flushes = 0; fault.flushes < 2; fault.flushes++) {
        atomic_store(&fault.left, 0);
        REFUSED(EIO, ckp_discard(engine, counter, &error));
        CHECK_EQ(engine->file.latest, counter);
        check_stored(engine, first);
    }
    OK(ckp_discard(engine, counter, &error));
    CHECK_EQ(engine->file.latest, first);
    close_engine(engine);
}

int main(void)
{
    test_each_operation_fails_once();
    test_a_failed_flush_fails_all_that_wrote();
    test_the_last_save_fails_while_closing();
    test_metadata_operations_fail_once();
    return 0;
}
