/* Transfers over loopback. */
#include <pthread.h>
#include <sched.h>

#include "pair.h"

static void fill(unsigned char *data, size_t bytes, uint64_t seed)
{
    for (size_t i = 0; i < bytes; i++)
        data[i] = (unsigned char)random_u32(&seed);
}

static const size_t sizes[] = {0, 1, 87, 88, 89, 0, 4096, 100000, 0, 1 << 20, 3 << 20, 5};
enum { SIZES = sizeof sizes / sizeof *sizes, LARGEST = 3 << 20 };

/* All sizes, eight under way at once, in both directions of a loop of two comms. */
static void exchange(struct pair p, uint64_t seed)
{
    enum { DEPTH = 8, MESSAGES = 3 * SIZES };
    unsigned char *out[DEPTH], *in[DEPTH];
    void *sends[DEPTH] = {0}, *recvs[DEPTH] = {0};
    int sent = 0, posted = 0, tested = 0, received = 0, done, size;

    for (int i = 0; i < DEPTH; i++) {
        out[i] = malloc(LARGEST);
        in[i] = malloc(LARGEST);
    }
    while (received < MESSAGES || tested < MESSAGES) {
        if (posted < MESSAGES && posted < received + DEPTH)
            if ((recvs[posted % DEPTH] = post_recv(p.recv, in[posted % DEPTH], LARGEST, 5)))
                posted++;
        if (sent < MESSAGES && sent < tested + DEPTH) {
            fill(out[sent % DEPTH], sizes[sent % SIZES], seed + (uint64_t)sent);
            if ((sends[sent % DEPTH] = post_send(p.send, out[sent % DEPTH], sizes[sent % SIZES], 5)))
                sent++;
        }
        if (tested < sent) {
            CHECK_EQ(NET->test(sends[tested % DEPTH], &done, &size), NCCL_SUCCESS);
            if (done)
                CHECK_EQ(size, sizes[tested++ % SIZES]);
        }
        if (received < posted) {
            CHECK_EQ(NET->test(recvs[received % DEPTH], &done, &size), NCCL_SUCCESS);
            if (done) {
                unsigned char *expected = malloc(LARGEST);
                CHECK_EQ(size, sizes[received % SIZES]);
                fill(expected, (size_t)size, seed + (uint64_t)received);
                CHECK(memcmp(expected, in[received % DEPTH], (size_t)size) == 0);
                free(expected);
                received++;
            }
        }
    }
    for (int i = 0; i < DEPTH; i++) {
        free(out[i]);
        free(in[i]);
    }
}

static void exchange_and_close(void)
{
    struct pair p = connect_pair();
    exchange(p, 1);
    close_pair(p);
}

/* The same buffer posted twice before the first receive completes: each has its own request. */
static void test_same_buffer_twice(void)
{
    struct pair p = connect_pair();
    char in = 0, out[2] = {1, 2};
    void *a = post_recv(p.recv, &in, 1, 0), *b = post_recv(p.recv, &in, 1, 0);

    CHECK(a && b && a != b);
    finish(post_send(p.send, &out[0], 1, 0), NULL);
    CHECK_EQ(finish(a, NULL), NCCL_SUCCESS);
    CHECK_EQ(in, 1);
    int done = 1;
    CHECK_EQ(NET->test(b, &done, NULL), NCCL_SUCCESS);
    CHECK_EQ(done, 0);
    finish(post_send(p.send, &out[1], 1, 0), NULL);
    CHECK_EQ(finish(b, NULL), NCCL_SUCCESS);
    CHECK_EQ(in, 2);
    close_pair(p);
}

/* Groups of eight, the tags sent in another order than they stand in the group. */
static void test_grouped(void)
{
    struct pair p = connect_pair();
    int in[2][8], out[16], tags[8], got[8];
    void *data[8], *group[2];
    size_t room[8];

    for (int g = 0; g < 2; g++) {
        for (int i = 0; i < 8; i++) {
            tags[i] = 100 + i;
            data[i] = &in[g][i];
            room[i] = sizeof in[g][i];
        }
        CHECK_EQ(NET->irecv(p.recv, 8, data, room, tags, NULL, NULL, &group[g]), NCCL_SUCCESS);
        CHECK(group[g]);
    }
    for (int i = 0; i < 16; i++) { /* 107 107 106 106 ... : the second of each belongs to the second group */
        out[i] = 1000 * (i % 2) + 107 - i / 2;
        CHECK_EQ(finish(post_send(p.send, &out[i], sizeof out[i], 107 - i / 2), NULL), NCCL_SUCCESS);
    }
    for (int g = 0; g < 2; g++) {
        CHECK_EQ(finish(group[g], got), NCCL_SUCCESS);
        for (int i = 0; i < 8; i++) {
            CHECK_EQ(got[i], sizeof(int));
            CHECK_EQ(in[g][i], 1000 * g + 100 + i);
        }
    }
    close_pair(p);
}

/* One tag runs far ahead while the group waits for the other: nothing is lost, nothing deadlocks, and the sender
 * is made to wait rather than memory to grow. */
static void test_run_ahead(void)
{
    enum { MESSAGES = 60, BYTES = 1 << 20 };
    struct pair p = connect_pair();
    unsigned char *out = malloc(BYTES), *in[2] = {malloc(BYTES), malloc(BYTES)};
    int tags[2] = {1, 2}, got[2], done, held = 0, sent[2] = {0}, received = 0;
    void *pending[2] = {0}, *group = NULL, *data[2] = {in[0], in[1]};
    size_t room[2] = {BYTES, BYTES};

    memset(out, 7, BYTES);
    while (received < MESSAGES) {
        if (!group)
            CHECK_EQ(NET->irecv(p.recv, 2, data, room, tags, NULL, NULL, &group), NCCL_SUCCESS);
        for (int t = 0; t < 2; t++) { /* the second tag's sender sleeps at first */
            if (!pending[t] && sent[t] < MESSAGES && (t == 0 || held || sent[0] == MESSAGES)) {
                pending[t] = post_send(p.send, out, BYTES - (size_t)sent[t], tags[t]);
                sent[t] += pending[t] != NULL;
                held += !pending[t];
            }
            if (pending[t]) {
                CHECK_EQ(NET->test(pending[t], &done, NULL), NCCL_SUCCESS);
                if (done)
                    pending[t] = NULL;
            }
        }
        CHECK_EQ(NET->test(group, &done, got), NCCL_SUCCESS);
        if (done) {
            CHECK_EQ(got[0], BYTES - received);
            CHECK_EQ(got[1], BYTES - received);
            group = NULL;
            received++;
        }
    }
    CHECK(held > 0);
    CHECK_EQ(sent[0], MESSAGES);
    free(out);
    free(in[0]);
    free(in[1]);
    close_pair(p);
}

/* Closing right after the last send was taken loses nothing, even while the receiver asks for a pause. */
static void test_close_with_data_under_way(void)
{
    enum { MESSAGES = 6, BYTES = 2 << 20 };
    struct pair p = connect_pair();
    unsigned char *out = calloc(MESSAGES, BYTES), *in = malloc(BYTES);
    void *sends[MESSAGES], *blocker = post_recv(p.recv, in, BYTES, 2);
    int done, left = MESSAGES, fds = open_fds();

    CHECK_EQ(finish(post_send(p.send, out, 1, 9), NULL), NCCL_SUCCESS);
    for (int i = 0; i < MESSAGES; i++)
        CHECK((sends[i] = post_send(p.send, out, BYTES, 1)) != NULL);
    while (left) {
        CHECK_EQ(NET->test(blocker, &done, NULL), NCCL_SUCCESS);
        for (int i = 0; i < MESSAGES; i++) {
            if (!sends[i])
                continue;
            CHECK_EQ(NET->test(sends[i], &done, NULL), NCCL_SUCCESS);
            if (done) {
                sends[i] = NULL;
                left--;
            }
        }
    }
    CHECK_EQ(NET->closeSend(p.send), NCCL_SUCCESS);
    for (int i = 0; i < MESSAGES; i++) {
        int size;
        CHECK_EQ(finish(post_recv(p.recv, in, BYTES, 1), &size), NCCL_SUCCESS);
        CHECK_EQ(size, BYTES);
    }
    CHECK_EQ(finish(post_recv(p.recv, in, BYTES, 9), NULL), NCCL_SUCCESS);
    CHECK_EQ(finish(blocker, NULL), NCCL_REMOTE_ERROR);
    CHECK_EQ(NET->closeRecv(p.recv), NCCL_SUCCESS);
    ckm_socket_reap();
    CHECK_EQ(open_fds(), fds - 2);
    free(out);
    free(in);
}

static void test_too_long(void)
{
    struct pair p = connect_pair();
    char out[8] = {0}, in[4];
    void *request = post_recv(p.recv, in, sizeof in, 0);

    finish(post_send(p.send, out, sizeof out, 0), NULL);
    CHECK_EQ(finish(request, NULL), NCCL_INVALID_USAGE);
    CHECK_EQ(NET->isend(p.send, out, (size_t)CKM_MAX_PAYLOAD + 1, 0, NULL, NULL, &request), NCCL_INVALID_ARGUMENT);
    close_pair(p);
}

static void test_many_requests(void)
{
    enum { MANY = 300 };
    struct pair p = connect_pair();
    static void *sends[MANY], *recvs[MANY];
    static int in[MANY], out[MANY];
    int n = 0;

    while (n < MANY && (recvs[n] = post_recv(p.recv, &in[n], sizeof in[n], 0)))
        n++;
    CHECK_EQ(n, 256);
    for (int i = 0; i < n; i++) {
        out[i] = i;
        CHECK(sends[i] = post_send(p.send, &out[i], sizeof out[i], 0));
    }
    CHECK(!post_send(p.send, out, 4, 0));
    for (int left = 2 * n; left;)
        for (int i = 2 * n - 1; i >= 0; i--) { /* in the wrong order, too */
            void **request = i < n ? &recvs[i] : &sends[i - n];
            int done = 0;
            if (*request)
                CHECK_EQ(NET->test(*request, &done, NULL), NCCL_SUCCESS);
            if (done) {
                CHECK(i >= n || in[i] == i);
                *request = NULL;
                left--;
            }
        }
    CHECK(recvs[0] = post_recv(p.recv, in, 4, 0));
    close_pair(p);
}

/* Frames on two flows, arriving in another order than their numbers: receives complete in that of the numbers. */
static void test_two_flows(void)
{
    int fd[2];
    char in[3] = {0};
    void *comm = raw_pair(fd), *requests[3];
    struct ckm_frame first = raw_frame(0, "a", 1, 0), second = raw_frame(1, "b", 1, 1), third = raw_frame(2, "c", 1, 0);
    int done;

    for (int i = 0; i < 3; i++)
        requests[i] = post_recv(comm, &in[i], 1, 0);
    CHECK_EQ(write(fd[1], &second, sizeof second), sizeof second);
    CHECK_EQ(write(fd[1], "b", 1), 1);
    usleep(1000);
    CHECK_EQ(NET->test(requests[1], &done, NULL), NCCL_SUCCESS);
    CHECK_EQ(done, 0);
    CHECK_EQ(checkmate_net_wait(&requests[1], 1, 1000), 0); /* not woken over and over by what has to wait */
    CHECK_EQ(write(fd[0], &first, sizeof first), sizeof first);
    CHECK_EQ(write(fd[0], "a", 1), 1);
    CHECK_EQ(write(fd[0], &third, sizeof third), sizeof third);
    CHECK_EQ(write(fd[0], "c", 1), 1);
    for (int i = 0; i < 3; i++)
        CHECK_EQ(finish(requests[i], NULL), NCCL_SUCCESS);
    CHECK(memcmp(in, "abc", 3) == 0);
    close(fd[0]);
    requests[0] = post_recv(comm, in, 1, 0); /* the tagged flow alone may still bring something */
    CHECK_EQ(NET->test(requests[0], &done, NULL), NCCL_SUCCESS);
    CHECK_EQ(done, 0);
    close(fd[1]);
    CHECK_EQ(finish(requests[0], NULL), NCCL_REMOTE_ERROR);
    NET->closeRecv(comm);
}

static void test_wait(void)
{
    struct pair p = connect_pair();
    char c = 0;
    void *request = post_recv(p.recv, &c, 1, 0), *both[2] = {NULL, request};
    int64_t start = ckm_now_ms();

    CHECK_EQ(checkmate_net_wait(both, 2, 50000), 0);
    CHECK(ckm_now_ms() - start >= 45);
    void *sent = post_send(p.send, &c, 1, 0);
    CHECK_EQ(checkmate_net_wait(&sent, 1, 10000000), 1); /* already written */
    CHECK_EQ(checkmate_net_wait(both, 2, 10000000), 1);
    CHECK_EQ(finish(request, NULL), NCCL_SUCCESS);
    finish(sent, NULL);
    CHECK_EQ(checkmate_net_wait(NULL, 0, 0), 0);
    close_pair(p);
}

/* Many comms at once, in many threads. */
static void *run_exchange(void *seed)
{
    struct pair p = connect_pair();
    exchange(p, (uint64_t)(uintptr_t)seed);
    close_pair(p);
    return NULL;
}

static void test_threads(void)
{
    pthread_t threads[4];

    for (uintptr_t i = 0; i < 4; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, run_exchange, (void *)(i + 10)), 0);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
}

/* One thread posts, another tests, on the same comms. */
struct shared {
    struct pair p;
    void *_Atomic requests[2];
};

static void *test_elsewhere(void *arg)
{
    struct shared *s = arg;
    for (int i = 0; i < 2 * 500; i++) {
        void *request;
        while (!(request = s->requests[i % 2]))
            sched_yield();
        CHECK_EQ(finish(request, NULL), NCCL_SUCCESS);
        s->requests[i % 2] = NULL;
    }
    return NULL;
}

static void test_any_thread(void)
{
    struct shared s = {.p = connect_pair()};
    pthread_t thread;
    int in = 0;

    CHECK_EQ(pthread_create(&thread, NULL, test_elsewhere, &s), 0);
    for (int i = 0; i < 500; i++) {
        int out = i;
        s.requests[0] = post_send(s.p.send, &out, sizeof out, 0);
        s.requests[1] = post_recv(s.p.recv, &in, sizeof in, 0);
        while (s.requests[0] || s.requests[1])
            sched_yield();
        CHECK_EQ(in, i);
    }
    pthread_join(thread, NULL);
    close_pair(s.p);
}

static void test_memory(void)
{
    struct pair p = connect_pair();
    char data[8];
    void *mhandle, *request = &p;

    CHECK_EQ(NET->regMr(p.send, data, sizeof data, NCCL_PTR_HOST, &mhandle), NCCL_SUCCESS);
    CHECK_EQ(NET->deregMr(p.send, mhandle), NCCL_SUCCESS);
    CHECK(NET->regMr(p.send, data, sizeof data, NCCL_PTR_CUDA, &mhandle) != NCCL_SUCCESS);
    CHECK(NET->regMrDmaBuf(p.send, data, sizeof data, NCCL_PTR_DMABUF, 0, 0, &mhandle) != NCCL_SUCCESS);
    CHECK_EQ(NET->iflush(p.recv, 0, NULL, NULL, NULL, &request), NCCL_SUCCESS);
    CHECK(!request);
    close_pair(p);
}

static void test_properties(void)
{
    struct nccl_net_properties_v11 props;

    memset(&props, 0xff, sizeof props);
    CHECK_EQ(NET->getProperties(0, &props), NCCL_SUCCESS);
    CHECK(strcmp(props.name, "lo") == 0);
    CHECK_EQ(props.ptrSupport, NCCL_PTR_HOST);
    CHECK_EQ(props.maxRecvs, 8);
    CHECK_EQ(props.vProps.ndevs, 1);
    CHECK_EQ(props.maxMultiRequestSize, 1);
    CHECK(props.speed > 0);
    CHECK(NET->getProperties(1, &props) != NCCL_SUCCESS);
}

/* All of it with the kernel's buffers, or with ones so small that nearly every write is partial. */
int main(int argc, char **argv)
{
    setenv("CHECKMATE_SOCKET_BUFFER", argc > 1 ? argv[1] : "0", 1);
    net_init();
    int fds = open_fds();

    test_properties();
    exchange_and_close();
    test_same_buffer_twice();
    test_grouped();
    test_run_ahead();
    test_close_with_data_under_way();
    test_too_long();
    test_many_requests();
    test_two_flows();
    test_wait();
    test_threads();
    test_any_thread();
    test_memory();
    CHECK_EQ(open_fds(), fds);
    return 0;
}
