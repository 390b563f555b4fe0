/* Tickets, order of commits, what is given when, and what is refused: on storage in memory. */
#include <errno.h>

#include "memory.h"

#define CHUNK CKP_BLOCK

static const struct ckp_options options = {.writers = 2, .pool_chunks = 4, .chunk_bytes = CHUNK};

static struct memory *file_of(uint32_t slots, uint64_t data_bytes)
{
    return memory_new(&(struct ckp_geometry){.slots = slots, .data_bytes = data_bytes, .meta_bytes = 64});
}

static struct ckp_engine *start(uint32_t slots, uint64_t data_bytes)
{
    return memory_start(file_of(slots, data_bytes), &options);
}

static uint64_t begin(struct ckp_engine *engine, uint64_t step, uint64_t bytes)
{
    uint64_t counter;

    OK(ckp_begin(engine, step, bytes, 8, WAIT_MS, &counter, &error));
    return counter;
}

static uint32_t wait_for(struct ckp_engine *engine, uint64_t counter)
{
    uint32_t state;

    OK(ckp_wait(engine, counter, WAIT_MS, &state, &error));
    return state;
}

static uint32_t finish(struct ckp_engine *engine, uint64_t counter, uint64_t step, uint32_t publish)
{
    OK(ckp_finish(engine, counter, &step, sizeof step, publish, &error));
    return wait_for(engine, counter);
}

static uint64_t latest(struct ckp_engine *engine)
{
    struct ckp_about about;

    ckp_describe(engine, &about);
    return about.latest;
}

static void check_intact(struct ckp_engine *engine, uint64_t counter)
{
    struct ckp_checkpoint found[8];
    int count = ckp_list(engine, found, 8);

    for (int i = 0; i < count; i++)
        if (found[i].counter == counter) {
            CHECK(is_intact(engine, &found[i]));
            return;
        }
    CHECK(!"listed");
}

/* Stop, and start again from the bytes alone. */
static struct ckp_engine *again(struct ckp_engine *engine)
{
    struct memory *memory = (struct memory *)engine->storage;
    struct memory *copy = memory_snapshot(memory);

    close_engine(engine);
    return memory_start(copy, &options);
}

static void test_sizes_that_are_no_multiple_of_anything(void)
{
    static const uint64_t sizes[] = {0, 1, 12, CHUNK - 1, CHUNK, CHUNK + 12, 3 * CHUNK, 5 * CHUNK - 4, 6 * CHUNK};
    struct ckp_engine *engine = start(3, 6 * CHUNK);
    uint64_t counter;
    uint32_t state;

    for (unsigned i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        OK(save(engine, i, sizes[i], 1, &counter, &state, &error));
        CHECK_EQ(state, CKP_COMMITTED);
        CHECK_EQ(latest(engine), counter);
        check_intact(engine, counter);
        engine = again(engine);
        CHECK_EQ(latest(engine), counter);
        check_intact(engine, counter);
    }
    close_engine(engine);
}

/* The padding of the last chunk stays within the slot: its neighbours are as they were. */
static void test_nothing_is_written_past_the_end(void)
{
    struct memory *memory = file_of(3, 2 * CHUNK + 12);
    struct ckp_engine *engine = memory_start(memory, &options);
    uint64_t slot_bytes = engine->file.super.slot_bytes, counter;
    uint32_t state;

    for (uint32_t slot = 1; slot < 3; slot++)
        memset(memory->bytes + CKP_SLOTS_START + slot * slot_bytes + CKP_BLOCK, 0xee, slot_bytes - CKP_BLOCK);
    OK(save(engine, 1, 2 * CHUNK + 12, 1, &counter, &state, &error));
    for (uint64_t i = CKP_BLOCK; i < slot_bytes; i++)
        CHECK_EQ(memory->bytes[CKP_SLOTS_START + slot_bytes + i], 0xee);
    for (uint64_t i = 2 * CHUNK + 12; i < 3 * CHUNK; i++)
        CHECK_EQ(memory->bytes[CKP_SLOTS_START + engine->file.super.data_offset + i], 0);
    close_engine(engine);
}

static void test_pieces_in_any_order(void)
{
    struct ckp_engine *engine = start(2, 4 * CHUNK);
    uint64_t bytes = 3 * CHUNK + 100, seed = 99, order[400];
    uint8_t data[4 * CHUNK];
    unsigned pieces = 0;

    for (uint64_t at = 0; at < bytes; at += 37)
        order[pieces++] = at;
    for (unsigned i = pieces - 1; i > 0; i--) {
        uint64_t j = random_next(&seed) % (i + 1), swapped = order[i];
        order[i] = order[j];
        order[j] = swapped;
    }
    fill_content(data, 5, bytes);
    uint64_t counter = begin(engine, 5, bytes);
    for (unsigned i = 0; i < pieces; i++) {
        uint64_t left = bytes - order[i];
        OK(give(engine, counter, order[i], data + order[i], left < 37 ? left : 37, &error));
    }
    OK(give(engine, counter, 40, data, 0, &error)); /* a tensor of no elements */
    OK(ckp_wait_copied(engine, counter, 0, bytes, WAIT_MS, &error));
    memset(data, 0, sizeof data); /* the source is free */
    CHECK_EQ(finish(engine, counter, 5, 1), CKP_COMMITTED);
    check_intact(engine, counter);
    close_engine(engine);
}

static void test_lent_buffers(void)
{
    struct ckp_engine *engine = start(2, 12 * CHUNK);
    uint64_t bytes = 11 * CHUNK + 7, size;
    uint64_t counter = begin(engine, 3, bytes);
    struct ckp_about about;
    uint8_t *buffer;

    ckp_describe(engine, &about);
    for (uint64_t chunk = 12; chunk-- > 0;) { /* more of them than the pool has */
        OK(ckp_lease(engine, counter, chunk, WAIT_MS, &buffer, &size, &error));
        CHECK(buffer >= about.pool && buffer + size <= about.pool + about.pool_bytes);
        CHECK_EQ(size, chunk == 11 ? 7 : CHUNK);
        for (uint64_t i = 0; i < size; i++)
            buffer[i] = content(3, chunk * CHUNK + i);
        OK(ckp_submit(engine, counter, chunk, &error));
    }
    REFUSED(EINVAL, ckp_submit(engine, counter, 3, &error));
    REFUSED(EINVAL, ckp_lease(engine, counter, 3, 0, &buffer, &size, &error));
    CHECK_EQ(finish(engine, counter, 3, 1), CKP_COMMITTED);
    check_intact(engine, counter);

    counter = begin(engine, 4, bytes);
    for (uint64_t chunk = 0; chunk < 4; chunk++)
        OK(ckp_lease(engine, counter, chunk, WAIT_MS, &buffer, &size, &error));
    REFUSED(ETIMEDOUT, ckp_lease(engine, counter, 4, 20, &buffer, &size, &error));
    REFUSED(CKP_GAP, ckp_finish(engine, counter, NULL, 0, 1, &error));
    OK(ckp_abort(engine, counter, &error)); /* what was lent is back */
    counter = begin(engine, 4, bytes);
    OK(ckp_lease(engine, counter, 0, WAIT_MS, &buffer, &size, &error));
    close_engine(engine);
}

static void test_wrong_calls(void)
{
    struct ckp_engine *engine = start(2, 4 * CHUNK);
    uint8_t data[4 * CHUNK] = {0};
    uint64_t counter;
    uint32_t state;

    REFUSED(EFBIG, ckp_begin(engine, 1, 4 * CHUNK + 1, 0, 0, &counter, &error));
    REFUSED(EFBIG, ckp_begin(engine, 1, 1, CKP_BLOCK + 1, 0, &counter, &error));
    REFUSED(CKP_NOT_FOUND, give(engine, 77, 0, data, 1, &error));
    REFUSED(CKP_NOT_FOUND, ckp_wait(engine, 77, 0, &state, &error));
    REFUSED(CKP_NOT_FOUND, ckp_read(engine, 77, 0, data, 1, &error));
    counter = begin(engine, 1, 2 * CHUNK);
    REFUSED(ETIMEDOUT, ckp_begin(engine, 2, 1, 0, 20, &(uint64_t){0}, &error)); /* N is 1 */
    REFUSED(EINVAL, give(engine, counter, 2 * CHUNK, data, 1, &error));
    REFUSED(EINVAL, give(engine, counter, UINT64_MAX, data, 2, &error));
    OK(give(engine, counter, 0, data, CHUNK + 5, &error));
    REFUSED(CKP_GAP, ckp_finish(engine, counter, NULL, 0, 1, &error));
    REFUSED(EFBIG, ckp_finish(engine, counter, data, 9, 1, &error));
    REFUSED(ETIMEDOUT, ckp_wait_copied(engine, counter, 0, 2 * CHUNK, 20, &error));
    OK(ckp_wait_copied(engine, counter, 0, CHUNK, WAIT_MS, &error));
    REFUSED(EINVAL, give(engine, counter, CHUNK + 4, data, 2, &error)); /* given twice: the ticket has failed */
    REFUSED(EINVAL, give(engine, counter, CHUNK + 5, data, CHUNK - 5, &error));
    REFUSED(EINVAL, ckp_finish(engine, counter, NULL, 0, 1, &error));
    REFUSED(EINVAL, ckp_wait(engine, counter, WAIT_MS, &state, &error));
    REFUSED(CKP_NOT_FOUND, ckp_wait(engine, counter, 0, &state, &error));
    OK(save(engine, 2, 2 * CHUNK, 1, &counter, &state, &error));
    close_engine(engine);
}

/* Bytes are not read before ckp_write was given the whole chunk, and not after wait_copied. */
static void test_abort_frees_the_source(void)
{
    struct ckp_engine *engine = start(3, 64 * CHUNK);
    uint64_t bytes = 64 * CHUNK;

    for (int i = 0; i < 50; i++) {
        uint64_t counter = begin(engine, 1, bytes);
        uint8_t *data = malloc(bytes);
        CHECK(data);
        memset(data, 1, bytes);
        OK(give(engine, counter, 0, data, bytes, &error));
        if (i % 2)
            OK(ckp_wait_copied(engine, counter, 0, CHUNK, WAIT_MS, &error));
        OK(ckp_abort(engine, counter, &error));
        free(data); /* the address sanitizer sees a late reader */
    }
    CHECK_EQ(latest(engine), 0);
    close_engine(engine);
}

/* A writer that waits at a gate before it writes the blocks of one chunk. */
struct gate {
    pthread_mutex_t lock;
    pthread_cond_t change;
    uint64_t offset; /* 0: open */
    int waiting;
};

static int wait_at_gate(void *context, const struct ckp_io *io)
{
    struct gate *gate = context;

    pthread_mutex_lock(&gate->lock);
    if (io && io->offset == gate->offset) {
        gate->waiting = 1;
        pthread_cond_broadcast(&gate->change);
        while (gate->offset)
            pthread_cond_wait(&gate->change, &gate->lock);
    }
    pthread_mutex_unlock(&gate->lock);
    return 0;
}

static void open_gate(struct gate *gate)
{
    pthread_mutex_lock(&gate->lock);
    gate->offset = 0;
    pthread_cond_broadcast(&gate->change);
    pthread_mutex_unlock(&gate->lock);
}

static void until_waiting(struct gate *gate)
{
    pthread_mutex_lock(&gate->lock);
    while (!gate->waiting)
        pthread_cond_wait(&gate->change, &gate->lock);
    pthread_mutex_unlock(&gate->lock);
}

static uint64_t chunk_offset(const struct ckp_engine *engine, uint32_t slot, uint64_t chunk)
{
    return ckp_slot_start(&engine->file.super, slot) + engine->file.super.data_offset + chunk * CHUNK;
}

/* Two chunks, the second is written first; then the power fails. */
static void test_half_a_checkpoint_is_not_visible(void)
{
    struct gate gate = {.lock = PTHREAD_MUTEX_INITIALIZER, .change = PTHREAD_COND_INITIALIZER};
    struct memory *memory = file_of(3, 2 * CHUNK);
    struct ckp_engine *engine = memory_start(memory, &options);
    uint8_t data[2 * CHUNK];
    uint64_t first, counter, step = 8;
    uint32_t state;

    OK(save(engine, 7, 2 * CHUNK, 1, &first, &state, &error));
    gate.offset = chunk_offset(engine, 1, 0);
    memory->context = &gate;
    memory->hook = wait_at_gate;
    fill_content(data, step, sizeof data);
    counter = begin(engine, step, sizeof data);
    OK(give(engine, counter, CHUNK, data + CHUNK, CHUNK, &error));
    OK(give(engine, counter, 0, data, CHUNK, &error));
    OK(ckp_finish(engine, counter, &step, sizeof step, 1, &error));
    until_waiting(&gate);
    for (uint64_t done = 0; done < 1;) { /* chunk 1 reaches the storage */
        pthread_mutex_lock(&engine->lock);
        done = engine->tickets->written;
        if (!done)
            pthread_cond_wait(&engine->change, &engine->lock);
        pthread_mutex_unlock(&engine->lock);
    }
    REFUSED(ETIMEDOUT, ckp_wait(engine, counter, 20, &state, &error));

    struct ckp_engine *after = memory_start(memory_snapshot(memory), &options);
    CHECK_EQ(latest(after), first);
    CHECK_EQ(ckp_list(after, NULL, 0), 1);
    check_intact(after, first);
    close_engine(after);

    open_gate(&gate);
    CHECK_EQ(wait_for(engine, counter), CKP_COMMITTED);
    check_intact(engine, counter);
    close_engine(engine);
}

/* The older of two in flight is held up; the newer one is committed, and stays so. */
static void test_a_newer_checkpoint_that_ends_first_wins(void)
{
    struct gate gate = {.lock = PTHREAD_MUTEX_INITIALIZER, .change = PTHREAD_COND_INITIALIZER};
    struct memory *memory = file_of(3, 2 * CHUNK);
    struct ckp_engine *engine = memory_start(memory, &options);
    uint8_t data[2 * CHUNK];
    uint64_t older, newer, step = 20;
    uint32_t state;

    gate.offset = chunk_offset(engine, 0, 0);
    memory->context = &gate;
    memory->hook = wait_at_gate;
    fill_content(data, step, sizeof data);
    older = begin(engine, step, sizeof data);
    OK(give(engine, older, 0, data, sizeof data, &error));
    OK(ckp_finish(engine, older, &step, sizeof step, 1, &error));
    until_waiting(&gate);
    OK(save(engine, 21, 2 * CHUNK, 1, &newer, &state, &error));
    CHECK_EQ(state, CKP_COMMITTED);
    open_gate(&gate);
    CHECK_EQ(wait_for(engine, older), CKP_SUPERSEDED);
    CHECK_EQ(latest(engine), newer);
    check_intact(engine, older);
    engine = again(engine);
    CHECK_EQ(latest(engine), newer);
    check_intact(engine, older);
    close_engine(engine);
}

static void test_prepared_checkpoints(void)
{
    struct ckp_engine *engine = start(4, CHUNK);
    uint64_t first, second, third, fourth;
    uint32_t state;

    OK(save(engine, 1, CHUNK, 1, &first, &state, &error));
    OK(save(engine, 2, CHUNK, 0, &second, &state, &error));
    CHECK_EQ(state, CKP_PREPARED);
    CHECK_EQ(latest(engine), first);
    for (int i = 0; i < 5; i++) /* a prepared one is never overwritten */
        OK(save(engine, 3, CHUNK, 1, &third, &state, &error));
    check_intact(engine, second);
    OK(ckp_publish(engine, second, &state, &error));
    CHECK_EQ(state, CKP_SUPERSEDED);
    OK(save(engine, 4, CHUNK, 0, &fourth, &state, &error));
    OK(ckp_publish(engine, fourth, &state, &error));
    CHECK_EQ(state, CKP_COMMITTED);
    CHECK_EQ(latest(engine), fourth);
    OK(ckp_discard(engine, fourth, &error)); /* the newest: the one before it takes its place, on storage too */
    CHECK_EQ(latest(engine), third);
    REFUSED(CKP_NOT_FOUND, ckp_publish(engine, fourth, &state, &error));
    engine = again(engine);
    CHECK_EQ(latest(engine), third);
    OK(save(engine, 5, CHUNK, 0, &second, &state, &error));
    CHECK(second > fourth); /* counters are never used again */
    close_engine(engine);
}

/* An earlier process prepared one: it can still be published, until something new begins. */
static void test_prepared_by_an_earlier_process(void)
{
    struct ckp_engine *engine = start(3, CHUNK);
    struct ckp_checkpoint found[3];
    uint64_t first, second, third;
    uint32_t state;

    OK(save(engine, 1, CHUNK, 1, &first, &state, &error));
    OK(save(engine, 2, CHUNK, 0, &second, &state, &error));
    engine = again(engine);
    CHECK_EQ(latest(engine), first);
    CHECK_EQ(ckp_list(engine, found, 3), 2);
    CHECK(found[0].counter == second && !found[0].published && found[1].published);
    OK(ckp_publish(engine, second, &state, &error));
    CHECK_EQ(state, CKP_COMMITTED);
    OK(save(engine, 3, CHUNK, 0, &third, &state, &error));
    engine = again(engine);
    CHECK_EQ(latest(engine), second);
    OK(save(engine, 4, CHUNK, 1, &first, &state, &error));
    engine = again(engine);
    CHECK_EQ(ckp_list(engine, found, 3), 2);
    CHECK(found[0].counter == first && found[1].counter == second);
    close_engine(engine);
}

static void test_held_checkpoints_stay(void)
{
    struct ckp_engine *engine = start(3, CHUNK);
    uint64_t held, counter;
    uint32_t state;

    OK(save(engine, 1, CHUNK, 1, &held, &state, &error));
    OK(ckp_hold(engine, held, &error));
    for (int i = 0; i < 6; i++)
        OK(save(engine, 2, CHUNK, 1, &counter, &state, &error));
    check_intact(engine, held);
    REFUSED(EBUSY, ckp_discard(engine, held, &error));
    ckp_release(engine, held);
    for (int i = 0; i < 2; i++)
        OK(save(engine, 3, CHUNK, 1, &counter, &state, &error));
    REFUSED(CKP_NOT_FOUND, ckp_hold(engine, held, &error));
    close_engine(engine);
}

static void test_closing(void)
{
    struct memory *memory = file_of(3, 4 * CHUNK);
    struct ckp_engine *engine = memory_start(memory, &options);
    uint8_t data[4 * CHUNK];
    uint64_t finished, open, step = 9;
    uint32_t state;

    fill_content(data, step, sizeof data);
    finished = begin(engine, step, sizeof data);
    OK(give(engine, finished, 0, data, sizeof data, &error));
    OK(ckp_finish(engine, finished, &step, sizeof step, 1, &error));
    open = begin(engine, 10, sizeof data);
    OK(give(engine, open, 0, data, CHUNK, &error));
    OK(ckp_close(engine, WAIT_MS, &error)); /* an aborted one is no error */
    OK(ckp_wait(engine, finished, 0, &state, &error));
    CHECK_EQ(state, CKP_COMMITTED);
    REFUSED(CKP_ABORTED, ckp_wait(engine, open, 0, &state, &error));
    REFUSED(CKP_CLOSED, ckp_begin(engine, 1, 1, 0, 0, &open, &error));
    REFUSED(CKP_CLOSED, ckp_read(engine, finished, 0, data, 1, &error));
    REFUSED(CKP_CLOSED, ckp_close(engine, 0, &error));
    ckp_free(engine);
}

static void test_read_only(void)
{
    struct memory *memory = file_of(2, CHUNK);
    struct ckp_engine *engine = memory_start(memory_snapshot(memory), &(struct ckp_options){.read_only = 1});
    uint64_t counter;
    uint32_t state;

    REFUSED(CKP_READ_ONLY, ckp_begin(engine, 1, 1, 0, 0, &counter, &error));
    REFUSED(CKP_READ_ONLY, ckp_publish(engine, 1, &state, &error));
    REFUSED(CKP_READ_ONLY, ckp_discard(engine, 1, &error));
    close_engine(engine);
    memory->storage.ops->close(&memory->storage);
}

int main(void)
{
    test_sizes_that_are_no_multiple_of_anything();
    test_nothing_is_written_past_the_end();
    test_pieces_in_any_order();
    test_lent_buffers();
    test_wrong_calls();
    test_abort_frees_the_source();
    test_half_a_checkpoint_is_not_visible();
    test_a_newer_checkpoint_that_ends_first_wins();
    test_prepared_checkpoints();
    test_prepared_by_an_earlier_process();
    test_held_checkpoints_stay();
    test_closing();
    test_read_only();
    return 0;
}
