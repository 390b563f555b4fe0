/* Keys and values of the switch's maps and its limits: the one definition, read by switch.bpf.c and by loader.py
 * (through cffi). Fields named *_be hold network byte order.
 */
#ifndef CHECKMATE_P4_MAPS_H
#define CHECKMATE_P4_MAPS_H

#include <stdint.h>

#define CKM_PORTS         512        /* port numbers are bit<9> */
#define CKM_DSCPS         64         /* DSCP values are bit<6> */
#define CKM_REPLICAS      64         /* members of a multicast group */
#define CKM_GROUPS        1024       /* multicast groups, and entries of the table live_group */
#define CKM_HEARTBEATS    4096       /* entries of the table heartbeat */
#define CKM_L2_ENTRIES    4096       /* entries of the table l2_forward */
#define CKM_REWRITES      2048       /* entries of the table rewrite */
#define CKM_MARK          0x434b0000 /* skb mark of a copy on its way to egress; the low 16 bits are its rid */
#define CKM_MARK_RID_MASK 0x0000ffff

/* Counters that exist once per port. */
enum ckm_counter {
    CKM_TAGGED_IN,
    CKM_UNTAGGED,
    CKM_TAGGED_WITHOUT_OPTION,
    CKM_GROUP_MISSING,
    CKM_SHADOW_DROPPED,
    CKM_MALFORMED,
    CKM_DROPPED,
    CKM_COPIES_OUT,
    CKM_REWRITE_MISSING,
    CKM_COUNTERS
};

struct ckm_count {
    uint64_t packets;
    uint64_t bytes;
};

/* A port, found by its interface's index. */
struct ckm_port {
    uint16_t number;
    uint16_t is_shadow;
    uint32_t registrar_ip_be;
    uint16_t registrar_port_be;
    uint16_t reserved; /* 0 */
};

struct ckm_heartbeat_key {
    uint16_t port;
    uint8_t dst[6];
};

struct ckm_heartbeat {
    uint32_t group;
    uint32_t counter; /* index into heartbeat_counters */
};

struct ckm_l2_key {
    uint8_t dst[6];
    uint8_t reserved[2]; /* 0 */
};

enum ckm_l2_action { CKM_DROP, CKM_FORWARD, CKM_FLOOD };

struct ckm_l2 {
    uint32_t action;
    uint32_t argument; /* CKM_FORWARD: port, CKM_FLOOD: multicast group */
};

struct ckm_replica {
    uint32_t ifindex;
    uint16_t port;
    uint16_t rid;
};

struct ckm_group {
    uint32_t size;
    struct ckm_replica replicas[CKM_REPLICAS];
};

struct ckm_rewrite_key {
    uint16_t port;
    uint16_t rid;
};

struct ckm_rewrite {
    uint8_t dst_mac[6]; /* the two addresses in the order of the Ethernet header */
    uint8_t src_mac[6];
    uint32_t dst_ip_be;
};

#endif
