/* NCCL's net interface, version 8: sizes are int, no profiler handles, so that nothing can be tagged. */
#include "net.h"

static nccl_result_t properties(int dev, struct nccl_net_properties_v8 *out)
{
    struct nccl_net_properties_v12 p;
    nccl_result_t result = ckm_net_properties(dev, &p);
    if (result == NCCL_SUCCESS)
        *out = (struct nccl_net_properties_v8){
            .name = p.name,
            .pciPath = p.pciPath,
            .guid = p.guid,
            .ptrSupport = p.ptrSupport,
            .regIsGlobal = p.regIsGlobal,
            .speed = p.speed,
            .port = p.port,
            .latency = p.latency,
            .maxComms = p.maxComms,
            .maxRecvs = p.maxRecvs,
            .netDeviceType = p.netDeviceType,
            .netDeviceVersion = p.netDeviceVersion,
        };
    return result;
}

static nccl_result_t connect_v8(int dev, void *handle, void **comm, struct nccl_net_device_handle **device)
{
    (void)device;
    return ckm_net_connect(dev, handle, comm);
}

static nccl_result_t accept_v8(void *listen_comm, void **comm, struct nccl_net_device_handle **device)
{
    (void)device;
    return ckm_net_accept(listen_comm, comm);
}

static nccl_result_t isend(void *comm, void *data, int size, int tag, void *mhandle, void **request)
{
    (void)mhandle;
    return size < 0 ? NCCL_INVALID_ARGUMENT : ckm_net_isend(comm, data, (size_t)size, tag, NULL, request);
}

static nccl_result_t irecv(void *comm, int n, void **data, int *sizes, int *tags, void **mhandles, void **request)
{
    size_t wide[CKM_MAX_RECVS];
    (void)mhandles;
    for (int i = 0; i < n && i < CKM_MAX_RECVS; i++)
        wide[i] = (size_t)sizes[i];
    return ckm_net_irecv(comm, n, data, wide, tags, request);
}

__attribute__((visibility("default"))) const struct nccl_net_v8 ncclNetPlugin_v8 = {
    .name = CKM_NET_NAME,
    .init = ckm_net_init,
    .devices = ckm_net_devices,
    .getProperties = properties,
    .listen = ckm_net_listen,
    .connect = connect_v8,
    .accept = accept_v8,
    .regMr = ckm_net_reg_mr,
    .regMrDmaBuf = ckm_net_reg_mr_dmabuf,
    .deregMr = ckm_net_dereg_mr,
    .isend = isend,
    .irecv = irecv,
    .iflush = ckm_net_iflush,
    .test = ckm_net_test,
    .closeSend = ckm_net_close_send,
    .closeRecv = ckm_net_close_recv,
    .closeListen = ckm_net_close_listen,
    .getDeviceMr = ckm_net_device_mr,
    .irecvConsumed = ckm_net_consumed,
};
