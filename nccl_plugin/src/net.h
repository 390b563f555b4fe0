/* The net side of the plugin, the same for every version of NCCL's interface.
 *
 * A send comm has one or two TCP connections, called flows: the plain one, and the tagged one for final chunks.
 * Every message is one frame (checkmate/wire.h) on one of them, numbered over both. All calls return at once;
 * what is under way moves on inside isend, irecv and test. Each comm has a lock, so any thread may call.
 */
#ifndef CHECKMATE_NET_H
#define CHECKMATE_NET_H

#include <pthread.h>
#include <stdbool.h>
#include <sys/poll.h>

#include "nccl/net_abi.h"

#define CKM_NET_NAME     "Checkmate"
#define CKM_MAX_RECVS    8   /* buffers in a grouped receive */
#define CKM_MAX_REQUESTS 256 /* in flight per comm: NCCL's 32, times grouped receives */

enum { CKM_PLAIN, CKM_TAGGED, CKM_FLOWS };

/* What every request starts with. */
struct ckm_request {
    bool is_send;
    bool done;
    void *comm;
};

struct ckm_send;
struct ckm_recv;

nccl_result_t ckm_net_init(nccl_logger_t logger);
nccl_result_t ckm_net_devices(int *ndev);
nccl_result_t ckm_net_properties(int dev, struct nccl_net_properties_v12 *props);

/* handshake.c */
nccl_result_t ckm_net_listen(int dev, void *handle, void **listen_comm);
nccl_result_t ckm_net_connect(int dev, void *handle, void **send_comm);
nccl_result_t ckm_net_accept(void *listen_comm, void **recv_comm);
nccl_result_t ckm_net_close_listen(void *listen_comm);

/* memory.c */
nccl_result_t ckm_net_reg_mr(void *comm, void *data, size_t size, int type, void **mhandle);
nccl_result_t ckm_net_reg_mr_dmabuf(void *comm, void *data, size_t size, int type, uint64_t offset, int fd,
                                    void **mhandle);
nccl_result_t ckm_net_dereg_mr(void *comm, void *mhandle);
nccl_result_t ckm_net_device_mr(void *comm, void *mhandle, void **device_mhandle);

/* send.c; the new comm owns the sockets, a tagged one of -1 is none */
nccl_result_t ckm_send_new(int plain, int tagged, const char *peer, struct ckm_send **comm);
nccl_result_t ckm_net_isend(void *comm, void *data, size_t size, int tag, void *phandle, void **request);
nccl_result_t ckm_net_close_send(void *comm);
nccl_result_t ckm_send_test(struct ckm_request *request, int *done, int *size);
int ckm_send_poll(struct ckm_request *request, struct pollfd *fds); /* -1: it may progress now; else fds written */

/* recv.c */
nccl_result_t ckm_recv_new(int plain, int tagged, const char *peer, struct ckm_recv **comm);
nccl_result_t ckm_net_irecv(void *comm, int n, void **data, const size_t *sizes, const int *tags, void **request);
nccl_result_t ckm_net_iflush(void *comm, int n, void **data, int *sizes, void **mhandles, void **request);
nccl_result_t ckm_net_consumed(void *comm, int n, void *request);
nccl_result_t ckm_net_close_recv(void *comm);
nccl_result_t ckm_recv_test(struct ckm_request *request, int *done, int *sizes);
int ckm_recv_poll(struct ckm_request *request, struct pollfd *fds);

nccl_result_t ckm_net_test(void *request, int *done, int *sizes);

#endif
