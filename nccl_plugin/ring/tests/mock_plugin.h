/* A net and profiler plugin within one process, for tests: messages are copied between the ranks' threads, and every
 * call is held against the order in which NCCL makes it. A violation aborts. */
#ifndef CHECKMATE_RING_TESTS_MOCK_PLUGIN_H
#define CHECKMATE_RING_TESTS_MOCK_PLUGIN_H

#include <stddef.h>
#include <stdint.h>

/* What the profiler knew about a message when isend was called. */
struct mock_send {
    const char *func;
    const void *send_buffer;
    uint64_t seq;
    int rank, nranks, peer, channel, nchannels, step, nsteps;
    const void *data;
    size_t bytes;
};

typedef void (*mock_send_hook)(const struct mock_send *send, void *context);

struct mock_counts {
    uint64_t sends, empty_sends, recvs, proxy_ops, steps, open_objects;
};

/* Entry points of the library, found with dlsym. */
typedef void (*mock_set_hook_fn)(mock_send_hook hook, void *context);
typedef void (*mock_get_counts_fn)(struct mock_counts *out);

#endif
