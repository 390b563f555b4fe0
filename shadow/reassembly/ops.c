#include "ops.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core.h"
#include "header.h"

#define MAX_OPS    65536u
#define MAX_SLICES (1u << 20) /* listed of one operation while learning */
#define MAX_RANGES 8u         /* named of one operation in a report */

void ckm_append(char *out, size_t size, size_t *used, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    size_t room = *used < size ? size - *used : 0;
    int written = vsnprintf(room ? out + *used : NULL, room, format, args);
    va_end(args);
    *used += written > 0 ? (size_t)written : 0;
}

void ckm_damage(struct ckm_group *group, uint32_t incarnation, const uint64_t *iteration, const uint32_t *bucket,
                const char *reason, const char *where)
{
    struct ckm_event event = {
        .kind = CKM_EVENT_DAMAGE,
        .incarnation = incarnation,
        .iteration = iteration ? *iteration : 0,
        .has_iteration = iteration != NULL,
        .bucket = bucket ? *bucket : 0,
        .has_bucket = bucket != NULL,
    };
    snprintf(event.reason, sizeof event.reason, "%s", reason);
    snprintf(event.where, sizeof event.where, "%s", where);
    group->core->counters.damages++;
    ckm_events_put(&group->events, &event);
}

/* The table */

static struct ckm_op **chain_of(struct ckm_ops *ops, uint64_t iteration, uint32_t bucket)
{
    uint64_t hash = (iteration * 0x9e3779b97f4a7c15u) ^ (bucket * 0xc2b2ae3d27d4eb4fu);
    return &ops->chains[(hash >> 32) % CKM_OP_CHAINS];
}

struct ckm_op *ckm_op_find(struct ckm_group *group, uint64_t iteration, uint32_t bucket)
{
    struct ckm_op *op = *chain_of(&group->ops, iteration, bucket);
    while (op && (op->iteration != iteration || op->bucket != bucket))
        op = op->chain;
    return op;
}

static void unchain(struct ckm_ops *ops, struct ckm_op *op)
{
    struct ckm_op **link = chain_of(ops, op->iteration, op->bucket);
    while (*link && *link != op)
        link = &(*link)->chain;
    if (*link)
        *link = op->chain;
}

static void free_contents(struct ckm_group *group, struct ckm_op *op)
{
    if (op->buffer) {
        ckm_pool_give(&group->core->pool, op->buffer);
        group->core->freed = 1;
    }
    ckm_layout_unref(op->layout);
    free(op->seen);
    free(op->slices);
    op->buffer = NULL;
    op->layout = NULL;
    op->seen = NULL;
    op->slices = NULL;
}

void ckm_op_unref(struct ckm_op *op)
{
    if (--op->refs == 0)
        free(op);
}

static void remove_op(struct ckm_group *group, struct ckm_op *op)
{
    struct ckm_ops *ops = &group->ops;
    unchain(ops, op);
    *(op->prev ? &op->prev->next : &ops->first) = op->next;
    *(op->next ? &op->next->prev : &ops->last) = op->prev;
    ops->count--;
    free_contents(group, op);
    op->state = CKM_OP_DAMAGED; /* for frames that still refer to it */
    ckm_op_unref(op);
}

void ckm_op_damage(struct ckm_group *group, struct ckm_op *op, const char *reason, const char *where)
{
    if (op->state != CKM_OP_FILLING)
        return;
    free_contents(group, op);
    op->state = CKM_OP_DAMAGED;
    snprintf(op->why, sizeof op->why, "%s", reason);
    ckm_damage(group, op->incarnation, &op->iteration, &op->bucket, reason, where);
}

/* Admission of new operations */

static int is_live(const struct ckm_op *op)
{
    return op->state == CKM_OP_FILLING || op->state == CKM_OP_COMPLETE;
}

static int is_past(const struct ckm_group *group, uint64_t iteration, uint64_t newest)
{
    return newest >= group->core->config.sets && iteration <= newest - group->core->config.sets;
}

static void give_up_op(struct ckm_group *group, struct ckm_op *op, uint64_t iteration)
{
    char reason[160], where[256];
    size_t used = 0;
    snprintf(reason, sizeof reason, "incomplete when iteration %" PRIu64 " arrived, %u iterations are held at most",
             iteration, group->core->config.sets);
    ckm_op_describe_missing(op, where, sizeof where, &used);
    ckm_op_damage(group, op, reason, where);
}

/* Makes the window of iterations end at this one. 0 when an older one stands in the way: always when it is complete
 * and held by the consumer, without force also when it is incomplete. */
static int make_way(struct ckm_group *group, uint64_t iteration, int force)
{
    int clear = 1;
    for (struct ckm_op *op = group->ops.first, *next; op; op = next) {
        next = op->next;
        if (op->incarnation != group->incarnation || !is_past(group, op->iteration, iteration))
            continue;
        if (force && op->state == CKM_OP_FILLING)
            give_up_op(group, op, iteration);
        if (is_live(op))
            clear = 0;
        else if (force || op->state != CKM_OP_FILLING)
            remove_op(group, op);
    }
    return clear;
}

static struct ckm_op *new_op(struct ckm_group *group, const struct ckm_frame *header)
{
    struct ckm_ops *ops = &group->ops;
    struct ckm_op *op = ops->count < MAX_OPS ? calloc(1, sizeof *op) : NULL;
    if (!op)
        return NULL;
    op->refs = 1;
    op->incarnation = header->incarnation;
    op->iteration = header->iteration;
    op->bucket = header->bucket;
    op->comm_id = header->comm_id;
    op->coll_seq = header->coll_seq;
    op->signature = ckm_signature_of(header);
    op->total = header->op_count * ckm_datatype_bytes(header->datatype);
    op->id = ++ops->next_id;
    op->prev = ops->last;
    *(ops->last ? &ops->last->next : &ops->first) = op;
    ops->last = op;
    struct ckm_op **chain = chain_of(ops, op->iteration, op->bucket);
    op->chain = *chain;
    *chain = op;
    ops->count++;
    return op;
}

static int prepare_contents(struct ckm_group *group, struct ckm_op *op)
{
    op->layout = ckm_layouts_get(group->layouts, &op->signature);
    if (!op->layout)
        return 0;
    op->layout->refs++;
    op->seen = calloc(ckm_layout_slots(op->layout), 1);
    return op->seen ? 0 : -1;
}

/* The operation of a header that has none yet. NULL with *claim saying what to do. */
static struct ckm_op *admit(struct ckm_group *group, const struct ckm_frame *h, const char *flow, int force,
                            enum ckm_claim *claim)
{
    const char *refused = NULL;
    *claim = CKM_CLAIM_SKIP;
    if (h->iteration > group->horizon) {
        group->core->counters.beyond++;
        return NULL;
    }
    if (is_past(group, h->iteration, group->ops.newest)) {
        group->core->counters.late++;
        if (h->payload_len && group->late_iteration != h->iteration)
            ckm_damage(group, h->incarnation, &h->iteration, &h->bucket, "arrived after newer iterations", flow);
        group->late_iteration = h->iteration;
        return NULL;
    }
    /* Once the window has moved to an iteration, what stood in its way then is no reason to wait again. */
    int moved = h->iteration <= group->ops.newest;
    int clear = make_way(group, h->iteration, force || moved);
    uint64_t total = h->op_count * ckm_datatype_bytes(h->datatype);
    struct ckm_buffer *buffer = clear ? ckm_pool_take(&group->core->pool, total) : NULL;
    if (!buffer && !force && (clear || !moved)) {
        *claim = CKM_CLAIM_WAIT;
        return NULL;
    }
    if (!clear)
        refused = "all gradient sets are held: the trainer outran the shadow";
    else if (!buffer)
        refused = "no gradient buffer is free within pool_bytes: the trainer outran the shadow";
    struct ckm_op *op = new_op(group, h);
    if (!op) {
        if (buffer)
            ckm_pool_give(&group->core->pool, buffer);
        ckm_damage(group, h->incarnation, &h->iteration, &h->bucket, "too many operations in flight", flow);
        return NULL;
    }
    op->buffer = buffer;
    group->ops.newest = h->iteration > group->ops.newest ? h->iteration : group->ops.newest;
    if (!refused && prepare_contents(group, op))
        refused = "out of memory";
    if (refused)
        ckm_op_damage(group, op, refused, flow);
    return op;
}

/* Placement */

static void describe_frame(const struct ckm_frame *h, const char *flow, char *out, size_t size)
{
    struct ckm_place p = ckm_place(h->step, h->slices_per_chunk, h->ring_pos, h->nranks);
    snprintf(out, size, "channel %u loop %u chunk %u slice %u (%u bytes), %s", h->channel, p.loop, p.chunk, p.slice,
             h->payload_len, flow);
}

static void damage_at(struct ckm_group *group, struct ckm_op *op, const struct ckm_frame *h, const char *flow,
                      const char *reason)
{
    char where[256];
    describe_frame(h, flow, where, sizeof where);
    ckm_op_damage(group, op, reason, where);
}

/* Place in the staged bytes of an operation whose layout is being learned. */
static uint8_t *stage(struct ckm_group *group, struct ckm_op *op, const struct ckm_frame *h, const char *flow)
{
    if (op->staged + h->payload_len > op->total || op->nslices >= MAX_SLICES) {
        damage_at(group, op, h, flow, "more bytes or slices than the operation can have");
        return NULL;
    }
    if (op->nslices == op->slices_room) {
        size_t room = op->slices_room ? 2 * op->slices_room : 64;
        struct ckm_slice *grown = realloc(op->slices, room * sizeof *grown);
        if (!grown) {
            damage_at(group, op, h, flow, "out of memory");
            return NULL;
        }
        op->slices = grown;
        op->slices_room = room;
    }
    struct ckm_place p = ckm_place(h->step, h->slices_per_chunk, h->ring_pos, h->nranks);
    op->slices[op->nslices++] = (struct ckm_slice){
        .channel = h->channel,
        .loop = p.loop,
        .chunk = p.chunk,
        .slice = p.slice,
        .length = h->payload_len,
        .offset = op->staged,
    };
    op->staged += h->payload_len;
    return op->buffer->data + op->staged - h->payload_len;
}

static uint8_t *place(struct ckm_group *group, struct ckm_op *op, const struct ckm_frame *h, const char *flow)
{
    struct ckm_place p = ckm_place(h->step, h->slices_per_chunk, h->ring_pos, h->nranks);
    size_t slot = ckm_layout_find(op->layout, h->channel, &p);
    if (slot == SIZE_MAX && !h->payload_len)
        return op->buffer->data; /* of a channel or loop that held nothing when the layout was learned */
    if (slot == SIZE_MAX || op->layout->slots[slot].length != h->payload_len) {
        /* The sender cuts this signature differently now: learn it afresh rather than refuse it for ever. */
        ckm_layouts_forget(&group->layouts, &op->signature);
        damage_at(group, op, h, flow, "slice does not fit the layout of operations of this kind");
        return NULL;
    }
    if (op->seen[slot]) {
        damage_at(group, op, h, flow, "slice arrived twice");
        return NULL;
    }
    op->seen[slot] = 1;
    return op->buffer->data + op->layout->slots[slot].offset;
}

static int same_operation(const struct ckm_op *op, const struct ckm_frame *h)
{
    struct ckm_signature signature = ckm_signature_of(h);
    return op->comm_id == h->comm_id && op->coll_seq == h->coll_seq && ckm_signature_equal(&op->signature, &signature);
}

/* A frame for an operation that takes no more. */
static void refuse_late(struct ckm_group *group, const struct ckm_op *op, const struct ckm_frame *h, const char *flow)
{
    group->core->counters.late++;
    /* Empty slices may well come after the last byte. */
    if (op->state == CKM_OP_DAMAGED || (same_operation(op, h) && !h->payload_len))
        return;
    char where[256];
    describe_frame(h, flow, where, sizeof where);
    ckm_damage(group, h->incarnation, &h->iteration, &h->bucket,
               same_operation(op, h) ? "slice of an operation that was already complete"
                                     : "second operation for the same iteration and bucket",
               where);
}

enum ckm_claim ckm_op_claim(struct ckm_group *group, const struct ckm_frame *h, const char *flow, int force,
                            struct ckm_op **op_out, uint8_t **dst)
{
    struct ckm_op *op = ckm_op_find(group, h->iteration, h->bucket);
    if (!op) {
        enum ckm_claim claim;
        op = admit(group, h, flow, force, &claim);
        if (!op)
            return claim;
    } else if (op->state != CKM_OP_FILLING) {
        refuse_late(group, op, h, flow);
        return CKM_CLAIM_SKIP;
    } else if (!same_operation(op, h)) {
        damage_at(group, op, h, flow, "second operation for the same iteration and bucket");
    }
    if (op->state != CKM_OP_FILLING)
        return CKM_CLAIM_SKIP;
    *dst = op->layout ? place(group, op, h, flow) : stage(group, op, h, flow);
    if (!*dst)
        return CKM_CLAIM_SKIP;
    op->refs++;
    *op_out = op;
    return CKM_CLAIM_PLACE;
}

/* Completion */

/* Learns the layout from what is staged and moves the bytes to their places. -1: the operation isn't complete yet,
 * for want of empty slices, or is damaged. */
static int settle(struct ckm_group *group, struct ckm_op *op)
{
    char error[128];
    struct ckm_layout *layout = NULL;
    /* Sorting them is worth while only when all loops can be whole. */
    if (op->nslices % ((size_t)op->signature.nranks * op->signature.slices_per_chunk))
        return -1;
    int bad = ckm_layout_learn(&op->signature, op->slices, op->nslices, &layout, error, sizeof error);
    if (bad < 0)
        ckm_op_damage(group, op, "no layout fits the slices that arrived", error);
    if (bad)
        return -1;
    op->layout = layout; /* the operation's reference */
    struct ckm_layout *known = ckm_layouts_get(group->layouts, &op->signature);
    if (known && !ckm_layout_equal(known, layout)) {
        ckm_layouts_forget(&group->layouts, &op->signature);
        ckm_op_damage(group, op, "operations of the same kind are cut differently", "whole operation");
        return -1;
    }
    struct ckm_buffer *placed = ckm_pool_take(&group->core->pool, op->total);
    if (!placed) {
        ckm_op_damage(group, op, "no gradient buffer is free within pool_bytes to learn the layout", "whole operation");
        return -1;
    }
    uint64_t offset = 0;
    for (size_t i = 0; i < op->nslices; offset += op->slices[i++].length)
        memcpy(placed->data + offset, op->buffer->data + op->slices[i].offset, op->slices[i].length);
    ckm_pool_give(&group->core->pool, op->buffer);
    op->buffer = placed;
    if (!known)
        ckm_layouts_put(&group->layouts, layout);
    return 0;
}

void ckm_op_received(struct ckm_group *group, struct ckm_op *op, uint32_t length)
{
    op->received += length;
    if (op->received < op->total || (!op->layout && settle(group, op)))
        return;
    free(op->slices);
    free(op->seen);
    op->slices = NULL;
    op->seen = NULL;
    op->state = CKM_OP_COMPLETE;
    group->core->counters.ops++;
    struct ckm_event event = {
        .kind = CKM_EVENT_COMPLETE,
        .incarnation = op->incarnation,
        .iteration = op->iteration,
        .has_iteration = 1,
        .bucket = op->bucket,
        .has_bucket = 1,
        .datatype = op->signature.datatype,
        .op = op->id,
        .data = op->buffer->data,
        .bytes = op->total,
        .count = op->signature.count,
        .comm_id = op->comm_id,
        .coll_seq = op->coll_seq,
        .at_us = ckm_now_us(),
    };
    if (ckm_events_put(&group->events, &event)) { /* out of memory: nobody would ever release it */
        free_contents(group, op);
        op->state = CKM_OP_DAMAGED;
    }
}

/* Release */

int ckm_ops_release(struct ckm_group *group, uint64_t id)
{
    struct ckm_op *op = group->ops.first;
    while (op && op->id != id)
        op = op->next;
    if (!op || op->state != CKM_OP_COMPLETE)
        return -1;
    free_contents(group, op);
    op->state = CKM_OP_RELEASED;
    if (op->incarnation != group->incarnation || is_past(group, op->iteration, group->ops.newest))
        remove_op(group, op);
    return 0;
}

void ckm_ops_reset(struct ckm_group *group)
{
    for (struct ckm_op *op = group->ops.first, *next; op; op = next) {
        next = op->next;
        if (op->state == CKM_OP_COMPLETE)
            unchain(&group->ops, op);
        else
            remove_op(group, op);
    }
    group->ops.newest = 0;
    group->core->freed = 1;
}

void ckm_ops_discard(struct ckm_group *group, uint64_t iteration)
{
    for (struct ckm_op *op = group->ops.first; op; op = op->next)
        if (op->state == CKM_OP_FILLING && op->iteration <= iteration) {
            free_contents(group, op);
            op->state = CKM_OP_DAMAGED;
            snprintf(op->why, sizeof op->why, "discarded");
        }
    group->core->freed = 1;
}

void ckm_ops_free(struct ckm_group *group)
{
    while (group->ops.first)
        remove_op(group, group->ops.first);
}

void ckm_op_describe_missing(const struct ckm_op *op, char *out, size_t size, size_t *used)
{
    ckm_append(out, size, used, "iteration %" PRIu64 " bucket %u: ", op->iteration, op->bucket);
    if (op->state == CKM_OP_DAMAGED) {
        ckm_append(out, size, used, "%s", op->why);
        return;
    }
    ckm_append(out, size, used, "%" PRIu64 " of %" PRIu64 " bytes missing", op->total - op->received, op->total);
    if (!op->layout)
        return;
    unsigned named = 0;
    for (size_t i = 0; i < ckm_layout_slots(op->layout); i++) {
        const struct ckm_slice *s = &op->layout->slots[i];
        if (op->seen[i] || !s->length)
            continue;
        if (++named > MAX_RANGES) {
            ckm_append(out, size, used, ", …");
            return;
        }
        ckm_append(out, size, used, "%s channel %u loop %u chunk %u slice %u at %" PRIu64 "..%" PRIu64,
                   named == 1 ? ":" : ",", s->channel, s->loop, s->chunk, s->slice, s->offset, s->offset + s->length);
    }
}
