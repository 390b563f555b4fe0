/* The frame that every message of the plugin travels in: the one definition.
 *
 * Both flows of a connection (plain and tagged) carry frames: one header and one payload for each isend.
 * Only tagged frames reach a shadow. Integers are little-endian. checkmate/wire.py mirrors this file and
 * tests/unit/test_wire.py holds the two together.
 */
#ifndef CHECKMATE_WIRE_H
#define CHECKMATE_WIRE_H

#include <stddef.h>
#include <stdint.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the frame header is little-endian and is written without conversion"
#endif

#define CKM_WIRE_MAGIC   0x464d4b43u /* "CKMF" */
#define CKM_WIRE_VERSION 3u

/* flags */
#define CKM_FLAG_TAGGED      0x01u /* a final chunk, on the tagged flow; every field below is valid */
#define CKM_FLAG_PAYLOAD_CRC 0x02u /* payload_crc is valid; always set with CKM_FLAG_TAGGED */
#define CKM_FLAG_FIRST       0x04u /* sent by the first rank; without it, by the last: see ckm_is_tagged below */

/* TCP option of the tagged flow: kind 253 (RFC 4727, RFC 6994), 8 bytes, the last 8 of the TCP header:
 * kind, length, ExID (16 bits, network order), value (32 bits, network order); counter = seq + value. */
#define CKM_TCPOPT_KIND 253u
#define CKM_TCPOPT_LEN  8u
#define CKM_TCPOPT_EXID 0x434bu /* "CK" */

/* The DSCP bit that marks the tagged flow, within the 6-bit DSCP field (TOS = DSCP << 2). */
#define CKM_DSCP_TAG_DEFAULT 0x20u

/* Largest payload of one frame; NCCL's largest slice is far below. Anything above is a damaged header. */
#define CKM_MAX_PAYLOAD (64u << 20)

struct ckm_frame {
    uint32_t magic;
    uint8_t version;
    uint8_t flags;
    uint8_t protocol; /* NCCL's: 0 LL, 1 LL128, 2 Simple */
    uint8_t datatype; /* ncclDataType_t */
    uint64_t message; /* number of this message on its connection, counted over both flows from 0 */
    uint64_t comm_id;
    uint64_t iteration;   /* set by the trainer before the all-reduce; the first optimizer step is 1 */
    uint64_t coll_seq;    /* NCCL's coll.seqNumber (counts per function) */
    uint64_t op_count;    /* elements of the whole all-reduce */
    uint32_t incarnation; /* of the job: grows at every restart */
    uint32_t bucket;
    uint32_t step; /* slice number within the op and channel, from 0; see ckm_place below */
    uint32_t payload_len;
    uint32_t tag; /* the net plugin's isend tag */
    uint16_t channel;
    uint16_t nchannels;
    uint16_t ring_pos; /* of the sender in this channel's ring; rank 0 stands at 0 */
    uint16_t nranks;
    uint8_t slices_per_chunk;
    uint8_t host_ranks;   /* ranks on rank 0's host: 1 to nranks - 1 */
    uint16_t group;       /* ckm_group_number of the data-parallel group's name */
    uint32_t payload_crc; /* CRC32C (RFC 3720) of the payload */
    uint32_t header_crc;  /* CRC32C of the 84 bytes before this field */
};

#define CKM_HEADER_BYTES 88u
_Static_assert(sizeof(struct ckm_frame) == CKM_HEADER_BYTES, "frame header size");
_Static_assert(offsetof(struct ckm_frame, message) == 8, "frame header layout");
_Static_assert(offsetof(struct ckm_frame, op_count) == 40, "frame header layout");
_Static_assert(offsetof(struct ckm_frame, incarnation) == 48, "frame header layout");
_Static_assert(offsetof(struct ckm_frame, channel) == 68, "frame header layout");
_Static_assert(offsetof(struct ckm_frame, slices_per_chunk) == 76, "frame header layout");
_Static_assert(offsetof(struct ckm_frame, group) == 78, "frame header layout");
_Static_assert(offsetof(struct ckm_frame, payload_crc) == 80, "frame header layout");
_Static_assert(offsetof(struct ckm_frame, header_crc) == 84, "frame header layout");

/* A group's number is made of its name, so that no two parts can number groups differently: FNV-1a (Fowler, Noll, Vo),
 * 32 bits folded to 16. */
static inline uint16_t ckm_group_number(const char *name)
{
    uint32_t hash = 2166136261u;
    for (; *name; name++)
        hash = (hash ^ (uint8_t)*name) * 16777619u;
    return (uint16_t)(hash >> 16 ^ hash);
}

/* Where a slice stands in a ring all-reduce (NCCL, src/device/all_reduce.h, runRing): one loop moves
 * nranks chunks; each rank sends 2(nranks-1) chunks a loop, the first nranks-1 of them partial sums
 * (reduce-scatter), the others final (all-gather). */
struct ckm_place {
    uint32_t loop, chunk, slice;
    int final;      /* 1: all-gather half, the chunk is fully reduced */
    uint32_t round; /* round within its half, from 0 */
};

static inline struct ckm_place ckm_place(uint32_t step, uint32_t slices_per_chunk, uint32_t ring_pos, uint32_t nranks)
{
    uint32_t sends = 2 * (nranks - 1);
    uint32_t k = step / slices_per_chunk % sends; /* chunk sent k-th within its loop */
    struct ckm_place p;
    p.loop = step / slices_per_chunk / sends;
    p.slice = step % slices_per_chunk;
    p.final = k >= nranks - 1;
    p.round = p.final ? k - (nranks - 1) : k;
    p.chunk = p.final ? (ring_pos + nranks - p.round) % nranks : (ring_pos + 2 * nranks - 1 - p.round) % nranks;
    return p;
}

/* Which final chunks are tagged. A ring enters the host of rank 0 at one rank, passes its host_ranks ranks, and leaves
 * it at another. The *last* rank, before the entry, sends every final chunk but the entry's own, in all rounds of the
 * all-gather half; that one leaves the host in round host_ranks - 1, sent by the *first* rank, at the exit. Together
 * that is every final chunk, once, on the way between two hosts. */
static inline uint32_t ckm_first_tagged_round(int is_first, uint32_t host_ranks)
{
    return is_first ? host_ranks - 1 : 0;
}

static inline int ckm_is_tagged(const struct ckm_place *place, int is_first, uint32_t host_ranks)
{
    return place->final && (!is_first || place->round == host_ranks - 1);
}

/* Where the two stand: the exit is less than host_ranks positions behind rank 0, the entry less than that before it. */
static inline int ckm_is_boundary(uint32_t ring_pos, int is_first, uint32_t host_ranks, uint32_t nranks)
{
    return is_first ? ring_pos < host_ranks : ring_pos >= nranks - host_ranks && ring_pos < nranks;
}

#endif
