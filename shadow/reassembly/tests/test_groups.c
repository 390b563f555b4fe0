/* A core of several groups: each hears of its own frames and of nothing else. */
#include "frames.h"

#define COUNT 64u
#define NOW   1000u
#define LATER (NOW + 500001u) /* beyond the time-out */
#define FRAME (CKM_HEADER_BYTES + 8 * ELEMENT)

static const uint16_t numbers[] = {7, 0x8001};
static uint8_t contents[2][COUNT * ELEMENT];

/* What the flows of a group carry: 0 is first's, 1 is last's. */
struct stream {
    struct bytes bytes[2];
    size_t sent[2];
};

static void fill(void)
{
    for (uint32_t i = 0; i < sizeof contents[0]; i++)
        for (uint32_t g = 0; g < 2; g++)
            contents[g][i] = (uint8_t)(i * (7 + 4 * g) + g);
}

/* Slices of at most so many elements. */
static struct stream cut_stream(uint16_t number, const uint8_t *content, uint64_t iterations, uint32_t slice)
{
    struct shape shape = {.count = COUNT, .nranks = 4, .nchannels = 1, .slices_per_chunk = 2, .slice = slice};
    struct stream stream = {0};
    shape.group = number;
    for (uint64_t i = 1; i <= iterations; i++)
        for (int f = 0; f < 2; f++)
            put_op(&stream.bytes[f], &shape, i, 0, content, 0, f);
    return stream;
}

static struct stream stream_of(uint16_t number, const uint8_t *content, uint64_t iterations)
{
    return cut_stream(number, content, iterations, 8);
}

static void free_stream(struct stream *stream)
{
    free(stream->bytes[0].data);
    free(stream->bytes[1].data);
}

/* Sends a flow up to this byte. Each group has ports of its own. */
static void pass(struct ckm_core *core, struct stream *stream, uint16_t ports, int f, size_t end)
{
    size_t n = end - stream->sent[f];
    CHECK(end <= stream->bytes[f].n && n <= 9000);
    feed_segment(core, (uint16_t)(2 * ports + f), (uint32_t)stream->sent[f], stream->bytes[f].data + stream->sent[f],
                 (uint32_t)n, NOW);
    stream->sent[f] = end;
}

static void pass_all(struct ckm_core *core, struct stream *stream, uint16_t ports)
{
    for (int f = 0; f < 2; f++)
        pass(core, stream, ports, f, stream->bytes[f].n);
}

static int no_event(struct ckm_group *group)
{
    struct ckm_event event;
    return ckm_group_poll(group, &event, 1, 0) == 0;
}

static uint64_t expect_complete(struct ckm_group *group, uint64_t iteration, const uint8_t *content)
{
    struct ckm_event e;
    CHECK(ckm_group_poll(group, &e, 1, 0) == 1);
    CHECK(e.kind == CKM_EVENT_COMPLETE && e.iteration == iteration && !memcmp(e.data, content, sizeof contents[0]));
    return e.op;
}

static void expect_damage(struct ckm_group *group, const char *reason)
{
    struct ckm_event e;
    CHECK(ckm_group_poll(group, &e, 1, 0) == 1);
    CHECK(e.kind == CKM_EVENT_DAMAGE && strstr(e.reason, reason));
}

static struct ckm_counters counters_of(struct ckm_core *core)
{
    struct ckm_counters counters;
    ckm_core_counters(core, &counters);
    return counters;
}

static void test_each_group_gets_its_own(void)
{
    struct ckm_core *core = core_of(numbers, 2);
    for (uint32_t g = 0; g < 2; g++) {
        struct stream stream = stream_of(numbers[g], contents[g], 1);
        pass_all(core, &stream, (uint16_t)g);
        free_stream(&stream);
    }
    for (uint32_t g = 0; g < 2; g++) { /* the same iteration and bucket of both */
        struct ckm_group *group = ckm_core_group(core, g), *other = ckm_core_group(core, 1 - g);
        uint64_t op = expect_complete(group, 1, contents[g]);
        CHECK(no_event(group) && ckm_group_release(group, op) == 0);
        CHECK(ckm_group_release(group, op) == -1 && (g == 0 || ckm_group_release(other, op) == -1));
    }
    CHECK(counters_of(core).foreign == 0 && counters_of(core).pool_used == 0);
    ckm_core_destroy(core);
}

static void test_frames_of_no_group_are_foreign(void)
{
    struct ckm_core *core = core_of(numbers, 2);
    struct stream stream = stream_of(8, contents[0], 2);
    pass_all(core, &stream, 0);
    free_stream(&stream);
    CHECK(no_event(ckm_core_group(core, 0)) && no_event(ckm_core_group(core, 1)));
    CHECK(counters_of(core).foreign == 16 && counters_of(core).stale == 0 && counters_of(core).frames == 0);
    ckm_core_destroy(core);
}

/* Whether a core of one group of this number takes frames of that one. */
static int takes(uint16_t number, uint16_t of)
{
    struct ckm_core *core = core_of(&number, 1);
    struct stream stream = stream_of(of, contents[0], 1);
    pass_all(core, &stream, 0);
    free_stream(&stream);
    int taken = counters_of(core).foreign == 0;
    if (taken)
        expect_complete(ckm_core_group(core, 0), 1, contents[0]);
    CHECK(no_event(ckm_core_group(core, 0)));
    ckm_core_destroy(core);
    return taken;
}

static void test_a_single_group_takes_what_is_not_anothers(void)
{
    uint16_t unnamed = ckm_group_number("");
    CHECK(takes(7, 7) && takes(7, unnamed) && takes(unnamed, 7) && takes(unnamed, unnamed));
    CHECK(!takes(7, 8));
}

/* A probe of the switch is of no incarnation, and of no group. */
static void test_a_probe_is_nobodys(void)
{
    for (uint32_t ngroups = 1; ngroups <= 2; ngroups++) {
        struct ckm_core *core = core_of(numbers, ngroups);
        struct ckm_frame header = {.magic = CKM_WIRE_MAGIC, .version = CKM_WIRE_VERSION};
        struct bytes frame = {0};
        put_frame(&frame, header, contents[0]);
        feed_segment(core, 0, 0, frame.data, (uint32_t)frame.n, NOW);
        free(frame.data);
        CHECK(counters_of(core).stale == 1 && counters_of(core).foreign == 0);
        CHECK(no_event(ckm_core_group(core, 0)) && no_event(ckm_core_group(core, ngroups - 1)));
        ckm_core_destroy(core);
    }
}

/* As NCCL may where their ranks have other links. */
static void test_groups_may_cut_equal_operations_differently(void)
{
    struct ckm_core *core = core_of(numbers, 2);
    struct stream streams[] = {cut_stream(numbers[0], contents[0], 4, 8), cut_stream(numbers[1], contents[1], 4, 2)};
    for (uint64_t i = 1; i <= 4; i++)
        for (uint32_t g = 0; g < 2; g++) {
            for (int f = 0; f < 2; f++)
                pass(core, &streams[g], (uint16_t)g, f, streams[g].bytes[f].n / 4 * i);
            struct ckm_group *group = ckm_core_group(core, g);
            CHECK(ckm_group_release(group, expect_complete(group, i, contents[g])) == 0);
        }
    for (uint32_t g = 0; g < 2; g++)
        free_stream(&streams[g]);
    ckm_core_destroy(core);
}

/* Nothing tells yet whose flow it is. */
static void test_a_restart_of_one_group_leaves_a_flow_that_has_just_begun(void)
{
    struct ckm_core *core = core_of(numbers, 2);
    struct stream stream = stream_of(numbers[0], contents[0], 1);
    pass(core, &stream, 0, 0, CKM_HEADER_BYTES - 5);
    ckm_group_set_incarnation(ckm_core_group(core, 1), 2);
    pass_all(core, &stream, 0);
    expect_complete(ckm_core_group(core, 0), 1, contents[0]);
    free_stream(&stream);
    ckm_core_destroy(core);
}

/* In the middle of a frame of another one. */
static void test_a_restart_of_one_group_leaves_the_others(void)
{
    struct ckm_core *core = core_of(numbers, 2);
    struct stream stays = stream_of(numbers[0], contents[0], 1), old = stream_of(numbers[1], contents[1], 1);
    pass(core, &stays, 0, 0, FRAME + CKM_HEADER_BYTES + 5);
    pass(core, &old, 1, 0, old.bytes[0].n);
    ckm_group_set_incarnation(ckm_core_group(core, 1), 2);
    pass(core, &old, 1, 1, old.bytes[1].n);
    pass_all(core, &stays, 0);
    expect_complete(ckm_core_group(core, 0), 1, contents[0]);
    CHECK(no_event(ckm_core_group(core, 0)) && no_event(ckm_core_group(core, 1)));
    CHECK(counters_of(core).stale > 0);
    free_stream(&stays);
    free_stream(&old);
    ckm_core_destroy(core);
}

static void test_horizons_and_discards_are_a_groups_own(void)
{
    struct ckm_core *core = core_of(numbers, 2);
    struct ckm_group *group = ckm_core_group(core, 0), *other = ckm_core_group(core, 1);
    struct stream stream = stream_of(numbers[0], contents[0], 1);
    char missing[256];
    ckm_group_expect(other, 0);
    pass(core, &stream, 0, 0, FRAME);
    ckm_group_discard(other, 1);
    CHECK(ckm_group_incomplete(other, 1, 1, missing, sizeof missing) && strstr(missing, "nothing has arrived"));
    pass_all(core, &stream, 0);
    expect_complete(group, 1, contents[0]);
    CHECK(counters_of(core).beyond == 0);
    free_stream(&stream);
    ckm_core_destroy(core);
}

static void test_damage_is_told_to_whom_it_concerns(void)
{
    struct ckm_core *core = core_of(numbers, 2);
    struct ckm_group *group = ckm_core_group(core, 0), *other = ckm_core_group(core, 1);
    struct stream stream = stream_of(numbers[0], contents[0], 1);
    pass(core, &stream, 0, 1, FRAME);
    stream.sent[1] += FRAME; /* is lost */
    pass(core, &stream, 0, 1, stream.bytes[1].n);
    ckm_core_tick(core, LATER);
    expect_damage(group, "bytes were lost"); /* by the flow */
    expect_damage(group, "bytes were lost"); /* by the operation */
    CHECK(no_event(group) && no_event(other));

    static const uint8_t nonsense[CKM_HEADER_BYTES] = {1}; /* where a first header must be: of whom, nobody can tell */
    feed_segment(core, 9, 0, nonsense, sizeof nonsense, LATER);
    expect_damage(group, "no valid frame header");
    expect_damage(other, "no valid frame header");

    ckm_core_report(core, "the driver dropped packets", "port 0");
    expect_damage(group, "the driver dropped packets");
    expect_damage(other, "the driver dropped packets");
    free_stream(&stream);
    ckm_core_destroy(core);
}

/* One that is never released fills the pool, but takes no other group's sets. */
static void test_a_slow_group_holds_up_itself_only(void)
{
    struct ckm_core *core = core_of(numbers, 2);
    struct stream slow = stream_of(numbers[0], contents[0], 4), quick = stream_of(numbers[1], contents[1], 5);
    pass_all(core, &slow, 0);
    for (uint64_t i = 1; i <= 3; i++)
        expect_complete(ckm_core_group(core, 0), i, contents[0]);
    for (uint64_t i = 1; i <= 5; i++) {
        for (int f = 0; f < 2; f++)
            pass(core, &quick, 1, f, quick.bytes[f].n / 5 * i);
        uint64_t op = expect_complete(ckm_core_group(core, 1), i, contents[1]);
        CHECK(ckm_group_release(ckm_core_group(core, 1), op) == 0);
    }
    CHECK(no_event(ckm_core_group(core, 0)));
    free_stream(&slow);
    free_stream(&quick);
    ckm_core_destroy(core);
}

int main(void)
{
    fill();
    test_each_group_gets_its_own();
    test_frames_of_no_group_are_foreign();
    test_a_single_group_takes_what_is_not_anothers();
    test_a_probe_is_nobodys();
    test_groups_may_cut_equal_operations_differently();
    test_a_restart_of_one_group_leaves_a_flow_that_has_just_begun();
    test_a_restart_of_one_group_leaves_the_others();
    test_horizons_and_discards_are_a_groups_own();
    test_damage_is_told_to_whom_it_concerns();
    test_a_slow_group_holds_up_itself_only();
    return 0;
}
