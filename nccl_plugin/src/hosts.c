#include "hosts.h"

#include <stdbool.h>
#include <stdlib.h>

#include "log.h"
#include "param.h"

/* The list's first number and the sum of all; false: it is not one. */
static bool parse(const char *text, uint32_t *first, uint32_t *sum)
{
    char *end = NULL;

    *first = *sum = 0;
    do {
        unsigned long ranks = *text >= '1' && *text <= '9' ? strtoul(text, &end, 10) : 0;
        if (ranks == 0 || ranks > UINT16_MAX - *sum || (*end && *end != ','))
            return false;
        *first = *first ? *first : (uint32_t)ranks;
        *sum += (uint32_t)ranks;
        text = end + 1;
    } while (*end);
    return true;
}

uint32_t ckm_first_host_ranks(uint32_t nranks)
{
    const char *text = ckm_param_text(CKM_HOST_RANKS);
    uint32_t first, sum;

    if (!*text)
        return 1;
    if (!parse(text, &first, &sum) || (first > UINT8_MAX && first != sum)) {
        CKM_WARN(
            "CHECKMATE_HOST_RANKS=%s is not usable: give the number of ranks on each host, at most %u, separated by "
            "commas, such as 4,4; nothing is tagged",
            text, UINT8_MAX);
        return 0;
    }
    return sum == nranks ? first : 0;
}
