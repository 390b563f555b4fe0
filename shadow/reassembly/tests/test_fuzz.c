/* Random jobs over random networks: what is handed out is right to the byte, all else is reported.
 *
 * Usage: test_fuzz [first seed [number of seeds]]
 */
#include "frames.h"

#define MAX_FLOWS   8u
#define ITERATIONS  6u
#define FAULTY      3u /* the first so many iterations see faults, the others none: they must complete */
#define MAX_BUCKETS 3u
#define SECOND_US   1000000u

enum fault { FAULT_NONE, FAULT_LOSS, FAULT_FLIP, FAULT_TRUNCATE, FAULTS };

struct segment {
    uint64_t when;
    uint32_t flow, n;
    uint64_t offset;
    int lost;
};

struct job {
    struct ckm_core *core;
    struct ckm_group *group; /* the job's */
    struct shape shape;
    uint32_t buckets, flows, segment_bytes, jitter, percent;
    enum fault fault;
    uint32_t seq_shift; /* added to sequence numbers after the first iteration, so that they wrap */
    struct bytes streams[MAX_FLOWS];
    uint8_t *content[ITERATIONS + 1][MAX_BUCKETS];
    int complete[ITERATIONS + 1][MAX_BUCKETS];
    uint64_t held[ITERATIONS * MAX_BUCKETS];
    uint32_t nheld, damages;
    uint64_t now;
};

static void choose_job(struct job *job)
{
    static const uint16_t ranks[] = {2, 3, 4, 8};
    int large = rnd(8) == 0; /* payloads that are longer than the pieces that their CRC is taken in */
    uint32_t most = large ? 40000 : rnd(4) ? 3000 : 12;
    static const uint16_t numbers[] = {1, 2, 3};
    uint32_t ngroups = 1 + rnd(3), group = rnd(ngroups);
    *job = (struct job){.core = core_of(numbers, ngroups), .now = 1};
    job->group = ckm_core_group(job->core, group);
    job->shape = (struct shape){
        .count = 1 + rnd(most),
        .nranks = ranks[rnd(4)],
        .nchannels = (uint16_t)(1 + rnd(MAX_FLOWS / 2)),
        .slices_per_chunk = (uint8_t)(1 + rnd(2)),
        .slice = 1 + rnd(large ? 20000 : 200),
        .group = numbers[group],
    };
    job->shape.host_ranks = (uint8_t)(1 + rnd(job->shape.nranks - 1u));
    job->shape.entry = (uint8_t)rnd(job->shape.host_ranks);
    job->buckets = 1 + rnd(MAX_BUCKETS);
    job->flows = job->shape.nchannels * 2u;
    job->segment_bytes = 1 + rnd(rnd(2) || large ? 1448 : 200);
    if (job->segment_bytes < job->shape.count / 200)
        job->segment_bytes = job->shape.count / 200;
    job->jitter = rnd(3) ? rnd(4000) : 0;
    job->percent = rnd(25);
    job->fault = (enum fault)rnd(FAULTS);
    job->seq_shift = rnd(2) ? 0u - rnd(20000) : 0;
}

static void add_iteration(struct job *job, uint32_t iteration)
{
    for (uint32_t b = 0; b < job->buckets; b++) {
        uint8_t *content = malloc(job->shape.count * ELEMENT);
        for (uint32_t i = 0; i < job->shape.count * ELEMENT; i++)
            content[i] = (uint8_t)rnd(256);
        job->content[iteration][b] = content;
        for (uint32_t f = 0; f < job->flows; f++)
            put_op(&job->streams[f], &job->shape, iteration, b, content, (uint16_t)(f / 2), f % 2);
    }
}

static int by_time(const void *left, const void *right)
{
    const struct segment *a = left, *b = right;
    return a->when < b->when ? -1 : a->when > b->when;
}

/* Cuts [from, end) of each flow into segments, with repeats that are cut differently, in order of arrival. */
static struct segment *cut(struct job *job, const uint64_t from[MAX_FLOWS], int faulty, size_t *n)
{
    struct bytes segments = {0};
    for (uint32_t f = 0; f < job->flows; f++) {
        uint64_t end = job->streams[f].n, span = end - from[f];
        for (uint64_t at = from[f]; at < end;) {
            uint32_t length = 1 + rnd(job->segment_bytes);
            length = length < end - at ? length : (uint32_t)(end - at);
            uint64_t when = (at - from[f]) * 100000 / span;
            int lost = faulty && job->fault != FAULT_NONE && rnd(100) < job->percent;
            struct segment s = {when + rnd(job->jitter + 1), f, length, at, lost};
            put(&segments, &s, sizeof s);
            if (!lost && rnd(100) < job->percent) {
                uint64_t back = at - (at < 300 ? at : rnd(300));
                uint64_t most = end - back < 1448 ? end - back : 1448;
                /* Not beyond what is lost: a repeat would bring that, which is fine but no fault. */
                struct segment again = {when + rnd(8000), f, 1 + rnd((uint32_t)most), back, 0};
                put(&segments, &again, sizeof again);
            }
            at += length;
        }
    }
    *n = segments.n / sizeof(struct segment);
    qsort(segments.data, *n, sizeof(struct segment), by_time);
    return (struct segment *)(void *)segments.data;
}

static void deliver(struct job *job, const struct segment *s, uint32_t shift)
{
    uint8_t packet[MAX_PACKET];
    uint32_t n = make_packet(packet, (uint16_t)s->flow, (uint32_t)s->offset + shift,
                             job->streams[s->flow].data + s->offset, s->n);
    if (s->lost && job->fault == FAULT_LOSS)
        return;
    if (s->lost && job->fault == FAULT_TRUNCATE)
        n -= 1 + rnd(n - 1);
    if (s->lost && job->fault == FAULT_FLIP)
        packet[OVERHEAD + rnd(s->n)] ^= (uint8_t)(1 << rnd(8));
    feed(job->core, packet, n, job->now += rnd(20));
}

static void take_complete(struct job *job, const struct ckm_event *e)
{
    CHECK(e->incarnation == 1 && e->iteration >= 1 && e->iteration <= ITERATIONS && e->bucket < job->buckets);
    CHECK(e->bytes == job->shape.count * ELEMENT && (uintptr_t)e->data % 64 == 0);
    CHECK(!job->complete[e->iteration][e->bucket]);
    CHECK(!memcmp(e->data, job->content[e->iteration][e->bucket], e->bytes));
    job->complete[e->iteration][e->bucket] = 1;
    job->held[job->nheld++] = e->op;
}

static void take_events(struct job *job)
{
    struct ckm_event events[16];
    for (int n; (n = ckm_group_poll(job->group, events, 16, 0)) > 0;)
        for (int i = 0; i < n; i++) {
            if (events[i].kind == CKM_EVENT_COMPLETE) {
                take_complete(job, &events[i]);
            } else {
                job->damages++;
                CHECK(events[i].reason[0] && events[i].where[0]);
            }
        }
}

static void release_all(struct job *job)
{
    while (job->nheld)
        CHECK(ckm_group_release(job->group, job->held[--job->nheld]) == 0);
}

static void shift_sequence(struct job *job)
{
    for (struct ckm_flow *flow = job->core->flows.first; flow; flow = flow->next)
        flow->next_offset += job->seq_shift;
}

static void run_iteration(struct job *job, uint32_t iteration)
{
    uint64_t from[MAX_FLOWS];
    size_t n;
    char missing[2048];
    for (uint32_t f = 0; f < job->flows; f++)
        from[f] = job->streams[f].n;
    add_iteration(job, iteration);
    /* The first iteration brings all flows into step before their numbers are moved. */
    int faulty = iteration <= FAULTY && (iteration > 1 || !job->seq_shift);
    struct segment *segments = cut(job, from, faulty, &n);
    for (size_t i = 0; i < n; i++)
        deliver(job, &segments[i], iteration > 1 ? job->seq_shift : 0);
    free(segments);
    while (ckm_core_tick(job->core, job->now) != UINT64_MAX)
        job->now += SECOND_US;
    release_all(job);
    take_events(job);
    if (rnd(2))
        release_all(job); /* else one iteration later */
    ckm_group_incomplete(job->group, 1, iteration, missing, sizeof missing);
    for (uint32_t b = 0; b < job->buckets; b++) {
        CHECK(job->complete[iteration][b] || missing[0] || job->damages);
        CHECK(job->complete[iteration][b] || faulty);
    }
    CHECK(faulty || iteration > FAULTY || !job->damages);
    if (iteration == 1)
        shift_sequence(job);
}

static void finish(struct job *job)
{
    struct ckm_counters counters;
    release_all(job);
    ckm_core_counters(job->core, &counters);
    CHECK(counters.held_bytes == 0);
    if (job->fault == FAULT_NONE)
        CHECK(job->damages == 0 && counters.gaps == 0 && counters.crc_errors == 0);
    ckm_group_discard(job->group, ITERATIONS);
    ckm_core_counters(job->core, &counters);
    CHECK(counters.pool_used == 0);
    ckm_core_destroy(job->core);
    for (uint32_t f = 0; f < job->flows; f++)
        free(job->streams[f].data);
    for (uint32_t i = 1; i <= ITERATIONS; i++)
        for (uint32_t b = 0; b < job->buckets; b++)
            free(job->content[i][b]);
}

int main(int argc, char **argv)
{
    uint64_t first = argc > 1 ? strtoull(argv[1], NULL, 0) : 1;
    uint64_t n = argc > 2 ? strtoull(argv[2], NULL, 0) : 300;
    for (uint64_t s = first; s < first + n; s++) {
        struct job job;
        seed(s);
        choose_job(&job);
        for (uint32_t i = 1; i <= ITERATIONS; i++)
            run_iteration(&job, i);
        finish(&job);
    }
    return 0;
}
