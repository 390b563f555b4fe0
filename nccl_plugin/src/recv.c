/* Receive comms: frames are read from both flows, matched to the posted receives in the order of their numbers,
 * and their payloads read straight into the buffers. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "checkmate/crc32c.h"
#include "checkmate/wire.h"
#include "counters.h"
#include "frame.h"
#include "log.h"
#include "net.h"
#include "param.h"
#include "socket.h"

#define READS_AT_ONCE    8          /* system calls in one call of ours */
#define UNEXPECTED_BYTES (8u << 20) /* kept for receives still to be posted; beyond, the sender is asked to wait */
#define MAX_PAUSED       64
#define PEER_LENGTH      32

/* One buffer of a receive. */
struct slot {
    char *data;
    size_t size, length; /* room; bytes of the message */
    int tag;
    bool matched, filled;
};

struct recv_request {
    struct ckm_request base;
    struct recv_request *next; /* in the order posted, or free */
    int n, matched, filled;
    struct slot slots[CKM_MAX_RECVS];
};

/* A message with a tag that no posted receive has: kept until one is posted. */
struct unexpected {
    struct unexpected *next;
    int tag;
    bool filled;
    size_t length;
    struct recv_request *request; /* that claimed it */
    struct slot *slot;
    char data[];
};

enum flow_state {
    READ_HEADER,
    MATCH, /* the header is complete; its message's turn or a receive for it has yet to come */
    READ_PAYLOAD,
};

struct recv_flow {
    int fd; /* -1: none */
    enum flow_state state;
    bool drained, closed;
    union {
        struct ckm_frame header;
        char raw[CKM_HEADER_BYTES];
    };
    size_t have; /* bytes of the header */
    char *to;    /* where the rest of the payload goes */
    size_t left;
    struct recv_request *request; /* either these two or `kept` */
    struct slot *slot;
    struct unexpected *kept;
};

struct ckm_recv {
    pthread_mutex_t lock;
    nccl_result_t error;
    struct recv_flow flows[CKM_FLOWS];
    uint64_t next_message; /* the number to be matched next */
    unsigned unmatched;    /* slots */
    struct recv_request *head, *tail, *free;
    struct unexpected *unexpected; /* in the order of arrival */
    size_t unexpected_bytes;
    unsigned npaused;
    int32_t paused[MAX_PAUSED];
    char peer[PEER_LENGTH];
    struct recv_request requests[CKM_MAX_REQUESTS];
};

nccl_result_t ckm_recv_new(int plain, int tagged, const char *peer, struct ckm_recv **comm)
{
    struct ckm_recv *c = calloc(1, sizeof *c);

    if (!c)
        return NCCL_SYSTEM_ERROR;
    pthread_mutex_init(&c->lock, NULL);
    c->flows[CKM_PLAIN].fd = plain;
    c->flows[CKM_TAGGED].fd = tagged;
    c->flows[CKM_TAGGED].closed = tagged < 0;
    for (int i = CKM_MAX_REQUESTS - 1; i >= 0; i--) {
        c->requests[i].base = (struct ckm_request){.is_send = false, .comm = c};
        c->requests[i].next = c->free;
        c->free = &c->requests[i];
    }
    strncpy(c->peer, peer, sizeof c->peer - 1);
    *comm = c;
    return NCCL_SUCCESS;
}

static nccl_result_t fail(struct ckm_recv *c, int error)
{
    if (!c->error)
        c->error = ckm_socket_failed("receiving from", c->peer, error);
    return c->error;
}

static nccl_result_t fail_text(struct ckm_recv *c, nccl_result_t result, const char *text)
{
    if (!c->error) {
        CKM_COUNT(errors, 1);
        CKM_WARN("receiving from %s: %s", c->peer, text);
        c->error = result;
    }
    return c->error;
}

static void slot_filled(struct recv_request *r, struct slot *slot, size_t length)
{
    slot->length = length;
    slot->filled = true;
    r->base.done = ++r->filled == r->n;
}

static struct slot *find_slot(struct ckm_recv *c, int tag, struct recv_request **request)
{
    for (struct recv_request *r = c->head; r; r = r->next)
        for (int i = 0; r->matched < r->n && i < r->n; i++)
            if (!r->slots[i].matched && r->slots[i].tag == tag) {
                *request = r;
                return &r->slots[i];
            }
    return NULL;
}

/* Holding back messages of a tag */

static int find_paused(const struct ckm_recv *c, int tag)
{
    for (unsigned i = 0; i < c->npaused; i++)
        if (c->paused[i] == tag)
            return (int)i;
    return -1;
}

static nccl_result_t set_paused(struct ckm_recv *c, int tag, bool paused)
{
    struct ckm_pause pause = {CKM_PAUSE_MAGIC, tag, paused};
    int at = find_paused(c, tag);

    if (paused == (at >= 0) || (paused && c->npaused == MAX_PAUSED))
        return NCCL_SUCCESS;
    if (send(c->flows[CKM_PLAIN].fd, &pause, sizeof pause, MSG_DONTWAIT | MSG_NOSIGNAL) != sizeof pause)
        return fail(c, errno);
    if (paused)
        c->paused[c->npaused++] = tag;
    else
        c->paused[at] = c->paused[--c->npaused];
    return NCCL_SUCCESS;
}

static struct unexpected *keep(struct ckm_recv *c, const struct ckm_frame *h)
{
    struct unexpected *kept = malloc(sizeof *kept + h->payload_len), **end = &c->unexpected;

    if (!kept) {
        fail(c, ENOMEM);
        return NULL;
    }
    *kept = (struct unexpected){.tag = (int)h->tag, .length = h->payload_len};
    while (*end)
        end = &(*end)->next;
    *end = kept;
    c->unexpected_bytes += h->payload_len;
    if (c->unexpected_bytes > UNEXPECTED_BYTES)
        set_paused(c, kept->tag, true);
    return kept;
}

static void give(struct ckm_recv *c, struct unexpected *kept) /* both filled and claimed */
{
    struct unexpected **at = &c->unexpected;

    memcpy(kept->slot->data, kept->data, kept->length);
    slot_filled(kept->request, kept->slot, kept->length);
    while (*at != kept)
        at = &(*at)->next;
    *at = kept->next;
    c->unexpected_bytes -= kept->length;
    free(kept);
}

static void claim(struct ckm_recv *c, struct recv_request *r, struct slot *slot)
{
    for (struct unexpected *u = c->unexpected; u; u = u->next) {
        if (u->slot || u->tag != slot->tag)
            continue;
        if (u->length > slot->size) {
            fail_text(c, NCCL_INVALID_USAGE, "a message is longer than the buffer posted for it");
            return;
        }
        slot->matched = true;
        r->matched++;
        c->unmatched--;
        u->request = r;
        u->slot = slot;
        if (u->filled)
            give(c, u);
        return;
    }
    set_paused(c, slot->tag, false);
}

/* Reading */

static void payload_done(struct ckm_recv *c, struct recv_flow *f, size_t length)
{
    CKM_COUNT(received_frames, 1);
    CKM_COUNT(received_bytes, length);
    f->state = READ_HEADER;
    if (f->kept) {
        f->kept->filled = true;
        if (f->kept->slot)
            give(c, f->kept);
    } else {
        slot_filled(f->request, f->slot, length);
    }
}

/* Gives the message whose header stands in `f` its place. False: not yet. */
static bool match(struct ckm_recv *c, struct recv_flow *f)
{
    size_t length = f->header.payload_len;

    if (f->header.message != c->next_message || c->unmatched == 0)
        return false;
    f->kept = NULL;
    f->slot = find_slot(c, (int)f->header.tag, &f->request);
    if (f->slot && length > f->slot->size) {
        fail_text(c, NCCL_INVALID_USAGE, "a message is longer than the buffer posted for it");
        return false;
    }
    if (f->slot) {
        f->slot->matched = true;
        f->slot->length = length;
        f->request->matched++;
        c->unmatched--;
        f->to = f->slot->data;
    } else if ((f->kept = keep(c, &f->header))) {
        f->to = f->kept->data;
    } else {
        return false;
    }
    c->next_message++;
    f->left = length;
    f->have = 0;
    f->state = READ_PAYLOAD;
    if (length == 0)
        payload_done(c, f, 0);
    return true;
}

static size_t payload_length(const struct recv_flow *f)
{
    return f->kept ? f->kept->length : f->slot->length;
}

static void take(struct ckm_recv *c, struct recv_flow *f, size_t bytes)
{
    if (f->state == READ_PAYLOAD) {
        size_t part = bytes < f->left ? bytes : f->left;
        f->to += part;
        f->left -= part;
        bytes -= part;
        if (f->left == 0)
            payload_done(c, f, payload_length(f));
    }
    f->have += bytes;
    if (f->have < CKM_HEADER_BYTES)
        return;
    const char *wrong = ckm_frame_check(&f->header, f == &c->flows[CKM_TAGGED]);
    if (wrong)
        fail_text(c, NCCL_INTERNAL_ERROR, wrong);
    f->state = MATCH;
}

/* One system call: the rest of a payload and the header after it, or the rest of a header. */
static void read_flow(struct ckm_recv *c, struct recv_flow *f)
{
    struct iovec iov[2];
    struct msghdr message = {.msg_iov = iov};
    size_t wanted = 0;

    if (f->state == READ_PAYLOAD) {
        iov[message.msg_iovlen++] = (struct iovec){f->to, f->left};
        wanted = f->left;
    }
    iov[message.msg_iovlen++] = (struct iovec){f->raw + f->have, CKM_HEADER_BYTES - f->have};
    wanted += CKM_HEADER_BYTES - f->have;
    ssize_t n = recvmsg(f->fd, &message, MSG_DONTWAIT);
    if (n > 0) {
        f->drained = (size_t)n < wanted;
        take(c, f, (size_t)n);
    } else if (n == 0) {
        f->drained = f->closed = true;
        if (f->state == READ_PAYLOAD || f->have)
            fail(c, 0);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
        f->drained = true;
    } else if (errno != EINTR) {
        fail(c, errno);
    }
}

static bool readable(const struct ckm_recv *c, const struct recv_flow *f)
{
    return !f->closed && (f->state == READ_PAYLOAD || (f->state == READ_HEADER && c->unmatched));
}

/* Are receives left that nothing can fill any more: both flows closed, or at a message whose turn cannot come? */
static bool starved(const struct ckm_recv *c)
{
    bool stuck = c->unmatched != 0;

    for (int i = 0; i < CKM_FLOWS; i++)
        stuck &= c->flows[i].closed || c->flows[i].state == MATCH;
    return stuck;
}

static nccl_result_t progress(struct ckm_recv *c)
{
    int reads = 0;
    bool again = true;

    for (int i = 0; i < CKM_FLOWS; i++)
        c->flows[i].drained = false;
    while (again && !c->error) {
        again = false;
        for (int i = 0; i < CKM_FLOWS && !c->error; i++) {
            struct recv_flow *f = &c->flows[i];
            if (readable(c, f) && !f->drained && reads++ < READS_AT_ONCE) {
                read_flow(c, f);
                again = true;
            }
            if (!c->error && f->state == MATCH)
                again |= match(c, f);
        }
    }
    if (!c->error && starved(c))
        fail(c, c->flows[CKM_PLAIN].closed ? 0 : EPROTO);
    return c->error;
}

/* Calls */

static nccl_result_t post(struct ckm_recv *c, int n, void **data, const size_t *sizes, const int *tags, void **request)
{
    struct recv_request *r = c->free;

    if (c->error)
        return c->error;
    if (!r)
        return NCCL_SUCCESS;
    c->free = r->next;
    r->next = NULL;
    r->base.done = false;
    r->n = n;
    r->matched = r->filled = 0;
    for (int i = 0; i < n; i++)
        r->slots[i] = (struct slot){.data = data[i], .size = sizes[i], .tag = tags[i]};
    if (c->head)
        c->tail->next = r;
    else
        c->head = r;
    c->tail = r;
    c->unmatched += (unsigned)n;
    for (int i = 0; i < n && (c->unexpected || c->npaused); i++)
        claim(c, r, &r->slots[i]);
    *request = r;
    return c->error;
}

nccl_result_t ckm_net_irecv(void *comm, int n, void **data, const size_t *sizes, const int *tags, void **request)
{
    struct ckm_recv *c = comm;

    *request = NULL;
    if (n < 1 || n > CKM_MAX_RECVS) {
        CKM_WARN("a grouped receive of %d buffers: 1 to %d are possible", n, CKM_MAX_RECVS);
        return NCCL_INVALID_ARGUMENT;
    }
    pthread_mutex_lock(&c->lock);
    nccl_result_t result = post(c, n, data, sizes, tags, request);
    pthread_mutex_unlock(&c->lock);
    return result;
}

static void release(struct ckm_recv *c, struct recv_request *r)
{
    struct recv_request **at = &c->head, *before = NULL;

    while (*at != r) {
        before = *at;
        at = &(*at)->next;
    }
    *at = r->next;
    if (c->tail == r)
        c->tail = before;
    r->next = c->free;
    c->free = r;
}

nccl_result_t ckm_recv_test(struct ckm_request *request, int *done, int *sizes)
{
    struct recv_request *r = (struct recv_request *)request;
    struct ckm_recv *c = request->comm;
    nccl_result_t result = NCCL_SUCCESS;

    *done = 0;
    pthread_mutex_lock(&c->lock);
    if (!request->done)
        result = c->error ? c->error : progress(c);
    if (request->done) { /* what has arrived is good, even if the connection has failed since */
        result = NCCL_SUCCESS;
        *done = 1;
        for (int i = 0; sizes && i < r->n; i++)
            sizes[i] = (int)r->slots[i].length;
        release(c, r);
    }
    pthread_mutex_unlock(&c->lock);
    return result;
}

int ckm_recv_poll(struct ckm_request *request, struct pollfd *fds)
{
    struct ckm_recv *c = request->comm;
    int n = 0;

    pthread_mutex_lock(&c->lock);
    for (int i = 0; i < CKM_FLOWS; i++)
        if (readable(c, &c->flows[i]))
            fds[n++] = (struct pollfd){.fd = c->flows[i].fd, .events = POLLIN};
    if (request->done || c->error)
        n = -1;
    pthread_mutex_unlock(&c->lock);
    return n;
}

/* Host memory needs no flush: NULL means that there is nothing to wait for. */
nccl_result_t ckm_net_iflush(void *comm, int n, void **data, int *sizes, void **mhandles, void **request)
{
    (void)comm, (void)n, (void)data, (void)sizes, (void)mhandles;
    *request = NULL;
    return NCCL_SUCCESS;
}

nccl_result_t ckm_net_consumed(void *comm, int n, void *request)
{
    (void)comm, (void)n, (void)request;
    return NCCL_SUCCESS;
}

nccl_result_t ckm_net_close_recv(void *comm)
{
    struct ckm_recv *c = comm;

    for (int i = 0; i < CKM_FLOWS; i++)
        if (c->flows[i].fd >= 0)
            close(c->flows[i].fd);
    while (c->unexpected) {
        struct unexpected *next = c->unexpected->next;
        free(c->unexpected);
        c->unexpected = next;
    }
    pthread_mutex_destroy(&c->lock);
    free(c);
    return NCCL_SUCCESS;
}
