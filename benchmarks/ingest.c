/* What ingest.py measures: the same packets in memory, copied only, and taken in by the receive core. */
#include <stdint.h>
#include <string.h>
#include <time.h>

#define BURST 64u /* as from a port */

typedef void feed_fn(void *core, const uint8_t *const *packets, const uint32_t *lengths, uint32_t n, uint64_t now_us);

/* CPU time of this thread, so that others on the machine don't count. */
static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* Chunked memcpy: each packet without its first `skip` bytes, one behind the other. */
double time_copy(uint8_t *to, const uint8_t *const *packets, const uint32_t *lengths, uint32_t n, uint32_t skip)
{
    double begin = seconds();
    for (uint32_t i = 0; i < n; i++) {
        memcpy(to, packets[i] + skip, lengths[i] - skip);
        to += lengths[i] - skip;
    }
    return seconds() - begin;
}

double time_ingest(void *feed, void *core, const uint8_t *const *packets, const uint32_t *lengths, uint32_t n)
{
    double begin = seconds();
    for (uint32_t i = 0; i < n; i += BURST)
        ((feed_fn *)feed)(core, packets + i, lengths + i, n - i < BURST ? n - i : BURST, 0);
    return seconds() - begin;
}
