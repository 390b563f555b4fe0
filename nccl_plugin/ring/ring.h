/* The CPU ring engine: collectives over an NCCL net plugin, driven as NCCL's proxy thread drives it.
 *
 * The Python binding reads its declarations from this file, so that it holds nothing but plain declarations and
 * preprocessor lines. A ring may be used from any thread.
 */
#ifndef CHECKMATE_RING_H
#define CHECKMATE_RING_H

#include <stddef.h>
#include <stdint.h>

#pragma GCC visibility push(default)

/* NCCL's ncclFunc_t. */
enum ckm_ring_func {
    CKM_RING_BROADCAST = 0,
    CKM_RING_REDUCE = 1,
    CKM_RING_ALLGATHER = 2,
    CKM_RING_REDUCESCATTER = 3,
    CKM_RING_ALLREDUCE = 4,
    CKM_RING_SEND = 6,
    CKM_RING_RECV = 7,
};

struct ckm_ring_config {
    const char *plugin; /* path of the library with ncclNetPlugin_v11 and, unless it has no profiler, ncclProfiler_v5 */
    const char *name;   /* of the communicator, for the profiler */
    uint64_t comm_id;   /* the same on all ranks */
    uint32_t rank, nranks, nchannels;
    uint32_t slice_bytes; /* largest payload of a message */
    uint32_t nhosts;
    const uint32_t *host_ranks; /* ranks on each host, in rank order; nranks in all. Not needed after creation. */
};

/* One operation. Buffers are the caller's until it is done.
 *   broadcast       in[0] == out[0], count elements
 *   reduce          in[0] on all ranks, out[0] (may be in[0]) on root
 *   all-gather      in[0], count elements; out[r] of each rank r
 *   reduce-scatter  in[r] for each rank r, count elements each; out[0]
 *   all-reduce      in[0], out[0] (may be in[0])
 *   send, recv      in[0] / out[0], count elements, peer in root
 */
struct ckm_ring_task {
    int func;  /* enum ckm_ring_func */
    int dtype; /* ncclDataType_t */
    int redop; /* ncclRedOp_t */
    int root;
    uint64_t count;
    const void *const *in;
    void *const *out;
    int64_t timeout_ms; /* from submission; negative: none */
};

struct ckm_ring;
struct ckm_ring_op;

/* Loads the plugin, starts listening and the proxy thread. NULL: `error` says why. */
struct ckm_ring *ckm_ring_create(const struct ckm_ring_config *config, char *error, size_t error_bytes);

/* Bytes of one rank's handles, and the handles: what every other rank needs in order to connect. */
size_t ckm_ring_handle_bytes(const struct ckm_ring *ring);
void ckm_ring_handles(const struct ckm_ring *ring, void *out);

/* Starts connecting, with the handles of all ranks in rank order. */
void ckm_ring_connect(struct ckm_ring *ring, const void *handles);

/* Waits for at most `timeout_ms`. Returns 1 when all connections stand, 0 when not yet, -1 when it failed. */
int ckm_ring_connected(struct ckm_ring *ring, int timeout_ms);

/* Starts an operation. NULL: refused, `error` says why. */
struct ckm_ring_op *ckm_ring_submit(struct ckm_ring *ring, const struct ckm_ring_task *task, char *error,
                                    size_t error_bytes);

/* Waits for at most `timeout_ms`. Returns 1 when done, 0 when not yet, -1 when it failed. */
int ckm_ring_op_wait(struct ckm_ring_op *op, int timeout_ms);
const char *ckm_ring_op_error(const struct ckm_ring_op *op);

/* Asks that the operation appear in ckm_ring_next_done. Returns 0, or 1 when it has ended already: it won't. */
int ckm_ring_op_notify(struct ckm_ring_op *op, uint64_t cookie);
void ckm_ring_op_free(struct ckm_ring_op *op);

/* Waits for an operation that ckm_ring_op_notify named. Returns 1, 0 after the time-out, -1 when the ring is closed
 * and no more will come. */
int ckm_ring_next_done(struct ckm_ring *ring, int timeout_ms, uint64_t *cookie);

/* The first error, or an empty string. Valid until ckm_ring_destroy. */
const char *ckm_ring_error(const struct ckm_ring *ring);

/* Fails all operations with `reason`, now and from now on, and closes the connections. */
void ckm_ring_abort(struct ckm_ring *ring, const char *reason);

/* Aborts what is still going on, ends the thread, closes everything and wakes ckm_ring_next_done. */
void ckm_ring_close(struct ckm_ring *ring);

/* Closes and frees. Operations that were not freed stay valid. */
void ckm_ring_destroy(struct ckm_ring *ring);

#pragma GCC visibility pop

#endif
