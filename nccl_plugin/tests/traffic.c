/* One end of a connection for the packet tests, through the tables of the built library, in NCCL's order:
 *
 *   traffic LIB recv MESSAGES BYTES            prints the handle, then what arrived
 *   traffic LIB send MESSAGES BYTES HANDLE PROFILER
 *
 * The sender is rank 1 of a ring of two, the last one: of every four messages it tags the last two, if PROFILER
 * is 1. Message i is filled with bytes that follow from i.
 */
#include <dlfcn.h>
#include <unistd.h>

#include "checkmate/api.h"
#include "nccl/net_abi.h"
#include "nccl/profiler_abi.h"
#include "test.h"

static const struct nccl_net_v11 *net;
static const struct nccl_profiler_v5 *profiler;
static int (*net_wait)(void *const *, int, int);
static int (*get_counters)(struct checkmate_counters *);
static int (*register_bucket)(const void *, size_t, uint32_t);
static void (*set_iteration)(uint64_t);
static void (*set_incarnation)(uint32_t);

static void load(const char *path)
{
    void *library = dlopen(path, RTLD_NOW), *ctx;
    int ndev;

    CHECK(library);
    net = dlsym(library, "ncclNetPlugin_v11");
    profiler = dlsym(library, "ncclProfiler_v5");
    *(void **)&net_wait = dlsym(library, "checkmate_net_wait");
    *(void **)&get_counters = dlsym(library, "checkmate_get_counters");
    *(void **)&register_bucket = dlsym(library, "checkmate_register_bucket");
    *(void **)&set_iteration = dlsym(library, "checkmate_set_iteration");
    *(void **)&set_incarnation = dlsym(library, "checkmate_set_incarnation");
    CHECK_EQ(net->init(&ctx, 1, NULL, test_logger, NULL), NCCL_SUCCESS);
    CHECK_EQ(net->devices(&ndev), NCCL_SUCCESS);
    CHECK_EQ(ndev, 1);
}

static void fill(uint32_t *data, size_t bytes, int message)
{
    for (size_t i = 0; i < bytes / sizeof *data; i++)
        data[i] = (uint32_t)message * 2654435761u + (uint32_t)i;
}

/* Zero-size and short messages stand among the others. */
static size_t length_of(int message, size_t bytes)
{
    return message % 7 == 3 ? 0 : message % 11 == 6 ? bytes / 4096 * 4 : bytes;
}

static void finish(void *request, int *size)
{
    int done = 0;
    while (!done) {
        CHECK_EQ(net->test(request, &done, size), NCCL_SUCCESS);
        if (!done)
            net_wait(&request, 1, 100000);
    }
}

static void receive(int messages, size_t bytes)
{
    char handle[NCCL_NET_HANDLE_BYTES];
    uint32_t *data = malloc(bytes), *expected = malloc(bytes);
    void *listener, *comm = NULL, *mhandle;
    int tag = 3, size;

    CHECK_EQ(net->listen(NULL, 0, handle, &listener), NCCL_SUCCESS);
    for (int i = 0; i < NCCL_NET_HANDLE_BYTES; i++)
        printf("%02x", (unsigned char)handle[i]);
    printf("\n");
    fflush(stdout);
    while (!comm) {
        CHECK_EQ(net->accept(listener, &comm, NULL), NCCL_SUCCESS);
        usleep(1000);
    }
    CHECK_EQ(net->closeListen(listener), NCCL_SUCCESS);
    CHECK_EQ(net->regMr(comm, data, bytes, NCCL_PTR_HOST, &mhandle), NCCL_SUCCESS);
    for (int i = 0; i < messages; i++) {
        void *request = NULL, *to = data;
        CHECK_EQ(net->irecv(comm, 1, &to, &bytes, &tag, &mhandle, NULL, &request), NCCL_SUCCESS);
        finish(request, &size);
        CHECK_EQ(size, length_of(i, bytes));
        fill(expected, bytes, i);
        CHECK(memcmp(data, expected, (size_t)size) == 0);
    }
    CHECK_EQ(net->closeRecv(comm), NCCL_SUCCESS);
    printf("received %d\n", messages);
}

static void *start(void *context, struct nccl_prof_event_v5 event)
{
    void *handle = NULL;
    CHECK_EQ(profiler->startEvent(context, &handle, &event), NCCL_SUCCESS);
    return handle;
}

static void *start_op(void *context, const void *bucket, size_t bytes, int messages)
{
    void *coll = start(context, (struct nccl_prof_event_v5){.type = NCCL_PROFILE_COLL,
                                                            .coll = {.func = "AllReduce",
                                                                     .sendBuff = bucket,
                                                                     .count = bytes / 4,
                                                                     .datatype = "ncclFloat32",
                                                                     .nChannels = 1,
                                                                     .algo = "RING",
                                                                     .proto = "SIMPLE"}});
    profiler->stopEvent(coll);
    return start(context,
                 (struct nccl_prof_event_v5){.type = NCCL_PROFILE_PROXY_OP,
                                             .parentObj = coll,
                                             .proxyOp = {.pid = getpid(), .peer = 0, .nSteps = messages, .isSend = 1}});
}

static void print_counters(void)
{
    struct checkmate_counters c;
    get_counters(&c);
    printf("tagged_frames %llu\ntagged_bytes %llu\nplain_frames %llu\nplain_bytes %llu\nno_option %llu\n",
           (unsigned long long)c.tagged_frames, (unsigned long long)c.tagged_bytes, (unsigned long long)c.plain_frames,
           (unsigned long long)c.plain_bytes, (unsigned long long)c.untagged[CHECKMATE_NO_OPTION]);
    printf("no_profiler %llu\ntagged_connections %llu\n", (unsigned long long)c.untagged[CHECKMATE_NO_PROFILER],
           (unsigned long long)c.tagged_connections);
}

static void *connect_to(const char *hex)
{
    char handle[NCCL_NET_HANDLE_BYTES];
    void *comm = NULL;

    for (int i = 0; i < NCCL_NET_HANDLE_BYTES; i++) {
        unsigned byte;
        CHECK_EQ(sscanf(hex + 2 * i, "%2x", &byte), 1);
        handle[i] = (char)byte;
    }
    while (!comm) {
        CHECK_EQ(net->connect(NULL, 0, handle, &comm, NULL), NCCL_SUCCESS);
        usleep(1000);
    }
    return comm;
}

static void send_all(int messages, size_t bytes, const char *hex, int with_profiler)
{
    uint32_t *data = calloc(1, bytes);
    CHECK_EQ(register_bucket(data, bytes, 6), 0);
    set_iteration(11);
    set_incarnation(2);
    void *comm = connect_to(hex), *context = NULL, *op = NULL, *mhandle;
    int mask;

    if (with_profiler) {
        CHECK_EQ(profiler->init(&context, 1, &mask, "traffic", 2, 2, 1, test_logger), NCCL_SUCCESS);
        op = start_op(context, data, bytes, messages);
        CHECK(op);
    }
    CHECK_EQ(net->regMr(comm, data, bytes, NCCL_PTR_HOST, &mhandle), NCCL_SUCCESS);
    for (int i = 0; i < messages; i++) {
        void *slot = op ? start(context, (struct nccl_prof_event_v5){.type = NCCL_PROFILE_PROXY_STEP,
                                                                     .parentObj = op,
                                                                     .proxyStep = {.step = i}})
                        : NULL;
        void *request = NULL;
        fill(data, bytes, i);
        while (!request)
            CHECK_EQ(net->isend(comm, data, length_of(i, bytes), 3, mhandle, &slot, &request), NCCL_SUCCESS);
        finish(request, NULL);
        if (slot)
            profiler->stopEvent(slot);
    }
    if (with_profiler) {
        profiler->stopEvent(op);
        profiler->finalize(context);
    }
    CHECK_EQ(net->closeSend(comm), NCCL_SUCCESS);
    print_counters();
    free(data);
}

int main(int argc, char **argv)
{
    CHECK(argc == 5 || argc == 7);
    load(argv[1]);
    int messages = atoi(argv[3]);
    size_t bytes = (size_t)atol(argv[4]);
    if (strcmp(argv[2], "recv") == 0)
        receive(messages, bytes);
    else
        send_all(messages, bytes, argv[5], atoi(argv[6]));
    if (warnings)
        printf("warning %s\n", last_warning);
    return 0;
}
