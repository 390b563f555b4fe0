#include "flow.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checkmate/crc32c.h"
#include "core.h"
#include "header.h"

#define FLOW_TEXT 96
/* The CRC is taken of the placed bytes, while they are in the first-level cache: in multiples that fill the
 * checksum's parallel lanes, and a little behind, as the newest are still on their way there. */
#define CRC_BYTES 6144u
#define CRC_LAG   8192u

static void describe(const struct ckm_flow *flow, char text[FLOW_TEXT])
{
    const uint8_t *ip = (const uint8_t *)&flow->key.src_ip;
    const uint8_t *src = (const uint8_t *)&flow->key.src_port, *dst = (const uint8_t *)&flow->key.dst_port;
    snprintf(text, FLOW_TEXT, "flow %u.%u.%u.%u:%u to port %u", ip[0], ip[1], ip[2], ip[3], src[0] << 8 | src[1],
             dst[0] << 8 | dst[1]);
}

/* What else may explain lost bytes. */
static void append_causes(const struct ckm_core *core, char *out, size_t size, size_t *used)
{
    if (core->counters.truncated)
        ckm_append(out, size, used,
                   "; %" PRIu64 " packets arrived truncated: turn segmentation offload off at the switch",
                   core->counters.truncated);
    if (core->counters.driver_drops)
        ckm_append(out, size, used, "; the receive ring dropped %" PRIu64 " packets so far",
                   core->counters.driver_drops);
}

static int is_filling(const struct ckm_flow *flow)
{
    return flow->op && flow->op->state == CKM_OP_FILLING;
}

/* The iteration that bytes lost behind the newest frame belong to, NULL when they don't tell: what followed a complete
 * operation is of another one. */
static const uint64_t *iteration_behind(const struct ckm_flow *flow)
{
    const struct ckm_op *op = flow->has_last ? ckm_op_find(flow->group, flow->last_iteration, flow->last_bucket) : NULL;
    return op && op->state != CKM_OP_COMPLETE && op->state != CKM_OP_RELEASED ? &flow->last_iteration : NULL;
}

/* Damage that this flow saw; its operation, while one is being received, is the one that is damaged. */
static void damage(struct ckm_core *core, struct ckm_flow *flow, const char *reason, const char *detail)
{
    char where[256];
    size_t used = 0;
    char text[FLOW_TEXT];
    describe(flow, text);
    ckm_append(where, sizeof where, &used, "%s: %s", text, detail);
    if (is_filling(flow)) {
        const struct ckm_frame *h = &flow->header.fields;
        struct ckm_place p = ckm_place(h->step, h->slices_per_chunk, h->ring_pos, h->nranks);
        ckm_append(where, sizeof where, &used, ", in channel %u loop %u chunk %u slice %u", h->channel, p.loop, p.chunk,
                   p.slice);
        append_causes(core, where, sizeof where, &used);
        ckm_op_damage(flow->group, flow->op, reason, where);
        return;
    }
    append_causes(core, where, sizeof where, &used);
    for (struct ckm_group *group = core->groups; group < core->groups + core->ngroups; group++)
        if (!flow->identified || flow->group == group)
            ckm_damage(group, group->incarnation, iteration_behind(flow), NULL, reason, where);
}

static int is_stale(const struct ckm_flow *flow)
{
    return flow->identified && (!flow->group || flow->incarnation != flow->group->incarnation);
}

static void leave_frame(struct ckm_flow *flow)
{
    if (flow->op)
        ckm_op_unref(flow->op);
    flow->op = NULL;
    flow->left = 0;
    flow->header_have = 0;
    flow->state = CKM_FLOW_HEADER;
}

/* From frames to operations */

/* Continues the payload's CRC over the first bytes of what was placed and not checked yet. */
static void check_placed(struct ckm_flow *flow, uint32_t bytes)
{
    flow->crc = ckm_crc32c(flow->crc, flow->dst - flow->unchecked, bytes);
    flow->unchecked -= bytes;
}

static void finish_frame(struct ckm_core *core, struct ckm_flow *flow)
{
    const struct ckm_frame *h = &flow->header.fields;
    if (is_filling(flow)) {
        check_placed(flow, flow->unchecked);
        if (flow->crc == h->payload_crc) {
            core->counters.frames++;
            core->counters.payload_bytes += h->payload_len;
            ckm_op_received(flow->group, flow->op, h->payload_len);
        } else {
            char detail[128];
            snprintf(detail, sizeof detail, "bytes %" PRIu64 "..%" PRIu64, flow->next_offset - h->payload_len,
                     flow->next_offset);
            core->counters.crc_errors++;
            damage(core, flow, "payload CRC32C is wrong", detail);
        }
    }
    leave_frame(flow);
}

static void seek_from(struct ckm_flow *flow, uint64_t offset)
{
    if (flow->lost_from == flow->lost_to)
        flow->lost_from = offset;
    flow->lost_to = offset > flow->lost_to ? offset : flow->lost_to;
    flow->state = CKM_FLOW_SEEK;
}

/* The header at hand, valid as a header, says something that can't be. */
static void refuse_header(struct ckm_core *core, struct ckm_flow *flow, const char *error)
{
    const struct ckm_frame *h = &flow->header.fields;
    char where[256], text[FLOW_TEXT];
    describe(flow, text);
    snprintf(where, sizeof where, "%s: frame at byte %" PRIu64, text, flow->next_offset - CKM_HEADER_BYTES);
    core->counters.header_errors++;
    struct ckm_op *op = ckm_op_find(flow->group, h->iteration, h->bucket);
    if (op && op->state == CKM_OP_FILLING)
        ckm_op_damage(flow->group, op, error, where);
    else
        ckm_damage(flow->group, h->incarnation, &h->iteration, &h->bucket, error, where);
}

static void count_gap(struct ckm_core *core, uint64_t bytes)
{
    core->counters.gaps++;
    core->counters.gap_bytes += bytes;
}

/* The stream was resumed at this frame after bytes were lost: what is now known never to complete? */
static void settle_loss(struct ckm_core *core, struct ckm_flow *flow, struct ckm_op *op)
{
    const struct ckm_frame *h = &flow->header.fields;
    char where[256], text[FLOW_TEXT];
    if (!flow->has_last)
        count_gap(core, flow->lost_to - flow->lost_from);
    describe(flow, text);
    snprintf(where, sizeof where, "%s: bytes %" PRIu64 "..%" PRIu64 " before channel %u step %u", text, flow->lost_from,
             flow->lost_to, h->channel, h->step);
    struct ckm_op *before = flow->has_last ? ckm_op_find(flow->group, flow->last_iteration, flow->last_bucket) : NULL;
    if (before && before != op)
        ckm_op_damage(flow->group, before, "bytes were lost", where);
    /* A flow carries one channel, and its frames of an operation start in loop 0, with the round that it tags first. */
    uint32_t round = ckm_first_tagged_round(h->flags & CKM_FLAG_FIRST, h->host_ranks);
    int is_first = h->step == (h->nranks - 1u + round) * h->slices_per_chunk;
    if (op && (before == op || !is_first))
        ckm_op_damage(flow->group, op, "bytes were lost", where);
    else if (!flow->has_last)
        ckm_damage(flow->group, h->incarnation, &h->iteration, NULL, "stream starts in the middle", where);
}

static struct ckm_group *group_of(struct ckm_core *core, uint16_t number)
{
    uint16_t unnamed = ckm_group_number("");
    if (core->ngroups == 1 && (number == unnamed || core->groups->number == unnamed))
        return core->groups;
    for (struct ckm_group *group = core->groups; group < core->groups + core->ngroups; group++)
        if (group->number == number)
            return group;
    return NULL;
}

static void identify(struct ckm_core *core, struct ckm_flow *flow)
{
    const struct ckm_frame *h = &flow->header.fields;
    struct ckm_group *group = group_of(core, h->group);
    if (group != flow->group)
        flow->has_last = 0;
    flow->group = group;
    if (flow->next_offset == CKM_HEADER_BYTES)
        flow->first_crc = h->header_crc;
    flow->identified = 1;
    flow->incarnation = h->incarnation;
    flow->comm_id = h->comm_id;
}

static void start_payload(struct ckm_flow *flow)
{
    flow->left = flow->header.fields.payload_len;
    flow->crc = 0;
    flow->unchecked = 0;
    flow->state = CKM_FLOW_PAYLOAD;
    flow->blocked_us = 0;
}

/* Payload of a header whose fields can't be used: skipped, if its length can be believed. */
static void skip_payload(struct ckm_flow *flow)
{
    if (flow->header.fields.payload_len <= CKM_MAX_PAYLOAD) {
        start_payload(flow);
        return;
    }
    flow->header_have = 0;
    flow->blocked_us = 0;
    seek_from(flow, flow->next_offset);
}

/* Decides what becomes of the frame whose header is whole. 0: it has to wait. */
static int claim(struct ckm_core *core, struct ckm_flow *flow, int force)
{
    const struct ckm_frame *h = &flow->header.fields;
    char error[160], text[FLOW_TEXT];
    identify(core, flow);
    int is_probe = h->incarnation == 0; /* of the switch, for no group */
    if (is_stale(flow) || is_probe) {
        *(flow->group || is_probe ? &core->counters.stale : &core->counters.foreign) += 1;
        flow->lost_from = flow->lost_to = 0;
        skip_payload(flow);
        return 1;
    }
    if (ckm_header_check(h, core->config.max_op_bytes, error, sizeof error)) {
        refuse_header(core, flow, error);
        skip_payload(flow);
        return 1;
    }
    describe(flow, text);
    struct ckm_op *op = NULL;
    enum ckm_claim answer = ckm_op_claim(flow->group, h, text, force, &op, &flow->dst);
    if (answer == CKM_CLAIM_WAIT)
        return 0;
    if (flow->lost_from != flow->lost_to)
        settle_loss(core, flow, op);
    flow->lost_from = flow->lost_to = 0;
    flow->last_iteration = h->iteration;
    flow->last_bucket = h->bucket;
    flow->has_last = 1;
    flow->op = op;
    start_payload(flow);
    return 1;
}

/* From bytes to frames */

/* Drops the first byte of the collected header and all up to the next place where one may start. */
static void next_candidate(struct ckm_flow *flow)
{
    static const uint32_t magic = CKM_WIRE_MAGIC;
    const uint8_t *bytes = flow->header.bytes;
    uint32_t have = flow->header_have, at = 1;
    for (; at < have; at++) {
        uint32_t n = have - at < sizeof magic ? have - at : (uint32_t)sizeof magic;
        if (bytes[at] == (uint8_t)magic && memcmp(bytes + at, &magic, n) == 0)
            break;
    }
    memmove(flow->header.bytes, bytes + at, have - at);
    flow->header_have = have - at;
}

static void header_is_bad(struct ckm_core *core, struct ckm_flow *flow)
{
    uint64_t at = flow->next_offset - CKM_HEADER_BYTES;
    if (flow->state == CKM_FLOW_HEADER) {
        char detail[96];
        snprintf(detail, sizeof detail, "bytes %" PRIu64 "..%" PRIu64, at, flow->next_offset);
        core->counters.header_errors++;
        if (!is_stale(flow))
            damage(core, flow, "no valid frame header where one must be", detail);
        seek_from(flow, at);
    }
    next_candidate(flow);
    flow->lost_to = flow->next_offset - flow->header_have;
}

static uint32_t take_header(struct ckm_core *core, struct ckm_flow *flow, const uint8_t *data, uint32_t length)
{
    uint32_t n = CKM_HEADER_BYTES - flow->header_have;
    n = n < length ? n : length;
    memcpy(flow->header.bytes + flow->header_have, data, n);
    flow->header_have += n;
    flow->next_offset += n;
    if (flow->header_have == CKM_HEADER_BYTES) {
        if (ckm_header_intact(flow->header.bytes))
            flow->state = CKM_FLOW_CLAIM;
        else
            header_is_bad(core, flow);
    }
    return n;
}

static uint32_t take_payload(struct ckm_flow *flow, const uint8_t *data, uint32_t length)
{
    uint32_t n = flow->left < length ? flow->left : length;
    if (is_filling(flow)) {
        memcpy(flow->dst, data, n);
        flow->dst += n;
        flow->unchecked += n;
        if (flow->unchecked >= CRC_BYTES + CRC_LAG)
            check_placed(flow, (flow->unchecked - CRC_LAG) / CRC_BYTES * CRC_BYTES);
    }
    flow->left -= n;
    flow->next_offset += n;
    return n;
}

/* Takes in-order bytes, moving next_offset. Returns how many; less than length when the flow has to wait. */
static uint32_t consume(struct ckm_core *core, struct ckm_flow *flow, const uint8_t *data, uint32_t length, int force)
{
    uint32_t used = 0;
    for (;;) {
        if (flow->state == CKM_FLOW_CLAIM && !claim(core, flow, force))
            return used;
        if (flow->state == CKM_FLOW_PAYLOAD && flow->left == 0) {
            finish_frame(core, flow);
            continue;
        }
        if (used == length)
            return used;
        if (flow->state == CKM_FLOW_PAYLOAD)
            used += take_payload(flow, data + used, length - used);
        else
            used += take_header(core, flow, data + used, length - used);
    }
}

/* From segments to bytes */

/* Remembers since when the flow waits; a wait is counted once. */
static void note_wait(struct ckm_core *core, struct ckm_flow *flow, uint64_t now_us)
{
    if (flow->state == CKM_FLOW_CLAIM && !flow->blocked_us) {
        flow->blocked_us = now_us ? now_us : 1;
        core->counters.stalls++;
    }
}

static void pop_held(struct ckm_core *core, struct ckm_flow *flow)
{
    uint64_t before = flow->held.bytes;
    ckm_reorder_pop(&flow->held);
    core->counters.held_bytes -= before - flow->held.bytes;
}

/* Takes what is in order now from what was held. force applies to the frame that waits, not to later ones. */
static void advance(struct ckm_core *core, struct ckm_flow *flow, int force, uint64_t now_us)
{
    consume(core, flow, NULL, 0, force);
    for (struct ckm_piece *piece; flow->state != CKM_FLOW_CLAIM && (piece = flow->held.first) != NULL;) {
        if (piece->offset > flow->next_offset)
            break;
        uint64_t end = piece->offset + piece->length;
        if (end > flow->next_offset) {
            uint32_t skip = (uint32_t)(flow->next_offset - piece->offset);
            consume(core, flow, piece->data + skip, piece->length - skip, 0);
        }
        if (end <= flow->next_offset)
            pop_held(core, flow);
    }
    note_wait(core, flow, now_us);
}

/* Bytes [next_offset, to) are lost: the rest of this payload is skipped, or the next header is looked for. */
static void skip_hole(struct ckm_core *core, struct ckm_flow *flow, uint64_t to)
{
    uint64_t from = flow->next_offset, lost = to - from;
    char detail[96];
    snprintf(detail, sizeof detail, "bytes %" PRIu64 "..%" PRIu64, from, to);
    int inside = flow->state == CKM_FLOW_PAYLOAD && lost <= flow->left;
    /* A flow without a valid header yet may be an old job's: the hole counts when one of this job is found. */
    int known = flow->identified && !is_stale(flow);
    if (known)
        count_gap(core, lost);
    if (inside ? is_filling(flow) : known && flow->state != CKM_FLOW_SEEK)
        damage(core, flow, "bytes were lost", detail);
    flow->next_offset = to;
    if (inside) {
        uint32_t left = flow->left - (uint32_t)lost;
        leave_frame(flow);
        flow->left = left;
        flow->state = CKM_FLOW_PAYLOAD;
        return;
    }
    leave_frame(flow);
    seek_from(flow, from);
    flow->lost_to = to;
}

static void give_up_hole(struct ckm_core *core, struct ckm_flow *flow, uint64_t now_us)
{
    skip_hole(core, flow, flow->held.first->offset);
    advance(core, flow, 0, now_us);
}

static void hold(struct ckm_core *core, struct ckm_flow *flow, uint64_t offset, const uint8_t *data, uint32_t length,
                 uint64_t now_us)
{
    uint64_t before = flow->held.bytes;
    uint32_t kept = ckm_reorder_insert(&flow->held, offset, data, length, now_us);
    core->counters.held_bytes += flow->held.bytes - before;
    core->counters.out_of_order += kept > 0 && !flow->blocked_us;
    core->counters.duplicates += kept == 0;
    core->counters.overlaps += kept > 0 && kept < length;
    while (flow->held.bytes > core->config.reorder_bytes) {
        if (flow->state == CKM_FLOW_CLAIM)
            advance(core, flow, 1, now_us);
        else
            give_up_hole(core, flow, now_us);
    }
}

static void take_segment(struct ckm_core *core, struct ckm_flow *flow, uint64_t offset, const uint8_t *data,
                         uint32_t length, uint64_t now_us)
{
    if (offset < flow->next_offset) {
        if (offset + length <= flow->next_offset) {
            core->counters.duplicates++;
            return;
        }
        core->counters.overlaps++;
        uint32_t old = (uint32_t)(flow->next_offset - offset);
        offset += old;
        data += old;
        length -= old;
    }
    if (offset == flow->next_offset && flow->state != CKM_FLOW_CLAIM) {
        uint32_t used = consume(core, flow, data, length, 0);
        offset += used;
        data += used;
        length -= used;
        note_wait(core, flow, now_us);
    }
    if (length)
        hold(core, flow, offset, data, length, now_us);
    else if (flow->held.first)
        advance(core, flow, 0, now_us);
}

/* The table */

static struct ckm_flow **chain_of(struct ckm_flows *flows, const struct ckm_flow_key *key)
{
    uint32_t ports = (uint32_t)key->src_port << 16 | key->dst_port;
    uint64_t hash = (key->src_ip * 0x9e3779b97f4a7c15u) ^ (ports * 0xc2b2ae3d27d4eb4fu);
    return &flows->chains[(hash >> 32) % CKM_FLOW_CHAINS];
}

static void link_last(struct ckm_flows *flows, struct ckm_flow *flow)
{
    flow->prev = flows->last;
    flow->next = NULL;
    *(flows->last ? &flows->last->next : &flows->first) = flow;
    flows->last = flow;
}

static void unlink_flow(struct ckm_flows *flows, struct ckm_flow *flow)
{
    *(flow->prev ? &flow->prev->next : &flows->first) = flow->next;
    *(flow->next ? &flow->next->prev : &flows->last) = flow->prev;
}

/* Empties a flow, as for a new connection; a frame in the middle is lost. */
static void restart(struct ckm_core *core, struct ckm_flow *flow, const char *reason)
{
    if (is_filling(flow)) {
        char detail[96];
        snprintf(detail, sizeof detail, "after byte %" PRIu64, flow->next_offset);
        damage(core, flow, reason, detail);
    }
    leave_frame(flow);
    core->counters.held_bytes -= flow->held.bytes;
    ckm_reorder_clear(&flow->held);
    struct ckm_flow empty = {.chain = flow->chain, .prev = flow->prev, .next = flow->next, .key = flow->key};
    *flow = empty;
}

static void remove_flow(struct ckm_core *core, struct ckm_flow *flow, const char *reason)
{
    restart(core, flow, reason);
    struct ckm_flow **link = chain_of(&core->flows, &flow->key);
    while (*link != flow)
        link = &(*link)->chain;
    *link = flow->chain;
    unlink_flow(&core->flows, flow);
    core->counters.flows--;
    free(flow);
}

static struct ckm_flow *find_flow(struct ckm_core *core, const struct ckm_segment *segment)
{
    const struct ckm_flow_key *key = &segment->key;
    struct ckm_flow **chain = chain_of(&core->flows, key), *flow = *chain;
    while (flow && (flow->key.src_ip != key->src_ip || flow->key.src_port != key->src_port ||
                    flow->key.dst_port != key->dst_port))
        flow = flow->chain;
    if (flow)
        return flow;
    if (core->counters.flows >= core->config.max_flows)
        remove_flow(core, core->flows.first, "flow was given up: more than max_flows are active");
    chain = chain_of(&core->flows, key);
    flow = calloc(1, sizeof *flow);
    if (!flow)
        return NULL;
    flow->key = *key;
    flow->first_seq = segment->seq;
    flow->chain = *chain;
    *chain = flow;
    link_last(&core->flows, flow);
    core->counters.flows++;
    return flow;
}

/* Stream offset of a sequence number: the one nearest to what is expected or, before that is known, to the first that
 * was seen, so that a shadow that comes late finds its place. Negative: before the stream's start. */
static int64_t offset_of(const struct ckm_flow *flow, uint32_t seq)
{
    uint64_t near = flow->next_offset ? flow->next_offset : flow->first_seq;
    return (int64_t)near + (int32_t)(seq - (uint32_t)near);
}

/* A copy's first segment on addresses and ports that were used before: SYNs are not copied, so only its frame tells. */
static int is_new_connection(const struct ckm_flow *flow, const struct ckm_segment *segment)
{
    struct ckm_frame first;
    if (segment->seq != 0 || segment->length < sizeof first || !ckm_header_intact(segment->data))
        return 0;
    memcpy(&first, segment->data, sizeof first);
    if (!flow->identified)
        return offset_of(flow, 0) != 0;
    if (first.incarnation != flow->incarnation || first.comm_id != flow->comm_id)
        return 1;
    /* The same job and communicator: the first frame again, a frame at the wrap, or another first frame. */
    return flow->first_crc && flow->next_offset < UINT32_MAX / 2 && first.header_crc != flow->first_crc;
}

void ckm_flows_segment(struct ckm_core *core, const struct ckm_segment *segment, uint64_t now_us)
{
    struct ckm_flow *flow = find_flow(core, segment);
    if (!flow)
        return; /* out of memory: the stream shows the hole */
    if (core->flows.last != flow) {
        unlink_flow(&core->flows, flow);
        link_last(&core->flows, flow);
    }
    if (is_new_connection(flow, segment)) {
        core->counters.flow_restarts++;
        restart(core, flow, "a new connection took the place of the flow");
    }
    int64_t offset = offset_of(flow, segment->seq);
    if (offset < 0) {
        core->counters.duplicates++;
        return;
    }
    take_segment(core, flow, (uint64_t)offset, segment->data, segment->length, now_us);
}

void ckm_flows_retry(struct ckm_core *core, uint64_t now_us)
{
    while (core->freed) {
        core->freed = 0;
        for (struct ckm_flow *flow = core->flows.first; flow; flow = flow->next)
            if (flow->blocked_us)
                advance(core, flow, 0, now_us);
    }
}

/* When the flow has waited long enough; UINT64_MAX: it does not wait. */
static uint64_t deadline_of(const struct ckm_core *core, const struct ckm_flow *flow)
{
    if (flow->blocked_us)
        return flow->blocked_us + core->config.gap_timeout_us;
    return flow->held.first ? flow->held.first->arrived_us + core->config.gap_timeout_us : UINT64_MAX;
}

uint64_t ckm_flows_tick(struct ckm_core *core, uint64_t now_us)
{
    uint64_t next = UINT64_MAX;
    for (struct ckm_flow *flow = core->flows.first; flow; flow = flow->next) {
        while (deadline_of(core, flow) <= now_us) {
            if (flow->blocked_us)
                advance(core, flow, 1, now_us);
            else
                give_up_hole(core, flow, now_us);
        }
        uint64_t deadline = deadline_of(core, flow);
        next = deadline < next ? deadline : next;
    }
    return next == UINT64_MAX ? next : next - now_us;
}

void ckm_flows_reset(struct ckm_group *group)
{
    struct ckm_core *core = group->core;
    for (struct ckm_flow *flow = core->flows.first, *next; flow; flow = next) {
        next = flow->next;
        if (flow->group == group || (!flow->group && core->ngroups == 1))
            remove_flow(core, flow, "flow was forgotten");
    }
}

void ckm_flows_free(struct ckm_core *core)
{
    while (core->flows.first)
        remove_flow(core, core->flows.first, "flow was forgotten");
}

void ckm_flows_describe(const struct ckm_group *group, char *out, size_t size, size_t *used)
{
    for (const struct ckm_flow *flow = group->core->flows.first; flow; flow = flow->next) {
        char text[FLOW_TEXT];
        if (flow->identified && flow->group != group)
            continue;
        describe(flow, text);
        if (flow->blocked_us)
            ckm_append(out, size, used, "\n%s: waits for a free gradient set at byte %" PRIu64, text,
                       flow->next_offset);
        else if (flow->held.first)
            ckm_append(out, size, used, "\n%s: bytes %" PRIu64 "..%" PRIu64 " have not arrived", text,
                       flow->next_offset, flow->held.first->offset);
        else if (flow->state == CKM_FLOW_PAYLOAD)
            ckm_append(out, size, used, "\n%s: bytes %" PRIu64 "..%" PRIu64 " have not arrived", text,
                       flow->next_offset, flow->next_offset + flow->left);
        else if (flow->state == CKM_FLOW_SEEK)
            ckm_append(out, size, used, "\n%s: no valid frame since byte %" PRIu64, text, flow->lost_from);
    }
    append_causes(group->core, out, size, used);
}
