/* Power cuts: at every moment of a run, with every kind of loss, a checkpoint that was acknowledged is found.
 *
 * A run is noted write by write and flush by flush. A power cut at a moment keeps every write that had ended when a
 * flush began that has ended too, and any part of the others: none, all, or a random choice of sectors of each. Every
 * such state is recovered; all checkpoints that are listed in it must be intact, and the newest must be one that was
 * acknowledged before, or a newer one. From some of the states the story goes on, with further cuts.
 */
#include <errno.h>
#include <sched.h>

#include "memory.h"

#define SECTOR       512u
#define DATA_BYTES   (5 * CKP_BLOCK + 12) /* six chunks of a block, the last one with three floats */
#define SAVES        12u
#define CUTS         6u /* random choices at each moment */
#define CONTINUED    8u /* states from which a second run starts */
#define LEAST_STATES 5000u

enum note { NOTE_COMMITTED, NOTE_PREPARED, NOTE_DECIDED };
enum drop { DROP_NOTHING, DROP_OPENING, DROP_CLEAR, DROP_DATA, DROP_METADATA, DROP_RECORD, DROP_KINDS };
enum { RUNS = 10 };
static enum drop dropped; /* a flush that is taken as if it had not been there */

static const struct ckp_options writable = {.writers = 4, .pool_chunks = 8, .chunk_bytes = CKP_BLOCK};
static const struct ckp_options readable = {.read_only = 1};

static int loud; /* say what is wrong */

struct saver {
    struct ckp_engine *engine;
    struct history *history;
    uint64_t seed;
    uint32_t saves;
};

static void note(struct history *history, enum note kind, uint64_t counter)
{
    history_add(history, (struct event){.kind = EVENT_NOTE, .id = kind, .value = counter});
}

static int idle_a_little(void *context, const struct ckp_io *io)
{
    (void)context, (void)io;
    sched_yield();
    return 0;
}

/* One of the two things that happen to a prepared checkpoint. */
static void decide(struct saver *saver, uint64_t counter)
{
    uint32_t state;

    note(saver->history, NOTE_PREPARED, counter);
    note(saver->history, NOTE_DECIDED, counter);
    if (random_next(&saver->seed) % 2) {
        OK(ckp_publish(saver->engine, counter, &state, &error));
        note(saver->history, NOTE_COMMITTED, counter);
    } else {
        OK(ckp_discard(saver->engine, counter, &error));
    }
}

static void give_up(struct saver *saver)
{
    uint8_t data[2 * CKP_BLOCK];
    uint64_t counter;

    fill_content(data, 1, sizeof data);
    OK(ckp_begin(saver->engine, 1, DATA_BYTES, 0, WAIT_MS, &counter, &error));
    OK(give(saver->engine, counter, CKP_BLOCK, data, sizeof data, &error));
    OK(ckp_abort(saver->engine, counter, &error));
}

static void *save_many(void *arg)
{
    struct saver *saver = arg;
    uint32_t state;
    uint64_t counter;

    for (uint32_t i = 0; i < saver->saves; i++) {
        uint64_t choice = random_next(&saver->seed) % 8, step = random_next(&saver->seed) % 100000;
        if (choice == 0)
            give_up(saver);
        OK(save(saver->engine, step, DATA_BYTES - choice * 1000, choice > 1, &counter, &state, &error));
        if (state == CKP_PREPARED)
            decide(saver, counter);
        else
            note(saver->history, NOTE_COMMITTED, counter);
    }
    return NULL;
}

/* Two threads that save at the same time; a run from `bytes`. */
static void run(const uint8_t *bytes, uint64_t count, uint32_t saves, uint32_t threads, uint64_t seed,
                struct history *history)
{
    struct memory *memory = memory_copy(bytes, count);
    struct saver savers[2];
    pthread_t handles[2];

    memory->history = history;
    memory->hook = idle_a_little;
    struct ckp_engine *engine = memory_start(memory, &writable);
    for (uint32_t i = 0; i < threads; i++) {
        savers[i] = (struct saver){engine, history, seed + i, saves / threads};
        CHECK(!pthread_create(&handles[i], NULL, save_many, &savers[i]));
    }
    for (uint32_t i = 0; i < threads; i++)
        pthread_join(handles[i], NULL);
    close_engine(engine);
}

/* The moment of a power cut. */
struct cut {
    const struct history *history;
    uint8_t *durable; /* bytes that are certainly there */
    uint64_t count;
    uint64_t *pending; /* places of writes that are not certainly there, in order */
    uint64_t pendings;
    uint8_t *ended; /* by number of write */
    uint64_t acknowledged;
    uint64_t prepared[4]; /* neither published nor discarded; 0: free */
    uint64_t seed;
    uint64_t states, wrong;
};

static void apply(const struct event *write, uint8_t *bytes, uint64_t choice, uint64_t *seed)
{
    for (uint64_t at = 0; at < write->bytes; at += SECTOR)
        if (choice == 1 || (choice > 1 && random_next(seed) % 2))
            memcpy(bytes + write->offset + at, write->data + at, SECTOR);
}

static int listed(const struct ckp_checkpoint *found, int count, uint64_t counter)
{
    while (count-- > 0)
        if (found[count].counter == counter)
            return 1;
    return 0;
}

static int is_wrong(const char *what, uint64_t counter)
{
    if (loud)
        fprintf(stderr, "%s: checkpoint %llu\n", what, (unsigned long long)counter);
    return 0;
}

static int is_right(const struct cut *cut, struct ckp_engine *engine)
{
    struct ckp_checkpoint found[8];
    int count = ckp_list(engine, found, 8);

    if (engine->file.latest != engine->file.committed)
        return is_wrong("a committed checkpoint is lost", engine->file.committed);
    if (engine->file.latest < cut->acknowledged)
        return is_wrong("an acknowledged checkpoint is lost", cut->acknowledged);
    for (int i = 0; i < count; i++)
        if (!is_intact(engine, &found[i]))
            return is_wrong("a damaged checkpoint is listed", found[i].counter);
    for (uint32_t i = 0; i < 4; i++)
        if (cut->prepared[i] && !listed(found, count, cut->prepared[i]))
            return is_wrong("a prepared checkpoint is lost", cut->prepared[i]);
    return 1;
}

/* What the power cut leaves: choice 0 keeps nothing uncertain, 1 all of it, others a random part. */
static uint8_t *image_of(struct cut *cut, uint64_t choice)
{
    uint8_t *bytes = malloc(cut->count);

    CHECK(bytes);
    memcpy(bytes, cut->durable, cut->count);
    for (uint64_t i = 0; i < cut->pendings; i++)
        if (choice < 3 || random_next(&cut->seed) % 2)
            apply(&cut->history->events[cut->pending[i]], bytes, choice, &cut->seed);
    return bytes;
}

static void look(struct cut *cut, uint64_t choice)
{
    uint8_t *bytes = image_of(cut, choice);
    struct ckp_engine *engine = memory_start(memory_copy(bytes, cut->count), &readable);

    cut->states++;
    cut->wrong += !is_right(cut, engine);
    close_engine(engine);
    free(bytes);
}

/* A flush has ended: what had been written when it began is certain now. */
static void make_durable(struct cut *cut, uint64_t start)
{
    uint64_t left = 0;
    uint64_t seed = 1;

    for (uint64_t i = 0; i < cut->pendings; i++) {
        const struct event *write = &cut->history->events[cut->pending[i]];
        int before = 0;
        for (uint64_t place = cut->pending[i]; place < start && !before; place++)
            before = cut->history->events[place].kind == EVENT_WRITTEN && cut->history->events[place].id == write->id;
        if (before)
            apply(write, cut->durable, 1, &seed);
        else
            cut->pending[left++] = cut->pending[i];
    }
    cut->pendings = left;
}

static void take_note(struct cut *cut, const struct event *event)
{
    uint64_t from = event->id == NOTE_PREPARED ? 0 : event->value, to = event->id == NOTE_PREPARED ? event->value : 0;

    if (event->id == NOTE_COMMITTED) {
        cut->acknowledged = event->value > cut->acknowledged ? event->value : cut->acknowledged;
        return;
    }
    for (uint32_t i = 0; i < 4; i++)
        if (cut->prepared[i] == from) {
            cut->prepared[i] = to;
            return;
        }
    CHECK(!"more prepared checkpoints than savers");
}

static void step(struct cut *cut, uint64_t place)
{
    const struct event *event = &cut->history->events[place];

    if (event->kind == EVENT_WRITE)
        cut->pending[cut->pendings++] = place;
    else if (event->kind == EVENT_FLUSHED)
        make_durable(cut, event->value);
    else if (event->kind == EVENT_NOTE)
        take_note(cut, event);
}

static void open_cut(struct cut *cut, const struct history *history, const uint8_t *bytes, uint64_t count,
                     uint64_t acknowledged)
{
    *cut = (struct cut){.history = history, .count = count, .acknowledged = acknowledged, .seed = 88172645463325252u};
    cut->durable = malloc(count);
    cut->pending = calloc(history->count + 1, sizeof *cut->pending);
    CHECK(cut->durable && cut->pending);
    memcpy(cut->durable, bytes, count);
}

static void close_cut(struct cut *cut)
{
    free(cut->durable);
    free(cut->pending);
}

/* From a state that a power cut left, run again, and cut that. */
static void go_on(struct cut *before, uint64_t *states, uint64_t *wrong);
/* The process is killed at this moment, and another one goes on; then the power is cut. */
static void go_on_after_kill(struct cut *before, uint64_t place, uint64_t *states, uint64_t *wrong);

/* Every moment of a run that began from `bytes`, when `acknowledged` was the newest. */
static void replay(const struct history *history, const uint8_t *bytes, uint64_t count, uint64_t acknowledged,
                   uint32_t continued, uint64_t *states, uint64_t *wrong)
{
    struct cut cut;

    open_cut(&cut, history, bytes, count, acknowledged);
    for (uint64_t place = 0; place < history->count; place++) {
        step(&cut, place);
        for (uint64_t choice = 0; choice < 2 + CUTS; choice++)
            look(&cut, choice);
        if (continued && place % (history->count / continued + 1) == 0) {
            go_on(&cut, states, wrong);
            go_on_after_kill(&cut, place, states, wrong);
        }
    }
    *states += cut.states;
    *wrong += cut.wrong;
    close_cut(&cut);
}

static void go_on(struct cut *before, uint64_t *states, uint64_t *wrong)
{
    uint8_t *bytes = image_of(before, 3);
    struct history history;
    uint64_t newest;

    struct ckp_engine *engine = memory_start(memory_copy(bytes, before->count), &readable);
    newest = engine->file.latest;
    close_engine(engine);
    history_open(&history);
    run(bytes, before->count, 4, 2, before->seed, &history);
    replay(&history, bytes, before->count, newest, 0, states, wrong);
    history_close(&history);
    free(bytes);
}

/* The history up to a place: all that had been begun is done. */
static void copy_history(const struct history *from, uint64_t count, struct history *to)
{
    history_open(to);
    for (uint64_t i = 0; i < count; i++) {
        struct event event = from->events[i];
        if (event.data) {
            event.data = malloc(event.bytes);
            CHECK(event.data);
            memcpy(event.data, from->events[i].data, event.bytes);
        }
        history_add(to, event);
    }
    for (uint64_t id = 0; id < from->ids; id++) /* said twice of some */
        history_add(to, (struct event){.kind = EVENT_WRITTEN, .id = id});
    to->ids = from->ids;
}

static void go_on_after_kill(struct cut *before, uint64_t place, uint64_t *states, uint64_t *wrong)
{
    uint8_t *visible = image_of(before, 1);
    struct history history;
    struct cut cut;

    copy_history(before->history, place + 1, &history);
    place = history.count;
    run(visible, before->count, 4, 2, before->seed, &history);
    for (uint64_t at = place; dropped == DROP_OPENING && history.events[at - 1].kind != EVENT_FLUSHED; at++)
        if (history.events[at].kind == EVENT_FLUSHED)
            history.events[at].value = 0;
    open_cut(&cut, &history, before->durable, before->count, before->acknowledged);
    memcpy(cut.pending, before->pending, before->pendings * sizeof *cut.pending);
    cut.pendings = before->pendings;
    for (uint64_t at = place; at < history.count; at++) {
        step(&cut, at);
        for (uint64_t choice = 0; choice < 2 + CUTS; choice++)
            look(&cut, choice);
    }
    *states += cut.states;
    *wrong += cut.wrong;
    close_cut(&cut);
    history_close(&history);
    free(visible);
}

static void test_every_power_cut_leaves_an_acknowledged_checkpoint(uint64_t seed)
{
    const struct ckp_geometry geometry = {.slots = 3, .data_bytes = DATA_BYTES, .meta_bytes = 8};
    struct memory *empty = memory_new(&geometry);
    uint64_t states = 0, wrong = 0;
    struct history history;

    loud = 1;
    history_open(&history);
    run(empty->bytes, empty->storage.bytes, SAVES, 2, seed, &history);
    replay(&history, empty->bytes, empty->storage.bytes, 0, CONTINUED, &states, &wrong);
    printf("%llu states after power cuts, %llu wrong\n", (unsigned long long)states, (unsigned long long)wrong);
    CHECK_EQ(wrong, 0);
    CHECK(states >= LEAST_STATES);
    history_close(&history);
    empty->storage.ops->close(&empty->storage);
}

/* What the writes since the last flush were, when one thread saves. */
static enum drop kind_of(const struct history *history, uint64_t flush, uint64_t slot_bytes)
{
    static const union ckp_block zeros;
    const struct event *write = NULL;

    for (uint64_t i = 0; i < flush; i++)
        if (history->events[i].kind == EVENT_WRITE)
            write = &history->events[i];
    if (!write)
        return DROP_OPENING;
    if (write->offset < CKP_SLOTS_START)
        return DROP_RECORD;
    if ((write->offset - CKP_SLOTS_START) % slot_bytes)
        return DROP_DATA;
    return memcmp(write->data, zeros.bytes, CKP_BLOCK) ? DROP_METADATA : DROP_CLEAR;
}

/* A run of an engine that leaves out one kind of flush: this test must notice. */
static uint64_t wrong_without(enum drop kind, uint64_t seed)
{
    const struct ckp_geometry geometry = {.slots = 2, .data_bytes = DATA_BYTES, .meta_bytes = 8};
    struct memory *empty = memory_new(&geometry);
    uint64_t states = 0, wrong = 0, slot_bytes = ((struct ckp_superblock *)empty->bytes)->slot_bytes;
    struct history history;

    dropped = kind;
    history_open(&history);
    run(empty->bytes, empty->storage.bytes, 6, 1, seed, &history);
    for (uint64_t i = 0; i < history.count; i++)
        if (history.events[i].kind == EVENT_FLUSHED && kind_of(&history, history.events[i].value, slot_bytes) == kind)
            history.events[i].value = 0; /* a flush before the first write */
    replay(&history, empty->bytes, empty->storage.bytes, 0, kind == DROP_OPENING ? CONTINUED : 0, &states, &wrong);
    history_close(&history);
    empty->storage.ops->close(&empty->storage);
    return wrong;
}

static void test_every_flush_is_needed(void)
{
    CHECK_EQ(wrong_without(DROP_NOTHING, 777), 0);
    loud = 0;
    for (enum drop kind = DROP_OPENING; kind < DROP_KINDS; kind++) {
        uint64_t wrong = 0;

        for (uint64_t seed = 777; !wrong && seed < 777 + RUNS; seed++) /* writers' order decides what a cut can show */
            wrong = wrong_without(kind, seed);
        CHECK(wrong > 0);
    }
}

/* A seed as the argument: another run. */
int main(int argc, char **argv)
{
    test_every_power_cut_leaves_an_acknowledged_checkpoint(argc > 1 ? strtoull(argv[1], NULL, 10) : 12345);
    test_every_flush_is_needed();
    return 0;
}
