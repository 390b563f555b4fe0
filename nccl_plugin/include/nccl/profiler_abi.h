/* NCCL's profiler plugin interface, versions 2 to 6 (symbols ncclProfiler_v2 ... ncclProfiler_v6).
 *
 * Written from the published interface: the layouts are NCCL's, the text is ours. What changed:
 *   v3   coll loses trafficBytes; kernel and network events
 *   v4   init gets communicator name, id, nodes, ranks, rank and logger; coll and p2p lose name and id
 *   v5   the event type is 64 bits wide; API events; coll and p2p name their group separately
 *   v6   copy-engine events
 */
#ifndef CHECKMATE_NCCL_PROFILER_ABI_H
#define CHECKMATE_NCCL_PROFILER_ABI_H

#include <stdbool.h>
#include <sys/types.h>

#include "nccl/common_abi.h"

/* Event types: also the bits of the activation mask that init returns. */
enum {
    NCCL_PROFILE_GROUP = 1 << 0,
    NCCL_PROFILE_COLL = 1 << 1,
    NCCL_PROFILE_P2P = 1 << 2,
    NCCL_PROFILE_PROXY_OP = 1 << 3,
    NCCL_PROFILE_PROXY_STEP = 1 << 4,
    NCCL_PROFILE_PROXY_CTRL = 1 << 5,
    NCCL_PROFILE_KERNEL_CH = 1 << 6,
    NCCL_PROFILE_NET_PLUGIN = 1 << 7,
    NCCL_PROFILE_GROUP_API = 1 << 8,
    NCCL_PROFILE_COLL_API = 1 << 9,
    NCCL_PROFILE_P2P_API = 1 << 10,
    NCCL_PROFILE_KERNEL_LAUNCH = 1 << 11,
    NCCL_PROFILE_CE_COLL = 1 << 12,
    NCCL_PROFILE_CE_SYNC = 1 << 13,
    NCCL_PROFILE_CE_BATCH = 1 << 14,
};

/* Event states that recordEventState reports for a proxy step or op. */
typedef enum {
    NCCL_STATE_SEND_GPU_WAIT = 8,
    NCCL_STATE_SEND_WAIT = 9,
    NCCL_STATE_RECV_WAIT = 10,
    NCCL_STATE_RECV_FLUSH_WAIT = 11,
    NCCL_STATE_RECV_GPU_WAIT = 12,
    NCCL_STATE_PROXY_OP_IN_PROGRESS = 19,
    NCCL_STATE_SEND_PEER_WAIT = 20,
} nccl_profiler_state_t;

struct nccl_prof_coll_v2 {
    const char *name;
    uint64_t commHash;
    uint64_t seqNumber;
    const char *func;
    const void *sendBuff;
    void *recvBuff;
    size_t count;
    int root;
    const char *datatype;
    size_t trafficBytes;
    uint8_t nChannels;
    uint8_t nWarps;
    const char *algo;
    const char *proto;
};
struct nccl_prof_coll_v3 {
    const char *name;
    uint64_t commHash;
    uint64_t seqNumber;
    const char *func;
    const void *sendBuff;
    void *recvBuff;
    size_t count;
    int root;
    const char *datatype;
    uint8_t nChannels;
    uint8_t nWarps;
    const char *algo;
    const char *proto;
};
struct nccl_prof_coll_v4 {
    uint64_t seqNumber;
    const char *func;
    const void *sendBuff;
    void *recvBuff;
    size_t count;
    int root;
    const char *datatype;
    uint8_t nChannels;
    uint8_t nWarps;
    const char *algo;
    const char *proto;
};
struct nccl_prof_coll_v5 { /* v4 and one more */
    uint64_t seqNumber;
    const char *func;
    const void *sendBuff;
    void *recvBuff;
    size_t count;
    int root;
    const char *datatype;
    uint8_t nChannels;
    uint8_t nWarps;
    const char *algo;
    const char *proto;
    void *parentGroup;
};
struct nccl_prof_p2p_v2 { /* v3 is the same */
    const char *name;
    uint64_t commHash;
    const char *func;
    void *buff;
    const char *datatype;
    size_t count;
    int peer;
};
struct nccl_prof_p2p_v4 {
    const char *func;
    void *buff;
    const char *datatype;
    size_t count;
    int peer;
    uint8_t nChannels;
};
struct nccl_prof_p2p_v5 {
    const char *func;
    void *buff;
    const char *datatype;
    size_t count;
    int peer;
    uint8_t nChannels;
    void *parentGroup;
};
struct nccl_prof_proxy_op {
    pid_t pid; /* of the process whose communicator this is: with PXN not always ours */
    uint8_t channelId;
    int peer;
    int nSteps;    /* in slices */
    int chunkSize; /* chunk times slice steps */
    int isSend;
};
struct nccl_prof_proxy_step {
    int step; /* slice number within op and channel */
};
struct nccl_prof_kernel_v3 {
    uint8_t channelId;
};
struct nccl_prof_kernel_v4 {
    uint8_t channelId;
    uint64_t pTimer;
};
struct nccl_prof_net_plugin {
    int64_t id;
    void *data;
};
struct nccl_prof_group_api {
    bool graphCaptured;
    int groupDepth;
};
struct nccl_prof_coll_api {
    const char *func;
    size_t count;
    const char *datatype;
    int root;
    void *stream;
    bool graphCaptured;
};
struct nccl_prof_p2p_api {
    const char *func;
    size_t count;
    const char *datatype;
    void *stream;
    bool graphCaptured;
};
struct nccl_prof_kernel_launch {
    void *stream;
};
struct nccl_prof_ce_coll {
    uint64_t seqNumber;
    const char *func;
    const void *sendBuff;
    void *recvBuff;
    size_t count;
    int root;
    const char *datatype;
    const char *syncStrategy;
    bool intraBatchSync;
    uint32_t batchSize;
    uint32_t numBatches;
    uint32_t ceSeqNum;
    void *stream;
};
struct nccl_prof_ce_sync {
    bool isComplete;
    int nRanks;
};
struct nccl_prof_ce_batch {
    int numOps;
    size_t totalBytes;
    bool useIntraSync;
};

struct nccl_prof_event_v2 {
    uint8_t type;
    void *parentObj;
    int rank;
    union {
        struct nccl_prof_coll_v2 coll;
        struct nccl_prof_p2p_v2 p2p;
        struct nccl_prof_proxy_op proxyOp;
        struct nccl_prof_proxy_step proxyStep;
    };
};
struct nccl_prof_event_v3 {
    uint8_t type;
    void *parentObj;
    int rank;
    union {
        struct nccl_prof_coll_v3 coll;
        struct nccl_prof_p2p_v2 p2p;
        struct nccl_prof_proxy_op proxyOp;
        struct nccl_prof_proxy_step proxyStep;
        struct nccl_prof_kernel_v3 kernelCh;
        struct nccl_prof_net_plugin netPlugin;
    };
};
struct nccl_prof_event_v4 {
    uint8_t type;
    void *parentObj;
    int rank;
    union {
        struct nccl_prof_coll_v4 coll;
        struct nccl_prof_p2p_v4 p2p;
        struct nccl_prof_proxy_op proxyOp;
        struct nccl_prof_proxy_step proxyStep;
        struct nccl_prof_kernel_v4 kernelCh;
        struct nccl_prof_net_plugin netPlugin;
    };
};
struct nccl_prof_event_v5 {
    uint64_t type;
    void *parentObj;
    int rank;
    union {
        struct nccl_prof_group_api groupApi;
        struct nccl_prof_coll_api collApi;
        struct nccl_prof_p2p_api p2pApi;
        struct nccl_prof_kernel_launch kernelLaunch;
        struct nccl_prof_coll_v5 coll;
        struct nccl_prof_p2p_v5 p2p;
        struct nccl_prof_proxy_op proxyOp;
        struct nccl_prof_proxy_step proxyStep;
        struct nccl_prof_kernel_v4 kernelCh;
        struct nccl_prof_net_plugin netPlugin;
    };
};
struct nccl_prof_event_v6 {
    uint64_t type;
    void *parentObj;
    int rank;
    union {
        struct nccl_prof_group_api groupApi;
        struct nccl_prof_coll_api collApi;
        struct nccl_prof_p2p_api p2pApi;
        struct nccl_prof_kernel_launch kernelLaunch;
        struct nccl_prof_coll_v5 coll;
        struct nccl_prof_p2p_v5 p2p;
        struct nccl_prof_proxy_op proxyOp;
        struct nccl_prof_proxy_step proxyStep;
        struct nccl_prof_kernel_v4 kernelCh;
        struct nccl_prof_net_plugin netPlugin;
        struct nccl_prof_ce_coll ceColl;
        struct nccl_prof_ce_sync ceCollSync;
        struct nccl_prof_ce_batch ceCollBatch;
    };
};

/* Arguments of a state; v2 and v3 put (size_t, int) first, which no code of ours reads. */
union nccl_prof_state_args {
    struct {
        size_t transSize;
    } proxyStep;
    struct {
        int appendedProxyOps;
    } proxyCtrl;
    struct {
        size_t transSize;
        int steps;
    } proxyOp_v2;
};

#define NCCL_PROFILER_EVENT_ENTRIES(version)                                                                           \
    nccl_result_t (*startEvent)(void *context, void **handle, struct nccl_prof_event_##version *event);                \
    nccl_result_t (*stopEvent)(void *handle);                                                                          \
    nccl_result_t (*recordEventState)(void *handle, nccl_profiler_state_t state, union nccl_prof_state_args *args);    \
    nccl_result_t (*finalize)(void *context);

struct nccl_profiler_v2 {
    const char *name;
    nccl_result_t (*init)(void **context, int *activationMask);
    NCCL_PROFILER_EVENT_ENTRIES(v2)
};
struct nccl_profiler_v3 {
    const char *name;
    nccl_result_t (*init)(void **context, int *activationMask);
    NCCL_PROFILER_EVENT_ENTRIES(v3)
};
struct nccl_profiler_v4 {
    const char *name;
    nccl_result_t (*init)(void **context, int *activationMask, const char *commName, uint64_t commHash, int nNodes,
                          int nranks, int rank, nccl_logger_t logger);
    NCCL_PROFILER_EVENT_ENTRIES(v4)
};
struct nccl_profiler_v5 {
    const char *name;
    nccl_result_t (*init)(void **context, uint64_t commId, int *activationMask, const char *commName, int nNodes,
                          int nranks, int rank, nccl_logger_t logger);
    NCCL_PROFILER_EVENT_ENTRIES(v5)
};
struct nccl_profiler_v6 {
    const char *name;
    nccl_result_t (*init)(void **context, uint64_t commId, int *activationMask, const char *commName, int nNodes,
                          int nranks, int rank, nccl_logger_t logger);
    NCCL_PROFILER_EVENT_ENTRIES(v6)
};

#define NCCL_PROF_AT(type, member, offset)                                                                             \
    _Static_assert(offsetof(struct type, member) == (offset), #type "." #member " is misplaced")
#define NCCL_PROF_SIZE(type, bytes) _Static_assert(sizeof(struct type) == (bytes), #type " has the wrong size")

NCCL_PROF_SIZE(nccl_prof_coll_v2, 104);
NCCL_PROF_SIZE(nccl_prof_coll_v3, 96);
NCCL_PROF_SIZE(nccl_prof_coll_v4, 80);
NCCL_PROF_SIZE(nccl_prof_coll_v5, 88);
NCCL_PROF_SIZE(nccl_prof_proxy_op, 24);
NCCL_PROF_SIZE(nccl_prof_ce_coll, 88);
NCCL_PROF_AT(nccl_prof_coll_v5, count, 32);
NCCL_PROF_AT(nccl_prof_coll_v5, datatype, 48);
NCCL_PROF_AT(nccl_prof_coll_v5, nChannels, 56);
NCCL_PROF_AT(nccl_prof_coll_v5, algo, 64);
NCCL_PROF_AT(nccl_prof_coll_v5, parentGroup, 80);
NCCL_PROF_AT(nccl_prof_proxy_op, peer, 8);
NCCL_PROF_AT(nccl_prof_proxy_op, isSend, 20);
NCCL_PROF_AT(nccl_prof_event_v2, coll, 24);
NCCL_PROF_AT(nccl_prof_event_v3, coll, 24);
NCCL_PROF_AT(nccl_prof_event_v4, proxyOp, 24);
NCCL_PROF_AT(nccl_prof_event_v5, parentObj, 8);
NCCL_PROF_AT(nccl_prof_event_v5, rank, 16);
NCCL_PROF_AT(nccl_prof_event_v5, proxyStep, 24);
NCCL_PROF_SIZE(nccl_prof_event_v2, 128);
NCCL_PROF_SIZE(nccl_prof_event_v3, 120);
NCCL_PROF_SIZE(nccl_prof_event_v4, 104);
NCCL_PROF_SIZE(nccl_prof_event_v5, 112);
NCCL_PROF_SIZE(nccl_prof_event_v6, 112);
NCCL_PROF_SIZE(nccl_profiler_v2, 6 * 8);
NCCL_PROF_SIZE(nccl_profiler_v6, 6 * 8);

#endif
