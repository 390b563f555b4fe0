/* The tag rule, through the profiler's tables: in every ring that passes each host once, each final chunk is tagged
 * once, between two hosts, by the two boundary ranks alone, and nothing else is. */
#include <stdbool.h>
#include <unistd.h>

#include "checkmate/api.h"
#include "log.h"
#include "nccl/profiler_abi.h"
#include "param.h"
#include "profiler.h"
#include "tag.h"
#include "test.h"

extern const struct nccl_profiler_v2 ncclProfiler_v2;
extern const struct nccl_profiler_v4 ncclProfiler_v4;
extern const struct nccl_profiler_v5 ncclProfiler_v5;
extern const struct nccl_profiler_v6 ncclProfiler_v6;

#define COUNT 1000
static float bucket[COUNT];

static struct nccl_prof_event_v5 coll_event(void)
{
    return (struct nccl_prof_event_v5){.type = NCCL_PROFILE_COLL,
                                       .coll = {.seqNumber = 5,
                                                .func = "AllReduce",
                                                .sendBuff = bucket,
                                                .count = COUNT,
                                                .datatype = "ncclFloat32",
                                                .nChannels = 2,
                                                .algo = "RING",
                                                .proto = "SIMPLE"}};
}

static uint64_t untagged(enum checkmate_reason reason)
{
    struct checkmate_counters c;
    CHECK_EQ(checkmate_get_counters(&c), 0);
    return c.untagged[reason];
}

static void *context_of(int rank, int nranks)
{
    void *context;
    int mask = 0;
    CHECK_EQ(ncclProfiler_v5.init(&context, 77, &mask, "test", 1, nranks, rank, test_logger), NCCL_SUCCESS);
    CHECK(context);
    CHECK_EQ(mask, NCCL_PROFILE_GROUP | NCCL_PROFILE_COLL | NCCL_PROFILE_PROXY_OP | NCCL_PROFILE_PROXY_STEP);
    return context;
}

static void *start(void *context, struct nccl_prof_event_v5 event)
{
    void *handle = &event;
    CHECK_EQ(ncclProfiler_v5.startEvent(context, &handle, &event), NCCL_SUCCESS);
    return handle;
}

static void *start_op(void *context, void *coll, int peer, int steps, int is_send)
{
    return start(context,
                 (struct nccl_prof_event_v5){
                     .type = NCCL_PROFILE_PROXY_OP,
                     .parentObj = coll,
                     .proxyOp = {.pid = getpid(), .channelId = 1, .peer = peer, .nSteps = steps, .isSend = is_send}});
}

static void *start_step(void *context, void *op, int step)
{
    return start(context, (struct nccl_prof_event_v5){
                              .type = NCCL_PROFILE_PROXY_STEP, .parentObj = op, .proxyStep = {.step = step}});
}

/* One channel's ring: ranks of a host have consecutive numbers, and stand side by side. */
#define MAX_RANKS 8
#define LOOPS     2
struct ring {
    int n, nhosts, ranks_of[MAX_RANKS]; /* ranks on each host */
    int host[MAX_RANKS];                /* of each rank */
    int order[MAX_RANKS];               /* rank at each position, rank 0 at 0 */
    int tagged[LOOPS][MAX_RANKS][2];    /* how often, by loop, chunk, slice */
};
static long rings_tried;

static void set_hosts(const int *ranks_of, int nhosts)
{
    char text[64];
    int used = 0;
    for (int h = 0; h < nhosts; h++)
        used += snprintf(text + used, sizeof text - (size_t)used, "%s%d", h ? "," : "", ranks_of[h]);
    setenv("CHECKMATE_HOST_RANKS", text, 1);
    ckm_param_reload();
}

/* The partial sums of rank 0's 1s and all others' 0s: the k-th chunk holds what the k ranks before had, and its own. */
static void run_probe(void *context, int pos, int next, int n)
{
    static float ones[COUNT];
    struct nccl_prof_event_v5 event = coll_event();
    int steps = 2 * (n - 1) * 2;

    CHECK_EQ(checkmate_register_probe(ones, sizeof ones), 0);
    event.coll.sendBuff = ones;
    checkmate_set_incarnation(0); /* attached to no shadow yet */
    void *coll = start(context, event), *op = start_op(context, coll, next, steps, 1);
    checkmate_set_incarnation(3);
    CHECK(op);
    for (int step = 0; step < steps; step++) {
        struct ckm_frame f;
        float sum = step / 2 >= pos;
        void *slot = start_step(context, op, step);
        CHECK(!ckm_tag_message(&slot, &sum, sizeof sum, &f));
        CHECK(!ckm_tag_message(&slot, &sum, sizeof sum, &f)); /* again, as when isend had no room */
    }
    ncclProfiler_v5.stopEvent(op);
}

/* All sends of one rank. */
static int run_rank(struct ring *ring, int pos)
{
    int n = ring->n, rank = ring->order[pos], next = ring->order[(pos + 1) % n], steps = LOOPS * 2 * (n - 1) * 2;
    bool is_first = ring->host[rank] == 0 && ring->host[next] != 0;
    bool is_last = ring->host[rank] != 0 && ring->host[next] == 0;
    void *context = context_of(rank, n);
    int sent = 0;

    if ((is_first || is_last) && ring->ranks_of[0] > 1) {
        uint64_t before = untagged(CHECKMATE_NO_POSITION);
        CHECK(!start_op(context, start(context, coll_event()), next, steps, 1));
        CHECK_EQ(untagged(CHECKMATE_NO_POSITION), before + 1);
        run_probe(context, pos, next, n);
    }
    void *coll = start(context, coll_event());
    CHECK(coll);
    CHECK_EQ(ncclProfiler_v5.stopEvent(coll), NCCL_SUCCESS); /* before any operation starts, as in NCCL */
    CHECK(!start_op(context, coll, next, steps, 0));
    void *op = start_op(context, coll, next, steps, 1);
    CHECK_EQ(op != NULL, is_first || is_last);
    for (int step = 0; op && step < steps; step++) {
        struct ckm_frame f;
        void *slot = start_step(context, op, step);
        if (!ckm_tag_message(&slot, NULL, 0, &f))
            continue;
        struct ckm_place p = ckm_place(f.step, f.slices_per_chunk, f.ring_pos, f.nranks);
        CHECK_EQ(f.step, step);
        CHECK_EQ(f.ring_pos, pos);
        CHECK_EQ(f.nranks, n);
        CHECK_EQ(f.host_ranks, ring->ranks_of[0]);
        CHECK_EQ((f.flags & CKM_FLAG_FIRST) != 0, is_first);
        CHECK_EQ(f.channel, 1);
        CHECK_EQ(f.nchannels, 2);
        CHECK_EQ(f.comm_id, 77);
        CHECK_EQ(f.group, ckm_group_number("dp1"));
        CHECK_EQ(f.coll_seq, 5);
        CHECK_EQ(f.op_count, COUNT);
        CHECK_EQ(f.datatype, NCCL_FLOAT32);
        CHECK_EQ(f.iteration, 42);
        CHECK_EQ(f.incarnation, 3);
        CHECK_EQ(f.bucket, 9);
        CHECK(p.final);
        ring->tagged[p.loop][p.chunk][p.slice]++;
        sent++;
        CHECK_EQ(ncclProfiler_v5.stopEvent(slot), NCCL_SUCCESS);
    }
    CHECK(!is_first || sent == LOOPS * 2); /* its own chunk */
    CHECK_EQ(ncclProfiler_v5.stopEvent(op), NCCL_SUCCESS);
    void *late = start_step(context, op, 2 * (n - 1));
    CHECK(!late);
    CHECK_EQ(ncclProfiler_v5.finalize(context), NCCL_SUCCESS);
    return sent;
}

static void test_ring(struct ring *ring)
{
    int sent = 0, senders = 0;

    memset(ring->tagged, 0, sizeof ring->tagged);
    for (int pos = 0; pos < ring->n; pos++) {
        int frames = run_rank(ring, pos);
        sent += frames;
        senders += frames > 0;
    }
    CHECK_EQ(senders, 2);
    CHECK_EQ(sent, LOOPS * ring->n * 2);
    for (int loop = 0; loop < LOOPS; loop++)
        for (int chunk = 0; chunk < ring->n; chunk++)
            CHECK(ring->tagged[loop][chunk][0] == 1 && ring->tagged[loop][chunk][1] == 1);
    rings_tried++;
}

/* Every order of the ranks in which those of a host stand side by side, beginning with the entry of rank 0's host. */
static void test_orders(struct ring *ring, int *entered, int placed, unsigned used)
{
    if (placed == ring->n) {
        int zero = 0;
        while (entered[zero] != 0)
            zero++;
        for (int pos = 0; pos < ring->n; pos++)
            ring->order[pos] = entered[(zero + pos) % ring->n];
        test_ring(ring);
        return;
    }
    int here = placed ? ring->host[entered[placed - 1]] : 0, left = 0;
    for (int rank = 0; rank < ring->n; rank++)
        left += ring->host[rank] == here && !(used >> rank & 1);
    for (int rank = 0; rank < ring->n; rank++) {
        if (used >> rank & 1 || (left && ring->host[rank] != here))
            continue;
        entered[placed] = rank;
        test_orders(ring, entered, placed + 1, used | 1u << rank);
    }
}

/* Every way to put n ranks on two hosts or more: where a bit is set, a host ends behind that rank. */
static void test_rings(int n)
{
    for (unsigned ends = 1; ends < 1u << (n - 1); ends++) {
        struct ring ring = {.n = n, .nhosts = 1};
        int entered[MAX_RANKS];
        for (int rank = 0; rank < n; rank++) {
            ring.host[rank] = ring.nhosts - 1;
            ring.ranks_of[ring.nhosts - 1]++;
            ring.nhosts += ends >> rank & 1;
        }
        set_hosts(ring.ranks_of, ring.nhosts);
        test_orders(&ring, entered, 0, 0);
    }
    unsetenv("CHECKMATE_HOST_RANKS");
    ckm_param_reload();
}

/* A probe that shows less than the position. */
static void test_probes(void)
{
    float zero = 0, one = 1;
    struct ckm_frame f;
    struct nccl_prof_event_v5 event = coll_event();
    static const struct {
        int empty, first_one; /* chunks; -1: none */
        enum checkmate_reason reason;
    } cases[] = {
        {-1, 0, CHECKMATE_REASONS},    {-1, 1, CHECKMATE_REASONS},    {-1, -1, CHECKMATE_NO_POSITION},
        {0, 1, CHECKMATE_NO_POSITION}, {1, 1, CHECKMATE_NO_POSITION}, {-1, 2, CHECKMATE_TORN_RING},
        {-1, 3, CHECKMATE_TORN_RING},
    };

    set_hosts((int[]){2, 2}, 2);
    CHECK_EQ(checkmate_register_probe(&f, sizeof f), 0);
    event.coll.sendBuff = &f;
    event.coll.count = sizeof f / sizeof(float);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        void *context = context_of(1, 4), *op = start_op(context, start(context, event), 2, 12, 1);
        bool tags = cases[i].reason == CHECKMATE_REASONS;
        uint64_t before = tags ? 0 : untagged(cases[i].reason);
        for (int chunk = 0; chunk < 6; chunk++) {
            void *step = start_step(context, op, 2 * chunk);
            bool has_one = cases[i].first_one >= 0 && chunk >= cases[i].first_one;
            CHECK(!ckm_tag_message(&step, has_one ? &one : &zero, chunk == cases[i].empty ? 0 : sizeof one, &f));
        }
        ncclProfiler_v5.stopEvent(op);
        op = start_op(context, start(context, coll_event()), 2, 12, 1);
        CHECK_EQ(op != NULL, tags);
        ncclProfiler_v5.stopEvent(op);
        CHECK(tags || untagged(cases[i].reason) == before + 1);
        ncclProfiler_v5.finalize(context);
    }
}

static void test_refused(enum checkmate_reason reason, struct nccl_prof_event_v5 event)
{
    void *context = context_of(0, 4);
    uint64_t before = untagged(reason);
    int said = warnings;

    CHECK(!start(context, event));
    CHECK_EQ(untagged(reason), before + 1);
    CHECK(!start(context, event));
    CHECK_EQ(untagged(reason), before + 2);
    CHECK(warnings <= said + 1); /* said once */
    ncclProfiler_v5.finalize(context);
}

static void test_hosts(void)
{
    static const char *const unusable[] = {",",   "2,",  ",2", "2,,2",    "0,4",  "-1,5",
                                           "2;2", "2 2", "x",  "4,65536", "256,4"};

    for (size_t i = 0; i < sizeof unusable / sizeof *unusable; i++) {
        int before = warnings;
        setenv("CHECKMATE_HOST_RANKS", unusable[i], 1);
        ckm_param_reload();
        void *context = context_of(0, 4);
        CHECK_EQ(warnings, before + 1);
        CHECK(strstr(last_warning, "CHECKMATE_HOST_RANKS"));
        CHECK(!start(context, coll_event()));
        ncclProfiler_v5.finalize(context);
    }
    set_hosts((int[]){2, 1}, 2);
    test_refused(CHECKMATE_OTHER_HOSTS, coll_event());
    set_hosts((int[]){4}, 1);
    test_refused(CHECKMATE_ONE_HOST, coll_event());
    unsetenv("CHECKMATE_HOST_RANKS");
    ckm_param_reload();
}

static void test_refusals(void)
{
    struct nccl_prof_event_v5 e;

    e = coll_event();
    e.coll.func = "Broadcast";
    test_refused(CHECKMATE_NOT_ALLREDUCE, e);
    e = coll_event();
    e.coll.func = NULL;
    test_refused(CHECKMATE_NOT_ALLREDUCE, e);
    e = coll_event();
    e.coll.sendBuff = bucket + 1;
    test_refused(CHECKMATE_NOT_REGISTERED, e);
    e = coll_event();
    e.coll.count = COUNT - 1;
    test_refused(CHECKMATE_SIZE_MISMATCH, e);
    e = coll_event();
    e.coll.datatype = "ncclFloat64";
    test_refused(CHECKMATE_SIZE_MISMATCH, e);
    e = coll_event();
    e.coll.datatype = "ncclInt32";
    test_refused(CHECKMATE_BAD_DATATYPE, e);
    e = coll_event();
    e.coll.algo = "TREE";
    test_refused(CHECKMATE_NOT_RING, e);
    e = coll_event();
    e.coll.proto = "LL128";
    test_refused(CHECKMATE_NOT_SIMPLE, e);
    checkmate_set_incarnation(0);
    test_refused(CHECKMATE_NO_INCARNATION, coll_event());
    checkmate_set_incarnation(3);
}

static void test_ops_refused(void)
{
    void *context = context_of(0, 4), *coll = start(context, coll_event());
    struct nccl_prof_event_v5 other = {.type = NCCL_PROFILE_PROXY_OP,
                                       .parentObj = coll,
                                       .proxyOp = {.pid = getpid() + 1, .peer = 1, .nSteps = 12, .isSend = 1}};

    CHECK(!start(context, other));
    CHECK_EQ(untagged(CHECKMATE_OTHER_PROCESS), 1);
    CHECK(!start_op(context, coll, 1, 13, 1));
    CHECK_EQ(untagged(CHECKMATE_BAD_STEPS), 1);
    CHECK(!start_op(context, NULL, 1, 12, 1));
    CHECK(!start_op(context, &coll, 1, 12, 1));
    ncclProfiler_v5.finalize(context);
    CHECK(!start_op(context, coll, 1, 12, 1)); /* the communicator is gone */
}

/* A slot in which anything may stand: other profilers' pointers, numbers near ours, handles of other kinds. */
static void test_foreign_handles(void)
{
    void *context = context_of(0, 4), *coll = start(context, coll_event()), *op = start_op(context, coll, 1, 12, 1);
    void *step = start_step(context, op, 6);
    struct ckm_frame f;
    uint64_t seed = 3;

    CHECK(ckm_tag_message(&step, NULL, 0, &f));
    CHECK(!ckm_tag_message(NULL, NULL, 0, &f));
    void *strange[] = {NULL, &f, op, coll, context, ckm_tag_group(), (void *)-1L, (void *)1L};
    for (size_t i = 0; i < sizeof strange / sizeof *strange; i++)
        CHECK(!ckm_tag_message(&strange[i], NULL, 0, &f));
    for (int i = 0; i < 100000; i++) {
        uintptr_t random = (uintptr_t)random_u32(&seed) << 32 ^ random_u32(&seed);
        void *near = (void *)((uintptr_t)step ^ (1ull << random % 40 << 24)), *far = (void *)random;
        ckm_tag_message(&far, NULL, 0, &f);
        ncclProfiler_v5.stopEvent(far);
        start_op(far, far, 1, 12, 1);
        start_step(far, far, (int)random);
        CHECK(!ckm_tag_message(&near, NULL, 0, &f));
    }
    CHECK(ckm_tag_message(&step, NULL, 0, &f));
    ncclProfiler_v5.stopEvent(op);
    CHECK(!ckm_tag_message(&step, NULL, 0, &f));
    ncclProfiler_v5.finalize(context);
}

static void test_pools_are_bounded(void)
{
    enum { MANY = 5000 };
    static void *ops[MANY];
    void *context = context_of(0, 4), *first = start(context, coll_event());
    int got = 0;

    for (int i = 0; i < MANY; i++)
        got += (ops[i] = start_op(context, first, 1, 12, 1)) != NULL;
    CHECK_EQ(got, 4096);
    CHECK(untagged(CHECKMATE_NO_ROOM) >= MANY - 4096);
    for (int i = 0; i < MANY; i++)
        ncclProfiler_v5.stopEvent(ops[i]);
    CHECK(ops[0] = start_op(context, first, 1, 12, 1));
    ncclProfiler_v5.stopEvent(ops[0]);
    for (int i = 0; i < 4095; i++)
        start(context, coll_event());
    CHECK(ops[0] = start_op(context, first, 1, 12, 1)); /* still there after 4095 others */
    ncclProfiler_v5.stopEvent(ops[0]);
    start(context, coll_event());
    CHECK(!start_op(context, first, 1, 12, 1)); /* its slot is another's now, and it is not taken for it */
    ncclProfiler_v5.finalize(context);
}

static void test_buckets(void)
{
    float other[4];

    CHECK(checkmate_register_bucket(NULL, 4, 1) < 0);
    CHECK(checkmate_register_bucket(other, 0, 1) < 0);
    CHECK_EQ(checkmate_register_bucket(other, sizeof other, 9), 0); /* the number moves to another buffer */
    test_refused(CHECKMATE_NOT_REGISTERED, coll_event());
    CHECK_EQ(checkmate_register_bucket(bucket, 4, 9), 0);
    test_refused(CHECKMATE_SIZE_MISMATCH, coll_event());
    CHECK_EQ(checkmate_register_bucket(bucket, sizeof bucket, 9), 0); /* the address gets another size */
    test_rings(4);
    checkmate_unregister_buckets();
    test_refused(CHECKMATE_NOT_REGISTERED, coll_event());
    for (uint32_t i = 0; i < 4096; i++)
        CHECK_EQ(checkmate_register_bucket((char *)0x1000 + i, 4, i), 0);
    CHECK(checkmate_register_bucket((char *)0x100, 4, 4096) < 0);
    checkmate_unregister_buckets();
}

static void test_versions(void)
{
    struct nccl_prof_event_v4 group = {.type = NCCL_PROFILE_GROUP};
    struct nccl_prof_event_v6 copy_engine = {.type = NCCL_PROFILE_CE_COLL};
    void *context, *handle = &context;
    int mask = -1;

    CHECK_EQ(ncclProfiler_v2.init(&context, &mask), NCCL_SUCCESS); /* no rank: nothing to be told */
    CHECK_EQ(mask, 0);
    CHECK_EQ(untagged(CHECKMATE_OLD_PROFILER), 1);
    CHECK_EQ(ncclProfiler_v4.init(&context, &mask, "", 1, 1, 4, 0, test_logger), NCCL_SUCCESS);
    CHECK_EQ(ncclProfiler_v4.startEvent(context, &handle, &group), NCCL_SUCCESS);
    CHECK(handle); /* NCCL up to 2.27 reports collectives only in a group that has one */
    CHECK_EQ(ncclProfiler_v4.stopEvent(handle), NCCL_SUCCESS);
    CHECK_EQ(ncclProfiler_v6.startEvent(context, &handle, &copy_engine), NCCL_SUCCESS);
    CHECK(!handle);
    CHECK_EQ(ncclProfiler_v4.finalize(context), NCCL_SUCCESS);
    CHECK(!ckm_tag_profiled());
    CHECK_EQ(ncclProfiler_v5.init(&context, 1, &mask, "", 1, 1, 0, test_logger), NCCL_SUCCESS);
    CHECK_EQ(mask, 0); /* a communicator of one rank sends nothing */
}

int main(void)
{
    setenv("CHECKMATE_GROUP", "dp1", 1);
    ckm_log_set(test_logger);
    CHECK_EQ(checkmate_register_bucket(bucket, sizeof bucket, 9), 0);
    checkmate_set_iteration(42);
    checkmate_set_incarnation(3);
    for (int n = 2; n <= MAX_RANKS; n++)
        test_rings(n);
    printf("%ld rings\n", rings_tried);
    test_probes();
    test_hosts();
    test_refusals();
    test_ops_refused();
    test_foreign_handles();
    test_pools_are_bounded();
    test_buckets();
    test_versions();
    return 0;
}
