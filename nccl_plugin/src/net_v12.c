/* NCCL's net interface, version 12. */
#include "net_shim.h"

static char context; /* NCCL keeps one per communicator; ours hold nothing */

static nccl_result_t init(void **ctx, uint64_t comm_id, struct nccl_net_config_v10 *config, nccl_logger_t logger,
                          nccl_net_profile_fn profile)
{
    (void)comm_id, (void)config, (void)profile;
    *ctx = &context;
    return ckm_net_init(logger);
}

static nccl_result_t properties(int dev, struct nccl_net_properties_v12 *out)
{
    struct nccl_net_properties_v12 p;
    nccl_result_t result = ckm_net_properties(dev, &p);
    if (result == NCCL_SUCCESS) {
        CKM_COPY_PROPERTIES(out, p);
        out->maxMultiRequestSize = p.maxMultiRequestSize;
        out->railId = p.railId;
        out->planeId = p.planeId;
    }
    return result;
}

static nccl_result_t listen_v12(void *ctx, int dev, void *handle, void **comm)
{
    (void)ctx;
    return ckm_net_listen(dev, handle, comm);
}

static nccl_result_t connect_v12(void *ctx, int dev, void *handle, void **comm, struct nccl_net_device_handle **device)
{
    (void)ctx, (void)device;
    return ckm_net_connect(dev, handle, comm);
}

static nccl_result_t make_vdevice(int *dev, struct nccl_net_vdevice_v12 *props)
{
    (void)dev, (void)props;
    return ckm_shim_refuse_vdevice();
}

static nccl_result_t finalize(void *ctx)
{
    (void)ctx;
    return NCCL_SUCCESS;
}

static nccl_result_t set_attributes(void *ctx, struct nccl_net_attr_v11 *attr)
{
    (void)ctx, (void)attr; /* hints */
    return NCCL_SUCCESS;
}

__attribute__((visibility("default"))) const struct nccl_net_v12 ncclNetPlugin_v12 = {
    CKM_NET_COMMON,
    .init = init,
    .getProperties = properties,
    .listen = listen_v12,
    .connect = connect_v12,
    .isend = ckm_shim_isend,
    .irecv = ckm_shim_irecv,
    .makeVDevice = make_vdevice,
    .finalize = finalize,
    .setNetAttr = set_attributes,
};
