/* Memory registration: the kernel copies from and to any host memory, so that nothing has to be done for it. */
#include "log.h"
#include "net.h"

static char registered; /* what every handle points to */

nccl_result_t ckm_net_reg_mr(void *comm, void *data, size_t size, int type, void **mhandle)
{
    (void)comm, (void)data, (void)size;
    *mhandle = NULL;
    if (type != NCCL_PTR_HOST) {
        CKM_INFO("regMr: memory of type %d is not supported, only host memory", type);
        return NCCL_INVALID_ARGUMENT;
    }
    *mhandle = &registered;
    return NCCL_SUCCESS;
}

nccl_result_t ckm_net_reg_mr_dmabuf(void *comm, void *data, size_t size, int type, uint64_t offset, int fd,
                                    void **mhandle)
{
    (void)comm, (void)data, (void)size, (void)type, (void)offset, (void)fd;
    *mhandle = NULL;
    CKM_INFO("regMrDmaBuf: not supported, only host memory is");
    return NCCL_INVALID_ARGUMENT;
}

nccl_result_t ckm_net_dereg_mr(void *comm, void *mhandle)
{
    (void)comm, (void)mhandle;
    return NCCL_SUCCESS;
}

nccl_result_t ckm_net_device_mr(void *comm, void *mhandle, void **device_mhandle)
{
    (void)comm, (void)mhandle;
    *device_mhandle = NULL;
    return NCCL_INVALID_USAGE; /* for networks with code on the device */
}
