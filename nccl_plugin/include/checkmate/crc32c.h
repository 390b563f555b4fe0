/* CRC32C (Castagnoli, RFC 3720): the checksum of frame headers and tagged payloads. */
#ifndef CHECKMATE_CRC32C_H
#define CHECKMATE_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/* CRC32C of `bytes` bytes. Start with crc 0; pass the result on to continue over a further piece. */
uint32_t ckm_crc32c(uint32_t crc, const void *data, size_t bytes);

/* The portable table version, whatever the processor: the reference that the fast one is tested against. */
uint32_t ckm_crc32c_portable(uint32_t crc, const void *data, size_t bytes);

#endif
