/* Send comms: frames, queued on their flow and written as the sockets take them. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "checkmate/crc32c.h"
#include "checkmate/wire.h"
#include "counters.h"
#include "log.h"
#include "net.h"
#include "param.h"
#include "socket.h"
#include "tag.h"

#define GATHER      16 /* pieces (headers and payloads) in one system call */
#define MAX_PAUSED  64
#define PEEK_EVERY  8 /* messages between two looks for what the receiver has to say */
#define PEER_LENGTH 32

struct send_request {
    struct ckm_request base;
    struct send_request *next; /* in its flow's queue, or free */
    struct ckm_frame header;
    char *data;
    size_t sent; /* header included */
    int flow;
};

struct send_flow {
    int fd; /* -1: none */
    struct send_request *head, *tail;
};

struct ckm_send {
    pthread_mutex_t lock;
    nccl_result_t error;
    struct send_flow flows[CKM_FLOWS];
    uint64_t messages;
    int64_t checked_ms; /* when progress, or life, was last seen */
    struct send_request *free;
    bool several_tags; /* only then may the receiver have anything to say */
    int32_t first_tag;
    unsigned npaused;
    int32_t paused[MAX_PAUSED];
    char peer[PEER_LENGTH];
    struct send_request requests[CKM_MAX_REQUESTS];
};

nccl_result_t ckm_send_new(int plain, int tagged, const char *peer, struct ckm_send **comm)
{
    struct ckm_send *c = calloc(1, sizeof *c);

    if (!c)
        return NCCL_SYSTEM_ERROR;
    pthread_mutex_init(&c->lock, NULL);
    c->flows[CKM_PLAIN].fd = plain;
    c->flows[CKM_TAGGED].fd = tagged;
    for (int i = CKM_MAX_REQUESTS - 1; i >= 0; i--) {
        c->requests[i].base = (struct ckm_request){.is_send = true, .comm = c};
        c->requests[i].next = c->free;
        c->free = &c->requests[i];
    }
    strncpy(c->peer, peer, sizeof c->peer - 1);
    if (tagged >= 0)
        CKM_COUNT(tagged_connections, 1);
    else
        CKM_COUNT(plain_connections, 1);
    *comm = c;
    return NCCL_SUCCESS;
}

static nccl_result_t fail(struct ckm_send *c, int error)
{
    if (!c->error)
        c->error = ckm_socket_failed("sending to", c->peer, error);
    return c->error;
}

static size_t total(const struct send_request *r)
{
    return CKM_HEADER_BYTES + r->header.payload_len;
}

/* Header and payload of as many queued frames as fit; the first from where it stopped. Returns the bytes. */
static size_t gather(const struct send_flow *f, struct iovec *iov, size_t *n)
{
    size_t bytes = 0;

    *n = 0;
    for (struct send_request *r = f->head; r && *n + 2 <= GATHER; r = r->next) {
        size_t skip = r->sent;
        if (skip < CKM_HEADER_BYTES) {
            iov[(*n)++] = (struct iovec){(char *)&r->header + skip, CKM_HEADER_BYTES - skip};
            skip = CKM_HEADER_BYTES;
        }
        if (skip < total(r))
            iov[(*n)++] = (struct iovec){r->data + (skip - CKM_HEADER_BYTES), total(r) - skip};
        bytes += total(r) - r->sent;
    }
    return bytes;
}

static void advance(struct send_flow *f, size_t bytes)
{
    while (f->head && bytes) {
        struct send_request *r = f->head;
        size_t step = total(r) - r->sent < bytes ? total(r) - r->sent : bytes;
        r->sent += step;
        bytes -= step;
        if (r->sent < total(r))
            break;
        r->base.done = true;
        f->head = r->next;
    }
}

/* Writes until the queue is empty or the socket is full. */
static nccl_result_t flush(struct ckm_send *c, struct send_flow *f)
{
    struct iovec iov[GATHER];
    struct msghdr message = {.msg_iov = iov};

    while (f->head) {
        size_t bytes = gather(f, iov, &message.msg_iovlen);
        ssize_t n = sendmsg(f->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            break;
        if (n < 0)
            return fail(c, errno);
        advance(f, (size_t)n);
        c->checked_ms = 0;
        if ((size_t)n < bytes)
            break;
    }
    return NCCL_SUCCESS;
}

static int find_paused(const struct ckm_send *c, int tag)
{
    for (unsigned i = 0; i < c->npaused; i++)
        if (c->paused[i] == tag)
            return (int)i;
    return -1;
}

static nccl_result_t apply_pause(struct ckm_send *c, const struct ckm_pause *pause)
{
    int at = find_paused(c, pause->tag);

    if (pause->magic != CKM_PAUSE_MAGIC || (pause->paused && at < 0 && c->npaused == MAX_PAUSED))
        return fail(c, EPROTO);
    if (pause->paused && at < 0)
        c->paused[c->npaused++] = pause->tag;
    else if (!pause->paused && at >= 0)
        c->paused[at] = c->paused[--c->npaused];
    return NCCL_SUCCESS;
}

/* The receiver writes whole messages of a few bytes, so that none is ever cut. */
static nccl_result_t listen_to_receiver(struct ckm_send *c)
{
    struct ckm_pause pause;
    ssize_t n;

    while (!c->error && (n = recv(c->flows[CKM_PLAIN].fd, &pause, sizeof pause, MSG_DONTWAIT)) >= 0) {
        if (n == 0)
            return fail(c, 0);
        if (n != sizeof pause)
            return fail(c, EPROTO);
        apply_pause(c, &pause);
    }
    if (!c->error && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)
        fail(c, errno);
    return c->error;
}

static void fill_header(struct send_request *r, uint64_t number, size_t size, int tag, void *phandle, bool can_tag)
{
    struct ckm_frame *h = &r->header;
    bool tagged = ckm_tag_message(phandle, r->data, size, h);

    if (tagged && !can_tag) {
        ckm_untagged(CHECKMATE_NO_OPTION);
        tagged = false;
    }
    if (!tagged) {
        ckm_tag_missing();
        *h = (struct ckm_frame){.magic = CKM_WIRE_MAGIC, .version = CKM_WIRE_VERSION};
    }
    h->message = number;
    h->payload_len = (uint32_t)size;
    h->tag = (uint32_t)tag;
    h->payload_crc = tagged ? ckm_crc32c(0, r->data, size) : 0;
    h->header_crc = ckm_crc32c(0, h, offsetof(struct ckm_frame, header_crc));
    r->flow = tagged ? CKM_TAGGED : CKM_PLAIN;
}

static void count_sent(int flow, size_t size)
{
    if (flow == CKM_TAGGED) {
        CKM_COUNT(tagged_frames, 1);
        CKM_COUNT(tagged_bytes, size);
    } else {
        CKM_COUNT(plain_frames, 1);
        CKM_COUNT(plain_bytes, size);
    }
}

static nccl_result_t send_locked(struct ckm_send *c, void *data, size_t size, int tag, void *phandle, void **request)
{
    struct send_request *r = c->free;

    if (c->error)
        return c->error;
    if (c->messages == 0)
        c->first_tag = tag;
    c->several_tags |= tag != c->first_tag;
    if ((c->npaused || c->messages % PEEK_EVERY == 0) && listen_to_receiver(c))
        return c->error;
    if (!r || find_paused(c, tag) >= 0)
        return NCCL_SUCCESS;
    r->data = data;
    r->sent = 0;
    r->base.done = false;
    fill_header(r, c->messages, size, tag, phandle, c->flows[CKM_TAGGED].fd >= 0);

    struct send_flow *f = &c->flows[r->flow];
    bool idle = !f->head;
    c->free = r->next;
    r->next = NULL;
    if (idle)
        f->head = r;
    else
        f->tail->next = r;
    f->tail = r;
    c->messages++;
    count_sent(r->flow, size);
    *request = r;
    return idle ? flush(c, f) : NCCL_SUCCESS;
}

nccl_result_t ckm_net_isend(void *comm, void *data, size_t size, int tag, void *phandle, void **request)
{
    struct ckm_send *c = comm;

    *request = NULL;
    if (size > CKM_MAX_PAYLOAD) {
        CKM_WARN("a message of %zu bytes is larger than %u", size, CKM_MAX_PAYLOAD);
        return NCCL_INVALID_ARGUMENT;
    }
    pthread_mutex_lock(&c->lock);
    nccl_result_t result = send_locked(c, data, size, tag, phandle, request);
    pthread_mutex_unlock(&c->lock);
    return result;
}

/* A peer that is alive may take its time; one that no longer acknowledges is an error. */
static nccl_result_t check_peer(struct ckm_send *c, int fd)
{
    int64_t now = ckm_now_ms();

    if (c->checked_ms == 0) {
        c->checked_ms = now;
    } else if (now - c->checked_ms > ckm_param_number(CKM_TIMEOUT_MS) / 4) {
        c->checked_ms = now;
        if (ckm_socket_dead(fd))
            return fail(c, ETIMEDOUT);
    }
    return NCCL_SUCCESS;
}

nccl_result_t ckm_send_test(struct ckm_request *request, int *done, int *size)
{
    struct send_request *r = (struct send_request *)request;
    struct ckm_send *c = request->comm;

    *done = 0;
    pthread_mutex_lock(&c->lock);
    nccl_result_t result = c->error;
    if (!result && !request->done)
        result = flush(c, &c->flows[r->flow]);
    if (!result && !request->done)
        result = check_peer(c, c->flows[r->flow].fd);
    if (!result && request->done) {
        *done = 1;
        if (size)
            *size = (int)r->header.payload_len;
        r->next = c->free;
        c->free = r;
    }
    pthread_mutex_unlock(&c->lock);
    return result;
}

int ckm_send_poll(struct ckm_request *request, struct pollfd *fds)
{
    struct send_request *r = (struct send_request *)request;
    struct ckm_send *c = request->comm;

    pthread_mutex_lock(&c->lock);
    int ready = request->done || c->error;
    fds[0] = (struct pollfd){.fd = c->flows[r->flow].fd, .events = POLLOUT};
    pthread_mutex_unlock(&c->lock);
    return ready ? -1 : 1;
}

nccl_result_t ckm_net_close_send(void *comm)
{
    struct ckm_send *c = comm;

    if (c->several_tags && !c->error)
        ckm_socket_retire(c->flows[CKM_PLAIN].fd);
    else
        close(c->flows[CKM_PLAIN].fd);
    if (c->flows[CKM_TAGGED].fd >= 0)
        close(c->flows[CKM_TAGGED].fd);
    pthread_mutex_destroy(&c->lock);
    free(c);
    return NCCL_SUCCESS;
}
