/* NCCL's net interface, version 9: no profiler handles yet, so that nothing can be tagged. */
#include "net_shim.h"

static nccl_result_t properties(int dev, struct nccl_net_properties_v9 *out)
{
    struct nccl_net_properties_v12 p;
    nccl_result_t result = ckm_net_properties(dev, &p);
    if (result == NCCL_SUCCESS)
        CKM_COPY_PROPERTIES(out, p);
    return result;
}

static nccl_result_t connect_v9(int dev, void *handle, void **comm, struct nccl_net_device_handle **device)
{
    (void)device;
    return ckm_net_connect(dev, handle, comm);
}

static nccl_result_t isend(void *comm, void *data, size_t size, int tag, void *mhandle, void **request)
{
    return ckm_shim_isend(comm, data, size, tag, mhandle, NULL, request);
}

static nccl_result_t irecv(void *comm, int n, void **data, size_t *sizes, int *tags, void **mhandles, void **request)
{
    return ckm_shim_irecv(comm, n, data, sizes, tags, mhandles, NULL, request);
}

static nccl_result_t make_vdevice(int *dev, struct nccl_net_vdevice_v9 *props)
{
    (void)dev, (void)props;
    return ckm_shim_refuse_vdevice();
}

__attribute__((visibility("default"))) const struct nccl_net_v9 ncclNetPlugin_v9 = {
    CKM_NET_COMMON, .init = ckm_net_init, .getProperties = properties, .listen = ckm_net_listen, .connect = connect_v9,
    .isend = isend, .irecv = irecv,       .makeVDevice = make_vdevice,
};
