#include "socket.h"

#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "counter_map.h"
#include "counters.h"
#include "log.h"
#include "param.h"

int64_t ckm_now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static int set(int fd, int level, int option, int value)
{
    return setsockopt(fd, level, option, &value, sizeof value);
}

/* Keep-alive finds a peer that is gone while nothing is being sent: three probes in one time-out. */
static int set_options(int fd)
{
    int period = (int)(ckm_param_number(CKM_TIMEOUT_MS) / 3000);

    if (period < 1)
        period = 1;
    return set(fd, IPPROTO_TCP, TCP_NODELAY, 1) || set(fd, SOL_SOCKET, SO_KEEPALIVE, 1) ||
           set(fd, IPPROTO_TCP, TCP_KEEPIDLE, period) || set(fd, IPPROTO_TCP, TCP_KEEPINTVL, period) ||
           set(fd, IPPROTO_TCP, TCP_KEEPCNT, 2);
}

static int close_keeping_errno(int fd)
{
    int error = errno;
    close(fd);
    errno = error;
    return -1;
}

static int new_socket(int buffer)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd >= 0 && buffer) {
        set(fd, SOL_SOCKET, SO_SNDBUF, buffer);
        set(fd, SOL_SOCKET, SO_RCVBUF, buffer);
    }
    return fd;
}

int ckm_socket_listen(struct sockaddr_in *address, int buffer)
{
    socklen_t length = sizeof *address;
    int fd = new_socket(buffer);

    if (fd < 0)
        return -1;
    address->sin_port = 0;
    if (bind(fd, (struct sockaddr *)address, length) || listen(fd, SOMAXCONN) ||
        getsockname(fd, (struct sockaddr *)address, &length))
        return close_keeping_errno(fd);
    return fd;
}

static int prepare_tagged(int fd)
{
    if (set(fd, IPPROTO_IP, IP_TOS, (int)ckm_param_number(CKM_DSCP) << 2))
        return -1;
    if (ckm_counter_register(fd))
        return 0;
    errno = ENODATA;
    return -1;
}

int ckm_socket_connect(const struct sockaddr_in *from, const struct sockaddr_in *to, int buffer, bool tagged)
{
    struct sockaddr_in source = *from;
    int fd = new_socket(buffer);

    if (fd < 0)
        return -1;
    source.sin_port = 0;
    if (set_options(fd) || set(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1) ||
        bind(fd, (const struct sockaddr *)&source, sizeof source) || (tagged && prepare_tagged(fd)))
        return close_keeping_errno(fd);
    if (connect(fd, (const struct sockaddr *)to, sizeof *to) && errno != EINPROGRESS)
        return close_keeping_errno(fd);
    return fd;
}

int ckm_socket_connected(int fd)
{
    struct pollfd p = {.fd = fd, .events = POLLOUT};
    socklen_t length = sizeof(int);
    int error = 0;

    if (poll(&p, 1, 0) == 0)
        return 0;
    getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length);
    errno = error;
    return error ? -1 : 1;
}

int ckm_socket_accept(int listener, struct sockaddr_in *peer)
{
    socklen_t length = sizeof *peer;
    int fd = accept4(listener, (struct sockaddr *)peer, &length, SOCK_NONBLOCK | SOCK_CLOEXEC);

    if (fd >= 0 && set_options(fd))
        return close_keeping_errno(fd);
    return fd;
}

/* The time since the last acknowledgement alone is not enough: probes of a closed window are rare after a while. */
bool ckm_socket_dead(int fd)
{
    struct tcp_info info = {0};
    socklen_t length = sizeof info;

    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length))
        return false;
    return info.tcpi_last_ack_recv > ckm_param_number(CKM_TIMEOUT_MS) &&
           (info.tcpi_retransmits > 0 || info.tcpi_probes > 1);
}

#define MAX_RETIRED 256

static pthread_mutex_t retired_lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    int fd;
    int64_t deadline_ms;
} retired[MAX_RETIRED];
static int nretired;

static bool closed_by_peer(int fd)
{
    char text[256];
    ssize_t n;

    while ((n = recv(fd, text, sizeof text, MSG_DONTWAIT)) > 0)
        ;
    return n == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
}

static void reap_locked(void)
{
    int kept = 0;

    for (int i = 0; i < nretired; i++)
        if (closed_by_peer(retired[i].fd) || ckm_now_ms() > retired[i].deadline_ms)
            close(retired[i].fd);
        else
            retired[kept++] = retired[i];
    nretired = kept;
}

void ckm_socket_reap(void)
{
    pthread_mutex_lock(&retired_lock);
    reap_locked();
    pthread_mutex_unlock(&retired_lock);
}

void ckm_socket_retire(int fd)
{
    pthread_mutex_lock(&retired_lock);
    reap_locked();
    shutdown(fd, SHUT_WR);
    if (nretired == MAX_RETIRED)
        close(retired[--nretired].fd);
    retired[nretired].fd = fd;
    retired[nretired++].deadline_ms = ckm_now_ms() + ckm_param_number(CKM_TIMEOUT_MS);
    pthread_mutex_unlock(&retired_lock);
}

nccl_result_t ckm_socket_failed(const char *doing, const char *peer, int error)
{
    CKM_COUNT(errors, 1);
    CKM_WARN("%s %s: %s", doing, peer, error ? strerror(error) : "the peer closed the connection");
    switch (error) {
    case 0:
    case ECONNRESET:
    case EPIPE:
    case ETIMEDOUT:
    case ECONNREFUSED:
    case EHOSTUNREACH:
    case ENETUNREACH:
        return NCCL_REMOTE_ERROR;
    default:
        return NCCL_SYSTEM_ERROR;
    }
}
