/* NCCL's net interface, version 10. */
#include "net_shim.h"

static nccl_result_t init(nccl_logger_t logger, nccl_net_profile_fn profile)
{
    (void)profile;
    return ckm_net_init(logger);
}

static nccl_result_t properties(int dev, struct nccl_net_properties_v9 *out)
{
    struct nccl_net_properties_v12 p;
    nccl_result_t result = ckm_net_properties(dev, &p);
    if (result == NCCL_SUCCESS)
        CKM_COPY_PROPERTIES(out, p);
    return result;
}

static nccl_result_t connect_v10(int dev, struct nccl_net_config_v10 *config, void *handle, void **comm,
                                 struct nccl_net_device_handle **device)
{
    (void)config, (void)device;
    return ckm_net_connect(dev, handle, comm);
}

static nccl_result_t make_vdevice(int *dev, struct nccl_net_vdevice_v9 *props)
{
    (void)dev, (void)props;
    return ckm_shim_refuse_vdevice();
}

__attribute__((visibility("default"))) const struct nccl_net_v10 ncclNetPlugin_v10 = {
    CKM_NET_COMMON,
    .init = init,
    .getProperties = properties,
    .listen = ckm_net_listen,
    .connect = connect_v10,
    .isend = ckm_shim_isend,
    .irecv = ckm_shim_irecv,
    .makeVDevice = make_vdevice,
};
