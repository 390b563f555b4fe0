#ifndef CHECKMATE_RING_REDUCE_KERNELS_H
#define CHECKMATE_RING_REDUCE_KERNELS_H

#include "reduce.h"

typedef void (*ckm_kernel)(void *dst, const void *a, const void *b, size_t n, uint32_t divisor);

extern const ckm_kernel ckm_kernels_base[CKM_NDTYPES][CKM_NREDOPS];
extern const ckm_kernel ckm_kernels_v3[CKM_NDTYPES][CKM_NREDOPS];

#endif
