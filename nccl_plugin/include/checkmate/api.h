/* What the training side calls in the plugin's library, beside the tables that NCCL calls.
 *
 * The Python binding reads its declarations from this file, so that it holds nothing but plain declarations
 * and preprocessor lines, which the binding skips. All functions may be called from any thread. State is
 * per process: one rank in a process.
 */
#ifndef CHECKMATE_API_H
#define CHECKMATE_API_H

#include <stddef.h>
#include <stdint.h>

#pragma GCC visibility push(default)

/* Why something that is sent was not tagged. Counted for each collective or each proxy operation, those marked
 * (messages) for each message. */
enum checkmate_reason {
    CHECKMATE_NO_PROFILER,    /* (messages) buckets are registered, but NCCL has not loaded the profiler */
    CHECKMATE_OLD_PROFILER,   /* communicators whose NCCL does not tell the profiler the rank and their number */
    CHECKMATE_NOT_ALLREDUCE,  /* another collective on a registered bucket */
    CHECKMATE_NOT_REGISTERED, /* the send buffer is not a registered bucket */
    CHECKMATE_SIZE_MISMATCH,  /* count times size is not the size registered */
    CHECKMATE_NOT_RING,       /* the algorithm is not ring */
    CHECKMATE_NOT_SIMPLE,     /* the protocol is not Simple */
    CHECKMATE_BAD_DATATYPE,   /* a datatype that no optimizer here handles */
    CHECKMATE_NO_INCARNATION, /* the incarnation is 0: tagging is off */
    CHECKMATE_OTHER_PROCESS,  /* the operation belongs to another process (PXN) */
    CHECKMATE_BAD_STEPS,      /* the number of steps is not a whole number of ring loops */
    CHECKMATE_NO_ROOM,        /* more operations at once than the plugin has room for */
    CHECKMATE_OTHER_HOSTS,    /* CHECKMATE_HOST_RANKS is not that of this communicator, or not usable */
    CHECKMATE_ONE_HOST,       /* all ranks are on one host: nothing of it crosses a switch */
    CHECKMATE_NO_POSITION,    /* several ranks share a host, and the ring position in this channel was not probed */
    CHECKMATE_TORN_RING,      /* a ring enters the host of rank 0 more than once */
    CHECKMATE_NO_OPTION,      /* (messages) the connection has no tagged flow: no counter map, no option */
    CHECKMATE_REASONS
};

/* Process-wide, since the library was loaded. Bytes are payload bytes. */
struct checkmate_counters {
    uint64_t tagged_frames;
    uint64_t tagged_bytes;
    uint64_t plain_frames;
    uint64_t plain_bytes;
    uint64_t received_frames;
    uint64_t received_bytes;
    uint64_t tagged_ops;                  /* proxy operations that send tagged frames */
    uint64_t untagged[CHECKMATE_REASONS]; /* by enum checkmate_reason */
    uint64_t tagged_connections;          /* send connections that have a tagged flow */
    uint64_t plain_connections;           /* send connections that have none */
    uint64_t errors;                      /* connections that failed: reset, closed by the peer, timed out, damaged */
};

/* One environment variable that the plugin reads. */
struct checkmate_param {
    const char *name;
    const char *value; /* in force */
    const char *fallback;
    const char *help;
};

/* Makes all-reduces that send from exactly `ptr`, `bytes` long, those of bucket number `bucket`.
 * Registering a bucket's number or address again replaces the old entry.
 * Returns 0, or a negative errno: EINVAL (null, zero bytes), ENOSPC (too many buckets). */
int checkmate_register_bucket(const void *ptr, size_t bytes, uint32_t bucket);

/* Registers a probe in the same way. Where several ranks share a host, the position of a rank in a channel's ring is
 * not told by anybody: it is read off the partial sums of one all-reduce of fp32 to which rank 0 contributes 1s and
 * all others 0s. It is never tagged, and must be through before the first bucket is sent. It must be large enough that
 * all channels are used and no chunk is empty. */
int checkmate_register_probe(const void *ptr, size_t bytes);
void checkmate_unregister_buckets(void);

/* The optimizer step, from 1, that all-reduces enqueued from now on belong to. */
void checkmate_set_iteration(uint64_t iteration);

/* The job's incarnation, which grows at every restart. 0, the default, switches tagging off. */
void checkmate_set_incarnation(uint32_t incarnation);

/* Returns 0. */
int checkmate_get_counters(struct checkmate_counters *out);

/* A short name of a reason, NULL beyond the last. */
const char *checkmate_reason_name(int reason);

/* Returns 0, or -1 beyond the last parameter. */
int checkmate_get_param(int index, struct checkmate_param *out);

/* CRC32C (RFC 3720) of `len` bytes, continued from `crc`; 0 at the start. */
uint32_t checkmate_crc32c(uint32_t crc, const void *data, size_t bytes);

/* For engines that have a CPU to spare for others; NCCL never calls it. Sleeps until at least one of the net
 * requests may progress when tested, or for `timeout_us`; returns at once when one already has. Requests that
 * are NULL are skipped. Returns how many may progress, 0 after the time-out, or a negative errno. */
int checkmate_net_wait(void *const *requests, int n, int timeout_us);

#pragma GCC visibility pop

#endif
