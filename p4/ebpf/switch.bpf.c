/* The switch's data path: clsact programs on every port.
 *
 * ckm_ingress decides where a frame goes; ckm_egress turns a copy into what its shadow receives. Frames are read
 * with bpf_skb_load_bytes and, on ingress, never written: the replica for the next rank shares its data with what
 * was sent. A GSO super-packet is one skb and is counted as the frames and bytes that it stands for.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/pkt_cls.h>
#include <linux/tcp.h>
#include <stdbool.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "checkmate/wire.h"
#include "maps.h"

#define IP_FRAGMENT    0x3fff /* more-fragments flag and fragment offset */
#define IP_VERSION     4
#define IP_MIN_WORDS   5
#define TCP_MIN_WORDS  5
#define VLAN_TAG_BYTES 4
#define DSCP_SHIFT     2

struct {
    __uint(type, BPF_MAP_TYPE_HASH);
    __uint(max_entries, CKM_PORTS);
    __type(key, uint32_t);
    __type(value, struct ckm_port);
} ports SEC(".maps");

struct {
    __uint(type, BPF_MAP_TYPE_ARRAY);
    __uint(max_entries, CKM_PORTS);
    __type(key, uint32_t);
    __type(value, uint32_t);
} ifindexes SEC(".maps");

struct {
    __uint(type, BPF_MAP_TYPE_ARRAY);
    __uint(max_entries, CKM_DSCPS);
    __type(key, uint32_t);
    __type(value, uint32_t);
} tagged_dscps SEC(".maps");

struct {
    __uint(type, BPF_MAP_TYPE_HASH);
    __uint(max_entries, CKM_HEARTBEATS);
    __type(key, struct ckm_heartbeat_key);
    __type(value, struct ckm_heartbeat);
} heartbeats SEC(".maps");

struct {
    __uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
    __uint(max_entries, CKM_HEARTBEATS);
    __type(key, uint32_t);
    __type(value, struct ckm_count);
} heartbeat_counters SEC(".maps");

struct {
    __uint(type, BPF_MAP_TYPE_HASH);
    __uint(max_entries, CKM_L2_ENTRIES);
    __type(key, struct ckm_l2_key);
    __type(value, struct ckm_l2);
} l2 SEC(".maps");

struct {
    __uint(type, BPF_MAP_TYPE_ARRAY);
    __uint(max_entries, 1);
    __type(key, uint32_t);
    __type(value, struct ckm_l2);
} l2_default SEC(".maps");

struct {
    __uint(type, BPF_MAP_TYPE_HASH);
    __uint(max_entries, CKM_GROUPS);
    __type(key, uint32_t);
    __type(value, struct ckm_group);
} groups SEC(".maps");

/* Multicast groups that copies may be made with, by number; values say nothing. */
struct {
    __uint(type, BPF_MAP_TYPE_HASH);
    __uint(max_entries, CKM_GROUPS);
    __type(key, uint32_t);
    __type(value, uint32_t);
} live_groups SEC(".maps");

struct {
    __uint(type, BPF_MAP_TYPE_HASH);
    __uint(max_entries, CKM_REWRITES);
    __type(key, struct ckm_rewrite_key);
    __type(value, struct ckm_rewrite);
} rewrites SEC(".maps");

struct {
    __uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
    __uint(max_entries, CKM_COUNTERS *CKM_PORTS);
    __type(key, uint32_t);
    __type(value, struct ckm_count);
} counters SEC(".maps");

struct option {
    uint8_t kind;
    uint8_t length;
    uint16_t exid_be;
    uint32_t value_be;
};
_Static_assert(sizeof(struct option) == CKM_TCPOPT_LEN, "TCP option size");

struct l3_headers {
    struct ethhdr eth;
    struct iphdr ip;
} __attribute__((packed));

enum kind { OTHER, TCP, MALFORMED };

/* What the rules look at. tcp, option and the fields after them are valid for kind TCP only. */
struct packet {
    enum kind kind;
    struct l3_headers l3;
    struct tcphdr tcp;
    struct option option; /* last 8 bytes of the TCP header; zero where there are no options to hold it */
    uint32_t tcp_offset;
    uint32_t payload;
    uint64_t frames, bytes; /* on the wire */
};

static __always_inline enum kind parse_tcp(struct __sk_buff *skb, struct packet *p, uint32_t l4_bytes)
{
    if (bpf_skb_load_bytes(skb, p->tcp_offset, &p->tcp, sizeof(p->tcp)))
        return MALFORMED;
    uint32_t header = p->tcp.doff * 4;
    if (p->tcp.doff < TCP_MIN_WORDS || header > l4_bytes)
        return MALFORMED;
    p->payload = l4_bytes - header;
    if (header >= sizeof(p->tcp) + sizeof(p->option) &&
        bpf_skb_load_bytes(skb, p->tcp_offset + header - sizeof(p->option), &p->option, sizeof(p->option)))
        return MALFORMED;
    if (skb->gso_segs > 1) {
        p->frames = skb->gso_segs;
        p->bytes += (uint64_t)(skb->gso_segs - 1) * (p->tcp_offset + header);
    }
    return TCP;
}

static __always_inline enum kind parse_ip(struct __sk_buff *skb, struct packet *p)
{
    uint32_t header = p->l3.ip.ihl * 4;
    uint32_t available = skb->len - sizeof(p->l3.eth);
    uint32_t total = bpf_ntohs(p->l3.ip.tot_len);
    if (total == 0 && skb->gso_size)
        total = available; /* a super-packet of more than 64 KiB */
    if (p->l3.ip.version != IP_VERSION || p->l3.ip.ihl < IP_MIN_WORDS || total < header || total > available)
        return MALFORMED;
    if (p->l3.ip.protocol != IPPROTO_TCP || (p->l3.ip.frag_off & bpf_htons(IP_FRAGMENT)))
        return OTHER;
    p->tcp_offset = sizeof(p->l3.eth) + header;
    return parse_tcp(skb, p, total - header);
}

/* A first VLAN tag is not in the data: the kernel keeps it beside the frame. Frames with a second one are OTHER.
 * Returns false when there is no whole Ethernet header. */
static __always_inline bool parse(struct __sk_buff *skb, struct packet *p)
{
    __builtin_memset(p, 0, sizeof(*p));
    p->frames = 1;
    p->bytes = skb->len + (skb->vlan_present ? VLAN_TAG_BYTES : 0);
    if (bpf_skb_load_bytes(skb, 0, &p->l3, sizeof(p->l3)) == 0) {
        p->kind = p->l3.eth.h_proto == bpf_htons(ETH_P_IP) ? parse_ip(skb, p) : OTHER;
        return true;
    }
    if (bpf_skb_load_bytes(skb, 0, &p->l3.eth, sizeof(p->l3.eth)))
        return false;
    p->kind = p->l3.eth.h_proto == bpf_htons(ETH_P_IP) ? MALFORMED : OTHER;
    return true;
}

static __always_inline void add(struct ckm_count *count, const struct packet *p)
{
    if (count) {
        count->packets += p->frames;
        count->bytes += p->bytes;
    }
}

static __always_inline void count(enum ckm_counter counter, uint16_t port, const struct packet *p)
{
    uint32_t index = (uint32_t)counter * CKM_PORTS + port;
    add(bpf_map_lookup_elem(&counters, &index), p);
}

static __always_inline int send(struct __sk_buff *skb, uint32_t ifindex, uint32_t mark)
{
    skb->mark = mark;
    return bpf_redirect(ifindex, 0);
}

/* Sends the frame to every member but the port it came from: clones, and the frame itself to the last one.
 * `mark`: CKM_MARK for copies that egress has to rewrite, 0 for flooding. Returns -1 when nobody is left. */
static __always_inline int replicate(struct __sk_buff *skb, const struct ckm_group *group, uint16_t from, uint32_t mark)
{
    uint32_t next = 0, next_mark = 0;
    for (uint32_t i = 0; i < CKM_REPLICAS; i++) {
        if (i >= group->size)
            break;
        const struct ckm_replica *replica = &group->replicas[i];
        if (replica->port == from)
            continue;
        if (next) {
            skb->mark = next_mark;
            bpf_clone_redirect(skb, next, 0);
        }
        next = replica->ifindex;
        next_mark = replica->rid ? mark | (mark ? replica->rid : 0) : 0;
    }
    return next ? send(skb, next, next_mark) : -1;
}

static __always_inline int l2_forward(struct __sk_buff *skb, const struct packet *p, uint16_t from)
{
    struct ckm_l2_key key = {};
    uint32_t zero = 0;
    __builtin_memcpy(key.dst, p->l3.eth.h_dest, sizeof(key.dst));
    const struct ckm_l2 *entry = bpf_map_lookup_elem(&l2, &key);
    if (!entry)
        entry = bpf_map_lookup_elem(&l2_default, &zero);
    if (entry && entry->action == CKM_FORWARD && entry->argument != from) {
        uint32_t port = entry->argument;
        uint32_t *ifindex = bpf_map_lookup_elem(&ifindexes, &port);
        if (ifindex && *ifindex)
            return send(skb, *ifindex, 0);
    }
    if (entry && entry->action == CKM_FLOOD) {
        uint32_t id = entry->argument;
        const struct ckm_group *group = bpf_map_lookup_elem(&groups, &id);
        int verdict = group ? replicate(skb, group, from, 0) : -1;
        if (verdict >= 0)
            return verdict;
    }
    count(CKM_DROPPED, from, p);
    return TC_ACT_SHOT;
}

static __always_inline bool to_registrar(const struct packet *p, const struct ckm_port *port)
{
    return p->kind == TCP && p->l3.ip.daddr == port->registrar_ip_be && p->tcp.dest == port->registrar_port_be;
}

static __always_inline bool is_tagged(const struct packet *p)
{
    uint32_t dscp = p->l3.ip.tos >> DSCP_SHIFT;
    uint32_t *tagged = bpf_map_lookup_elem(&tagged_dscps, &dscp);
    return tagged && *tagged;
}

static __always_inline bool has_counter(const struct packet *p)
{
    return p->option.kind == CKM_TCPOPT_KIND && p->option.length == CKM_TCPOPT_LEN &&
           p->option.exid_be == bpf_htons(CKM_TCPOPT_EXID);
}

/* Replicates a tagged frame that a boundary rank sent. Returns -1 when it is to be forwarded like any other. */
static __always_inline int heartbeat(struct __sk_buff *skb, const struct packet *p, uint16_t from)
{
    count(CKM_TAGGED_IN, from, p);
    if (!has_counter(p)) {
        count(CKM_TAGGED_WITHOUT_OPTION, from, p);
        return -1;
    }
    struct ckm_heartbeat_key key = {.port = from};
    __builtin_memcpy(key.dst, p->l3.eth.h_dest, sizeof(key.dst));
    const struct ckm_heartbeat *entry = bpf_map_lookup_elem(&heartbeats, &key);
    if (!entry)
        return -1;
    uint32_t id = entry->group, index = entry->counter;
    add(bpf_map_lookup_elem(&heartbeat_counters, &index), p);
    const struct ckm_group *group = bpf_map_lookup_elem(&live_groups, &id) ? bpf_map_lookup_elem(&groups, &id) : NULL;
    int verdict = group ? replicate(skb, group, from, CKM_MARK) : -1;
    if (verdict < 0)
        count(CKM_GROUP_MISSING, from, p);
    return verdict;
}

SEC("tc")
int ckm_ingress(struct __sk_buff *skb)
{
    struct packet p;
    uint32_t ifindex = skb->ifindex;
    const struct ckm_port *port = bpf_map_lookup_elem(&ports, &ifindex);
    if (!port || !parse(skb, &p))
        return TC_ACT_SHOT;
    uint16_t from = port->number;
    if (port->is_shadow) {
        if (to_registrar(&p, port))
            return l2_forward(skb, &p, from);
        count(CKM_SHADOW_DROPPED, from, &p);
        return TC_ACT_SHOT;
    }
    if (p.kind == TCP && p.payload && is_tagged(&p)) {
        int verdict = heartbeat(skb, &p, from);
        if (verdict >= 0)
            return verdict;
    } else {
        count(p.kind == MALFORMED ? CKM_MALFORMED : CKM_UNTAGGED, from, &p);
    }
    return l2_forward(skb, &p, from);
}

static __always_inline void rewrite(struct __sk_buff *skb, const struct packet *p, const struct ckm_rewrite *to)
{
    uint32_t ip = sizeof(p->l3.eth);
    uint32_t tcp_check = p->tcp_offset + offsetof(struct tcphdr, check);
    uint32_t new_ip = to->dst_ip_be;
    uint32_t seq = bpf_htonl(bpf_ntohl(p->tcp.seq) + bpf_ntohl(p->option.value_be));
    uint8_t macs[2 * ETH_ALEN];

    __builtin_memcpy(macs, to->dst_mac, sizeof(macs));
    bpf_skb_store_bytes(skb, 0, macs, sizeof(macs), 0);
    bpf_skb_store_bytes(skb, ip + offsetof(struct iphdr, daddr), &new_ip, sizeof(new_ip), 0);
    bpf_skb_store_bytes(skb, p->tcp_offset + offsetof(struct tcphdr, seq), &seq, sizeof(seq), 0);
    bpf_l3_csum_replace(skb, ip + offsetof(struct iphdr, check), p->l3.ip.daddr, new_ip, sizeof(new_ip));
    bpf_l4_csum_replace(skb, tcp_check, p->l3.ip.daddr, new_ip, BPF_F_PSEUDO_HDR | sizeof(new_ip));
    bpf_l4_csum_replace(skb, tcp_check, p->tcp.seq, seq, sizeof(seq));
}

/* A copy without a rewrite entry would reach the shadow with the wrong sequence numbers: it is dropped. */
SEC("tc")
int ckm_egress(struct __sk_buff *skb)
{
    struct packet p;
    uint32_t ifindex = skb->ifindex, mark = skb->mark;
    if ((mark & ~CKM_MARK_RID_MASK) != CKM_MARK)
        return TC_ACT_UNSPEC;
    skb->mark = 0;
    const struct ckm_port *port = bpf_map_lookup_elem(&ports, &ifindex);
    if (!port || !parse(skb, &p))
        return TC_ACT_SHOT;
    struct ckm_rewrite_key key = {.port = port->number, .rid = mark & CKM_MARK_RID_MASK};
    const struct ckm_rewrite *to = bpf_map_lookup_elem(&rewrites, &key);
    if (!to || p.kind != TCP) {
        count(CKM_REWRITE_MISSING, key.port, &p);
        return TC_ACT_SHOT;
    }
    count(CKM_COPIES_OUT, key.port, &p);
    rewrite(skb, &p, to);
    return TC_ACT_UNSPEC;
}

char LICENSE[] SEC("license") = "Apache-2.0";
