/* CRC32C: SSE 4.2 where the processor has it, slicing-by-8 tables elsewhere.
 *
 * The crc32 instruction takes three cycles but one can start every cycle, so long inputs are cut into three
 * lanes whose CRCs are computed side by side and then joined. Joining needs the CRC of a lane as if `LANE`
 * zero bytes followed it, which is a linear map over GF(2), kept as four 256-entry tables.
 */
#include "checkmate/crc32c.h"

#include <pthread.h>
#include <string.h>

#define POLYNOMIAL 0x82f63b78u /* reflected */
#define LANE       2048u       /* bytes of one lane; a multiple of 8 */

static uint32_t table[8][256];
static uint32_t shift[4][256]; /* appends LANE zero bytes */
static pthread_once_t once = PTHREAD_ONCE_INIT;

static uint32_t append_zeros(uint32_t crc, size_t bytes)
{
    while (bytes--)
        crc = table[0][crc & 0xff] ^ (crc >> 8);
    return crc;
}

static void make_tables(void)
{
    uint32_t basis[32];

    for (uint32_t i = 0; i < 256; i++) {
        uint32_t crc = i;
        for (int bit = 0; bit < 8; bit++)
            crc = crc & 1 ? POLYNOMIAL ^ (crc >> 1) : crc >> 1;
        table[0][i] = crc;
    }
    for (int t = 1; t < 8; t++)
        for (uint32_t i = 0; i < 256; i++)
            table[t][i] = table[0][table[t - 1][i] & 0xff] ^ (table[t - 1][i] >> 8);
    for (int bit = 0; bit < 32; bit++)
        basis[bit] = append_zeros(1u << bit, LANE);
    for (int byte = 0; byte < 4; byte++)
        for (uint32_t i = 0; i < 256; i++)
            for (int bit = 0; bit < 8; bit++)
                if (i >> bit & 1)
                    shift[byte][i] ^= basis[8 * byte + bit];
}

static uint64_t load64(const unsigned char *p)
{
    uint64_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

static uint32_t portable(uint32_t crc, const unsigned char *p, size_t n)
{
    for (; n >= 8; p += 8, n -= 8) {
        uint64_t v = load64(p) ^ crc;
        crc = 0;
        for (int i = 0; i < 8; i++)
            crc ^= table[7 - i][v >> (8 * i) & 0xff];
    }
    while (n--)
        crc = table[0][(crc ^ *p++) & 0xff] ^ (crc >> 8);
    return crc;
}

#if defined(__x86_64__)
#include <nmmintrin.h>

static uint32_t join(uint32_t crc)
{
    return shift[0][crc & 0xff] ^ shift[1][crc >> 8 & 0xff] ^ shift[2][crc >> 16 & 0xff] ^ shift[3][crc >> 24];
}

__attribute__((target("sse4.2"))) static uint32_t hardware(uint32_t crc, const unsigned char *p, size_t n)
{
    uint64_t a = crc;

    for (; n >= 3 * LANE; p += 3 * LANE, n -= 3 * LANE) {
        uint64_t b = 0, c = 0;
        for (size_t i = 0; i < LANE; i += 8) {
            a = _mm_crc32_u64(a, load64(p + i));
            b = _mm_crc32_u64(b, load64(p + LANE + i));
            c = _mm_crc32_u64(c, load64(p + 2 * LANE + i));
        }
        a = join(join((uint32_t)a) ^ (uint32_t)b) ^ (uint32_t)c;
    }
    for (; n >= 8; p += 8, n -= 8)
        a = _mm_crc32_u64(a, load64(p));
    while (n--)
        a = _mm_crc32_u8((uint32_t)a, *p++);
    return (uint32_t)a;
}

static int have_hardware(void)
{
    return __builtin_cpu_supports("sse4.2");
}
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>

static uint32_t hardware(uint32_t crc, const unsigned char *p, size_t n)
{
    for (; n >= 8; p += 8, n -= 8)
        crc = __crc32cd(crc, load64(p));
    while (n--)
        crc = __crc32cb(crc, *p++);
    return crc;
}

static int have_hardware(void)
{
    return 1;
}
#else
static uint32_t hardware(uint32_t crc, const unsigned char *p, size_t n)
{
    return portable(crc, p, n);
}

static int have_hardware(void)
{
    return 0;
}
#endif

uint32_t ckm_crc32c(uint32_t crc, const void *data, size_t bytes)
{
    pthread_once(&once, make_tables);
    return ~(have_hardware() ? hardware(~crc, data, bytes) : portable(~crc, data, bytes));
}

uint32_t ckm_crc32c_portable(uint32_t crc, const void *data, size_t bytes)
{
    pthread_once(&once, make_tables);
    return ~portable(~crc, data, bytes);
}
