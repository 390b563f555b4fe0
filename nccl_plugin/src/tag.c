#include "tag.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "counters.h"
#include "hosts.h"
#include "nccl/common_abi.h"
#include "param.h"

/* A handle: magic (8 bits), kind (3), slot (12), generation (17), step (24). The magic makes it a non-canonical
 * address on every 64-bit platform. A slot's generation changes whenever it is filled again, and starts at a
 * number that differs between processes, so that a stale or foreign handle does not match. */
#define MAGIC     0xc5ull
#define SLOT_BITS 12
#define GEN_BITS  17
#define STEP_BITS 24
#define GEN_MASK  ((1u << GEN_BITS) - 1)
#define MAX_STEPS (1u << STEP_BITS)

#define MAX_BUCKETS  4096
#define MAX_CONTEXTS 1024
#define MAX_COLLS    4096
#define MAX_OPS      4096
#define MAX_CHANNELS 64         /* NCCL's MAXCHANNELS */
#define PROBE        UINT32_MAX /* number of the bucket that is one */
_Static_assert(MAX_COLLS <= 1 << SLOT_BITS && MAX_OPS <= 1 << SLOT_BITS && MAX_CONTEXTS <= 1 << SLOT_BITS, "slots");
_Static_assert(sizeof(void *) == 8, "handles need 64 bits");

/* What a probe has shown of this rank's position in a channel's ring: it is the number of chunks that the rank sends in
 * a loop before the first to which rank 0 has contributed. */
struct position {
    uint16_t value; /* chunks without, so far */
    bool known;
};

struct context {
    uint64_t comm_id;
    uint32_t rank, nranks, gen;
    uint32_t host_ranks; /* on rank 0's host: ranks below this number; 0: not known */
    uint16_t group;
    bool used;
    struct position positions[MAX_CHANNELS];
};

/* Taken at the start of the collective, on the application's thread: the iteration is the caller's. */
struct coll {
    uint64_t iteration, seq, count;
    uint32_t incarnation, bucket, channels, gen;
    uint8_t datatype;
};

struct op {
    struct ckm_frame frame; /* every field that the operation's messages have in common */
    const void *probing;    /* the communicator of a probe, else NULL */
    _Atomic uint32_t gen;   /* 0: free */
    uint16_t next_free;
};

struct bucket {
    const void *ptr;
    size_t bytes;
    uint32_t number;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct bucket buckets[MAX_BUCKETS];
static uint32_t nbuckets;
static struct context contexts[MAX_CONTEXTS];
static struct coll colls[MAX_COLLS];
static struct op ops[MAX_OPS];
static uint32_t next_coll, next_gen, ops_used, first_free_op = MAX_OPS;
static _Atomic uint64_t iteration;
static _Atomic uint32_t incarnation, profiled, registered;

static void *make_handle(enum ckm_handle_kind kind, uint32_t slot, uint32_t gen, uint32_t step)
{
    uint64_t h = MAGIC << 56 | (uint64_t)kind << 53 | (uint64_t)slot << (GEN_BITS + STEP_BITS) |
                 (uint64_t)gen << STEP_BITS | step;
    return (void *)(uintptr_t)h;
}

enum ckm_handle_kind ckm_handle_kind(const void *handle)
{
    uint64_t h = (uintptr_t)handle;
    return h >> 56 == MAGIC ? (enum ckm_handle_kind)(h >> 53 & 7) : 0;
}

static uint32_t handle_slot(const void *handle)
{
    return (uintptr_t)handle >> (GEN_BITS + STEP_BITS) & ((1u << SLOT_BITS) - 1);
}

static uint32_t handle_gen(const void *handle)
{
    return (uintptr_t)handle >> STEP_BITS & GEN_MASK;
}

static uint32_t new_gen(void) /* never 0; under the lock */
{
    if (next_gen == 0)
        next_gen = (uint32_t)getpid() * 2654435761u ^ (uint32_t)time(NULL);
    do
        next_gen++;
    while ((next_gen & GEN_MASK) == 0);
    return next_gen & GEN_MASK;
}

/* The three look-ups; under the lock. NULL unless the handle is of the right kind and its slot still holds it. */
static struct context *find_context(const void *handle)
{
    struct context *c = contexts + handle_slot(handle);
    if (ckm_handle_kind(handle) != CKM_HANDLE_CONTEXT || handle_slot(handle) >= MAX_CONTEXTS)
        return NULL;
    return c->used && c->gen == handle_gen(handle) ? c : NULL;
}

static struct coll *find_coll(const void *handle)
{
    struct coll *c = colls + handle_slot(handle);
    return ckm_handle_kind(handle) == CKM_HANDLE_COLL && c->gen == handle_gen(handle) ? c : NULL;
}

static struct op *find_op(const void *handle, enum ckm_handle_kind kind)
{
    struct op *o = ops + handle_slot(handle);
    if (ckm_handle_kind(handle) != kind)
        return NULL;
    return atomic_load_explicit(&o->gen, memory_order_acquire) == handle_gen(handle) ? o : NULL;
}

/* The training side */

int checkmate_register_bucket(const void *ptr, size_t bytes, uint32_t bucket)
{
    uint32_t kept = 0;
    int rc = 0;

    if (!ptr || bytes == 0)
        return -EINVAL;
    pthread_mutex_lock(&lock);
    for (uint32_t i = 0; i < nbuckets; i++)
        if (buckets[i].ptr != ptr && buckets[i].number != bucket)
            buckets[kept++] = buckets[i];
    if (kept < MAX_BUCKETS)
        buckets[kept++] = (struct bucket){ptr, bytes, bucket};
    else
        rc = -ENOSPC;
    nbuckets = kept;
    registered = kept;
    pthread_mutex_unlock(&lock);
    return rc;
}

int checkmate_register_probe(const void *ptr, size_t bytes)
{
    return checkmate_register_bucket(ptr, bytes, PROBE);
}

void checkmate_unregister_buckets(void)
{
    pthread_mutex_lock(&lock);
    nbuckets = 0;
    registered = 0;
    pthread_mutex_unlock(&lock);
}

void checkmate_set_iteration(uint64_t value)
{
    iteration = value;
}

void checkmate_set_incarnation(uint32_t value)
{
    incarnation = value;
}

/* The profiler's side */

void *ckm_tag_group(void)
{
    return make_handle(CKM_HANDLE_GROUP, 0, 0, 0);
}

void *ckm_tag_context(uint64_t comm_id, uint32_t rank, uint32_t nranks)
{
    void *handle = NULL;

    pthread_mutex_lock(&lock);
    for (uint32_t i = 0; i < MAX_CONTEXTS && !handle; i++)
        if (!contexts[i].used) {
            contexts[i] = (struct context){.comm_id = comm_id,
                                           .rank = rank,
                                           .nranks = nranks,
                                           .gen = new_gen(),
                                           .host_ranks = ckm_first_host_ranks(nranks),
                                           .group = ckm_group_number(ckm_param_text(CKM_GROUP)),
                                           .used = true};
            handle = make_handle(CKM_HANDLE_CONTEXT, i, contexts[i].gen, 0);
            profiled++;
        }
    pthread_mutex_unlock(&lock);
    if (!handle)
        ckm_untagged(CHECKMATE_NO_ROOM);
    return handle;
}

void ckm_tag_context_free(void *handle)
{
    pthread_mutex_lock(&lock);
    struct context *context = find_context(handle);
    if (context) {
        context->used = false;
        profiled--;
    }
    pthread_mutex_unlock(&lock);
}

bool ckm_tag_profiled(void)
{
    return profiled != 0;
}

void ckm_tag_missing(void)
{
    if (registered && !profiled && incarnation)
        ckm_untagged(CHECKMATE_NO_PROFILER);
}

static const struct datatype {
    const char *name;
    uint8_t number, bytes;
} datatypes[] = {
    {"ncclFloat32", NCCL_FLOAT32, 4},
    {"ncclFloat64", NCCL_FLOAT64, 8},
    {"ncclFloat16", NCCL_FLOAT16, 2},
    {"ncclBfloat16", NCCL_BFLOAT16, 2},
};

static const struct datatype *find_datatype(const char *name)
{
    for (size_t i = 0; i < sizeof datatypes / sizeof *datatypes; i++)
        if (name && strcmp(name, datatypes[i].name) == 0)
            return datatypes + i;
    return NULL;
}

static bool differs(const char *a, const char *b)
{
    return !a || strcmp(a, b) != 0;
}

/* Why the collective is not tagged, or CHECKMATE_REASONS when it is, or is a probe. */
static enum checkmate_reason judge(const struct context *context, const struct ckm_coll *coll,
                                   const struct bucket *bucket, const struct datatype *type)
{
    if (!context || !bucket)
        return CHECKMATE_NOT_REGISTERED;
    if (differs(coll->func, "AllReduce"))
        return CHECKMATE_NOT_ALLREDUCE;
    if (!type)
        return CHECKMATE_BAD_DATATYPE;
    if (bucket->bytes % type->bytes || coll->count != bucket->bytes / type->bytes)
        return CHECKMATE_SIZE_MISMATCH;
    if (differs(coll->algo, "RING"))
        return CHECKMATE_NOT_RING;
    if (differs(coll->proto, "SIMPLE"))
        return CHECKMATE_NOT_SIMPLE;
    if (incarnation == 0 && bucket->number != PROBE)
        return CHECKMATE_NO_INCARNATION;
    if (context->host_ranks == 0)
        return CHECKMATE_OTHER_HOSTS;
    if (context->host_ranks == context->nranks)
        return CHECKMATE_ONE_HOST;
    return CHECKMATE_REASONS;
}

static const struct bucket *find_bucket(const void *ptr)
{
    for (uint32_t i = 0; i < nbuckets; i++)
        if (buckets[i].ptr == ptr)
            return buckets + i;
    return NULL;
}

void *ckm_tag_coll(void *context_handle, const struct ckm_coll *coll)
{
    const struct datatype *type = find_datatype(coll->datatype);
    void *handle = NULL;

    pthread_mutex_lock(&lock);
    const struct bucket *bucket = find_bucket(coll->send_buffer);
    enum checkmate_reason reason = judge(find_context(context_handle), coll, bucket, type);
    if (reason == CHECKMATE_REASONS) {
        uint32_t slot = next_coll++ % MAX_COLLS; /* NCCL never says when the last operation has started */
        colls[slot] = (struct coll){.iteration = iteration,
                                    .seq = coll->seq,
                                    .count = coll->count,
                                    .incarnation = incarnation,
                                    .bucket = bucket->number,
                                    .channels = coll->channels,
                                    .gen = new_gen(),
                                    .datatype = type->number};
        handle = make_handle(CKM_HANDLE_COLL, slot, colls[slot].gen, 0);
    }
    pthread_mutex_unlock(&lock);
    if (!handle)
        ckm_untagged(reason);
    return handle;
}

static void *new_op(const struct ckm_frame *frame, const void *probing) /* under the lock */
{
    uint32_t slot = first_free_op;

    if (slot != MAX_OPS)
        first_free_op = ops[slot].next_free;
    else if (ops_used < MAX_OPS)
        slot = ops_used++;
    else
        return NULL;
    uint32_t gen = new_gen();
    ops[slot].frame = *frame;
    ops[slot].probing = probing;
    atomic_store_explicit(&ops[slot].gen, gen, memory_order_release);
    return make_handle(CKM_HANDLE_OP, slot, gen, 0);
}

/* A send from or to rank 0's host, that host being one end only: from it, the first rank's, to it, the last rank's. */
static bool crosses(const struct context *context, int peer)
{
    bool from = context->rank < context->host_ranks, to = (uint32_t)peer < context->host_ranks;
    return peer >= 0 && (uint32_t)peer < context->nranks && from != to;
}

static bool find_position(const struct context *context, bool is_first, uint32_t channel, uint16_t *position)
{
    if (context->host_ranks == 1) { /* rank 0 stands at 0, and the last rank before it */
        *position = (uint16_t)(is_first ? 0 : context->nranks - 1);
        return true;
    }
    if (channel >= MAX_CHANNELS || !context->positions[channel].known)
        return false;
    *position = context->positions[channel].value;
    return true;
}

/* Why the operation of a boundary rank is not tagged, or CHECKMATE_REASONS; under the lock. */
static enum checkmate_reason start_op(const void *context_handle, const struct context *context,
                                      const struct coll *coll, const struct ckm_op *op, void **handle)
{
    bool is_first = context->rank < context->host_ranks, is_probe = coll->bucket == PROBE;
    uint32_t per_loop = 2 * (context->nranks - 1) * CKM_SLICES_PER_CHUNK;
    uint16_t position = 0;

    if (op->steps <= 0 || (uint32_t)op->steps % per_loop || (uint32_t)op->steps > MAX_STEPS)
        return CHECKMATE_BAD_STEPS;
    if (!is_probe && !find_position(context, is_first, op->channel, &position))
        return CHECKMATE_NO_POSITION;
    if (!is_probe && !ckm_is_boundary(position, is_first, context->host_ranks, context->nranks))
        return CHECKMATE_TORN_RING;
    struct ckm_frame frame = {
        .magic = CKM_WIRE_MAGIC,
        .version = CKM_WIRE_VERSION,
        .flags = CKM_FLAG_TAGGED | CKM_FLAG_PAYLOAD_CRC | (is_first ? CKM_FLAG_FIRST : 0),
        .protocol = NCCL_PROTO_SIMPLE,
        .datatype = coll->datatype,
        .comm_id = context->comm_id,
        .iteration = coll->iteration,
        .coll_seq = coll->seq,
        .op_count = coll->count,
        .incarnation = coll->incarnation,
        .bucket = coll->bucket,
        .channel = (uint16_t)op->channel,
        .nchannels = (uint16_t)coll->channels,
        .ring_pos = position,
        .nranks = (uint16_t)context->nranks,
        .slices_per_chunk = CKM_SLICES_PER_CHUNK,
        .host_ranks = (uint8_t)context->host_ranks,
        .group = context->group,
    };
    *handle = new_op(&frame, is_probe ? context_handle : NULL);
    return *handle ? CHECKMATE_REASONS : CHECKMATE_NO_ROOM;
}

void *ckm_tag_op(void *context_handle, void *coll_handle, const struct ckm_op *op)
{
    void *handle = NULL;
    enum checkmate_reason reason = CHECKMATE_REASONS;

    if (!op->is_send || ckm_handle_kind(coll_handle) != CKM_HANDLE_COLL)
        return NULL;
    if (op->pid != getpid()) {
        ckm_untagged(CHECKMATE_OTHER_PROCESS);
        return NULL;
    }
    pthread_mutex_lock(&lock);
    const struct context *context = find_context(context_handle);
    const struct coll *coll = find_coll(coll_handle);
    bool is_probe = coll && coll->bucket == PROBE;
    if (!context || !coll)
        reason = CHECKMATE_NO_ROOM; /* so many collectives later that the slot was filled again */
    else if (crosses(context, op->peer))
        reason = start_op(context_handle, context, coll, op, &handle);
    pthread_mutex_unlock(&lock);
    if (reason != CHECKMATE_REASONS)
        ckm_untagged(reason);
    else if (handle && !is_probe)
        CKM_COUNT(tagged_ops, 1);
    return handle;
}

void ckm_tag_op_free(void *handle)
{
    pthread_mutex_lock(&lock);
    struct op *op = find_op(handle, CKM_HANDLE_OP);
    if (op) {
        atomic_store_explicit(&op->gen, 0, memory_order_release);
        op->next_free = (uint16_t)first_free_op;
        first_free_op = handle_slot(handle);
    }
    pthread_mutex_unlock(&lock);
}

/* Of a probe the first slice of each chunk up to the first final one. */
static bool is_probed(const struct ckm_place *place)
{
    return place->loop == 0 && place->slice == 0 && (!place->final || place->round == 0);
}

void *ckm_tag_step(void *op_handle, int step)
{
    struct op *op = find_op(op_handle, CKM_HANDLE_OP);

    if (!op || step < 0 || (uint32_t)step >= MAX_STEPS)
        return NULL;
    struct ckm_frame *f = &op->frame;
    struct ckm_place place = ckm_place((uint32_t)step, f->slices_per_chunk, f->ring_pos, f->nranks);
    if (op->probing ? !is_probed(&place) : !ckm_is_tagged(&place, f->flags & CKM_FLAG_FIRST, f->host_ranks))
        return NULL;
    return make_handle(CKM_HANDLE_STEP, handle_slot(op_handle), handle_gen(op_handle), (uint32_t)step);
}

/* Chunks are sent in the order of their numbers. One that cannot be looked into leaves the position unknown. */
static void probe(const struct op *op, uint32_t chunk, const void *data, size_t size)
{
    uint32_t element;

    if (op->frame.channel >= MAX_CHANNELS || size < sizeof element)
        return;
    memcpy(&element, data, sizeof element);
    pthread_mutex_lock(&lock);
    struct context *context = find_context(op->probing);
    struct position *position = context ? &context->positions[op->frame.channel] : NULL;
    if (position && !position->known && position->value == chunk) {
        position->known = element != 0;
        position->value += element == 0;
    }
    pthread_mutex_unlock(&lock);
}

bool ckm_tag_message(void *const *phandle, const void *data, size_t size, struct ckm_frame *frame)
{
    const void *handle = phandle ? *phandle : NULL;
    struct op *op = find_op(handle, CKM_HANDLE_STEP);
    uint32_t step = (uint32_t)((uintptr_t)handle & (MAX_STEPS - 1));

    if (op && op->probing)
        probe(op, step / op->frame.slices_per_chunk, data, size);
    if (!op || op->probing)
        return false;
    *frame = op->frame;
    frame->step = step;
    return atomic_load_explicit(&op->gen, memory_order_acquire) == handle_gen(handle);
}
