/* Assertions of all C tests, which stay in every build. CHECK_CONTEXT: text that tells more, such as a seed. */
#ifndef CHECKMATE_TESTS_ASSERTIONS_H
#define CHECKMATE_TESTS_ASSERTIONS_H

#include <stdio.h>
#include <stdlib.h>

#ifndef CHECK_CONTEXT
#define CHECK_CONTEXT ""
#endif

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s: failed: %s%s\n", __FILE__, __LINE__, __func__, #condition, CHECK_CONTEXT);     \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

#define CHECK_EQ(a, b)                                                                                                 \
    do {                                                                                                               \
        long long a_ = (long long)(a), b_ = (long long)(b);                                                            \
        if (a_ != b_) {                                                                                                \
            fprintf(stderr, "%s:%d: %s: %s is %lld, %s is %lld%s\n", __FILE__, __LINE__, __func__, #a, a_, #b, b_,     \
                    CHECK_CONTEXT);                                                                                    \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

#endif
