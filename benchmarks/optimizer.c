/* The memory traffic of an Adam step and next to no arithmetic: reads θ, m, v and the gradient, writes θ, m, v, and
 * with master copies the model's parameter. */
#include <stddef.h>
#include <stdint.h>

void traffic_32(float *restrict theta, float *restrict m, float *restrict v, const float *restrict grad, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        theta[i] += grad[i];
        m[i] += grad[i];
        v[i] += grad[i];
    }
}

void traffic_16(float *restrict theta, float *restrict m, float *restrict v, const uint16_t *restrict grad, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        theta[i] += grad[i];
        m[i] += grad[i];
        v[i] += grad[i];
    }
}

void traffic_copy(float *restrict theta, float *restrict m, float *restrict v, const uint16_t *restrict grad,
                  uint16_t *restrict copy, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        theta[i] += grad[i];
        m[i] += grad[i];
        v[i] += grad[i];
        copy[i] = grad[i];
    }
}
