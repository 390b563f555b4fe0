/* Writes the counter option on every payload packet of the connections that are registered in counter_map.
 *
 * sock_ops program on a cgroup. The option carries counter - seq, not the counter, because the kernel writes it
 * once per buffer, before segmentation copies it onto every segment: the sum seq + value is right on each.
 * Empty packets have no option. The kernel reserves room for it in the segment size too, so that an option never
 * makes a packet too long.
 */
#include <linux/bpf.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "checkmate/counter.h"
#include "checkmate/wire.h"

#define TCP_FLAGS_SYN_RST 0x06

struct {
    __uint(type, BPF_MAP_TYPE_SK_STORAGE);
    __uint(map_flags, BPF_F_NO_PREALLOC);
    __type(key, int);
    __type(value, struct ckm_counter);
} counter_map SEC(".maps");

struct option {
    __u8 kind, length;
    __be16 exid;
    __be32 value;
} __attribute__((packed));
_Static_assert(sizeof(struct option) == CKM_TCPOPT_LEN, "option length");

static struct ckm_counter *find(struct bpf_sock_ops *ops)
{
    struct bpf_sock *sk = ops->sk;
    return sk ? bpf_sk_storage_get(&counter_map, sk, 0, 0) : 0;
}

static void connecting(struct bpf_sock_ops *ops)
{
    if (find(ops))
        bpf_sock_ops_cb_flags_set(ops, ops->bpf_sock_ops_cb_flags | BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG);
}

static void established(struct bpf_sock_ops *ops)
{
    struct ckm_counter *counter = find(ops);

    if (!counter || !(ops->bpf_sock_ops_cb_flags & BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG))
        return;
    counter->value = counter->base - ops->snd_nxt;
    counter->state = CKM_COUNTER_ARMED;
}

/* Without a packet, the kernel asks how much room options will take in full segments. */
static void reserve(struct bpf_sock_ops *ops)
{
    if (ops->args[0] != BPF_WRITE_HDR_TCP_CURRENT_MSS && (ops->skb_tcp_flags & TCP_FLAGS_SYN_RST || ops->skb_len == 0))
        return;
    struct ckm_counter *counter = find(ops);
    if (counter && counter->state == CKM_COUNTER_ARMED)
        bpf_reserve_hdr_opt(ops, CKM_TCPOPT_LEN, 0);
}

static void write(struct bpf_sock_ops *ops)
{
    struct ckm_counter *counter = find(ops);
    struct option option = {.kind = CKM_TCPOPT_KIND, .length = CKM_TCPOPT_LEN, .exid = bpf_htons(CKM_TCPOPT_EXID)};

    if (!counter)
        return;
    option.value = bpf_htonl(counter->value);
    bpf_store_hdr_opt(ops, &option, sizeof option, 0);
}

SEC("sockops")
int counter(struct bpf_sock_ops *ops)
{
    switch (ops->op) {
    case BPF_SOCK_OPS_TCP_CONNECT_CB:
        connecting(ops);
        break;
    case BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB:
        established(ops);
        break;
    case BPF_SOCK_OPS_HDR_OPT_LEN_CB:
        reserve(ops);
        break;
    case BPF_SOCK_OPS_WRITE_HDR_OPT_CB:
        write(ops);
        break;
    }
    return 1;
}

char _license[] SEC("license") = "GPL";
