/* Every kernel of every instruction set against plain arithmetic, to the last bit. */
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "check.h"
#include "reduce_kernels.h"

#define COUNT 1037 /* no multiple of any vector */

static uint64_t state = 88172645463325252u;

static uint64_t random_bits(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

static float from_bf16(uint16_t v)
{
    uint32_t bits = (uint32_t)v << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

/* The nearest bf16, ties to even, by search over the two candidates. */
static uint16_t to_bf16(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if (isnan(f))
        return 0x7fc0;
    uint16_t low = (uint16_t)(bits >> 16);
    uint32_t rest = bits & 0xffff;
    return (uint16_t)(low + (rest > 0x8000 || (rest == 0x8000 && (low & 1))));
}

static double apply(int op, double a, double b, bool is_float)
{
    if (op == CKM_SUM || op == CKM_AVG)
        return is_float ? (float)a + (float)b : a + b;
    if (op == CKM_PROD)
        return is_float ? (float)a * (float)b : a * b;
    if (isnan(a) || isnan(b))
        return NAN;
    return op == CKM_MAX ? (a > b ? a : b) : (a < b ? a : b);
}

/* Values with infinities, NaN, zeros of both signs, subnormals and ties. */
static void fill(uint8_t *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++)
        bytes[i] = (uint8_t)random_bits();
}

static bool same_half(uint16_t got, uint16_t want, bool want_nan)
{
    return want_nan ? (got & 0x7fff) > 0x7c00 : got == want || ((got | want) & 0x7fff) == 0;
}

static void check_float16(const ckm_kernel table[CKM_NREDOPS], bool bf16, int op, uint32_t divisor)
{
    uint16_t a[COUNT], b[COUNT], d[COUNT];
    fill((uint8_t *)a, sizeof(a));
    fill((uint8_t *)b, sizeof(b));
    table[op](d, a, b, COUNT, divisor);
    for (size_t i = 0; i < COUNT; i++) {
        _Float16 ha, hb;
        memcpy(&ha, &a[i], 2);
        memcpy(&hb, &b[i], 2);
        float fa = bf16 ? from_bf16(a[i]) : (float)ha, fb = bf16 ? from_bf16(b[i]) : (float)hb;
        float want = (float)apply(op, fa, fb, true);
        want = op == CKM_AVG ? want / (float)divisor : want;
        _Float16 h = (_Float16)want;
        uint16_t bits;
        memcpy(&bits, &h, 2);
        bool ok = bf16 ? d[i] == to_bf16(want) || (want == 0 && (d[i] & 0x7fff) == 0) || (isnan(want) && d[i] == 0x7fc0)
                       : same_half(d[i], bits, isnan(want));
        CHECK(ok, "%s op %d: %a with %a gives %04x", bf16 ? "bf16" : "fp16", op, fa, fb, d[i]);
    }
}

#define CHECK_TYPE(name, T, M, dtype, is_float)                                                                        \
    static void name(const ckm_kernel table[CKM_NREDOPS], int op, uint32_t divisor)                                    \
    {                                                                                                                  \
        T a[COUNT], b[COUNT], d[COUNT];                                                                                \
        fill((uint8_t *)a, sizeof(a));                                                                                 \
        fill((uint8_t *)b, sizeof(b));                                                                                 \
        table[op](d, a, b, COUNT, divisor);                                                                            \
        for (size_t i = 0; i < COUNT; i++) {                                                                           \
            T sum = (T)((M)a[i] + (M)b[i]), prod = (T)((M)a[i] * (M)b[i]), want;                                       \
            if (op == CKM_MAX || op == CKM_MIN)                                                                        \
                want = op == CKM_MAX ? (a[i] > b[i] || a[i] != a[i] ? a[i] : b[i])                                     \
                                     : (a[i] < b[i] || a[i] != a[i] ? a[i] : b[i]);                                    \
            else                                                                                                       \
                want = op == CKM_SUM ? sum : op == CKM_PROD ? prod : (T)(sum / (T)divisor);                            \
            bool same = !memcmp(&want, &d[i], sizeof(T)) || (want != want && d[i] != d[i]);                            \
            CHECK(same || (is_float && want == 0 && d[i] == 0), #T " op %d element %zu", op, i);                       \
        }                                                                                                              \
        memcpy(d, b, sizeof(d)); /* in place */                                                                        \
        T out[COUNT];                                                                                                  \
        table[op](out, a, b, COUNT, divisor);                                                                          \
        table[op](d, a, d, COUNT, divisor);                                                                            \
        CHECK(!memcmp(out, d, sizeof(d)), #T " op %d in place", op);                                                   \
    }

CHECK_TYPE(check_i8, int8_t, uint32_t, CKM_INT8, false)
CHECK_TYPE(check_u8, uint8_t, uint32_t, CKM_UINT8, false)
CHECK_TYPE(check_i32, int32_t, uint32_t, CKM_INT32, false)
CHECK_TYPE(check_u32, uint32_t, uint32_t, CKM_UINT32, false)
CHECK_TYPE(check_i64, int64_t, uint64_t, CKM_INT64, false)
CHECK_TYPE(check_u64, uint64_t, uint64_t, CKM_UINT64, false)
CHECK_TYPE(check_f32, float, float, CKM_FLOAT32, true)
CHECK_TYPE(check_f64, double, double, CKM_FLOAT64, true)

static void check_table(const ckm_kernel table[CKM_NDTYPES][CKM_NREDOPS])
{
    for (int op = 0; op < CKM_NREDOPS; op++) {
        uint32_t divisor = op == CKM_AVG ? 3 : 1;
        check_i8(table[CKM_INT8], op, divisor);
        check_u8(table[CKM_UINT8], op, divisor);
        check_i32(table[CKM_INT32], op, divisor);
        check_u32(table[CKM_UINT32], op, divisor);
        check_i64(table[CKM_INT64], op, divisor);
        check_u64(table[CKM_UINT64], op, divisor);
        check_f32(table[CKM_FLOAT32], op, divisor);
        check_f64(table[CKM_FLOAT64], op, divisor);
        check_float16(table[CKM_FLOAT16], false, op, divisor);
        check_float16(table[CKM_BFLOAT16], true, op, divisor);
    }
}

int main(void)
{
    check_table(ckm_kernels_base);
#ifdef CKM_RING_V3
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"))
        check_table(ckm_kernels_v3);
#endif
    float a = 1, b = 2, d = 0;
    ckm_reduce(&d, &a, &b, 1, CKM_FLOAT32, CKM_AVG, 1);
    CHECK(d == 3, "an average's partial sums are not divided: %g", (double)d);
    puts("reduce: ok");
    return 0;
}
