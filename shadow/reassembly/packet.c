#include "packet.h"

#include <string.h>

#define ETHERNET_BYTES 14u
#define IPV4_BYTES     20u
#define TCP_BYTES      20u
#define ETHERTYPE_IPV4 0x0800u
#define PROTOCOL_TCP   6u
/* All of the field but "don't fragment" and the reserved bit: offset or "more fragments" means a fragment. */
#define FRAGMENT_MASK 0x3fffu

static uint32_t be16(const uint8_t *p)
{
    return (uint32_t)p[0] << 8 | p[1];
}

static uint32_t be32(const uint8_t *p)
{
    return be16(p) << 16 | be16(p + 2);
}

static enum ckm_packet parse_tcp(const uint8_t *ip, uint32_t ip_header, uint32_t ip_total, struct ckm_segment *segment)
{
    const uint8_t *tcp = ip + ip_header;
    uint32_t tcp_header = (tcp[12] >> 4) * 4u;
    if (tcp_header < TCP_BYTES || ip_header + tcp_header > ip_total)
        return CKM_PACKET_MALFORMED;
    segment->length = ip_total - ip_header - tcp_header;
    if (segment->length == 0)
        return CKM_PACKET_OTHER;
    memcpy(&segment->key.src_ip, ip + 12, 4);
    memcpy(&segment->key.src_port, tcp, 2);
    memcpy(&segment->key.dst_port, tcp + 2, 2);
    segment->seq = be32(tcp + 4);
    segment->data = tcp + tcp_header;
    return CKM_PACKET_COPY;
}

enum ckm_packet ckm_packet_parse(const uint8_t *packet, uint32_t length, uint32_t dscp, struct ckm_segment *segment)
{
    if (length < ETHERNET_BYTES + IPV4_BYTES || be16(packet + 12) != ETHERTYPE_IPV4)
        return CKM_PACKET_OTHER;
    const uint8_t *ip = packet + ETHERNET_BYTES;
    if (ip[0] >> 4 != 4 || ip[9] != PROTOCOL_TCP || !(ip[1] >> 2 & dscp))
        return CKM_PACKET_OTHER;
    uint32_t ip_header = (ip[0] & 15) * 4u;
    uint32_t ip_total = be16(ip + 2);
    if (ip_header < IPV4_BYTES || ip_total < ip_header + TCP_BYTES || (be16(ip + 6) & FRAGMENT_MASK))
        return CKM_PACKET_MALFORMED;
    if (ip_total > length - ETHERNET_BYTES)
        return CKM_PACKET_TRUNCATED;
    return parse_tcp(ip, ip_header, ip_total, segment);
}
