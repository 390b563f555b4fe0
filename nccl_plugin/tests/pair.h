/* Two comms of the net table, connected over loopback in one process, and a sender made by hand. */
#ifndef CHECKMATE_PAIR_H
#define CHECKMATE_PAIR_H

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include "checkmate/api.h"
#include "checkmate/crc32c.h"
#include "checkmate/wire.h"
#include "nccl/net_abi.h"
#include "param.h"
#include "socket.h"
#include "test.h"

extern const struct nccl_net_v11 ncclNetPlugin_v11;
#define NET (&ncclNetPlugin_v11)

struct pair {
    void *send, *recv;
};

static inline void net_init(void)
{
    struct nccl_net_config_v10 config = {-1};
    void *ctx;
    int ndev;

    setenv("CHECKMATE_IFNAME", "=lo", 1);
    CHECK_EQ(NET->init(&ctx, 1, &config, test_logger, NULL), NCCL_SUCCESS);
    CHECK_EQ(NET->devices(&ndev), NCCL_SUCCESS);
    CHECK_EQ(ndev, 1);
}

static inline void set_param(const char *name, const char *value)
{
    setenv(name, value, 1);
    ckm_param_reload();
}

static inline struct pair connect_pair(void)
{
    char handle[NCCL_NET_HANDLE_BYTES];
    struct pair p = {0};
    void *listener;

    CHECK_EQ(NET->listen(NULL, 0, handle, &listener), NCCL_SUCCESS);
    while (!p.send || !p.recv) {
        if (!p.send)
            CHECK_EQ(NET->connect(NULL, 0, handle, &p.send, NULL), NCCL_SUCCESS);
        if (!p.recv)
            CHECK_EQ(NET->accept(listener, &p.recv, NULL), NCCL_SUCCESS);
    }
    CHECK_EQ(NET->closeListen(listener), NCCL_SUCCESS);
    return p;
}

static inline void close_pair(struct pair p)
{
    CHECK_EQ(NET->closeSend(p.send), NCCL_SUCCESS);
    CHECK_EQ(NET->closeRecv(p.recv), NCCL_SUCCESS);
}

static inline void *post_send(void *comm, void *data, size_t size, int tag)
{
    void *request = NULL;
    CHECK_EQ(NET->isend(comm, data, size, tag, NULL, NULL, &request), NCCL_SUCCESS);
    return request;
}

static inline void *post_recv(void *comm, void *data, size_t size, int tag)
{
    void *request = NULL;
    CHECK_EQ(NET->irecv(comm, 1, &data, &size, &tag, NULL, NULL, &request), NCCL_SUCCESS);
    return request;
}

/* Tests until done or failed, for ten seconds at most. */
static inline nccl_result_t finish(void *request, int *sizes)
{
    int64_t deadline = ckm_now_ms() + 10000;
    int done = 0;

    while (ckm_now_ms() < deadline) {
        nccl_result_t result = NET->test(request, &done, sizes);
        if (result || done)
            return result;
        checkmate_net_wait(&request, 1, 10000);
    }
    return NCCL_IN_PROGRESS;
}

/* The start of a handle and the hello, as in handshake.c: a peer with other code has only the bytes. */
struct raw_handle {
    uint32_t magic;
    uint16_t version;
    uint16_t port[2];
    uint32_t address;
    uint64_t nonce;
};
struct raw_hello {
    uint32_t magic;
    uint16_t version;
    uint16_t tagged_port;
    uint64_t nonce;
};

static inline int raw_connect(uint16_t port)
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = port, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    CHECK_EQ(connect(fd, (struct sockaddr *)&to, sizeof to), 0);
    return fd;
}

static inline struct ckm_frame raw_frame(uint64_t message, const void *payload, uint32_t length, int tagged)
{
    struct ckm_frame f = {.magic = CKM_WIRE_MAGIC, .version = CKM_WIRE_VERSION, .message = message};
    f.payload_len = length;
    if (tagged) {
        f.flags = CKM_FLAG_TAGGED | CKM_FLAG_PAYLOAD_CRC;
        f.payload_crc = ckm_crc32c(0, payload, length);
    }
    f.header_crc = ckm_crc32c(0, &f, offsetof(struct ckm_frame, header_crc));
    return f;
}

/* A receive comm whose sender is two plain sockets. */
static inline void *raw_pair(int fd[2])
{
    char handle[NCCL_NET_HANDLE_BYTES];
    struct raw_handle h;
    struct sockaddr_in local;
    socklen_t length = sizeof local;
    void *listener, *recv_comm = NULL;

    CHECK_EQ(NET->listen(NULL, 0, handle, &listener), NCCL_SUCCESS);
    memcpy(&h, handle, sizeof h);
    fd[0] = raw_connect(h.port[0]);
    fd[1] = raw_connect(h.port[1]);
    CHECK_EQ(getsockname(fd[1], (struct sockaddr *)&local, &length), 0);
    struct raw_hello hello = {0x4f4d4b43u, 1, local.sin_port, h.nonce};
    CHECK_EQ(write(fd[0], &hello, 5), 5); /* in two pieces */
    CHECK_EQ(NET->accept(listener, &recv_comm, NULL), NCCL_SUCCESS);
    CHECK(!recv_comm);
    CHECK_EQ(write(fd[0], (char *)&hello + 5, sizeof hello - 5), sizeof hello - 5);
    while (!recv_comm)
        CHECK_EQ(NET->accept(listener, &recv_comm, NULL), NCCL_SUCCESS);
    CHECK_EQ(NET->closeListen(listener), NCCL_SUCCESS);
    return recv_comm;
}

#endif
