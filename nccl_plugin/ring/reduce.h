/* Element-wise reductions, the same to the last bit on every machine: no reassociation, no fused multiply-add.
 *
 * bf16 and fp16 are computed in float and rounded to nearest even once per operation. Integers wrap.
 * min and max propagate NaN. avg divides the sum by `divisor` in the last reduction of a chunk.
 */
#ifndef CHECKMATE_RING_REDUCE_H
#define CHECKMATE_RING_REDUCE_H

#include <stddef.h>
#include <stdint.h>

/* NCCL's ncclDataType_t. */
enum ckm_dtype {
    CKM_INT8 = 0,
    CKM_UINT8 = 1,
    CKM_INT32 = 2,
    CKM_UINT32 = 3,
    CKM_INT64 = 4,
    CKM_UINT64 = 5,
    CKM_FLOAT16 = 6,
    CKM_FLOAT32 = 7,
    CKM_FLOAT64 = 8,
    CKM_BFLOAT16 = 9,
    CKM_NDTYPES = 10,
};

/* NCCL's ncclRedOp_t. */
enum ckm_redop { CKM_SUM = 0, CKM_PROD = 1, CKM_MAX = 2, CKM_MIN = 3, CKM_AVG = 4, CKM_NREDOPS = 5 };

size_t ckm_dtype_bytes(int dtype);

/* dst[i] = op(a[i], b[i]); dst may be a or b. divisor: 1, or for the last reduction of CKM_AVG the rank count. */
void ckm_reduce(void *dst, const void *a, const void *b, size_t count, int dtype, int op, uint32_t divisor);

#endif
