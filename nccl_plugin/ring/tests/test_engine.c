/* The engine over the mock plugin, each rank a thread: results, order of calls (the mock aborts on a wrong one), the
 * phase rule and the layout rule on every message, errors, clean ends. argv[1]: the mock plugin. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <string.h>
#include <time.h>

#include "check.h"
#include "checkmate/wire.h"
#include "mock_plugin.h"
#include "reduce.h"
#include "ring.h"

#define MAX_RANKS  5
#define SLICE      4096
#define WAIT_MS    20000
#define MAX_FRAMES 20000

static const char *mock_path;
static mock_set_hook_fn set_hook;
static mock_get_counts_fn get_counts;

struct job {
    uint32_t nranks, nchannels;
    pthread_barrier_t barrier;
    uint8_t *handles;
    void (*body)(struct job *job, struct ckm_ring *ring, uint32_t rank);
};

struct member {
    struct job *job;
    uint32_t rank;
};

static void *member_main(void *arg)
{
    struct member *member = arg;
    struct job *job = member->job;
    uint32_t each_alone[MAX_RANKS];
    for (uint32_t r = 0; r < job->nranks; r++)
        each_alone[r] = 1;
    struct ckm_ring_config config = {.plugin = mock_path,
                                     .name = "test",
                                     .comm_id = 77,
                                     .rank = member->rank,
                                     .nranks = job->nranks,
                                     .nchannels = job->nchannels,
                                     .slice_bytes = SLICE,
                                     .nhosts = job->nranks,
                                     .host_ranks = each_alone};
    char error[256] = "";
    struct ckm_ring *ring = ckm_ring_create(&config, error, sizeof(error));
    CHECK(ring, "%s", error);
    ckm_ring_handles(ring, job->handles + member->rank * ckm_ring_handle_bytes(ring));
    pthread_barrier_wait(&job->barrier);
    ckm_ring_connect(ring, job->handles);
    CHECK(ckm_ring_connected(ring, WAIT_MS) == 1, "%s", ckm_ring_error(ring));
    pthread_barrier_wait(&job->barrier);
    job->body(job, ring, member->rank);
    pthread_barrier_wait(&job->barrier);
    ckm_ring_destroy(ring);
    return NULL;
}

static void run(uint32_t nranks, uint32_t nchannels, void (*body)(struct job *, struct ckm_ring *, uint32_t))
{
    struct job job = {.nranks = nranks, .nchannels = nchannels, .body = body};
    job.handles = calloc(nranks, (nchannels + nranks) * 128);
    pthread_barrier_init(&job.barrier, NULL, nranks);
    pthread_t threads[MAX_RANKS];
    struct member members[MAX_RANKS];
    for (uint32_t r = 0; r < nranks; r++) {
        members[r] = (struct member){&job, r};
        CHECK(!pthread_create(&threads[r], NULL, member_main, &members[r]), "thread");
    }
    for (uint32_t r = 0; r < nranks; r++)
        pthread_join(threads[r], NULL);
    pthread_barrier_destroy(&job.barrier);
    free(job.handles);
}

static struct ckm_ring_op *submit(struct ckm_ring *ring, const struct ckm_ring_task *task)
{
    char error[256] = "";
    struct ckm_ring_op *op = ckm_ring_submit(ring, task, error, sizeof(error));
    CHECK(op, "%s", error);
    return op;
}

static void finish(struct ckm_ring_op *op)
{
    CHECK(ckm_ring_op_wait(op, WAIT_MS) == 1, "%s", ckm_ring_op_error(op));
    ckm_ring_op_free(op);
}

/* ---- results ---- */

static const size_t sizes[] = {0, 1, 5, 1000, 4099, 30011};
#define NSIZES (sizeof(sizes) / sizeof(sizes[0]))

static int32_t value(uint32_t rank, size_t i)
{
    return (int32_t)((rank + 1) * 1000 + i % 977);
}

static int32_t sum_of(uint32_t nranks, size_t i)
{
    int32_t sum = 0;
    for (uint32_t r = 0; r < nranks; r++)
        sum += value(r, i);
    return sum;
}

static int32_t *filled(uint32_t rank, size_t count)
{
    int32_t *data = malloc(count * 4 + 4);
    for (size_t i = 0; i < count; i++)
        data[i] = value(rank, i);
    return data;
}

static void allreduce(struct ckm_ring *ring, uint32_t nranks, uint32_t rank, size_t count, bool in_place)
{
    int32_t *in = filled(rank, count), *out = in_place ? in : calloc(count + 1, 4);
    const void *ins[] = {in};
    void *outs[] = {out};
    finish(submit(ring, &(struct ckm_ring_task){CKM_RING_ALLREDUCE, CKM_INT32, CKM_SUM, 0, count, ins, outs, -1}));
    for (size_t i = 0; i < count; i++) {
        CHECK(out[i] == sum_of(nranks, i), "all-reduce of %zu, element %zu: %d", count, i, out[i]);
        CHECK(in_place || in[i] == value(rank, i), "the input was changed");
    }
    free(in);
    if (!in_place)
        free(out);
}

static void broadcast(struct ckm_ring *ring, uint32_t rank, uint32_t root, size_t count)
{
    int32_t *data = filled(rank, count);
    const void *ins[] = {data};
    void *outs[] = {data};
    finish(
        submit(ring, &(struct ckm_ring_task){CKM_RING_BROADCAST, CKM_INT32, CKM_SUM, (int)root, count, ins, outs, -1}));
    for (size_t i = 0; i < count; i++)
        CHECK(data[i] == value(root, i), "broadcast of %zu, element %zu", count, i);
    free(data);
}

static void reduce(struct ckm_ring *ring, uint32_t nranks, uint32_t rank, uint32_t root, size_t count)
{
    int32_t *data = filled(rank, count);
    const void *ins[] = {data};
    void *outs[] = {data};
    finish(submit(ring, &(struct ckm_ring_task){CKM_RING_REDUCE, CKM_INT32, CKM_SUM, (int)root, count, ins, outs, -1}));
    for (size_t i = 0; i < count; i++)
        CHECK(data[i] == (rank == root ? sum_of(nranks, i) : value(rank, i)), "reduce of %zu, element %zu", count, i);
    free(data);
}

static void allgather(struct ckm_ring *ring, uint32_t nranks, uint32_t rank, size_t count)
{
    int32_t *in = filled(rank, count), *out[MAX_RANKS];
    const void *ins[] = {in};
    for (uint32_t r = 0; r < nranks; r++)
        out[r] = calloc(count + 1, 4);
    finish(submit(
        ring, &(struct ckm_ring_task){CKM_RING_ALLGATHER, CKM_INT32, CKM_SUM, 0, count, ins, (void *const *)out, -1}));
    for (uint32_t r = 0; r < nranks; r++) {
        for (size_t i = 0; i < count; i++)
            CHECK(out[r][i] == value(r, i), "all-gather of %zu, block %u, element %zu", count, r, i);
        free(out[r]);
    }
    free(in);
}

static void reducescatter(struct ckm_ring *ring, uint32_t nranks, uint32_t rank, size_t count)
{
    int32_t *in[MAX_RANKS], *out = calloc(count + 1, 4);
    void *outs[] = {out};
    for (uint32_t r = 0; r < nranks; r++)
        in[r] = filled(rank + r, count);
    finish(submit(ring, &(struct ckm_ring_task){CKM_RING_REDUCESCATTER, CKM_INT32, CKM_SUM, 0, count,
                                                (const void *const *)in, outs, -1}));
    for (size_t i = 0; i < count; i++) {
        int32_t want = 0;
        for (uint32_t r = 0; r < nranks; r++)
            want += value(r + rank, i);
        CHECK(out[i] == want, "reduce-scatter of %zu, element %zu", count, i);
    }
    for (uint32_t r = 0; r < nranks; r++)
        free(in[r]);
    free(out);
}

/* Everybody sends to the next before it receives: a schedule that ran one after the other would hang. */
static void exchange(struct ckm_ring *ring, uint32_t nranks, uint32_t rank, size_t count)
{
    int32_t *in = filled(rank, count), *out = calloc(count + 1, 4);
    const void *ins[] = {in};
    void *outs[] = {out};
    int next = (int)((rank + 1) % nranks), prev = (int)((rank + nranks - 1) % nranks);
    struct ckm_ring_op *send =
        submit(ring, &(struct ckm_ring_task){CKM_RING_SEND, CKM_INT32, CKM_SUM, next, count, ins, NULL, -1});
    finish(submit(ring, &(struct ckm_ring_task){CKM_RING_RECV, CKM_INT32, CKM_SUM, prev, count, NULL, outs, -1}));
    finish(send);
    for (size_t i = 0; i < count; i++)
        CHECK(out[i] == value((uint32_t)prev, i), "send and receive of %zu, element %zu", count, i);
    free(in);
    free(out);
}

static void all_collectives(struct job *job, struct ckm_ring *ring, uint32_t rank)
{
    for (size_t k = 0; k < NSIZES; k++) {
        allreduce(ring, job->nranks, rank, sizes[k], true);
        allreduce(ring, job->nranks, rank, sizes[k], false);
        allgather(ring, job->nranks, rank, sizes[k]);
        reducescatter(ring, job->nranks, rank, sizes[k]);
        broadcast(ring, rank, (uint32_t)k % job->nranks, sizes[k]);
        reduce(ring, job->nranks, rank, (uint32_t)k % job->nranks, sizes[k]);
        exchange(ring, job->nranks, rank, sizes[k]);
    }
}

/* One rank: copies. */
static void alone(struct job *job, struct ckm_ring *ring, uint32_t rank)
{
    for (size_t k = 0; k < NSIZES; k++) {
        allreduce(ring, job->nranks, rank, sizes[k], false);
        allgather(ring, job->nranks, rank, sizes[k]);
        reducescatter(ring, job->nranks, rank, sizes[k]);
        broadcast(ring, rank, 0, sizes[k]);
    }
}

/* ---- what a shadow would get ---- */

struct frame {
    uint32_t channel, loop, chunk, slice;
    size_t bytes;
    uint8_t payload[SLICE];
};

static struct frame *frames;
static size_t nframes;

/* Heartbeat tagging: first tags its own chunk in all-gather round 0, last all that it sends in rounds 0 to n-2. */
static void capture(const struct mock_send *send, void *context)
{
    (void)context;
    uint32_t n = (uint32_t)send->nranks;
    bool first = send->rank == 0, last = send->peer == 0;
    if (strcmp(send->func, "AllReduce") != 0 || (!first && !last))
        return;
    CHECK(send->nsteps % (int)(4 * (n - 1)) == 0, "%d steps are not whole loops", send->nsteps);
    struct ckm_place place = ckm_place((uint32_t)send->step, 2, first ? 0 : n - 1, n);
    if (!place.final || (first && place.round != 0) || (!first && place.round > n - 2))
        return;
    CHECK(nframes < MAX_FRAMES && send->bytes <= SLICE, "frame %zu of %zu bytes", nframes, send->bytes);
    struct frame *frame = &frames[nframes++];
    *frame = (struct frame){(uint32_t)send->channel, place.loop, place.chunk, place.slice, send->bytes, {0}};
    if (send->bytes)
        memcpy(frame->payload, send->data, send->bytes);
}

static int compare(const void *va, const void *vb)
{
    const struct frame *a = va, *b = vb;
    const uint32_t ka[] = {a->channel, a->loop, a->chunk, a->slice}, kb[] = {b->channel, b->loop, b->chunk, b->slice};
    for (int i = 0; i < 4; i++)
        if (ka[i] != kb[i])
            return ka[i] < kb[i] ? -1 : 1;
    return 0;
}

static size_t shadow_count;

static void one_allreduce(struct job *job, struct ckm_ring *ring, uint32_t rank)
{
    allreduce(ring, job->nranks, rank, shadow_count, true);
}

/* Tagged frames, sorted by place, hold the reduced buffer: each final chunk once, nothing partial. */
static void test_shadow(uint32_t nranks, uint32_t nchannels, size_t count)
{
    nframes = 0;
    shadow_count = count;
    set_hook(capture, NULL);
    run(nranks, nchannels, one_allreduce);
    set_hook(NULL, NULL);
    qsort(frames, nframes, sizeof(*frames), compare);
    size_t at = 0;
    for (size_t f = 0; f < nframes; f++) {
        CHECK(f == 0 || compare(&frames[f - 1], &frames[f]) < 0, "a chunk is tagged twice");
        for (size_t b = 0; b + 4 <= frames[f].bytes; b += 4, at++) {
            int32_t got;
            memcpy(&got, frames[f].payload + b, 4);
            CHECK(got == sum_of(nranks, at), "n %u channels %u: element %zu is %d", nranks, nchannels, at, got);
        }
    }
    CHECK(at == count, "n %u channels %u: %zu of %zu elements tagged", nranks, nchannels, at, count);
}

/* 5 floats over 4 ranks: 48 messages, 36 of them empty. */
static void test_empty_messages(void)
{
    struct mock_counts before, after;
    shadow_count = 5;
    get_counts(&before);
    run(4, 2, one_allreduce);
    get_counts(&after);
    CHECK(after.sends - before.sends == 48 && after.empty_sends - before.empty_sends == 36, "%d of %d empty",
          (int)(after.empty_sends - before.empty_sends), (int)(after.sends - before.sends));
}

/* ---- errors ---- */

static void refused(struct job *job, struct ckm_ring *ring, uint32_t rank)
{
    (void)job;
    char error[256] = "";
    int32_t x = 0;
    const void *ins[] = {&x};
    void *outs[] = {&x};
    struct ckm_ring_task task = {99, CKM_INT32, CKM_SUM, 0, 1, ins, outs, -1};
    CHECK(!ckm_ring_submit(ring, &task, error, sizeof(error)) && strstr(error, "operation 99"), "%s", error);
    task = (struct ckm_ring_task){CKM_RING_SEND, CKM_INT32, CKM_SUM, (int)rank, 1, ins, outs, -1};
    CHECK(!ckm_ring_submit(ring, &task, error, sizeof(error)) && strstr(error, "itself"), "%s", error);
    task = (struct ckm_ring_task){CKM_RING_BROADCAST, CKM_INT32, CKM_SUM, 9, 1, ins, outs, -1};
    CHECK(!ckm_ring_submit(ring, &task, error, sizeof(error)) && strstr(error, "rank 9"), "%s", error);
}

/* Rank 0 never comes: the others' deadline ends the operation, and everything after it. */
static void late(struct job *job, struct ckm_ring *ring, uint32_t rank)
{
    (void)job;
    if (rank == 0)
        return;
    int32_t x[100] = {0};
    const void *ins[] = {x};
    void *outs[] = {x};
    struct ckm_ring_task task = {CKM_RING_ALLREDUCE, CKM_INT32, CKM_SUM, 0, 100, ins, outs, 100};
    struct ckm_ring_op *op = submit(ring, &task);
    CHECK(ckm_ring_op_wait(op, WAIT_MS) == -1, "an operation without rank 0 ended well");
    CHECK(strstr(ckm_ring_op_error(op), "time-out") || strstr(ckm_ring_op_error(op), "failed"), "%s",
          ckm_ring_op_error(op));
    ckm_ring_op_free(op);
    char error[256] = "";
    CHECK(!ckm_ring_submit(ring, &task, error, sizeof(error)) && error[0], "accepted after a failure");
}

/* One rank aborts: its neighbours' connections break, and so on around the ring. */
static void aborted(struct job *job, struct ckm_ring *ring, uint32_t rank)
{
    (void)job;
    int32_t *x = calloc(30000, 4);
    const void *ins[] = {x};
    void *outs[] = {x};
    struct ckm_ring_task task = {CKM_RING_ALLREDUCE, CKM_INT32, CKM_SUM, 0, 30000, ins, outs, -1};
    if (rank == 1) {
        ckm_ring_abort(ring, "asked for");
    } else {
        struct ckm_ring_op *op = submit(ring, &task);
        CHECK(ckm_ring_op_wait(op, WAIT_MS) == -1, "the operation ended well");
        ckm_ring_op_free(op);
    }
    CHECK(ckm_ring_error(ring)[0], "no error");
    free(x);
}

/* Of all the rings above. */
static void test_nothing_left(void)
{
    struct mock_counts counts;
    get_counts(&counts);
    CHECK(counts.open_objects == 0, "%d objects of the plugin left open", (int)counts.open_objects);
}

static void completions(struct job *job, struct ckm_ring *ring, uint32_t rank)
{
    (void)job;
    int32_t x[4] = {1, 2, 3, 4};
    const void *ins[] = {x};
    void *outs[] = {x};
    uint64_t cookie = 0;
    CHECK(ckm_ring_next_done(ring, 1, &cookie) == 0, "a completion out of nothing");
    struct ckm_ring_op *op =
        submit(ring, &(struct ckm_ring_task){CKM_RING_ALLREDUCE, CKM_INT32, CKM_SUM, 0, 4, ins, outs, -1});
    if (ckm_ring_op_notify(op, 40 + rank) == 0)
        CHECK(ckm_ring_next_done(ring, WAIT_MS, &cookie) == 1 && cookie == 40 + rank, "cookie %d", (int)cookie);
    CHECK(ckm_ring_op_wait(op, WAIT_MS) == 1 && ckm_ring_op_notify(op, 1) == 1, "ended operations do not notify");
    ckm_ring_op_free(op);
    ckm_ring_close(ring);
    CHECK(ckm_ring_next_done(ring, WAIT_MS, &cookie) == -1, "the queue of a closed ring goes on");
}

int main(int argc, char **argv)
{
    CHECK(argc == 2, "usage: test_engine MOCK_PLUGIN");
    mock_path = argv[1];
    void *mock = dlopen(mock_path, RTLD_NOW);
    CHECK(mock, "%s", dlerror());
    *(void **)&set_hook = dlsym(mock, "mock_set_hook");
    *(void **)&get_counts = dlsym(mock, "mock_get_counts");
    frames = calloc(MAX_FRAMES, sizeof(*frames));
    for (uint32_t n = 2; n <= MAX_RANKS; n++)
        for (uint32_t channels = 1; channels <= 4; channels *= 2) {
            run(n, channels, all_collectives);
            test_shadow(n, channels, 5);
            test_shadow(n, channels, 30011);
        }
    run(1, 2, alone);
    test_empty_messages();
    run(3, 2, refused);
    run(3, 2, late);
    run(4, 2, aborted);
    run(3, 1, completions);
    test_nothing_left();
    free(frames);
    puts("engine: ok");
    return 0;
}
