/* Finds the TCP payload of a copy in an Ethernet frame. */
#ifndef CHECKMATE_REASSEMBLY_PACKET_H
#define CHECKMATE_REASSEMBLY_PACKET_H

#include <stdint.h>

/* The copy's destination is the shadow and says nothing, so these three tell flows apart (network order). */
struct ckm_flow_key {
    uint32_t src_ip;
    uint16_t src_port, dst_port;
};

struct ckm_segment {
    struct ckm_flow_key key;
    uint32_t seq;
    uint32_t length; /* > 0 */
    const uint8_t *data;
};

enum ckm_packet {
    CKM_PACKET_COPY,      /* segment is filled in */
    CKM_PACKET_OTHER,     /* not of a tagged flow, or without payload */
    CKM_PACKET_MALFORMED, /* lengths that can't be, or an IP fragment */
    CKM_PACKET_TRUNCATED, /* holds less than its IP header says */
};

enum ckm_packet ckm_packet_parse(const uint8_t *packet, uint32_t length, uint32_t dscp, struct ckm_segment *segment);

#endif
