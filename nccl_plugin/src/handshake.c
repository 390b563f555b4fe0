/* listen, connect and accept.
 *
 * The handle names two ports. The sender connects to the first, the plain flow, and, if final chunks can be
 * tagged here, to the second. When both are up it says hello on the plain one: which of the listener's handles it
 * followed (a nonce) and the source port of its tagged connection, by which the acceptor pairs the two.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include "counter_map.h"
#include "device.h"
#include "log.h"
#include "net.h"
#include "param.h"
#include "socket.h"

#define HANDLE_MAGIC 0x484d4b43u /* "CKMH" */
#define HELLO_MAGIC  0x4f4d4b43u /* "CKMO" */
#define VERSION      1
#define MAX_WAITING  64  /* connections accepted but not yet complete, per listener and kind */
#define RETRY_MS     100 /* between attempts to connect */

struct handle {
    uint32_t magic;
    uint16_t version;
    uint16_t port[CKM_FLOWS]; /* network order */
    uint32_t address;         /* network order */
    uint64_t nonce;
    uint64_t attempt; /* 0; the connecting side keeps its place here between calls */
};
_Static_assert(sizeof(struct handle) <= NCCL_NET_HANDLE_BYTES, "handle size");

struct hello {
    uint32_t magic;
    uint16_t version;
    uint16_t tagged_port; /* network order; 0: no tagged flow */
    uint64_t nonce;
};

static void name_peer(char *out, size_t bytes, uint32_t address, uint16_t port)
{
    struct in_addr in = {address};
    inet_ntop(AF_INET, &in, out, (socklen_t)bytes);
    size_t used = strlen(out);
    snprintf(out + used, bytes - used, ":%u", ntohs(port));
}

/* The connecting side */

struct attempt {
    uint64_t id;
    struct attempt *next;
    struct handle handle;
    int fd[CKM_FLOWS];
    bool tagged, refused;
    int64_t started_ms, retry_ms, touched_ms;
    struct hello hello;
    size_t said; /* bytes of the hello */
    char peer[32];
};

static pthread_mutex_t attempts_lock = PTHREAD_MUTEX_INITIALIZER;
static struct attempt *attempts;
static uint64_t last_id;

static void close_flows(int fd[CKM_FLOWS])
{
    for (int i = 0; i < CKM_FLOWS; i++) {
        if (fd[i] >= 0)
            close(fd[i]);
        fd[i] = -1;
    }
}

static void drop(struct attempt *a)
{
    pthread_mutex_lock(&attempts_lock);
    struct attempt **at = &attempts;
    while (*at != a)
        at = &(*at)->next;
    *at = a->next;
    pthread_mutex_unlock(&attempts_lock);
    close_flows(a->fd);
    free(a);
}

/* Attempts that NCCL no longer asks about, after an abort; under the lock. */
static void forget_abandoned(int64_t now)
{
    for (struct attempt **at = &attempts; *at;) {
        struct attempt *a = *at;
        if (now - a->touched_ms > 2 * ckm_param_number(CKM_TIMEOUT_MS)) {
            *at = a->next;
            close_flows(a->fd);
            free(a);
        } else {
            at = &a->next;
        }
    }
}

static struct attempt *find_attempt(struct handle *handle)
{
    int64_t now = ckm_now_ms();

    pthread_mutex_lock(&attempts_lock);
    forget_abandoned(now);
    struct attempt *a = attempts;
    while (a && a->id != handle->attempt)
        a = a->next;
    if (!a && (a = calloc(1, sizeof *a))) {
        *a = (struct attempt){.id = ++last_id, .next = attempts, .handle = *handle, .fd = {-1, -1}, .tagged = true};
        a->started_ms = a->retry_ms = now;
        name_peer(a->peer, sizeof a->peer, handle->address, handle->port[CKM_PLAIN]);
        attempts = a;
        handle->attempt = a->id;
    }
    if (a)
        a->touched_ms = now;
    pthread_mutex_unlock(&attempts_lock);
    return a;
}

static int open_flows(struct attempt *a, const struct ckm_device *device)
{
    for (int i = 0; i < CKM_FLOWS; i++) {
        struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = a->handle.port[i]};
        to.sin_addr.s_addr = a->handle.address;
        if (i == CKM_TAGGED && !a->tagged)
            continue;
        a->fd[i] = ckm_socket_connect(&device->address, &to, device->socket_buffer, i == CKM_TAGGED);
        if (i == CKM_TAGGED && a->fd[i] < 0 && errno == ENODATA)
            a->tagged = false;
        else if (a->fd[i] < 0)
            return -1;
    }
    return 0;
}

/* Never tagged without the option: the program must have seen this connection. */
static void check_armed(struct attempt *a)
{
    if (!a->tagged || ckm_counter_armed(a->fd[CKM_TAGGED]))
        return;
    CKM_WARN("the counter program did not see the connection to %s: it is not tagged. Is the program attached to a "
             "cgroup that this process is in?",
             a->peer);
    close(a->fd[CKM_TAGGED]);
    a->fd[CKM_TAGGED] = -1;
    a->tagged = false;
}

static void prepare_hello(struct attempt *a)
{
    struct sockaddr_in local = {0};
    socklen_t length = sizeof local;

    check_armed(a);
    if (a->tagged)
        getsockname(a->fd[CKM_TAGGED], (struct sockaddr *)&local, &length);
    a->hello = (struct hello){HELLO_MAGIC, VERSION, local.sin_port, a->handle.nonce};
}

/* 1: connected, hello said; 0: not yet; -1: failed, errno. */
static int step(struct attempt *a, const struct ckm_device *device)
{
    if (a->fd[CKM_PLAIN] < 0 && open_flows(a, device))
        return -1;
    if (!a->hello.magic) {
        for (int i = 0; i < CKM_FLOWS; i++) {
            int up = a->fd[i] < 0 ? 1 : ckm_socket_connected(a->fd[i]);
            if (up <= 0)
                return up;
        }
        prepare_hello(a);
    }
    ssize_t n =
        send(a->fd[CKM_PLAIN], (char *)&a->hello + a->said, sizeof a->hello - a->said, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n < 0)
        return errno == EAGAIN || errno == EINTR ? 0 : -1;
    a->said += (size_t)n;
    return a->said == sizeof a->hello;
}

static bool worth_retrying(int error)
{
    return error == ECONNREFUSED || error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH;
}

static nccl_result_t connect_step(struct attempt *a, const struct ckm_device *device, void **send_comm)
{
    int64_t now = ckm_now_ms();
    nccl_result_t result = NCCL_SUCCESS;
    struct ckm_send *comm = NULL;
    int up = now < a->retry_ms ? 0 : step(a, device);

    if (up > 0) {
        result = ckm_send_new(a->fd[CKM_PLAIN], a->fd[CKM_TAGGED], a->peer, &comm);
        if (comm)
            a->fd[CKM_PLAIN] = a->fd[CKM_TAGGED] = -1;
    } else if (up < 0 && !worth_retrying(errno)) {
        result = ckm_socket_failed("connecting to", a->peer, errno);
    } else if (now - a->started_ms > ckm_param_number(CKM_TIMEOUT_MS)) {
        result = ckm_socket_failed("connecting to", a->peer, up < 0 ? errno : ETIMEDOUT);
    } else if (up < 0) {
        close_flows(a->fd);
        a->retry_ms = now + RETRY_MS;
    }
    if (up > 0 || result)
        drop(a);
    *send_comm = comm;
    return result;
}

nccl_result_t ckm_net_connect(int dev, void *opaque, void **send_comm)
{
    const struct ckm_device *device = ckm_device(dev);
    struct handle handle;

    *send_comm = NULL;
    memcpy(&handle, opaque, sizeof handle);
    if (!device || handle.magic != HANDLE_MAGIC || handle.version != VERSION) {
        CKM_WARN("connect: device %d does not exist, or the handle is not from this version of the plugin", dev);
        return NCCL_INVALID_ARGUMENT;
    }
    ckm_socket_reap();
    struct attempt *a = find_attempt(&handle);
    if (!a)
        return NCCL_SYSTEM_ERROR;
    memcpy(opaque, &handle, sizeof handle);
    nccl_result_t result = connect_step(a, device, send_comm);
    if (result || *send_comm) {
        handle.attempt = 0;
        memcpy(opaque, &handle, sizeof handle);
    }
    return result;
}

/* The listening side */

struct waiting {
    int fd; /* -1: free */
    struct sockaddr_in peer;
    int64_t since_ms;
    struct hello hello; /* of plain ones */
    size_t heard;
};

struct listener {
    pthread_mutex_t lock;
    int fd[CKM_FLOWS];
    uint64_t nonce;
    int64_t asked_ms; /* first accept since the last one that succeeded; 0: none */
    struct waiting waiting[CKM_FLOWS][MAX_WAITING];
};

static void free_listener(struct listener *l)
{
    close_flows(l->fd);
    for (int i = 0; i < CKM_FLOWS; i++)
        for (int w = 0; w < MAX_WAITING; w++)
            if (l->waiting[i][w].fd >= 0)
                close(l->waiting[i][w].fd);
    pthread_mutex_destroy(&l->lock);
    free(l);
}

static struct listener *new_listener(void)
{
    struct listener *l = calloc(1, sizeof *l);

    if (!l)
        return NULL;
    pthread_mutex_init(&l->lock, NULL);
    for (int i = 0; i < CKM_FLOWS; i++) {
        l->fd[i] = -1;
        for (int w = 0; w < MAX_WAITING; w++)
            l->waiting[i][w].fd = -1;
    }
    return l;
}

nccl_result_t ckm_net_listen(int dev, void *opaque, void **listen_comm)
{
    const struct ckm_device *device = ckm_device(dev);
    struct handle handle = {.magic = HANDLE_MAGIC, .version = VERSION};

    *listen_comm = NULL;
    if (!device)
        return NCCL_INVALID_ARGUMENT;
    ckm_socket_reap();
    struct listener *l = new_listener();
    if (!l)
        return NCCL_SYSTEM_ERROR;
    for (int i = 0; i < CKM_FLOWS; i++) {
        struct sockaddr_in address = device->address;
        l->fd[i] = ckm_socket_listen(&address, device->socket_buffer);
        if (l->fd[i] < 0) {
            CKM_WARN("cannot listen on %s: %s", device->name, strerror(errno));
            free_listener(l);
            return NCCL_SYSTEM_ERROR;
        }
        handle.port[i] = address.sin_port;
        handle.address = address.sin_addr.s_addr;
    }
    while (getrandom(&l->nonce, sizeof l->nonce, 0) != sizeof l->nonce)
        ;
    handle.nonce = l->nonce;
    memset(opaque, 0, NCCL_NET_HANDLE_BYTES);
    memcpy(opaque, &handle, sizeof handle);
    *listen_comm = l;
    return NCCL_SUCCESS;
}

/* Takes in new connections, as many as there is room for; drops those that have waited too long. */
static void take_in(struct listener *l, int flow, int64_t now)
{
    bool more = true;

    for (int w = 0; w < MAX_WAITING; w++) {
        struct waiting *p = &l->waiting[flow][w];
        if (p->fd >= 0 && now - p->since_ms > ckm_param_number(CKM_TIMEOUT_MS)) {
            CKM_WARN("a connection from %s did not finish its handshake", inet_ntoa(p->peer.sin_addr));
            close(p->fd);
            p->fd = -1;
        }
        if (p->fd < 0 && more) {
            *p = (struct waiting){.since_ms = now};
            p->fd = ckm_socket_accept(l->fd[flow], &p->peer);
            more = p->fd >= 0;
        }
    }
}

/* 1: the hello is complete and ours; 0: not yet, or dropped. */
static int hear(struct listener *l, struct waiting *p)
{
    size_t missing = sizeof p->hello - p->heard;
    ssize_t n = missing ? recv(p->fd, (char *)&p->hello + p->heard, missing, MSG_DONTWAIT) : 1;

    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
        return 0;
    if (n > 0 && missing)
        p->heard += (size_t)n;
    if (n > 0 && p->heard < sizeof p->hello)
        return 0;
    if (n > 0 && p->hello.magic == HELLO_MAGIC && p->hello.version == VERSION && p->hello.nonce == l->nonce)
        return 1;
    CKM_WARN("dropped a connection from %s that is not this job's", inet_ntoa(p->peer.sin_addr));
    close(p->fd);
    p->fd = -1;
    return 0;
}

static struct waiting *find_tagged(struct listener *l, const struct waiting *plain)
{
    for (int w = 0; w < MAX_WAITING; w++) {
        struct waiting *p = &l->waiting[CKM_TAGGED][w];
        if (p->fd >= 0 && p->peer.sin_port == plain->hello.tagged_port &&
            p->peer.sin_addr.s_addr == plain->peer.sin_addr.s_addr)
            return p;
    }
    return NULL;
}

static nccl_result_t complete(struct waiting *plain, struct waiting *tagged, void **recv_comm)
{
    struct ckm_recv *comm = NULL;
    char peer[32];

    name_peer(peer, sizeof peer, plain->peer.sin_addr.s_addr, plain->peer.sin_port);
    nccl_result_t result = ckm_recv_new(plain->fd, tagged ? tagged->fd : -1, peer, &comm);
    if (result == NCCL_SUCCESS) {
        plain->fd = -1;
        if (tagged)
            tagged->fd = -1;
    }
    *recv_comm = comm;
    return result;
}

static nccl_result_t accept_locked(struct listener *l, void **recv_comm)
{
    int64_t now = ckm_now_ms();

    take_in(l, CKM_PLAIN, now);
    take_in(l, CKM_TAGGED, now);
    for (int w = 0; w < MAX_WAITING; w++) {
        struct waiting *plain = &l->waiting[CKM_PLAIN][w];
        if (plain->fd < 0 || !hear(l, plain))
            continue;
        struct waiting *tagged = plain->hello.tagged_port ? find_tagged(l, plain) : NULL;
        if (plain->hello.tagged_port && !tagged)
            continue;
        l->asked_ms = 0;
        return complete(plain, tagged, recv_comm);
    }
    if (!l->asked_ms)
        l->asked_ms = now;
    if (now - l->asked_ms > ckm_param_number(CKM_TIMEOUT_MS))
        return ckm_socket_failed("waiting for", "a connection", ETIMEDOUT);
    return NCCL_SUCCESS;
}

nccl_result_t ckm_net_accept(void *listen_comm, void **recv_comm)
{
    struct listener *l = listen_comm;

    *recv_comm = NULL;
    pthread_mutex_lock(&l->lock);
    nccl_result_t result = accept_locked(l, recv_comm);
    pthread_mutex_unlock(&l->lock);
    return result;
}

nccl_result_t ckm_net_close_listen(void *listen_comm)
{
    free_listener(listen_comm);
    return NCCL_SUCCESS;
}
