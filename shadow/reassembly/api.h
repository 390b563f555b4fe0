/* The receive core: packets in, complete gradient buffers and damage reports out. No DPDK here.
 *
 * Python reads this file too (cffi): only plain declarations, no macros with arguments. Every function may be
 * called from any thread. Times are microseconds of one monotonic clock.
 */
#ifndef CHECKMATE_REASSEMBLY_API_H
#define CHECKMATE_REASSEMBLY_API_H

#include <stddef.h>
#include <stdint.h>

struct ckm_core;
struct ckm_group; /* what a core holds of one data-parallel group; lives as long as the core */

struct ckm_core_config {
    uint64_t max_op_bytes;   /* largest all-reduce that is accepted */
    uint64_t pool_bytes;     /* bound of all gradient buffers together */
    uint64_t reorder_bytes;  /* bound of bytes held out of order, for each flow */
    uint64_t gap_timeout_us; /* a hole with later bytes behind it is given up after this long */
    uint32_t sets;           /* iterations in flight at most */
    uint32_t max_flows;
    uint32_t dscp; /* bit of the 6-bit DSCP field that marks the copies */
};

enum ckm_event_kind { CKM_EVENT_COMPLETE = 1, CKM_EVENT_DAMAGE = 2 };

struct ckm_event {
    uint32_t kind;
    uint32_t incarnation;
    uint64_t iteration;
    uint32_t bucket;
    uint8_t has_iteration; /* damage only: the field above is known */
    uint8_t has_bucket;
    uint8_t datatype;
    uint8_t reserved;
    uint64_t op; /* complete only: handle for ckm_core_release */
    uint8_t *data;
    uint64_t bytes;
    uint64_t count;
    uint64_t comm_id;
    uint64_t coll_seq;
    uint64_t at_us;   /* complete only: when its last frame was verified */
    char reason[192]; /* damage only */
    char where[256];
};

struct ckm_counters {
    uint64_t packets;       /* of tagged flows */
    uint64_t bytes;         /* TCP payload of those */
    uint64_t other;         /* packets that are no copies */
    uint64_t malformed;     /* impossible IP or TCP lengths, fragments */
    uint64_t truncated;     /* shorter than the IP header says: segmentation offload at the sender's side */
    uint64_t frames;        /* frames whose payload was verified */
    uint64_t payload_bytes; /* of those */
    uint64_t ops;           /* completed all-reduces */
    uint64_t stale;         /* frames of another incarnation */
    uint64_t foreign;       /* frames of a group that is none of the core's */
    uint64_t late;          /* frames of an operation that was already given up */
    uint64_t beyond;        /* frames of an iteration that nobody may be at yet */
    uint64_t duplicates;    /* segments that held nothing new */
    uint64_t overlaps;      /* segments of which a part was already there */
    uint64_t out_of_order;  /* segments held back */
    uint64_t gaps;          /* holes given up */
    uint64_t gap_bytes;
    uint64_t header_errors;
    uint64_t crc_errors;
    uint64_t damages;       /* damage events raised */
    uint64_t flows;         /* now */
    uint64_t flow_restarts; /* a new connection on the addresses and ports of an old one */
    uint64_t stalls;        /* times that a flow waited for a free gradient set */
    uint64_t held_bytes;    /* out-of-order bytes held now */
    uint64_t pool_used;     /* bytes of gradient buffers now */
    uint64_t driver_drops;  /* dropped between driver and receiver */
    uint64_t wakeups;       /* times that the receive thread found nothing and slept */
};

#pragma GCC visibility push(default)

/* Takes frames of these groups, by number (ckm_frame.group); a single one also takes those of a group without a name,
 * and one without a name takes all. NULL when out of memory. */
struct ckm_core *ckm_core_create(const struct ckm_core_config *config, const uint16_t *numbers, uint32_t ngroups);
void ckm_core_destroy(struct ckm_core *core);
/* By its place in numbers. */
struct ckm_group *ckm_core_group(struct ckm_core *core, uint32_t index);

/* Takes n Ethernet frames; nothing of them is kept by reference. */
void ckm_core_feed(struct ckm_core *core, const uint8_t *const *packets, const uint32_t *lengths, uint32_t n,
                   uint64_t now_us);
/* Gives up holes and stalls that are older than the time-out. Call it when no packet is waiting. Returns the
 * microseconds until it has something to do, UINT64_MAX for nothing. */
uint64_t ckm_core_tick(struct ckm_core *core, uint64_t now_us);

/* For who feeds: tells that no packet is waiting, and how many were lost in front of the core since the last call. */
void ckm_core_note_idle(struct ckm_core *core, uint64_t drops);
/* Raises damage that no stream shows, of no known iteration, in all groups. */
void ckm_core_report(struct ckm_core *core, const char *reason, const char *where);

/* Waits until an event is there, at most timeout_us; returns the number written to out. */
int ckm_group_poll(struct ckm_group *group, struct ckm_event *out, int max, uint64_t timeout_us);
/* Gives the buffer of a complete operation back; -1 when op is no complete operation. */
int ckm_group_release(struct ckm_group *group, uint64_t op);
/* Frames of other incarnations are dropped from now on; operations of others that are not complete are forgotten. */
void ckm_group_set_incarnation(struct ckm_group *group, uint32_t incarnation);
/* Frames of later iterations than this one are dropped from now on (at first none are): a wrong iteration number must
 * not move the window away from those that are being trained. */
void ckm_group_expect(struct ckm_group *group, uint64_t iteration);
/* Forgets operations of iterations up to this one that are not complete, without reporting damage. */
void ckm_group_discard(struct ckm_group *group, uint64_t iteration);
/* Writes what is missing of an iteration; empty when all that was seen of it is complete, or it is long past, or
 * another incarnation's. Returns the length as snprintf does. */
int ckm_group_incomplete(struct ckm_group *group, uint32_t incarnation, uint64_t iteration, char *out, size_t size);
void ckm_core_counters(struct ckm_core *core, struct ckm_counters *out);

uint64_t ckm_now_us(void);

#pragma GCC visibility pop

#endif
