/* NCCL's net plugin interface, versions 8 to 12 (symbols ncclNetPlugin_v8 ... ncclNetPlugin_v12).
 *
 * Written from the published interface: the layouts are NCCL's, the text is ours. What changed:
 *   v9   sizes are size_t; properties gain forceFlush, vProps, maxP2pBytes, maxCollBytes; makeVDevice
 *   v10  isend and irecv get profiler handles; init gets the profiler callback; connect gets a configuration
 *   v11  a context per communicator: init(ctx, commId, config), listen/connect take it, finalize, setNetAttr
 *   v12  properties gain railId and planeId; up to 8 devices in a virtual one
 */
#ifndef CHECKMATE_NCCL_NET_ABI_H
#define CHECKMATE_NCCL_NET_ABI_H

#include "nccl/common_abi.h"

#define NCCL_NET_HANDLE_BYTES     128 /* what listen() may write */
#define NCCL_NET_MAX_REQUESTS     32  /* requests in flight per comm object that NCCL asks for */
#define NCCL_NET_MAX_COLL_BYTES   (1L << 40)
#define NCCL_NET_ID_UNDEFINED     (-1)
#define NCCL_NET_DEVICE_TYPE_HOST 0

enum { NCCL_PTR_HOST = 1, NCCL_PTR_CUDA = 2, NCCL_PTR_DMABUF = 4 };

/* Network-defined profiler events: (event handle, type, profiler handle, plugin id, data). Not used by us. */
typedef nccl_result_t (*nccl_net_profile_fn)(void **, int, void *, int64_t, void *);

struct nccl_net_device_handle; /* device-side offload; NULL for host networks */

struct nccl_net_vdevice_v9 {
    int ndevs;
    int devs[4];
};
struct nccl_net_vdevice_v12 {
    int ndevs;
    int devs[8];
};
struct nccl_net_config_v10 {
    int trafficClass;
};
struct nccl_net_comm_attr_v11 {
    int32_t maxConcurrentPeers, minConcurrentPeers, maxFlowsPerPeer, minFlowsPerPeer;
};
struct nccl_net_attr_v11 {
    struct nccl_net_comm_attr_v11 send, recv;
    uint32_t op, algo, proto;
};

struct nccl_net_properties_v8 {
    char *name;
    char *pciPath; /* in /sys */
    uint64_t guid;
    int ptrSupport; /* NCCL_PTR_* */
    int regIsGlobal;
    int speed; /* Mbit/s */
    int port;
    float latency; /* us */
    int maxComms;
    int maxRecvs;
    int netDeviceType;
    int netDeviceVersion;
};

#define NCCL_NET_PROPERTIES_V9_FIELDS                                                                                  \
    char *name;                                                                                                        \
    char *pciPath;                                                                                                     \
    uint64_t guid;                                                                                                     \
    int ptrSupport;                                                                                                    \
    int regIsGlobal;                                                                                                   \
    int forceFlush;                                                                                                    \
    int speed;                                                                                                         \
    int port;                                                                                                          \
    float latency;                                                                                                     \
    int maxComms;                                                                                                      \
    int maxRecvs;                                                                                                      \
    int netDeviceType;                                                                                                 \
    int netDeviceVersion;

struct nccl_net_properties_v9 { /* v10 is the same */
    NCCL_NET_PROPERTIES_V9_FIELDS
    struct nccl_net_vdevice_v9 vProps;
    size_t maxP2pBytes;
    size_t maxCollBytes;
};
struct nccl_net_properties_v11 {
    NCCL_NET_PROPERTIES_V9_FIELDS
    struct nccl_net_vdevice_v9 vProps;
    size_t maxP2pBytes;
    size_t maxCollBytes;
    int maxMultiRequestSize;
};
struct nccl_net_properties_v12 {
    NCCL_NET_PROPERTIES_V9_FIELDS
    struct nccl_net_vdevice_v12 vProps;
    size_t maxP2pBytes;
    size_t maxCollBytes;
    int maxMultiRequestSize;
    int16_t railId;
    int16_t planeId;
};

/* The entries that never changed, in the runs in which they stand in every table. */
#define NCCL_NET_MEMORY_ENTRIES                                                                                        \
    nccl_result_t (*regMr)(void *comm, void *data, size_t size, int type, void **mhandle);                             \
    nccl_result_t (*regMrDmaBuf)(void *comm, void *data, size_t size, int type, uint64_t offset, int fd,               \
                                 void **mhandle);                                                                      \
    nccl_result_t (*deregMr)(void *comm, void *mhandle);
#define NCCL_NET_COMPLETION_ENTRIES                                                                                    \
    nccl_result_t (*iflush)(void *recvComm, int n, void **data, int *sizes, void **mhandles, void **request);          \
    nccl_result_t (*test)(void *request, int *done, int *sizes);                                                       \
    nccl_result_t (*closeSend)(void *sendComm);                                                                        \
    nccl_result_t (*closeRecv)(void *recvComm);                                                                        \
    nccl_result_t (*closeListen)(void *listenComm);                                                                    \
    nccl_result_t (*getDeviceMr)(void *comm, void *mhandle, void **deviceMhandle);                                     \
    nccl_result_t (*irecvConsumed)(void *recvComm, int n, void *request);
#define NCCL_NET_TRANSFER_ENTRIES_V10                                                                                  \
    nccl_result_t (*isend)(void *sendComm, void *data, size_t size, int tag, void *mhandle, void *phandle,             \
                           void **request);                                                                            \
    nccl_result_t (*irecv)(void *recvComm, int n, void **data, size_t *sizes, int *tags, void **mhandles,              \
                           void **phandles, void **request);

struct nccl_net_v8 {
    const char *name;
    nccl_result_t (*init)(nccl_logger_t logger);
    nccl_result_t (*devices)(int *ndev);
    nccl_result_t (*getProperties)(int dev, struct nccl_net_properties_v8 *props);
    nccl_result_t (*listen)(int dev, void *handle, void **listenComm);
    nccl_result_t (*connect)(int dev, void *handle, void **sendComm, struct nccl_net_device_handle **deviceHandle);
    nccl_result_t (*accept)(void *listenComm, void **recvComm, struct nccl_net_device_handle **deviceHandle);
    NCCL_NET_MEMORY_ENTRIES
    nccl_result_t (*isend)(void *sendComm, void *data, int size, int tag, void *mhandle, void **request);
    nccl_result_t (*irecv)(void *recvComm, int n, void **data, int *sizes, int *tags, void **mhandles, void **request);
    NCCL_NET_COMPLETION_ENTRIES
};

struct nccl_net_v9 {
    const char *name;
    nccl_result_t (*init)(nccl_logger_t logger);
    nccl_result_t (*devices)(int *ndev);
    nccl_result_t (*getProperties)(int dev, struct nccl_net_properties_v9 *props);
    nccl_result_t (*listen)(int dev, void *handle, void **listenComm);
    nccl_result_t (*connect)(int dev, void *handle, void **sendComm, struct nccl_net_device_handle **deviceHandle);
    nccl_result_t (*accept)(void *listenComm, void **recvComm, struct nccl_net_device_handle **deviceHandle);
    NCCL_NET_MEMORY_ENTRIES
    nccl_result_t (*isend)(void *sendComm, void *data, size_t size, int tag, void *mhandle, void **request);
    nccl_result_t (*irecv)(void *recvComm, int n, void **data, size_t *sizes, int *tags, void **mhandles,
                           void **request);
    NCCL_NET_COMPLETION_ENTRIES
    nccl_result_t (*makeVDevice)(int *dev, struct nccl_net_vdevice_v9 *props);
};

struct nccl_net_v10 {
    const char *name;
    nccl_result_t (*init)(nccl_logger_t logger, nccl_net_profile_fn profile);
    nccl_result_t (*devices)(int *ndev);
    nccl_result_t (*getProperties)(int dev, struct nccl_net_properties_v9 *props);
    nccl_result_t (*listen)(int dev, void *handle, void **listenComm);
    nccl_result_t (*connect)(int dev, struct nccl_net_config_v10 *config, void *handle, void **sendComm,
                             struct nccl_net_device_handle **deviceHandle);
    nccl_result_t (*accept)(void *listenComm, void **recvComm, struct nccl_net_device_handle **deviceHandle);
    NCCL_NET_MEMORY_ENTRIES
    NCCL_NET_TRANSFER_ENTRIES_V10
    NCCL_NET_COMPLETION_ENTRIES
    nccl_result_t (*makeVDevice)(int *dev, struct nccl_net_vdevice_v9 *props);
};

struct nccl_net_v11 {
    const char *name;
    nccl_result_t (*init)(void **ctx, uint64_t commId, struct nccl_net_config_v10 *config, nccl_logger_t logger,
                          nccl_net_profile_fn profile);
    nccl_result_t (*devices)(int *ndev);
    nccl_result_t (*getProperties)(int dev, struct nccl_net_properties_v11 *props);
    nccl_result_t (*listen)(void *ctx, int dev, void *handle, void **listenComm);
    nccl_result_t (*connect)(void *ctx, int dev, void *handle, void **sendComm,
                             struct nccl_net_device_handle **deviceHandle);
    nccl_result_t (*accept)(void *listenComm, void **recvComm, struct nccl_net_device_handle **deviceHandle);
    NCCL_NET_MEMORY_ENTRIES
    NCCL_NET_TRANSFER_ENTRIES_V10
    NCCL_NET_COMPLETION_ENTRIES
    nccl_result_t (*makeVDevice)(int *dev, struct nccl_net_vdevice_v9 *props);
    nccl_result_t (*finalize)(void *ctx);
    nccl_result_t (*setNetAttr)(void *ctx, struct nccl_net_attr_v11 *attr);
};

struct nccl_net_v12 {
    const char *name;
    nccl_result_t (*init)(void **ctx, uint64_t commId, struct nccl_net_config_v10 *config, nccl_logger_t logger,
                          nccl_net_profile_fn profile);
    nccl_result_t (*devices)(int *ndev);
    nccl_result_t (*getProperties)(int dev, struct nccl_net_properties_v12 *props);
    nccl_result_t (*listen)(void *ctx, int dev, void *handle, void **listenComm);
    nccl_result_t (*connect)(void *ctx, int dev, void *handle, void **sendComm,
                             struct nccl_net_device_handle **deviceHandle);
    nccl_result_t (*accept)(void *listenComm, void **recvComm, struct nccl_net_device_handle **deviceHandle);
    NCCL_NET_MEMORY_ENTRIES
    NCCL_NET_TRANSFER_ENTRIES_V10
    NCCL_NET_COMPLETION_ENTRIES
    nccl_result_t (*makeVDevice)(int *dev, struct nccl_net_vdevice_v12 *props);
    nccl_result_t (*finalize)(void *ctx);
    nccl_result_t (*setNetAttr)(void *ctx, struct nccl_net_attr_v11 *attr);
};

/* LP64, as on every platform that NCCL builds for. */
#define NCCL_ABI_AT(type, member, offset)                                                                              \
    _Static_assert(offsetof(struct type, member) == (offset), #type "." #member " is misplaced")
#define NCCL_ABI_SIZE(type, bytes) _Static_assert(sizeof(struct type) == (bytes), #type " has the wrong size")

NCCL_ABI_SIZE(nccl_net_properties_v8, 64);
NCCL_ABI_AT(nccl_net_properties_v8, speed, 32);
NCCL_ABI_AT(nccl_net_properties_v8, netDeviceVersion, 56);
NCCL_ABI_SIZE(nccl_net_properties_v9, 104);
NCCL_ABI_AT(nccl_net_properties_v9, vProps, 64);
NCCL_ABI_AT(nccl_net_properties_v9, maxP2pBytes, 88);
NCCL_ABI_SIZE(nccl_net_properties_v11, 112);
NCCL_ABI_AT(nccl_net_properties_v11, maxMultiRequestSize, 104);
NCCL_ABI_SIZE(nccl_net_properties_v12, 128);
NCCL_ABI_AT(nccl_net_properties_v12, vProps, 64);
NCCL_ABI_AT(nccl_net_properties_v12, maxP2pBytes, 104);
NCCL_ABI_AT(nccl_net_properties_v12, planeId, 126);
NCCL_ABI_SIZE(nccl_net_attr_v11, 44);
NCCL_ABI_SIZE(nccl_net_v8, 19 * 8);
NCCL_ABI_AT(nccl_net_v8, isend, 10 * 8);
NCCL_ABI_SIZE(nccl_net_v9, 20 * 8);
NCCL_ABI_SIZE(nccl_net_v10, 20 * 8);
NCCL_ABI_SIZE(nccl_net_v11, 22 * 8);
NCCL_ABI_AT(nccl_net_v11, test, 13 * 8);
NCCL_ABI_AT(nccl_net_v11, makeVDevice, 19 * 8);
NCCL_ABI_SIZE(nccl_net_v12, 22 * 8);
NCCL_ABI_AT(nccl_net_v12, setNetAttr, 21 * 8);

#endif
