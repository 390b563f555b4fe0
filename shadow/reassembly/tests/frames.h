/* Copies as a switch would make them: an all-reduce's tagged streams, cut into packets, for the tests. */
#ifndef CHECKMATE_REASSEMBLY_TESTS_FRAMES_H
#define CHECKMATE_REASSEMBLY_TESTS_FRAMES_H

#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char seed_text[40];
#define CHECK_CONTEXT seed_text

#include "assertions.h"
#include "checkmate/crc32c.h"
#include "checkmate/wire.h"
#include "core.h"

#define ELEMENT    4u /* bytes of a float */
#define OVERHEAD   54u
#define MAX_PACKET 9100u

static uint64_t random_state;

static inline uint32_t rnd(uint32_t below)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)((random_state >> 16) % below);
}

/* What a failed check names. */
static inline void note_seed(uint64_t value)
{
    snprintf(seed_text, sizeof seed_text, " (seed %llu)", (unsigned long long)value);
}

static inline void seed(uint64_t value)
{
    note_seed(value);
    random_state = value * 0x9e3779b97f4a7c15u + 1;
    for (int i = 0; i < 8; i++)
        rnd(2);
}

struct bytes {
    uint8_t *data;
    size_t n, room;
};

static inline void put(struct bytes *to, const void *data, size_t n)
{
    if (to->n + n > to->room) {
        to->room = 2 * (to->n + n);
        to->data = realloc(to->data, to->room);
    }
    if (n)
        memcpy(to->data + to->n, data, n);
    to->n += n;
}

/* Shape of the all-reduces of a job. */
struct shape {
    uint32_t count; /* elements */
    uint16_t nranks, nchannels;
    uint8_t slices_per_chunk;
    uint32_t slice;     /* elements of a slice at most */
    uint8_t host_ranks; /* ranks on rank 0's host; 0: 1 */
    uint8_t entry;      /* how many of them a ring passes before rank 0 */
    uint16_t group;
};

/* Of the first rank; its payload is still to be told. */
static inline struct ckm_frame header_of(const struct shape *shape, uint64_t iteration, uint32_t bucket)
{
    return (struct ckm_frame){
        .magic = CKM_WIRE_MAGIC,
        .version = CKM_WIRE_VERSION,
        .flags = CKM_FLAG_TAGGED | CKM_FLAG_PAYLOAD_CRC | CKM_FLAG_FIRST,
        .protocol = 2,
        .datatype = 7,
        .comm_id = 77,
        .iteration = iteration,
        .coll_seq = iteration * 100 + bucket,
        .op_count = shape->count,
        .incarnation = 1,
        .bucket = bucket,
        .nchannels = shape->nchannels,
        .nranks = shape->nranks,
        .slices_per_chunk = shape->slices_per_chunk,
        .host_ranks = shape->host_ranks ? shape->host_ranks : 1,
        .group = shape->group,
    };
}

static inline void put_frame(struct bytes *to, struct ckm_frame header, const uint8_t *payload)
{
    header.payload_crc = ckm_crc32c(0, payload, header.payload_len);
    header.header_crc = ckm_crc32c(0, &header, offsetof(struct ckm_frame, header_crc));
    put(to, &header, sizeof header);
    put(to, payload, header.payload_len);
}

/* Appends what the flow of a channel and boundary (0: first, 1: last) carries for one all-reduce. */
static inline void put_op(struct bytes *to, const struct shape *shape, uint64_t iteration, uint32_t bucket,
                          const uint8_t *content, uint16_t channel, int last)
{
    struct ckm_frame header = header_of(shape, iteration, bucket);
    uint32_t per_channel = (shape->count + shape->nchannels - 1) / shape->nchannels;
    uint32_t begin = channel * per_channel < shape->count ? channel * per_channel : shape->count;
    uint32_t end = begin + per_channel < shape->count ? begin + per_channel : shape->count;
    uint32_t per_loop = shape->nranks * shape->slices_per_chunk;
    uint32_t slice = (end - begin + per_loop - 1) / per_loop;
    slice = slice < shape->slice ? slice : shape->slice;
    header.channel = channel;
    header.ring_pos = last ? shape->nranks - 1 - shape->entry : header.host_ranks - 1 - shape->entry;
    header.flags &= (uint8_t)(last ? ~CKM_FLAG_FIRST : ~0u);
    for (uint32_t loop = 0; loop == 0 || begin < end; loop++, begin += slice * per_loop)
        for (uint32_t round = 0; round < shape->nranks - 1u; round++)
            for (uint32_t s = 0; s < shape->slices_per_chunk; s++) {
                header.step =
                    (loop * 2 * (shape->nranks - 1) + shape->nranks - 1 + round) * shape->slices_per_chunk + s;
                struct ckm_place place =
                    ckm_place(header.step, shape->slices_per_chunk, header.ring_pos, shape->nranks);
                if (!ckm_is_tagged(&place, !last, header.host_ranks))
                    continue;
                uint32_t from = begin + (place.chunk * shape->slices_per_chunk + s) * slice;
                uint32_t left = from < end ? end - from : 0;
                header.payload_len = (left < slice ? left : slice) * ELEMENT;
                header.message++;
                put_frame(to, header, header.payload_len ? content + from * ELEMENT : content);
            }
}

/* One flow's packet; returns its length. */
static inline uint32_t make_packet(uint8_t *packet, uint16_t flow, uint32_t seq, const uint8_t *data, uint32_t n)
{
    memset(packet, 0, OVERHEAD);
    packet[12] = 8;
    uint8_t *ip = packet + 14, *tcp = ip + 20;
    ip[0] = 0x45;
    ip[1] = CKM_DSCP_TAG_DEFAULT << 2;
    *(uint16_t *)(void *)(ip + 2) = htons((uint16_t)(40 + n));
    ip[9] = 6;
    ip[12] = 10;
    ip[15] = 1;
    *(uint16_t *)(void *)tcp = htons((uint16_t)(4000 + flow));
    *(uint16_t *)(void *)(tcp + 2) = htons(5000);
    seq = htonl(seq);
    memcpy(tcp + 4, &seq, sizeof seq);
    tcp[12] = 5 << 4;
    if (n)
        memcpy(packet + OVERHEAD, data, n);
    return OVERHEAD + n;
}

static inline void feed(struct ckm_core *core, const uint8_t *packet, uint32_t n, uint64_t now_us)
{
    /* A copy of exactly this size, so that the sanitizer sees reads beyond it. */
    uint8_t *exact = malloc(n ? n : 1);
    if (n)
        memcpy(exact, packet, n);
    const uint8_t *packets[] = {exact};
    ckm_core_feed(core, packets, &n, 1, now_us);
    free(exact);
}

static inline void feed_segment(struct ckm_core *core, uint16_t flow, uint32_t seq, const uint8_t *data, uint32_t n,
                                uint64_t now_us)
{
    uint8_t packet[MAX_PACKET];
    feed(core, packet, make_packet(packet, flow, seq, data, n), now_us);
}

static inline struct ckm_core *core_of(const uint16_t *numbers, uint32_t ngroups)
{
    struct ckm_core_config config = {
        .max_op_bytes = 1 << 20,
        .pool_bytes = 16 << 20,
        .reorder_bytes = 1 << 20,
        .gap_timeout_us = 500000,
        .sets = 3,
        .max_flows = 64,
        .dscp = CKM_DSCP_TAG_DEFAULT,
    };
    struct ckm_core *core = ckm_core_create(&config, numbers, ngroups);
    for (uint32_t i = 0; i < ngroups; i++)
        ckm_group_set_incarnation(ckm_core_group(core, i), 1);
    return core;
}

static inline struct ckm_core *new_core(void)
{
    static const uint16_t number = 0;
    return core_of(&number, 1);
}

/* The group of a core that has one. */
static inline struct ckm_group *only(struct ckm_core *core)
{
    return ckm_core_group(core, 0);
}

#endif
