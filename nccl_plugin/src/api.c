#include "checkmate/api.h"

#include "checkmate/crc32c.h"

uint32_t checkmate_crc32c(uint32_t crc, const void *data, size_t bytes)
{
    return ckm_crc32c(crc, data, bytes);
}
