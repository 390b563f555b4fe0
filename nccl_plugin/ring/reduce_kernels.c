/* The loops of reduce.c, compiled once for the base instruction set and once for x86-64-v3 (AVX2, F16C): KERNELS
 * names the table of the variant. Built with -ffp-contract=off, so both give the same bits. */
#include "reduce_kernels.h"

#include <string.h>

#ifdef __F16C__
#include <immintrin.h>
#endif

typedef uint16_t bf16;
typedef _Float16 fp16;

static inline float bf16_load(bf16 v)
{
    uint32_t bits = (uint32_t)v << 16;
    float f;
    memcpy(&f, &bits, sizeof(f));
    return f;
}

static inline bf16 bf16_store(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof(bits));
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (bf16)(f != f ? 0x7fc0u : rounded);
}

/* The compiler converts fp16 one by one; F16C converts eight at a time, with the same rounding. */
static inline void fp16_widen(float *out, const fp16 *in, size_t n)
{
    size_t i = 0;
#ifdef __F16C__
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(in + i))));
#endif
    for (; i < n; i++)
        out[i] = (float)in[i];
}

static inline void fp16_narrow(fp16 *out, const float *in, size_t n)
{
    size_t i = 0;
#ifdef __F16C__
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(out + i), _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < n; i++)
        out[i] = (fp16)in[i];
}

#define SAME(x)   (x)
#define MIN(a, b) ((a) < (b) || (a) != (a) ? (a) : (b))
#define MAX(a, b) ((a) > (b) || (a) != (a) ? (a) : (b))
#define ADD(a, b) ((a) + (b))
#define MUL(a, b) ((a) * (b))

/* T: element; M: type it is computed in (unsigned for integer sums, so that they wrap). */
#define KERNEL(name, T, M, LOAD, STORE, EXPR)                                                                          \
    static void name(void *dst, const void *va, const void *vb, size_t n, uint32_t divisor)                            \
    {                                                                                                                  \
        T *d = dst;                                                                                                    \
        const T *pa = va, *pb = vb;                                                                                    \
        (void)divisor;                                                                                                 \
        _Pragma("GCC ivdep") for (size_t i = 0; i < n; i++)                                                            \
        {                                                                                                              \
            M a = (M)LOAD(pa[i]), b = (M)LOAD(pb[i]);                                                                  \
            d[i] = (T)STORE(EXPR);                                                                                     \
        }                                                                                                              \
    }

/* S: the signed or unsigned type in which an average divides. */
#define KERNELS_OF(tag, T, M, S, LOAD, STORE)                                                                          \
    KERNEL(tag##_sum, T, M, LOAD, STORE, ADD(a, b))                                                                    \
    KERNEL(tag##_prod, T, M, LOAD, STORE, MUL(a, b))                                                                   \
    KERNEL(tag##_max, T, S, LOAD, STORE, MAX(a, b))                                                                    \
    KERNEL(tag##_min, T, S, LOAD, STORE, MIN(a, b))                                                                    \
    KERNEL(tag##_avg, T, M, LOAD, STORE, (S)(T)ADD(a, b) / (S)divisor)

/* As KERNEL, for fp16, by blocks that stay in the first-level cache. */
#define BLOCK 128
#define KERNEL_FP16(name, EXPR)                                                                                        \
    static void name(void *dst, const void *va, const void *vb, size_t n, uint32_t divisor)                            \
    {                                                                                                                  \
        fp16 *d = dst;                                                                                                 \
        const fp16 *pa = va, *pb = vb;                                                                                 \
        float fa[BLOCK], fb[BLOCK];                                                                                    \
        (void)divisor;                                                                                                 \
        for (size_t at = 0; at < n; at += BLOCK) {                                                                     \
            size_t m = n - at < BLOCK ? n - at : BLOCK;                                                                \
            fp16_widen(fa, pa + at, m);                                                                                \
            fp16_widen(fb, pb + at, m);                                                                                \
            for (size_t i = 0; i < m; i++) {                                                                           \
                float a = fa[i], b = fb[i];                                                                            \
                fa[i] = EXPR;                                                                                          \
            }                                                                                                          \
            fp16_narrow(d + at, fa, m);                                                                                \
        }                                                                                                              \
    }

/* The sum of a floating average is not rounded before the division. */
#define KERNELS_OF_FLOAT(KERNEL_OF)                                                                                    \
    KERNEL_OF(sum, ADD(a, b))                                                                                          \
    KERNEL_OF(prod, MUL(a, b))                                                                                         \
    KERNEL_OF(max, MAX(a, b))                                                                                          \
    KERNEL_OF(min, MIN(a, b))                                                                                          \
    KERNEL_OF(avg, ADD(a, b) / divisor)

#define F32(op, EXPR) KERNEL(f32_##op, float, float, SAME, SAME, EXPR)
#define F64(op, EXPR) KERNEL(f64_##op, double, double, SAME, SAME, EXPR)
#define B16(op, EXPR) KERNEL(b16_##op, bf16, float, bf16_load, bf16_store, EXPR)
#define F16(op, EXPR) KERNEL_FP16(f16_##op, EXPR)

KERNELS_OF(i8, int8_t, uint32_t, int32_t, SAME, SAME)
KERNELS_OF(u8, uint8_t, uint32_t, uint32_t, SAME, SAME)
KERNELS_OF(i32, int32_t, uint32_t, int32_t, SAME, SAME)
KERNELS_OF(u32, uint32_t, uint32_t, uint32_t, SAME, SAME)
KERNELS_OF(i64, int64_t, uint64_t, int64_t, SAME, SAME)
KERNELS_OF(u64, uint64_t, uint64_t, uint64_t, SAME, SAME)
KERNELS_OF_FLOAT(F16)
KERNELS_OF_FLOAT(F32)
KERNELS_OF_FLOAT(F64)
KERNELS_OF_FLOAT(B16)

#define ROW(tag)                                                                                                       \
    {                                                                                                                  \
        [CKM_SUM] = tag##_sum, [CKM_PROD] = tag##_prod, [CKM_MAX] = tag##_max, [CKM_MIN] = tag##_min,                  \
        [CKM_AVG] = tag##_avg                                                                                          \
    }

const ckm_kernel KERNELS[CKM_NDTYPES][CKM_NREDOPS] = {
    [CKM_INT8] = ROW(i8),     [CKM_UINT8] = ROW(u8),     [CKM_INT32] = ROW(i32),   [CKM_UINT32] = ROW(u32),
    [CKM_INT64] = ROW(i64),   [CKM_UINT64] = ROW(u64),   [CKM_FLOAT16] = ROW(f16), [CKM_FLOAT32] = ROW(f32),
    [CKM_FLOAT64] = ROW(f64), [CKM_BFLOAT16] = ROW(b16),
};
