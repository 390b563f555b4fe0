/* Flows: a 32-bit sequence window that wraps becomes a 64-bit stream offset, the stream becomes frames. */
#ifndef CHECKMATE_REASSEMBLY_FLOW_H
#define CHECKMATE_REASSEMBLY_FLOW_H

#include "ops.h"
#include "packet.h"
#include "reorder.h"

enum ckm_flow_state {
    CKM_FLOW_HEADER, /* in step: header bytes are collected */
    CKM_FLOW_CLAIM,  /* a header is whole, its payload has no place yet */
    CKM_FLOW_PAYLOAD,
    CKM_FLOW_SEEK, /* out of step: looking for the next valid header */
};

struct ckm_flow {
    struct ckm_flow *chain;       /* of its hash bucket */
    struct ckm_flow *prev, *next; /* all flows, least recently used first */
    struct ckm_flow_key key;
    uint64_t next_offset; /* stream offset of the next byte; the first byte has offset and sequence number 0 */
    uint32_t first_seq;   /* of the first segment seen; after a restart 0 */
    struct ckm_reorder held;
    enum ckm_flow_state state;

    union {
        uint8_t bytes[CKM_HEADER_BYTES];
        struct ckm_frame fields; /* valid in CLAIM and PAYLOAD */
    } header;
    uint32_t header_have;
    struct ckm_op *op; /* payload is placed here; NULL: skipped */
    uint8_t *dst;
    uint32_t left; /* payload bytes to come */
    uint32_t crc;  /* of the payload placed so far, but for the last unchecked bytes */
    uint32_t unchecked;

    int identified;          /* a valid header was seen; first_crc is of the one at offset 0, 0: none seen */
    struct ckm_group *group; /* that its frames are of; NULL: not known, or none of the core's */
    uint32_t incarnation, first_crc;
    uint64_t comm_id;
    uint64_t last_iteration; /* of the newest frame of the present incarnation */
    uint32_t last_bucket;
    int has_last;
    uint64_t lost_from, lost_to; /* stream bytes lost since the last valid header; equal: none */
    uint64_t blocked_us;         /* since when CLAIM waits for a free set; 0: it doesn't */
};

#define CKM_FLOW_CHAINS 1024u

struct ckm_flows {
    struct ckm_flow *first, *last;
    struct ckm_flow *chains[CKM_FLOW_CHAINS];
};

void ckm_flows_segment(struct ckm_core *core, const struct ckm_segment *segment, uint64_t now_us);
/* Looks again at flows that wait for a free set, if one became free. */
void ckm_flows_retry(struct ckm_core *core, uint64_t now_us);
/* Gives up what has waited too long; microseconds until the next such moment, UINT64_MAX: none. */
uint64_t ckm_flows_tick(struct ckm_core *core, uint64_t now_us);
/* Forgets flows of this group, and, where there is no other, those that no group is known of. */
void ckm_flows_reset(struct ckm_group *group);
void ckm_flows_free(struct ckm_core *core);
/* Appends what flows that may be the group's wait for, and causes. */
void ckm_flows_describe(const struct ckm_group *group, char *out, size_t size, size_t *used);

#endif
