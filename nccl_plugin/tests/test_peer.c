/* Peers that die, never answer, are somebody else, or send damaged frames. */
#include <errno.h>
#include <signal.h>
#include <sys/wait.h>

#include "pair.h"

/* Runs one end in a child process that is killed when it has said that it is connected. */
static pid_t start_child(int child_sends, char handle[NCCL_NET_HANDLE_BYTES], void *listener, int ready)
{
    pid_t pid = fork();
    void *comm = NULL;

    if (pid)
        return pid;
    while (!comm)
        CHECK_EQ(child_sends ? NET->connect(NULL, 0, handle, &comm, NULL) : NET->accept(listener, &comm, NULL),
                 NCCL_SUCCESS);
    CHECK_EQ(write(ready, "x", 1), 1);
    for (;;)
        pause();
}

static void test_killed(int child_sends)
{
    enum { DEPTH = 8, BYTES = 4 << 20 };
    char handle[NCCL_NET_HANDLE_BYTES], byte, *data = calloc(DEPTH, BYTES);
    void *listener, *comm = NULL, *requests[DEPTH];
    int fds = open_fds(), ready[2], status;

    CHECK_EQ(pipe(ready), 0);
    CHECK_EQ(NET->listen(NULL, 0, handle, &listener), NCCL_SUCCESS);
    pid_t child = start_child(child_sends, handle, listener, ready[1]);
    while (!comm)
        CHECK_EQ(child_sends ? NET->accept(listener, &comm, NULL) : NET->connect(NULL, 0, handle, &comm, NULL),
                 NCCL_SUCCESS);
    CHECK_EQ(read(ready[0], &byte, 1), 1);
    for (int i = 0; i < DEPTH; i++)
        CHECK((requests[i] = child_sends ? post_recv(comm, data, BYTES, 0)
                                         : post_send(comm, data + (size_t)i * BYTES, BYTES, 0)) != NULL);
    CHECK_EQ(kill(child, SIGKILL), 0);
    CHECK_EQ(waitpid(child, &status, 0), child);

    int64_t start = ckm_now_ms();
    CHECK_EQ(finish(requests[DEPTH - 1], NULL), NCCL_REMOTE_ERROR);
    CHECK(ckm_now_ms() - start < 2000);
    CHECK_EQ(finish(requests[0], NULL), NCCL_REMOTE_ERROR); /* and it stays failed */
    CHECK(strstr(last_warning, "NET/Checkmate"));
    CHECK_EQ(child_sends ? NET->closeRecv(comm) : NET->closeSend(comm), NCCL_SUCCESS);
    CHECK_EQ(NET->closeListen(listener), NCCL_SUCCESS);
    close(ready[0]);
    close(ready[1]);
    CHECK_EQ(open_fds(), fds);
    free(data);
}

static void test_connect_refused(void)
{
    char handle[NCCL_NET_HANDLE_BYTES];
    void *listener, *comm = NULL;
    int fds = open_fds();
    int64_t start = ckm_now_ms();
    nccl_result_t result = NCCL_SUCCESS;

    set_param("CHECKMATE_TIMEOUT_MS", "300");
    CHECK_EQ(NET->listen(NULL, 0, handle, &listener), NCCL_SUCCESS);
    NET->closeListen(listener);
    while (!result && ckm_now_ms() - start < 5000) {
        result = NET->connect(NULL, 0, handle, &comm, NULL);
        usleep(1000);
    }
    CHECK_EQ(result, NCCL_REMOTE_ERROR);
    CHECK(ckm_now_ms() - start >= 300);
    CHECK_EQ(open_fds(), fds);
    memset(handle, 1, sizeof handle);
    CHECK_EQ(NET->connect(NULL, 0, handle, &comm, NULL), NCCL_INVALID_ARGUMENT);
}

/* Strangers and half-finished handshakes are dropped; the real peer still gets through. */
static void test_strangers(void)
{
    char handle[NCCL_NET_HANDLE_BYTES], noise[64] = "GET / HTTP/1.0\r\n\r\n";
    struct raw_handle h;
    struct pair p = {0};
    void *listener, *none;
    int fds = open_fds(), silent, said = warnings;

    set_param("CHECKMATE_TIMEOUT_MS", "400");
    CHECK_EQ(NET->listen(NULL, 0, handle, &listener), NCCL_SUCCESS);
    memcpy(&h, handle, sizeof h);
    silent = raw_connect(h.port[0]);
    int stray = raw_connect(h.port[1]);
    for (int i = 0; i < 5; i++) {
        int fd = raw_connect(h.port[0]);
        CHECK_EQ(write(fd, noise, sizeof noise), sizeof noise);
        CHECK_EQ(NET->accept(listener, &none, NULL), NCCL_SUCCESS);
        CHECK(!none);
        close(fd);
    }
    while (!p.send || !p.recv) {
        if (!p.send)
            CHECK_EQ(NET->connect(NULL, 0, handle, &p.send, NULL), NCCL_SUCCESS);
        if (!p.recv)
            CHECK_EQ(NET->accept(listener, &p.recv, NULL), NCCL_SUCCESS);
    }
    CHECK(warnings >= said + 5);
    close_pair(p);

    int64_t start = ckm_now_ms();
    nccl_result_t result = NCCL_SUCCESS;
    while (!result && ckm_now_ms() - start < 5000) {
        result = NET->accept(listener, &none, NULL);
        usleep(1000);
    }
    CHECK_EQ(result, NCCL_REMOTE_ERROR);
    CHECK_EQ(read(silent, noise, 1), 0); /* closed on it */
    CHECK_EQ(NET->closeListen(listener), NCCL_SUCCESS);
    close(silent);
    close(stray);
    CHECK_EQ(open_fds(), fds);
}

/* A connect that NCCL gives up asking about does not keep its sockets for ever. */
static void test_abandoned(void)
{
    char handle[NCCL_NET_HANDLE_BYTES], other[NCCL_NET_HANDLE_BYTES];
    void *listener, *comm;
    int fds = open_fds();

    set_param("CHECKMATE_TIMEOUT_MS", "100");
    CHECK_EQ(NET->listen(NULL, 0, handle, &listener), NCCL_SUCCESS);
    struct raw_handle h;
    memcpy(&h, handle, sizeof h);
    h.address = htonl(0x7f010203); /* nobody, but on this machine */
    h.port[0] = h.port[1] = htons(9);
    memcpy(other, handle, sizeof other);
    memcpy(other, &h, sizeof h);
    CHECK_EQ(NET->connect(NULL, 0, other, &comm, NULL), NCCL_SUCCESS);
    CHECK(!comm);
    usleep(250000);
    while (!comm)
        CHECK_EQ(NET->connect(NULL, 0, handle, &comm, NULL), NCCL_SUCCESS);
    NET->closeSend(comm);
    NET->closeListen(listener);
    CHECK_EQ(open_fds(), fds);
}

/* Streams with flipped bits, cut anywhere: an error, or the right data; never a crash or a hang. */
static void test_damaged_streams(void)
{
    uint64_t seed = 11;
    int errors = 0, intact = 0;

    for (int round = 0; round < 150; round++) {
        unsigned char stream[2 * CKM_HEADER_BYTES + 300], in[300];
        int fd[2], flow = (int)(random_u32(&seed) % 2), damage = round % 3;
        void *comm = raw_pair(fd), *request = post_recv(comm, in, sizeof in, 0);
        size_t bytes = sizeof stream - CKM_HEADER_BYTES;

        for (size_t i = 0; i < sizeof stream; i++)
            stream[i] = (unsigned char)random_u32(&seed);
        struct ckm_frame f = raw_frame(0, stream + CKM_HEADER_BYTES, 300, flow);
        memcpy(stream, &f, sizeof f);
        if (damage == 1)
            stream[random_u32(&seed) % CKM_HEADER_BYTES] ^= (unsigned char)(1u << random_u32(&seed) % 8);
        if (damage == 2)
            bytes = random_u32(&seed) % bytes;
        CHECK_EQ(write(fd[flow], stream, bytes), bytes);
        close(fd[0]);
        close(fd[1]);
        nccl_result_t result = finish(request, NULL);
        if (result == NCCL_SUCCESS)
            CHECK(damage == 0 && memcmp(in, stream + CKM_HEADER_BYTES, 300) == 0);
        else
            CHECK(damage != 0 && result != NCCL_IN_PROGRESS);
        errors += result != NCCL_SUCCESS;
        intact += result == NCCL_SUCCESS;
        NET->closeRecv(comm);
    }
    CHECK_EQ(intact, 50);
    CHECK_EQ(errors, 100);
}

/* A number is missing: the receive can never be filled, and says so. */
static void test_gap(void)
{
    int fd[2];
    char in;
    void *comm = raw_pair(fd), *request = post_recv(comm, &in, 1, 0);
    struct ckm_frame plain = raw_frame(1, "a", 1, 0), tagged = raw_frame(2, "b", 1, 1);

    CHECK_EQ(write(fd[0], &plain, sizeof plain), sizeof plain);
    CHECK_EQ(write(fd[1], &tagged, sizeof tagged), sizeof tagged);
    CHECK_EQ(finish(request, NULL), NCCL_SYSTEM_ERROR);
    close(fd[0]);
    close(fd[1]);
    NET->closeRecv(comm);
}

int main(void)
{
    net_init();
    test_killed(0);
    test_killed(1);
    test_damaged_streams();
    test_gap();
    test_connect_refused();
    test_strangers();
    test_abandoned();
    struct checkmate_counters c;
    checkmate_get_counters(&c);
    CHECK(c.errors >= 4);
    return 0;
}
