/* Runs every rank's schedule against the others', on sets of contributing ranks instead of numbers. */
#include <string.h>

#include "check.h"
#include "checkmate/wire.h"
#include "schedule.h"

#define MAX_RANKS 9
#define MAX_COUNT 5000
#define CHUNK     128 /* elements of a full chunk: two slices of 64 */

static uint32_t data[MAX_RANKS][MAX_RANKS][MAX_COUNT]; /* by rank, block, element: set of ranks summed */

static struct ckm_schedule schedule_of(enum ckm_pattern pattern, uint32_t n, uint32_t ix, size_t count)
{
    return (struct ckm_schedule){
        .pattern = pattern, .nranks = n, .index = ix, .elem = 4, .count = count, .chunk = CHUNK};
}

/* Each rank once, rank 0 at position 0, the ranks of a host side by side. */
static void check_order(const uint32_t *host_ranks, uint32_t nhosts, uint32_t n, uint32_t channel, uint32_t *order)
{
    uint32_t host[MAX_RANKS], seen = 0, changes = 0, rank = 0;
    for (uint32_t h = 0; h < nhosts; h++)
        for (uint32_t i = 0; i < host_ranks[h]; i++)
            host[rank++] = h;
    ckm_ring_order(host_ranks, nhosts, channel, order);
    for (uint32_t i = 0; i < n; i++) {
        seen |= 1u << order[i];
        changes += host[order[i]] != host[order[(i + 1) % n]];
    }
    CHECK(order[0] == 0 && seen == (1u << n) - 1, "n %u channel %u is no ring from rank 0", n, channel);
    CHECK(changes == (nhosts > 1 ? nhosts : 0), "n %u channel %u leaves hosts %u times, not %u", n, channel, changes,
          nhosts);
}

static void test_order(void)
{
    for (uint32_t n = 1; n <= MAX_RANKS; n++) {
        uint32_t a[MAX_RANKS], b[MAX_RANKS];
        for (uint32_t ends = 0; ends < 1u << (n - 1); ends++) { /* where a bit is set, a host ends behind that rank */
            uint32_t host_ranks[MAX_RANKS] = {0}, nhosts = 0;
            for (uint32_t rank = 0; rank < n; rank++) {
                host_ranks[nhosts]++;
                nhosts += ends >> rank & 1 || rank == n - 1;
            }
            for (uint32_t c = 0; c < 8; c++)
                check_order(host_ranks, nhosts, n, c, a);
            ckm_ring_order(host_ranks, nhosts, 0, a);
            ckm_ring_order(host_ranks, nhosts, 1, b);
            CHECK(nhosts < n || n <= 2 || a[n - 1] != b[n - 1], "n %u: the first two channels end at the same rank", n);
        }
    }
    /* Rank 0 neither enters nor leaves: 1 0 2 | 4 3 5. */
    uint32_t two_hosts[] = {3, 3}, order[MAX_RANKS], expected[] = {0, 2, 4, 3, 5, 1};
    ckm_ring_order(two_hosts, 2, 1, order);
    CHECK(memcmp(order, expected, sizeof expected) == 0, "channel 1 of 3 + 3 ranks");
}

static void test_split(void)
{
    const size_t counts[] = {0, 1, 5, 2048, 2049, 100003, 1u << 22};
    for (size_t k = 0; k < sizeof(counts) / sizeof(counts[0]); k++) {
        for (uint32_t nchannels = 1; nchannels <= 8; nchannels++) {
            size_t offset[CKM_RING_MAX_CHANNELS], count[CKM_RING_MAX_CHANNELS], at = 0;
            uint32_t used = ckm_ring_split(counts[k], 4, nchannels, offset, count);
            CHECK(used <= nchannels, "%u channels of %u", used, nchannels);
            for (uint32_t c = 0; c < used; c++) {
                CHECK(offset[c] == at && count[c] > 0, "count %zu channel %u", counts[k], c);
                at += count[c];
            }
            CHECK(at == counts[k], "%zu of %zu elements", at, counts[k]);
        }
    }
}

static void fill(enum ckm_pattern pattern, uint32_t n, size_t count)
{
    memset(data, 0, sizeof(data));
    for (uint32_t ix = 0; ix < n; ix++)
        for (uint32_t block = 0; block < n; block++)
            for (size_t i = 0; i < count; i++)
                if (pattern != CKM_PATTERN_ALLGATHER || block == ix)
                    data[ix][block][i] = 1u << ix;
}

/* One receive: what the previous position sends in the same step arrives. */
static void deliver(const struct ckm_schedule *from, const struct ckm_schedule *to, uint32_t step)
{
    struct ckm_slice out = ckm_schedule_send(from, step), in = ckm_schedule_recv(to, step);
    CHECK(out.block == in.block && out.offset == in.offset && out.count == in.count,
          "n %u position %u step %u: sent %zu+%zu, expected %zu+%zu", to->nranks, to->index, step, out.offset,
          out.count, in.offset, in.count);
    CHECK(out.count <= CHUNK / CKM_RING_SLICES, "slice of %zu elements", out.count);
    CHECK(in.offset + in.count <= to->count || in.count == 0, "step %u runs past the end", step);
    for (size_t i = in.offset; i < in.offset + in.count; i++) {
        uint32_t arrived = data[from->index][out.block][i], *own = &data[to->index][in.block][i];
        CHECK(in.sink == CKM_TO_OUTPUT || (arrived & *own) == 0, "a rank's value is added twice");
        *own = in.sink == CKM_TO_OUTPUT ? arrived : arrived | *own;
        CHECK(in.sink != CKM_TO_REDUCE_LAST || *own == (1u << to->nranks) - 1, "the last reduction is not complete");
    }
}

static uint32_t loop_steps(enum ckm_pattern pattern, uint32_t n)
{
    return CKM_RING_SLICES * (pattern == CKM_PATTERN_ALLREDUCE ? 2 * (n - 1) : n - 1);
}

static void check_ring(enum ckm_pattern pattern, uint32_t n, size_t count)
{
    struct ckm_schedule s[MAX_RANKS];
    fill(pattern, n, count);
    for (uint32_t ix = 0; ix < n; ix++)
        s[ix] = schedule_of(pattern, n, ix, count);
    uint32_t steps = ckm_schedule_sends(&s[0]);
    CHECK(steps % loop_steps(pattern, n) == 0, "%u steps are not whole loops", steps);
    for (uint32_t step = 0; step < steps; step++) {
        for (uint32_t ix = 0; ix < n; ix++) {
            struct ckm_slice send = ckm_schedule_send(&s[ix], step);
            CHECK(send.source == CKM_FROM_INPUT || send.needs == step - CKM_RING_SLICES, "step %u needs %u", step,
                  send.needs);
            deliver(&s[(ix + n - 1) % n], &s[ix], step);
        }
    }
}

static void test_rings(void)
{
    const size_t counts[] = {1, 5, 127, 128, 129, 1000, 4096, 4999};
    for (uint32_t n = 2; n <= MAX_RANKS; n++) {
        for (size_t k = 0; k < sizeof(counts) / sizeof(counts[0]); k++) {
            check_ring(CKM_PATTERN_ALLREDUCE, n, counts[k]);
            for (uint32_t ix = 0; ix < n; ix++)
                for (size_t i = 0; i < counts[k]; i++)
                    CHECK(data[ix][0][i] == (1u << n) - 1, "all-reduce n %u element %zu", n, i);
            check_ring(CKM_PATTERN_ALLGATHER, n, counts[k]);
            for (uint32_t ix = 0; ix < n * n; ix++)
                for (size_t i = 0; i < counts[k]; i++)
                    CHECK(data[ix / n][ix % n][i] == 1u << ix % n, "all-gather n %u element %zu", n, i);
            check_ring(CKM_PATTERN_REDUCESCATTER, n, counts[k]);
            for (uint32_t ix = 0; ix < n; ix++)
                for (size_t i = 0; i < counts[k]; i++)
                    CHECK(data[ix][ix][i] == (1u << n) - 1, "reduce-scatter n %u element %zu", n, i);
        }
    }
}

/* The frame header's rule (wire.h) and the shadow's layout rule: sort by loop, chunk, slice and add up lengths. */
static void test_place(void)
{
    const size_t counts[] = {1, 5, 129, 1000, 4999};
    for (uint32_t n = 2; n <= MAX_RANKS; n++) {
        for (size_t k = 0; k < sizeof(counts) / sizeof(counts[0]); k++) {
            static size_t offset[MAX_COUNT], length[MAX_COUNT];
            uint32_t slots = 0;
            for (uint32_t ix = 0; ix < n; ix++) {
                struct ckm_schedule s = schedule_of(CKM_PATTERN_ALLREDUCE, n, ix, counts[k]);
                for (uint32_t step = 0; step < ckm_schedule_sends(&s); step++) {
                    struct ckm_place place = ckm_place(step, CKM_RING_SLICES, ix, n);
                    CHECK(place.final == (step % (4 * (n - 1)) >= 2 * (n - 1)), "phase of step %u", step);
                    struct ckm_slice slice = ckm_schedule_send(&s, step);
                    uint32_t slot = (place.loop * n + place.chunk) * CKM_RING_SLICES + place.slice;
                    slots = slot + 1 > slots ? slot + 1 : slots;
                    offset[slot] = slice.offset;
                    length[slot] = slice.count;
                }
            }
            size_t at = 0;
            for (uint32_t slot = 0; slot < slots; slot++) {
                CHECK(length[slot] == 0 || offset[slot] == at, "n %u slot %u: %zu, not %zu", n, slot, offset[slot], at);
                at += length[slot];
            }
            CHECK(at == counts[k], "n %u: %zu of %zu elements", n, at, counts[k]);
        }
    }
}

/* 5 floats over 4 ranks: 36 of the 48 messages are empty. */
static void test_empty_slices(void)
{
    uint32_t empty = 0, all = 0;
    for (uint32_t ix = 0; ix < 4; ix++) {
        struct ckm_schedule s = schedule_of(CKM_PATTERN_ALLREDUCE, 4, ix, 5);
        for (uint32_t step = 0; step < ckm_schedule_sends(&s); step++, all++)
            empty += ckm_schedule_send(&s, step).count == 0;
    }
    CHECK(empty == 36 && all == 48, "%u of %u empty", empty, all);
}

static void check_pipeline(enum ckm_pattern pattern, uint32_t n, uint32_t root)
{
    uint32_t sends = 0, recvs = 0;
    for (uint32_t ix = 0; ix < n; ix++) {
        struct ckm_schedule s = schedule_of(pattern, n, ix, 300), next = schedule_of(pattern, n, (ix + 1) % n, 300);
        s.root_index = next.root_index = root;
        CHECK(ckm_schedule_sends(&s) == ckm_schedule_recvs(&next), "position %u", ix);
        sends += ckm_schedule_sends(&s) > 0;
        recvs += ckm_schedule_recvs(&s) > 0;
    }
    CHECK(sends == n - 1 && recvs == n - 1, "%u senders, %u receivers of %u", sends, recvs, n);
}

int main(void)
{
    test_order();
    test_split();
    test_rings();
    test_place();
    test_empty_slices();
    for (uint32_t n = 2; n <= 5; n++) {
        for (uint32_t root = 0; root < n; root++) {
            check_pipeline(CKM_PATTERN_PIPELINE_FROM, n, root);
            check_pipeline(CKM_PATTERN_PIPELINE_TO, n, root);
        }
    }
    puts("schedule: ok");
    return 0;
}
