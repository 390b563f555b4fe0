/* Connections: each rank listens for every channel and every peer, the sender connects. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "engine.h"

int ckm_link_listen(struct ckm_ring *ring, struct ckm_link *link, uint8_t *handle, char *error, size_t error_bytes)
{
    nccl_result_t result = ring->plugin.net->listen(ring->net_ctx, link->dev, handle, &link->listen);
    if (result == NCCL_SUCCESS)
        return 0;
    snprintf(error, error_bytes, "net plugin %s: cannot listen on device %d: %s", ring->plugin.net->name, link->dev,
             ckm_result_text(result));
    return -1;
}

static nccl_result_t try_once(struct ckm_ring *ring, struct ckm_link *link)
{
    struct nccl_net_device_handle *device = NULL;
    if (link->send)
        return ring->plugin.net->connect(ring->net_ctx, link->dev, link->handle, &link->comm, &device);
    nccl_result_t result = ring->plugin.net->accept(link->listen, &link->comm, &device);
    if (result == NCCL_SUCCESS && link->comm) {
        ring->plugin.net->closeListen(link->listen);
        link->listen = NULL;
    }
    return result;
}

static size_t staging_bytes(const struct ckm_ring *ring)
{
    return (size_t)CKM_RING_DEPTH * ring->config.slice_bytes;
}

/* Partial sums arrive here; pages that are never used are never backed. */
static int add_staging(struct ckm_ring *ring, struct ckm_link *link)
{
    void *memory =
        mmap(NULL, staging_bytes(ring), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        ckm_ring_fail(ring, "out of memory for %zu bytes of receive slots", staging_bytes(ring));
        return -1;
    }
    link->staging = memory;
    nccl_result_t result =
        ring->plugin.net->regMr(link->comm, memory, staging_bytes(ring), NCCL_PTR_HOST, &link->staging_mr);
    if (result == NCCL_SUCCESS)
        return 0;
    ckm_ring_fail(ring, "cannot register receive slots: %s", ckm_result_text(result));
    return -1;
}

int ckm_link_progress(struct ckm_ring *ring, struct ckm_link *link)
{
    if (link->comm)
        return 1;
    nccl_result_t result = try_once(ring, link);
    if (result != NCCL_SUCCESS) {
        ckm_ring_fail(ring, "cannot %s rank %u: %s", link->send ? "connect to" : "accept a connection from", link->peer,
                      ckm_result_text(result));
        return -1;
    }
    if (!link->comm)
        return 0;
    bool ring_recv = !link->send && !(ring->p2p_recv && link == &ring->p2p_recv[link->peer]);
    return ring_recv && add_staging(ring, link) ? -1 : 1;
}

void ckm_link_close(struct ckm_ring *ring, struct ckm_link *link)
{
    const struct nccl_net_v11 *net = ring->plugin.net;
    if (link->staging_mr)
        net->deregMr(link->comm, link->staging_mr);
    if (link->comm)
        link->send ? net->closeSend(link->comm) : net->closeRecv(link->comm);
    if (link->listen)
        net->closeListen(link->listen);
    if (link->staging)
        munmap(link->staging, staging_bytes(ring));
    link->comm = link->listen = link->staging_mr = NULL;
    link->staging = NULL;
}
