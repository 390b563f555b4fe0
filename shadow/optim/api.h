/* An Adam or AdamW step of fp32 parameters in one pass over memory, with fp32 or bf16 gradients.
 *
 * Python reads this file too (cffi): only plain declarations, no macros with arguments. `elements` is a multiple of 64;
 * theta, m, v, their copy and the gradient don't overlap and need no alignment but their elements'. Any thread may
 * call.
 */
#ifndef CHECKMATE_OPTIM_API_H
#define CHECKMATE_OPTIM_API_H

#include <stddef.h>
#include <stdint.h>

/* What a step's hyperparameters and its number come to, each computed in double and rounded once. */
struct ckm_adam {
    float decay; /* Adam: weight decay, added to the gradient; AdamW: 0 */
    float keep;  /* AdamW: 1 - lr * weight decay; Adam: 1 */
    float lerp;  /* 1 - beta1 */
    float beta2;
    float beta2_left; /* 1 - beta2 */
    float root;       /* square root of 1 - beta2 ^ step */
    float eps;
    float size; /* -lr / (1 - beta1 ^ step) */
};

/* `copy`: theta rounded to bf16, or NULL. */
void ckm_adam_float32(float *theta, float *m, float *v, uint16_t *copy, const float *grad, size_t elements,
                      const struct ckm_adam *by);
void ckm_adam_bfloat16(float *theta, float *m, float *v, uint16_t *copy, const uint16_t *grad, size_t elements,
                       const struct ckm_adam *by);

#endif
