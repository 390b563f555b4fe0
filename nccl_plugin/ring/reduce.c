#include "reduce_kernels.h"

size_t ckm_dtype_bytes(int dtype)
{
    static const size_t bytes[CKM_NDTYPES] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    return bytes[dtype];
}

static int have_v3(void)
{
#ifdef CKM_RING_V3
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
#else
    return 0;
#endif
}

void ckm_reduce(void *dst, const void *a, const void *b, size_t count, int dtype, int op, uint32_t divisor)
{
    if (op == CKM_AVG && divisor == 1)
        op = CKM_SUM;
#ifdef CKM_RING_V3
    if (have_v3()) {
        ckm_kernels_v3[dtype][op](dst, a, b, count, divisor);
        return;
    }
#else
    (void)have_v3;
#endif
    ckm_kernels_base[dtype][op](dst, a, b, count, divisor);
}
