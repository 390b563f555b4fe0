#include "log.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>

static _Atomic(nccl_logger_t) log_fn;

void ckm_log_set(nccl_logger_t logger)
{
    nccl_logger_t none = NULL;
    if (logger)
        atomic_compare_exchange_strong(&log_fn, &none, logger);
}

void ckm_log(nccl_log_level_t level, unsigned long subsys, const char *file, int line, const char *fmt, ...)
{
    nccl_logger_t logger = atomic_load_explicit(&log_fn, memory_order_relaxed);
    char text[512];
    va_list args;

    if (!logger)
        return;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    logger(level, subsys, file, line, "NET/Checkmate : %s", text);
}
