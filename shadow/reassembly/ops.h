/* Operations: one all-reduce (bucket) of one iteration each, from its first frame to the release of its buffer. */
#ifndef CHECKMATE_REASSEMBLY_OPS_H
#define CHECKMATE_REASSEMBLY_OPS_H

#include "events.h"
#include "layout.h"
#include "pool.h"

struct ckm_group;

enum ckm_op_state {
    CKM_OP_FILLING,
    CKM_OP_COMPLETE, /* handed out, not released yet */
    CKM_OP_RELEASED, /* remembered, so that a second copy is noticed */
    CKM_OP_DAMAGED,  /* remembered, so that the rest of it is dropped */
};

struct ckm_op {
    struct ckm_op *prev, *next; /* all operations, in order of creation */
    struct ckm_op *chain;       /* of its hash bucket */
    enum ckm_op_state state;
    uint32_t refs; /* the list, and each frame that is being received */
    uint32_t incarnation, bucket;
    uint64_t iteration, id;
    uint64_t comm_id, coll_seq;
    struct ckm_signature signature;
    uint64_t total, received; /* bytes; received are verified */
    struct ckm_buffer *buffer;
    struct ckm_layout *layout; /* NULL: learning, then slices are listed and staged in order of arrival */
    uint8_t *seen;             /* with a layout: which slots have been claimed */
    struct ckm_slice *slices;
    size_t nslices, slices_room;
    uint64_t staged;
    char why[160]; /* damaged: the reason */
};

#define CKM_OP_CHAINS 1024u

struct ckm_ops {
    struct ckm_op *first, *last;
    struct ckm_op *chains[CKM_OP_CHAINS]; /* of the present incarnation */
    uint64_t newest;                      /* iteration */
    uint64_t next_id;
    uint32_t count;
};

enum ckm_claim {
    CKM_CLAIM_PLACE, /* payload goes to dst */
    CKM_CLAIM_SKIP,  /* payload is of no use */
    CKM_CLAIM_WAIT,  /* no free set or buffer now: try again, or force */
};

/* Finds the place of a checked header's payload. op (referenced) and dst are set for CKM_CLAIM_PLACE only. With
 * force, what stands in the way is given up, so that the answer isn't CKM_CLAIM_WAIT. flow says for reports where the
 * frame came from. */
enum ckm_claim ckm_op_claim(struct ckm_group *group, const struct ckm_frame *header, const char *flow, int force,
                            struct ckm_op **op, uint8_t **dst);
/* The frame's payload is there and verified. */
void ckm_op_received(struct ckm_group *group, struct ckm_op *op, uint32_t length);
/* The operation, if it is still filling, will never complete. */
void ckm_op_damage(struct ckm_group *group, struct ckm_op *op, const char *reason, const char *where);
void ckm_op_unref(struct ckm_op *op);
struct ckm_op *ckm_op_find(struct ckm_group *group, uint64_t iteration, uint32_t bucket);

int ckm_ops_release(struct ckm_group *group, uint64_t id);
/* Forgets all but complete operations; those stay until they are released. */
void ckm_ops_reset(struct ckm_group *group);
void ckm_ops_discard(struct ckm_group *group, uint64_t iteration);
void ckm_ops_free(struct ckm_group *group);

/* Damage that no operation stands for. iteration and bucket may be NULL. */
void ckm_damage(struct ckm_group *group, uint32_t incarnation, const uint64_t *iteration, const uint32_t *bucket,
                const char *reason, const char *where);

/* Appends to a text of bounded size; *used counts what would have been written. */
__attribute__((format(printf, 4, 5))) void ckm_append(char *out, size_t size, size_t *used, const char *format, ...);
void ckm_op_describe_missing(const struct ckm_op *op, char *out, size_t size, size_t *used);

#endif
