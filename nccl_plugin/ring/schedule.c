#include "schedule.h"

/* NCCL gives a channel no less than this; the all-reduce counts every byte twice. */
#define CELL_BYTES (16u * 1024 / 2)

static size_t div_up(size_t a, size_t b)
{
    return (a + b - 1) / b;
}

static size_t min_size(size_t a, size_t b)
{
    return a < b ? a : b;
}

static uint32_t gcd(uint32_t a, uint32_t b)
{
    while (b) {
        uint32_t t = a % b;
        a = b;
        b = t;
    }
    return a;
}

/* The channel-th stride coprime with n, in the order 1, n-1, 2, n-2, ... (cyclically). */
static uint32_t stride_of(uint32_t n, uint32_t channel)
{
    if (n <= 2)
        return 1;
    uint32_t nstrides = 0;
    for (uint32_t s = 1; s < n; s++)
        nstrides += gcd(s, n) == 1;
    uint32_t want = channel % nstrides, seen = 0;
    for (uint32_t s = 1;; s++) {
        if (gcd(s, n) != 1)
            continue;
        if (seen++ == want)
            return s;
        if (n - s != s && seen++ == want)
            return n - s;
    }
}

/* Rank 0 goes where the ring begins; what of its host comes before it, to the end. */
static uint32_t place_first_host(uint32_t count, uint32_t channel, uint32_t nranks, uint32_t *order)
{
    uint32_t stride = stride_of(count, channel), before = 0;
    while ((channel + (uint64_t)before * stride) % count)
        before++;
    for (uint32_t i = 0; i < count; i++)
        order[(i + nranks - before) % nranks] = (uint32_t)((channel + (uint64_t)i * stride) % count);
    return count - before;
}

void ckm_ring_order(const uint32_t *host_ranks, uint32_t nhosts, uint32_t channel, uint32_t *order)
{
    uint32_t stride = stride_of(nhosts, channel), nranks = 0;
    for (uint32_t h = 0; h < nhosts; h++)
        nranks += host_ranks[h];
    uint32_t at = place_first_host(host_ranks[0], channel, nranks, order);
    for (uint32_t i = 1; i < nhosts; i++) {
        uint32_t host = (uint32_t)((uint64_t)i * stride % nhosts), count = host_ranks[host], base = 0;
        for (uint32_t h = 0; h < host; h++)
            base += host_ranks[h];
        for (uint32_t k = 0; k < count; k++)
            order[at++] = base + (uint32_t)((channel + (uint64_t)k * stride_of(count, channel)) % count);
    }
}

uint32_t ckm_ring_split(size_t count, size_t elem, uint32_t nchannels, size_t *offsets, size_t *counts)
{
    size_t per_cell = CELL_BYTES / elem;
    size_t cells = div_up(count, per_cell);
    size_t per_channel = div_up(cells, nchannels) * per_cell;
    uint32_t used = 0;
    for (size_t at = 0; at < count; at += per_channel, used++) {
        offsets[used] = at;
        counts[used] = min_size(per_channel, count - at);
    }
    return used;
}

/* Chunks that one loop moves past this rank, that is the divisor of the loop's part of the buffer. */
static uint32_t chunks_per_loop(const struct ckm_schedule *s)
{
    return s->pattern == CKM_PATTERN_ALLREDUCE ? s->nranks : 1;
}

static uint32_t loops(const struct ckm_schedule *s)
{
    return (uint32_t)div_up(s->count, s->chunk * chunks_per_loop(s));
}

static uint32_t rounds(const struct ckm_schedule *s)
{
    switch (s->pattern) {
    case CKM_PATTERN_ALLREDUCE:
        return 2 * (s->nranks - 1);
    case CKM_PATTERN_ALLGATHER:
    case CKM_PATTERN_REDUCESCATTER:
        return s->nranks - 1;
    default:
        return 1;
    }
}

/* Is there a receive (a send) at this rank at all? Only the ends of a pipeline lack one. */
static bool is_source(const struct ckm_schedule *s)
{
    uint32_t first = s->pattern == CKM_PATTERN_PIPELINE_TO ? (s->root_index + 1) % s->nranks : s->root_index;
    return (s->pattern == CKM_PATTERN_PIPELINE_FROM || s->pattern == CKM_PATTERN_PIPELINE_TO) && s->index == first;
}

static bool is_drain(const struct ckm_schedule *s)
{
    if (s->pattern == CKM_PATTERN_PIPELINE_TO)
        return s->index == s->root_index;
    return s->pattern == CKM_PATTERN_PIPELINE_FROM && (s->index + 1) % s->nranks == s->root_index;
}

uint32_t ckm_schedule_sends(const struct ckm_schedule *s)
{
    return is_drain(s) ? 0 : loops(s) * rounds(s) * CKM_RING_SLICES;
}

uint32_t ckm_schedule_recvs(const struct ckm_schedule *s)
{
    return is_source(s) ? 0 : loops(s) * rounds(s) * CKM_RING_SLICES;
}

/* Chunk size of a loop: full, or for what is left an equal share rounded up to 16 bytes. */
static size_t loop_chunk(const struct ckm_schedule *s, size_t left)
{
    uint32_t n = chunks_per_loop(s);
    if (left >= n * s->chunk)
        return s->chunk;
    size_t align = s->elem < 16 ? 16 / s->elem : 1;
    return div_up(div_up(left, n), align) * align;
}

/* The slice-th part of `nelem` elements: NCCL cuts at multiples of 16 elements, not below 1/32 of a full slice. */
static void cut_slice(const struct ckm_schedule *s, size_t nelem, uint32_t slice, size_t *offset, size_t *count)
{
    size_t size = div_up(nelem, 16 * CKM_RING_SLICES) * 16;
    size_t least = s->chunk / CKM_RING_SLICES / 32;
    size = size > least ? size : least;
    *offset = min_size(slice * size, nelem);
    *count = min_size(size, nelem - *offset);
}

/* Chunk (all-reduce) or block (all-gather, reduce-scatter) that position `pos` sends in round k of a loop. */
static uint32_t chunk_sent(const struct ckm_schedule *s, uint32_t pos, uint32_t k)
{
    uint32_t n = s->nranks;
    switch (s->pattern) {
    case CKM_PATTERN_ALLREDUCE: /* both halves: pos-1-k (mod n) */
    case CKM_PATTERN_REDUCESCATTER:
        return (pos + 2 * n - 1 - k) % n;
    case CKM_PATTERN_ALLGATHER:
        return (pos + n - k) % n;
    default:
        return 0;
    }
}

static struct ckm_slice place(const struct ckm_schedule *s, uint32_t step, uint32_t pos)
{
    struct ckm_slice out = {0};
    uint32_t chunk = chunk_sent(s, pos, step / CKM_RING_SLICES % rounds(s));
    size_t at = (size_t)(step / CKM_RING_SLICES / rounds(s)) * chunks_per_loop(s) * s->chunk;
    size_t left = s->count - at;
    size_t size = loop_chunk(s, left), within;

    if (s->pattern == CKM_PATTERN_ALLREDUCE) {
        size_t from = min_size(chunk * size, left);
        cut_slice(s, min_size(size, left - from), step % CKM_RING_SLICES, &within, &out.count);
        out.offset = s->offset + at + from + within;
        return out;
    }
    out.block = chunk;
    cut_slice(s, min_size(size, left), step % CKM_RING_SLICES, &within, &out.count);
    out.offset = s->offset + at + within;
    return out;
}

struct ckm_slice ckm_schedule_send(const struct ckm_schedule *s, uint32_t step)
{
    struct ckm_slice out = place(s, step, s->index);
    uint32_t k = step / CKM_RING_SLICES % rounds(s);
    bool pipeline = s->pattern == CKM_PATTERN_PIPELINE_FROM || s->pattern == CKM_PATTERN_PIPELINE_TO;
    bool first = pipeline ? is_source(s) : k == 0;
    out.source = first ? CKM_FROM_INPUT : CKM_FROM_WORK;
    out.needs = pipeline || first ? step : step - CKM_RING_SLICES;
    return out;
}

static enum ckm_sink sink_of(const struct ckm_schedule *s, uint32_t k)
{
    switch (s->pattern) {
    case CKM_PATTERN_ALLREDUCE:
        if (k >= s->nranks - 1)
            return CKM_TO_OUTPUT;
        return k == s->nranks - 2 ? CKM_TO_REDUCE_LAST : CKM_TO_REDUCE;
    case CKM_PATTERN_REDUCESCATTER:
        return k == s->nranks - 2 ? CKM_TO_REDUCE_LAST : CKM_TO_REDUCE;
    case CKM_PATTERN_PIPELINE_TO:
        return is_drain(s) ? CKM_TO_REDUCE_LAST : CKM_TO_REDUCE;
    default:
        return CKM_TO_OUTPUT;
    }
}

struct ckm_slice ckm_schedule_recv(const struct ckm_schedule *s, uint32_t step)
{
    struct ckm_slice out = place(s, step, (s->index + s->nranks - 1) % s->nranks);
    out.sink = sink_of(s, step / CKM_RING_SLICES % rounds(s));
    return out;
}
