/* Values and types that NCCL's net and profiler plugin interfaces share.
 *
 * Written from the published interface (NCCL 2.19 to 2.30): the layouts and values are NCCL's, the text is ours.
 */
#ifndef CHECKMATE_NCCL_COMMON_ABI_H
#define CHECKMATE_NCCL_COMMON_ABI_H

#include <stddef.h>
#include <stdint.h>

typedef enum {
    NCCL_SUCCESS = 0,
    NCCL_UNHANDLED_CUDA_ERROR = 1,
    NCCL_SYSTEM_ERROR = 2,
    NCCL_INTERNAL_ERROR = 3,
    NCCL_INVALID_ARGUMENT = 4,
    NCCL_INVALID_USAGE = 5,
    NCCL_REMOTE_ERROR = 6,
    NCCL_IN_PROGRESS = 7,
} nccl_result_t;

typedef enum {
    NCCL_INT8 = 0,
    NCCL_UINT8 = 1,
    NCCL_INT32 = 2,
    NCCL_UINT32 = 3,
    NCCL_INT64 = 4,
    NCCL_UINT64 = 5,
    NCCL_FLOAT16 = 6,
    NCCL_FLOAT32 = 7,
    NCCL_FLOAT64 = 8,
    NCCL_BFLOAT16 = 9,
    NCCL_FLOAT8_E4M3 = 10,
    NCCL_FLOAT8_E5M2 = 11,
} nccl_datatype_t;

enum { NCCL_PROTO_LL = 0, NCCL_PROTO_LL128 = 1, NCCL_PROTO_SIMPLE = 2 };

typedef enum {
    NCCL_LOG_NONE = 0,
    NCCL_LOG_VERSION = 1,
    NCCL_LOG_WARN = 2,
    NCCL_LOG_INFO = 3,
    NCCL_LOG_ABORT = 4,
    NCCL_LOG_TRACE = 5,
} nccl_log_level_t;

/* Bits of the logger's second argument: which part of NCCL speaks. */
enum { NCCL_SUBSYS_INIT = 0x1, NCCL_SUBSYS_NET = 0x10, NCCL_SUBSYS_PROFILE = 0x4000 };

typedef void (*nccl_logger_t)(nccl_log_level_t level, unsigned long subsys, const char *file, int line, const char *fmt,
                              ...);

#endif
