/* What the shims of net versions 9 to 12 share. */
#ifndef CHECKMATE_NET_SHIM_H
#define CHECKMATE_NET_SHIM_H

#include "net.h"

/* Copies the properties that all of these versions have. */
#define CKM_COPY_PROPERTIES(out, p)                                                                                    \
    do {                                                                                                               \
        (out)->name = (p).name;                                                                                        \
        (out)->pciPath = (p).pciPath;                                                                                  \
        (out)->guid = (p).guid;                                                                                        \
        (out)->ptrSupport = (p).ptrSupport;                                                                            \
        (out)->regIsGlobal = (p).regIsGlobal;                                                                          \
        (out)->forceFlush = (p).forceFlush;                                                                            \
        (out)->speed = (p).speed;                                                                                      \
        (out)->port = (p).port;                                                                                        \
        (out)->latency = (p).latency;                                                                                  \
        (out)->maxComms = (p).maxComms;                                                                                \
        (out)->maxRecvs = (p).maxRecvs;                                                                                \
        (out)->netDeviceType = (p).netDeviceType;                                                                      \
        (out)->netDeviceVersion = (p).netDeviceVersion;                                                                \
        (out)->vProps.ndevs = (p).vProps.ndevs;                                                                        \
        (out)->vProps.devs[0] = (p).vProps.devs[0];                                                                    \
        (out)->maxP2pBytes = (p).maxP2pBytes;                                                                          \
        (out)->maxCollBytes = (p).maxCollBytes;                                                                        \
    } while (0)

/* The entries that are the same in all of these versions. */
#define CKM_NET_COMMON                                                                                                 \
    .name = CKM_NET_NAME, .devices = ckm_net_devices, .accept = ckm_shim_accept, .regMr = ckm_net_reg_mr,              \
    .regMrDmaBuf = ckm_net_reg_mr_dmabuf, .deregMr = ckm_net_dereg_mr, .iflush = ckm_net_iflush, .test = ckm_net_test, \
    .closeSend = ckm_net_close_send, .closeRecv = ckm_net_close_recv, .closeListen = ckm_net_close_listen,             \
    .getDeviceMr = ckm_net_device_mr, .irecvConsumed = ckm_net_consumed

static inline nccl_result_t ckm_shim_accept(void *listen_comm, void **comm, struct nccl_net_device_handle **device)
{
    (void)device; /* left NULL: no code of ours runs on the device */
    return ckm_net_accept(listen_comm, comm);
}

static inline nccl_result_t ckm_shim_isend(void *comm, void *data, size_t size, int tag, void *mhandle, void *phandle,
                                           void **request)
{
    (void)mhandle;
    return ckm_net_isend(comm, data, size, tag, phandle, request);
}

static inline nccl_result_t ckm_shim_irecv(void *comm, int n, void **data, size_t *sizes, int *tags, void **mhandles,
                                           void **phandles, void **request)
{
    (void)mhandles, (void)phandles;
    return ckm_net_irecv(comm, n, data, sizes, tags, request);
}

/* Fusing devices is refused; NCCL then uses them one by one. */
static inline nccl_result_t ckm_shim_refuse_vdevice(void)
{
    return NCCL_INVALID_USAGE;
}

#endif
