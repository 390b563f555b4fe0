#include "net.h"

#include <errno.h>

#include "checkmate/api.h"
#include "checkmate/wire.h"
#include "device.h"
#include "log.h"

#define MAX_WAIT 256 /* file descriptors in one wait */

nccl_result_t ckm_net_init(nccl_logger_t logger)
{
    ckm_log_set(logger);
    return NCCL_SUCCESS;
}

nccl_result_t ckm_net_devices(int *ndev)
{
    *ndev = ckm_devices();
    return NCCL_SUCCESS;
}

nccl_result_t ckm_net_properties(int dev, struct nccl_net_properties_v12 *props)
{
    const struct ckm_device *device = ckm_device(dev);

    if (!device)
        return NCCL_INVALID_ARGUMENT;
    *props = (struct nccl_net_properties_v12){
        .name = (char *)device->name,
        .pciPath = *device->pci_path ? (char *)device->pci_path : NULL,
        .guid = (uint64_t)dev,
        .ptrSupport = NCCL_PTR_HOST,
        .regIsGlobal = 1,
        .speed = device->speed,
        .maxComms = 65536,
        .maxRecvs = CKM_MAX_RECVS,
        .netDeviceType = NCCL_NET_DEVICE_TYPE_HOST,
        .vProps = {.ndevs = 1, .devs = {dev}},
        .maxP2pBytes = CKM_MAX_PAYLOAD,
        .maxCollBytes = CKM_MAX_PAYLOAD,
        .maxMultiRequestSize = 1,
        .railId = NCCL_NET_ID_UNDEFINED,
        .planeId = NCCL_NET_ID_UNDEFINED,
    };
    return NCCL_SUCCESS;
}

nccl_result_t ckm_net_test(void *request, int *done, int *sizes)
{
    struct ckm_request *r = request;
    return r->is_send ? ckm_send_test(r, done, sizes) : ckm_recv_test(r, done, sizes);
}

int checkmate_net_wait(void *const *requests, int n, int timeout_us)
{
    struct pollfd fds[MAX_WAIT];
    struct timespec timeout = {timeout_us / 1000000, timeout_us % 1000000 * 1000L};
    nfds_t nfds = 0;

    for (int i = 0; i < n && nfds + CKM_FLOWS <= MAX_WAIT; i++) {
        struct ckm_request *r = requests[i];
        if (!r)
            continue;
        int more = r->is_send ? ckm_send_poll(r, fds + nfds) : ckm_recv_poll(r, fds + nfds);
        if (more < 0)
            return 1;
        nfds += (nfds_t)more;
    }
    int ready = ppoll(fds, nfds, timeout_us < 0 ? NULL : &timeout, NULL);
    return ready < 0 ? -errno : ready;
}
