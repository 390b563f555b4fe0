/* One situation at a time: what the receive core says and keeps. */
#include "frames.h"

#define COUNT 64u
#define NOW   1000u
#define LATER (NOW + 500001u) /* beyond the time-out */

static const struct shape shape = {COUNT, 4, 1, 2, 8, 1, 0, 0};
static uint8_t content[COUNT * ELEMENT];

struct flow_stream {
    struct bytes bytes;
    size_t sent;
};

/* The job's two flows: 0 is first's, 1 is last's. */
static struct flow_stream streams[2];

static void begin(void)
{
    for (uint32_t i = 0; i < sizeof content; i++)
        content[i] = (uint8_t)(i * 7 + 1);
    for (int f = 0; f < 2; f++) {
        free(streams[f].bytes.data);
        streams[f] = (struct flow_stream){0};
    }
}

static void add_op(uint64_t iteration, uint32_t bucket)
{
    for (int f = 0; f < 2; f++)
        put_op(&streams[f].bytes, &shape, iteration, bucket, content, 0, f);
}

/* Sends the next n bytes of a flow (0: all that is left), or only counts them as sent. */
static void pass(struct ckm_core *core, int f, size_t n, int lost)
{
    struct flow_stream *s = &streams[f];
    size_t end = n ? s->sent + n : s->bytes.n;
    CHECK(end <= s->bytes.n);
    while (s->sent < end) {
        size_t part = end - s->sent < 1448 ? end - s->sent : 1448;
        if (!lost)
            feed_segment(core, (uint16_t)f, (uint32_t)s->sent, s->bytes.data + s->sent, (uint32_t)part, NOW);
        s->sent += part;
    }
}

static void pass_all(struct ckm_core *core)
{
    pass(core, 0, 0, 0);
    pass(core, 1, 0, 0);
}

static struct ckm_event next_event(struct ckm_core *core)
{
    struct ckm_event event;
    CHECK(ckm_group_poll(only(core), &event, 1, 0) == 1);
    return event;
}

static int no_event(struct ckm_core *core)
{
    struct ckm_event event;
    return ckm_group_poll(only(core), &event, 1, 0) == 0;
}

static struct ckm_event expect_complete(struct ckm_core *core, uint64_t iteration, uint32_t bucket)
{
    struct ckm_event e = next_event(core);
    CHECK(e.kind == CKM_EVENT_COMPLETE && e.iteration == iteration && e.bucket == bucket);
    CHECK(e.bytes == sizeof content && !memcmp(e.data, content, sizeof content));
    return e;
}

static void expect_damage(struct ckm_core *core, uint64_t iteration, const char *reason, const char *where)
{
    struct ckm_event e = next_event(core);
    if (e.kind != CKM_EVENT_DAMAGE || e.iteration != iteration || !strstr(e.reason, reason) || !strstr(e.where, where))
        fprintf(stderr, "kind %u iteration %llu: %s / %s\n", e.kind, (unsigned long long)e.iteration, e.reason,
                e.where);
    CHECK(e.kind == CKM_EVENT_DAMAGE && e.has_iteration && e.iteration == iteration);
    CHECK(strstr(e.reason, reason) && strstr(e.where, where));
}

/* The operation before is complete: which iteration was hit, the bytes don't tell. */
static void expect_damage_behind_what_is_complete(struct ckm_core *core, const char *reason, const char *where)
{
    struct ckm_event e = next_event(core);
    CHECK(e.kind == CKM_EVENT_DAMAGE && !e.has_iteration && !e.has_bucket);
    CHECK(strstr(e.reason, reason) && strstr(e.where, where));
}

static struct ckm_counters counters_of(struct ckm_core *core)
{
    struct ckm_counters counters;
    ckm_core_counters(core, &counters);
    return counters;
}

/* A core that learned the layout from iteration 1, complete and released. */
static struct ckm_core *taught_core(void)
{
    struct ckm_core *core = new_core();
    begin();
    add_op(1, 0);
    pass_all(core);
    CHECK(ckm_group_release(only(core), expect_complete(core, 1, 0).op) == 0);
    return core;
}

static void test_release_once(void)
{
    struct ckm_core *core = taught_core();
    add_op(2, 5);
    pass_all(core);
    struct ckm_event e = expect_complete(core, 2, 5);
    CHECK(e.count == COUNT && e.datatype == 7 && e.comm_id == 77 && e.coll_seq == 205 && e.incarnation == 1);
    CHECK(counters_of(core).pool_used == sizeof content);
    CHECK(ckm_group_release(only(core), e.op) == 0);
    CHECK(ckm_group_release(only(core), e.op) == -1 && ckm_group_release(only(core), 12345) == -1);
    CHECK(counters_of(core).pool_used == 0);
    ckm_core_destroy(core);
}

static void test_hole_waits_for_its_time(void)
{
    struct ckm_core *core = taught_core();
    size_t at = streams[1].sent;
    char range[64];
    add_op(2, 0);
    add_op(3, 0);
    pass(core, 0, 0, 0);
    pass(core, 1, CKM_HEADER_BYTES + 4, 0);
    pass(core, 1, 8, 1);
    pass(core, 1, 0, 0);
    CHECK(no_event(core));
    CHECK(ckm_core_tick(core, NOW + 400000) == 100000 && no_event(core));
    CHECK(ckm_core_tick(core, LATER) == UINT64_MAX);
    snprintf(range, sizeof range, "bytes %zu..%zu, in channel 0 loop 0 chunk 3 slice 0", at + CKM_HEADER_BYTES + 4,
             at + CKM_HEADER_BYTES + 12);
    expect_damage(core, 2, "bytes were lost", range);
    expect_complete(core, 3, 0);
    CHECK(no_event(core) && counters_of(core).gaps == 1 && counters_of(core).gap_bytes == 8);
    ckm_core_destroy(core);
}

static void test_hole_is_given_up_when_too_much_waits(void)
{
    struct ckm_core *core = taught_core();
    core->config.reorder_bytes = 1000;
    add_op(2, 0);
    add_op(3, 0);
    pass(core, 0, 0, 0);
    pass(core, 1, 10, 1);
    pass(core, 1, 300, 0);
    CHECK(no_event(core));
    pass(core, 1, 0, 0);
    expect_damage_behind_what_is_complete(core, "bytes were lost", "bytes ");
    expect_damage(core, 2, "bytes were lost", "before channel 0 step");
    expect_complete(core, 3, 0);
    CHECK(counters_of(core).held_bytes == 0);
    ckm_core_destroy(core);
}

static void test_lost_frames_damage_the_operation_at_the_next_header(void)
{
    struct ckm_core *core = taught_core();
    add_op(2, 0);
    size_t op = streams[1].bytes.n - streams[1].sent;
    add_op(3, 0);
    pass(core, 0, 0, 0);
    pass(core, 1, op / 2, 0); /* the second half is lost, with the start of iteration 3 */
    pass(core, 1, op / 2 + 50, 1);
    pass(core, 1, 0, 0);
    ckm_core_tick(core, LATER);
    CHECK(!next_event(core).has_bucket);
    expect_damage(core, 2, "bytes were lost", "before channel 0 step 7");
    expect_damage(core, 3, "bytes were lost", "before channel 0 step 7");
    add_op(4, 0);
    pass_all(core);
    expect_complete(core, 4, 0);
    ckm_core_destroy(core);
}

static void test_missing_end_is_told_on_request(void)
{
    struct ckm_core *core = taught_core();
    char text[1024];
    add_op(2, 3);
    pass(core, 0, 0, 0);
    pass(core, 1, streams[1].bytes.n - streams[1].sent - 10, 0);
    CHECK(ckm_core_tick(core, LATER) == UINT64_MAX && no_event(core));
    CHECK(ckm_group_incomplete(only(core), 1, 2, text, sizeof text) == (int)strlen(text));
    CHECK(strstr(text, "iteration 2 bucket 3: 32 of 256 bytes missing"));
    CHECK(strstr(text, "flow 10.0.0.1:4001 to port 5000: bytes"));
    CHECK(ckm_group_incomplete(only(core), 1, 1, text, sizeof text) == 0 && !text[0]);
    CHECK(ckm_group_incomplete(only(core), 2, 2, text, sizeof text) == 0);
    ckm_core_destroy(core);
}

static void test_missing_slices_are_named(void)
{
    struct ckm_core *core = taught_core();
    char text[1024], small[8];
    add_op(2, 3);
    pass(core, 1, 0, 0); /* all of last's: first's chunk 0 is missing */
    int n = ckm_group_incomplete(only(core), 1, 2, text, sizeof text);
    CHECK(strstr(text, "64 of 256 bytes missing: channel 0 loop 0 chunk 0 slice 0 at 0..32, channel 0 loop 0 chunk 0 "
                       "slice 1 at 32..64"));
    CHECK(ckm_group_incomplete(only(core), 1, 2, small, sizeof small) == n && strlen(small) == sizeof small - 1);
    ckm_core_destroy(core);
}

static void test_payload_crc(void)
{
    struct ckm_core *core = taught_core();
    add_op(2, 0);
    add_op(3, 0);
    streams[1].bytes.data[streams[1].sent + CKM_HEADER_BYTES + 3] ^= 0x10;
    pass_all(core);
    expect_damage(core, 2, "payload CRC32C is wrong", "channel 0 loop 0 chunk 3 slice 0");
    expect_complete(core, 3, 0);
    CHECK(counters_of(core).crc_errors == 1);
    ckm_core_destroy(core);
}

static void test_payload_crc_of_long_frames(void)
{
    static const struct shape large = {40000, 2, 1, 1, 20000, 1, 0, 0};
    static uint8_t zeros[40000 * ELEMENT];
    for (size_t wrong = 0; wrong < 80000; wrong += 1999) {
        struct ckm_core *core = new_core();
        begin();
        for (int f = 0; f < 2; f++)
            put_op(&streams[f].bytes, &large, 1, 0, zeros, 0, f);
        if (wrong)
            streams[1].bytes.data[CKM_HEADER_BYTES + wrong] = 1;
        pass_all(core);
        struct ckm_event e = next_event(core);
        CHECK(e.kind == (wrong ? CKM_EVENT_DAMAGE : CKM_EVENT_COMPLETE));
        CHECK(counters_of(core).crc_errors == (wrong ? 1 : 0));
        ckm_core_destroy(core);
    }
}

static void test_header_crc(void)
{
    struct ckm_core *core = taught_core();
    add_op(2, 0);
    add_op(3, 0);
    streams[1].bytes.data[streams[1].sent + 9] ^= 1;
    pass_all(core);
    expect_damage_behind_what_is_complete(core, "no valid frame header", "flow 10.0.0.1:4001");
    expect_damage(core, 2, "bytes were lost", "before channel 0 step 7");
    expect_complete(core, 3, 0);
    CHECK(counters_of(core).header_errors == 1);
    ckm_core_destroy(core);
}

/* Impossible fields in a header whose CRC is right. */
static void test_header_fields(void)
{
    static const struct {
        size_t at, size;
        uint64_t value;
        const char *reason;
    } cases[] = {
        {offsetof(struct ckm_frame, version), 1, 1, "version 1"},
        {offsetof(struct ckm_frame, flags), 1, CKM_FLAG_TAGGED, "flags 0x01"},
        {offsetof(struct ckm_frame, protocol), 1, 0, "protocol 0"},
        {offsetof(struct ckm_frame, datatype), 1, 12, "datatype 12"},
        {offsetof(struct ckm_frame, op_count), 8, 0, "op_count 0"},
        {offsetof(struct ckm_frame, op_count), 8, (1 << 18) + 1, "op_count 262145"},
        {offsetof(struct ckm_frame, op_count), 8, UINT64_MAX, "op_count"},
        {offsetof(struct ckm_frame, payload_len), 4, 31, "payload_len 31"},
        {offsetof(struct ckm_frame, payload_len), 4, 260, "payload_len 260"},
        {offsetof(struct ckm_frame, payload_len), 4, UINT32_MAX, "payload_len 4294967295"},
        {offsetof(struct ckm_frame, nranks), 2, 1, "of 1 ranks"},
        {offsetof(struct ckm_frame, nranks), 2, 0, "of 0 ranks"},
        {offsetof(struct ckm_frame, ring_pos), 2, 1, "ring_pos 1"},
        {offsetof(struct ckm_frame, host_ranks), 1, 0, "0 of them"},
        {offsetof(struct ckm_frame, host_ranks), 1, 2, "is not tagged"}, /* it leaves the host one round later */
        {offsetof(struct ckm_frame, host_ranks), 1, 4, "4 of them"},
        {offsetof(struct ckm_frame, channel), 2, 256, "channel 256"},
        {offsetof(struct ckm_frame, nchannels), 2, 0, "of 0"},
        {offsetof(struct ckm_frame, slices_per_chunk), 1, 0, "slices_per_chunk"},
        {offsetof(struct ckm_frame, step), 4, 0, "step 0"},
        {offsetof(struct ckm_frame, step), 4, 12 * COUNT + 6, "step 774"}, /* more loops than elements */
        {offsetof(struct ckm_frame, step), 4, UINT32_MAX - 3, "step 4294967292"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct ckm_core *core = taught_core();
        note_seed(i);
        struct ckm_frame h = header_of(&shape, 2, 0);
        h.step = 6;
        h.payload_len = 32;
        memcpy((uint8_t *)&h + cases[i].at, &cases[i].value, cases[i].size);
        struct bytes frame = {0};
        h.header_crc = ckm_crc32c(0, &h, offsetof(struct ckm_frame, header_crc));
        put(&frame, &h, sizeof h);
        put(&frame, content, h.payload_len < sizeof content ? h.payload_len : sizeof content);
        feed_segment(core, 0, (uint32_t)streams[0].sent, frame.data, (uint32_t)frame.n, NOW);
        expect_damage(core, 2, cases[i].reason, "flow 10.0.0.1:4000");
        CHECK(no_event(core) && counters_of(core).header_errors == 1);
        free(frame.data);
        ckm_core_destroy(core);
    }
}

static void test_slice_twice(void)
{
    struct ckm_core *core = taught_core();
    add_op(2, 0);
    put_op(&streams[0].bytes, &shape, 2, 0, content, 0, 0); /* sent again as new bytes: no retransmission */
    pass(core, 0, 0, 0);
    expect_damage(core, 2, "slice arrived twice", "channel 0 loop 0 chunk 0 slice 0");
    CHECK(no_event(core));
    ckm_core_destroy(core);
}

static void test_slice_twice_while_learning(void)
{
    struct ckm_core *core = new_core();
    begin();
    put_op(&streams[0].bytes, &shape, 1, 0, content, 0, 0);
    add_op(1, 0);
    pass_all(core);
    struct ckm_event e = next_event(core);
    CHECK(e.kind == CKM_EVENT_DAMAGE && e.iteration == 1 && !only(core)->layouts && no_event(core));
    ckm_core_destroy(core);
}

static void test_slice_after_completion(void)
{
    struct ckm_core *core = taught_core();
    put_op(&streams[0].bytes, &shape, 1, 0, content, 0, 0);
    pass(core, 0, 0, 0);
    expect_damage(core, 1, "already complete", "channel 0 loop 0 chunk 0 slice 0");
    ckm_core_destroy(core);
}

static void test_second_operation_for_a_key(void)
{
    struct ckm_core *core = taught_core();
    struct ckm_frame h = header_of(&shape, 2, 0);
    h.step = 6;
    h.payload_len = 32;
    put_frame(&streams[0].bytes, h, content);
    h.coll_seq++;
    h.step = 7;
    put_frame(&streams[0].bytes, h, content);
    pass(core, 0, 0, 0);
    expect_damage(core, 2, "second operation for the same iteration and bucket", "slice 1");
    ckm_core_destroy(core);
}

static void test_cut_differently_is_damage_and_learned_afresh(void)
{
    struct ckm_core *core = taught_core();
    struct shape other = shape;
    other.slice = 4;
    for (uint64_t i = 2; i <= 3; i++)
        for (int f = 0; f < 2; f++)
            put_op(&streams[f].bytes, &other, i, 0, content, 0, f);
    pass_all(core);
    expect_damage(core, 2, "does not fit the layout", "slice 0 (16 bytes)");
    expect_complete(core, 3, 0);
    ckm_core_destroy(core);
}

static void test_more_bytes_than_the_operation(void)
{
    struct ckm_core *core = new_core();
    begin();
    struct shape longer = shape;
    longer.count = 2 * COUNT;
    uint8_t twice[sizeof content * 2] = {0};
    struct bytes stream = {0};
    put_op(&stream, &longer, 1, 0, twice, 0, 1);
    for (size_t at = 0; at < stream.n;) { /* the frames of the longer operation, with the shorter one's count */
        struct ckm_frame h;
        memcpy(&h, stream.data + at, sizeof h);
        h.op_count = COUNT;
        put_frame(&streams[1].bytes, h, stream.data + at + sizeof h);
        at += sizeof h + h.payload_len;
    }
    pass(core, 1, 0, 0);
    expect_damage(core, 1, "more bytes or slices", "channel 0");
    free(stream.data);
    ckm_core_destroy(core);
}

static void test_empty_slices_after_completion(void)
{
    struct ckm_core *core = new_core();
    begin();
    struct shape tiny = shape;
    tiny.count = 5;
    for (uint64_t i = 1; i <= 2; i++) {
        for (int f = 0; f < 2; f++)
            put_op(&streams[f].bytes, &tiny, i, 0, content, 0, f);
        pass_all(core);
        struct ckm_event e = next_event(core);
        CHECK(e.kind == CKM_EVENT_COMPLETE && e.iteration == i && e.bytes == 20 && !memcmp(e.data, content, 20));
        CHECK(no_event(core));
    }
    ckm_core_destroy(core);
}

/* One element over two channels: the second holds only empty slices, and makes no difference where it is missing. */
static void test_channel_of_empty_slices(void)
{
    struct ckm_core *core = new_core();
    struct shape tiny = shape;
    tiny.count = 1;
    tiny.nchannels = 2;
    for (uint16_t f = 4; f-- > 0;) { /* the second channel first */
        struct bytes flow = {0};
        for (uint32_t b = f / 2; b < 3; b++)
            put_op(&flow, &tiny, 1, b, content, f / 2, f % 2);
        feed_segment(core, f, 0, flow.data, (uint32_t)flow.n, NOW);
        free(flow.data);
    }
    for (uint32_t b = 0; b < 3; b++) {
        struct ckm_event e = next_event(core);
        CHECK(e.kind == CKM_EVENT_COMPLETE && e.bucket == b && e.bytes == 4 && !memcmp(e.data, content, 4));
    }
    CHECK(no_event(core));
    ckm_core_destroy(core);
}

static void test_other_incarnations_are_stale(void)
{
    struct ckm_core *core = taught_core();
    add_op(2, 0);
    pass(core, 0, 0, 0);
    pass(core, 1, CKM_HEADER_BYTES + 4, 0);
    ckm_group_set_incarnation(only(core), 2);
    pass(core, 1, 0, 0); /* the old job goes on for a while, from the middle of its stream */
    ckm_core_tick(core, LATER);
    CHECK(no_event(core));
    CHECK(counters_of(core).stale > 0 && counters_of(core).pool_used == 0 && counters_of(core).held_bytes == 0);
    ckm_core_destroy(core);
}

static void test_new_job_on_the_same_addresses(void)
{
    struct ckm_core *core = taught_core();
    add_op(2, 0);
    pass(core, 0, 0, 0);
    ckm_group_set_incarnation(only(core), 2);
    pass(core, 1, 0, 0);
    ckm_core_tick(core, LATER);
    CHECK(counters_of(core).stale > 0);
    begin();
    for (int f = 0; f < 2; f++) {
        put_op(&streams[f].bytes, &shape, 2, 0, content, 0, f);
        for (size_t at = 0; at < streams[f].bytes.n; at += CKM_HEADER_BYTES + 32) {
            struct ckm_frame h;
            memcpy(&h, streams[f].bytes.data + at, sizeof h);
            h.incarnation = 2;
            h.header_crc = ckm_crc32c(0, &h, offsetof(struct ckm_frame, header_crc));
            memcpy(streams[f].bytes.data + at, &h, sizeof h);
        }
    }
    pass_all(core);
    CHECK(expect_complete(core, 2, 0).incarnation == 2);
    CHECK(no_event(core) && counters_of(core).flow_restarts == 1);
    ckm_core_destroy(core);
}

static void test_other_communicator_on_the_same_addresses(void)
{
    struct ckm_core *core = taught_core();
    struct ckm_frame h = header_of(&shape, 2, 0);
    struct bytes frame = {0};
    h.comm_id = 78;
    h.step = 6;
    h.payload_len = 32;
    put_frame(&frame, h, content);
    feed_segment(core, 0, 0, frame.data, (uint32_t)frame.n, NOW);
    CHECK(counters_of(core).flow_restarts == 1 && counters_of(core).frames == 9 && no_event(core));
    feed_segment(core, 0, 0, frame.data, (uint32_t)frame.n, NOW); /* its retransmission is none */
    CHECK(counters_of(core).flow_restarts == 1 && counters_of(core).duplicates == 1 && no_event(core));
    free(frame.data);
    ckm_core_destroy(core);
}

static void test_late_shadow_finds_its_place(void)
{
    struct ckm_core *core = new_core();
    const uint32_t far = 3000000000u; /* beyond 2^31: nothing before was seen */
    begin();
    add_op(7, 0);
    add_op(8, 0);
    for (int f = 0; f < 2; f++) {
        size_t from = 50;
        feed_segment(core, (uint16_t)f, far + 50, streams[f].bytes.data + from, (uint32_t)(streams[f].bytes.n - from),
                     NOW);
    }
    CHECK(no_event(core));
    ckm_core_tick(core, LATER);
    CHECK(next_event(core).kind == CKM_EVENT_DAMAGE);
    struct ckm_event e;
    while ((e = next_event(core)).kind == CKM_EVENT_DAMAGE)
        CHECK(e.iteration == 7);
    CHECK(e.iteration == 8 && !memcmp(e.data, content, sizeof content));
    ckm_core_destroy(core);
}

static void test_first_waits_for_a_free_set(void)
{
    struct ckm_core *core = taught_core(); /* three sets */
    struct ckm_event held[3];
    for (uint64_t i = 2; i <= 5; i++)
        add_op(i, 0);
    pass_all(core);
    for (uint64_t i = 2; i <= 4; i++)
        held[i - 2] = expect_complete(core, i, 0);
    CHECK(no_event(core) && counters_of(core).stalls == 2);
    CHECK(ckm_group_release(only(core), held[0].op) == 0);
    expect_complete(core, 5, 0);
    CHECK(!memcmp(held[1].data, content, sizeof content) && counters_of(core).held_bytes == 0);
    ckm_core_destroy(core);
}

static void test_outrun_is_damage(void)
{
    struct ckm_core *core = taught_core();
    for (uint64_t i = 2; i <= 5; i++)
        add_op(i, 0);
    add_op(5, 1);
    pass_all(core);
    for (uint64_t i = 2; i <= 4; i++)
        expect_complete(core, i, 0);
    ckm_core_tick(core, LATER);
    expect_damage(core, 5, "the trainer outran the shadow", "flow");
    expect_damage(core, 5, "the trainer outran the shadow", "flow");
    CHECK(no_event(core) && counters_of(core).pool_used == 3 * sizeof content);
    ckm_core_destroy(core);
}

static void test_incomplete_is_given_up_for_newer(void)
{
    struct ckm_core *core = taught_core();
    add_op(2, 0);
    pass(core, 0, 0, 0);
    size_t missing = streams[1].bytes.n - streams[1].sent;
    for (uint64_t i = 3; i <= 5; i++)
        add_op(i, 0);
    pass(core, 0, 0, 0);
    feed_segment(core, 1, (uint32_t)(streams[1].sent + missing), streams[1].bytes.data + streams[1].sent + missing,
                 (uint32_t)(streams[1].bytes.n - streams[1].sent - missing), NOW);
    for (uint64_t now = LATER; ckm_core_tick(core, now) != UINT64_MAX; now += LATER)
        ;
    struct ckm_event e;
    int gave_up = 0;
    while ((e = next_event(core)).kind == CKM_EVENT_DAMAGE)
        gave_up += e.iteration == 2 && e.has_bucket;
    CHECK(gave_up == 1 && e.iteration == 3);
    ckm_core_destroy(core);
}

static void test_pool_is_bounded(void)
{
    struct ckm_core *core = taught_core();
    core->pool.limit = 2 * sizeof content;
    for (uint32_t b = 0; b < 3; b++)
        add_op(2, b);
    pass_all(core);
    expect_complete(core, 2, 0);
    expect_complete(core, 2, 1);
    CHECK(no_event(core));
    ckm_core_tick(core, LATER);
    expect_damage(core, 2, "no gradient buffer is free", "flow");
    CHECK(core->pool.allocated == 2 * sizeof content);
    ckm_core_destroy(core);
}

static void test_iterations_beyond_the_horizon_are_dropped(void)
{
    struct ckm_core *core = taught_core();
    ckm_group_expect(only(core), 3);
    add_op(UINT64_C(1) << 63, 0);
    add_op(4, 0);
    add_op(2, 0);
    pass_all(core);
    expect_complete(core, 2, 0);
    CHECK(no_event(core) && counters_of(core).beyond > 0);
    ckm_group_expect(only(core), 4);
    add_op(4, 0);
    pass_all(core);
    expect_complete(core, 4, 0);
    ckm_core_destroy(core);
}

static void test_discard_frees_what_is_incomplete(void)
{
    struct ckm_core *core = taught_core();
    add_op(2, 0);
    pass(core, 0, 0, 0);
    CHECK(counters_of(core).pool_used == sizeof content);
    ckm_group_discard(only(core), 1);
    CHECK(counters_of(core).pool_used == sizeof content);
    ckm_group_discard(only(core), 2);
    CHECK(counters_of(core).pool_used == 0);
    pass(core, 1, 0, 0);
    CHECK(no_event(core) && counters_of(core).late > 0);
    add_op(3, 0);
    pass_all(core);
    expect_complete(core, 3, 0);
    ckm_core_destroy(core);
}

static void test_flows_are_bounded(void)
{
    struct ckm_core *core = new_core();
    begin();
    add_op(1, 0);
    for (uint16_t f = 0; f < 1000; f++)
        feed_segment(core, f, 0, streams[0].bytes.data, 100, NOW);
    CHECK(counters_of(core).flows == 64);
    CHECK(next_event(core).kind == CKM_EVENT_DAMAGE); /* the frame that a forgotten flow was in */
    ckm_core_destroy(core);
}

static void test_unpolled_damage_is_bounded(void)
{
    struct ckm_core *core = new_core();
    struct ckm_event e = {0};
    for (int i = 0; i < 3000; i++)
        ckm_core_report(core, "reason", "where");
    int n = 0;
    while (ckm_group_poll(only(core), &e, 1, 0) == 1)
        n++;
    CHECK(n == 1025 && strstr(e.reason, "1976 events were dropped") && e.incarnation == 1);
    ckm_core_destroy(core);
}

static void test_poll_waits(void)
{
    struct ckm_core *core = new_core();
    struct ckm_event e;
    uint64_t begin_us = ckm_now_us();
    CHECK(ckm_group_poll(only(core), &e, 1, 30000) == 0);
    CHECK(ckm_now_us() - begin_us >= 30000);
    ckm_core_destroy(core);
}

static void test_truncated_packets_are_named_as_cause(void)
{
    struct ckm_core *core = taught_core();
    uint8_t packet[MAX_PACKET];
    add_op(2, 0);
    uint32_t n = make_packet(packet, 1, (uint32_t)streams[1].sent, streams[1].bytes.data + streams[1].sent, 100);
    feed(core, packet, n - 1, NOW);
    streams[1].sent += 100;
    pass_all(core);
    ckm_core_tick(core, LATER);
    expect_damage_behind_what_is_complete(core, "bytes were lost",
                                          "1 packets arrived truncated: turn segmentation offload off");
    CHECK(counters_of(core).truncated == 1);
    ckm_core_destroy(core);
}

int main(void)
{
    test_release_once();
    test_hole_waits_for_its_time();
    test_hole_is_given_up_when_too_much_waits();
    test_lost_frames_damage_the_operation_at_the_next_header();
    test_missing_end_is_told_on_request();
    test_missing_slices_are_named();
    test_payload_crc();
    test_payload_crc_of_long_frames();
    test_header_crc();
    test_header_fields();
    test_slice_twice();
    test_slice_twice_while_learning();
    test_slice_after_completion();
    test_second_operation_for_a_key();
    test_cut_differently_is_damage_and_learned_afresh();
    test_more_bytes_than_the_operation();
    test_empty_slices_after_completion();
    test_channel_of_empty_slices();
    test_other_incarnations_are_stale();
    test_new_job_on_the_same_addresses();
    test_other_communicator_on_the_same_addresses();
    test_late_shadow_finds_its_place();
    test_first_waits_for_a_free_set();
    test_outrun_is_damage();
    test_incomplete_is_given_up_for_newer();
    test_pool_is_bounded();
    test_iterations_beyond_the_horizon_are_dropped();
    test_discard_frees_what_is_incomplete();
    test_flows_are_bounded();
    test_unpolled_damage_is_bounded();
    test_poll_waits();
    test_truncated_packets_are_named_as_cause();
    return 0;
}
