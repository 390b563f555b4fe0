/* What the C tests share: a logger that counts, open files, random numbers. */
#ifndef CHECKMATE_TEST_H
#define CHECKMATE_TEST_H

#include <dirent.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "assertions.h"
#include "nccl/common_abi.h"

static int warnings; /* logged so far */
static char last_warning[512];

__attribute__((format(printf, 5, 6))) static inline void test_logger(nccl_log_level_t level, unsigned long subsys,
                                                                     const char *file, int line, const char *fmt, ...)
{
    va_list args;
    (void)subsys, (void)file, (void)line;
    if (level != NCCL_LOG_WARN)
        return;
    warnings++;
    va_start(args, fmt);
    vsnprintf(last_warning, sizeof last_warning, fmt, args);
    va_end(args);
}

static inline int open_fds(void)
{
    int n = 0;
    DIR *d = opendir("/proc/self/fd");
    while (readdir(d))
        n++;
    closedir(d);
    return n;
}

/* A small generator, so that a failure can be repeated from its seed. */
static inline uint32_t random_u32(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 33);
}

#endif
