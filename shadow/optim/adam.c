/* The arithmetic of torch's fused CPU kernel on whole vectors (aten/src/ATen/native/cpu/FusedAdamKernel.cpp), rounding
 * by rounding: fmaf where that one multiplies and adds at once, and nowhere else (-ffp-contract=off). Unlike that one
 * it prefetches, so that square roots and divisions are hidden behind memory, and widens gradients in registers.
 */
#include "api.h"

#include <math.h>
#include <string.h>

#define LINE  16  /* elements of a cache line */
#define TURN  64  /* elements between two prefetches: enough for the compiler to make vectors of them */
#define AHEAD 256 /* elements: far enough for memory, near enough for the first cache */

#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__)
#define EACH_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define EACH_CPU
#endif
#define EXPORT __attribute__((visibility("default")))

static inline float from_float32(float grad)
{
    return grad;
}

static inline float from_bfloat16(uint16_t grad)
{
    uint32_t bits = (uint32_t)grad << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* To the nearest, ties to even; as torch's copy does it, any NaN included. */
static inline uint16_t to_bfloat16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return value != value ? 0xffff : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#define DEFINE(type, stored)                                                                                           \
    EXPORT EACH_CPU void ckm_adam_##type(float *restrict theta, float *restrict m, float *restrict v,                  \
                                         uint16_t *restrict copy, const stored *restrict grad, size_t elements,        \
                                         const struct ckm_adam *by)                                                    \
    {                                                                                                                  \
        const struct ckm_adam c = *by;                                                                                 \
        const int is_short = c.lerp < 0.5f; /* torch's lerp starts from the nearer end */                              \
        const float weight = is_short ? c.lerp : c.lerp - 1;                                                           \
                                                                                                                       \
        for (size_t turn = 0; turn < elements; turn += TURN) {                                                         \
            for (size_t i = turn + AHEAD; i < turn + AHEAD + TURN; i += LINE) {                                        \
                __builtin_prefetch(theta + i, 1);                                                                      \
                __builtin_prefetch(m + i, 1);                                                                          \
                __builtin_prefetch(v + i, 1);                                                                          \
            }                                                                                                          \
            for (size_t i = turn; i < turn + TURN; i++) {                                                              \
                float g = from_##type(grad[i]);                                                                        \
                if (c.decay != 0)                                                                                      \
                    g = fmaf(theta[i], c.decay, g);                                                                    \
                float first = fmaf(weight, g - m[i], is_short ? m[i] : g);                                             \
                float second = fmaf(c.beta2_left * g, g, v[i] * c.beta2);                                              \
                m[i] = first;                                                                                          \
                v[i] = second;                                                                                         \
                theta[i] = theta[i] * c.keep + c.size * first / (sqrtf(second) / c.root + c.eps);                      \
            }                                                                                                          \
            if (copy)                                                                                                  \
                for (size_t i = turn; i < turn + TURN; i++)                                                            \
                    copy[i] = to_bfloat16(theta[i]);                                                                   \
        }                                                                                                              \
    }

DEFINE(float32, float)
DEFINE(bfloat16, uint16_t)
