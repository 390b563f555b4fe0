#include "header.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "checkmate/crc32c.h"
#include "layout.h"

#define PROTOCOL_SIMPLE 2

int ckm_header_intact(const uint8_t bytes[CKM_HEADER_BYTES])
{
    uint32_t magic, crc;
    memcpy(&magic, bytes, sizeof magic);
    memcpy(&crc, bytes + offsetof(struct ckm_frame, header_crc), sizeof crc);
    return magic == CKM_WIRE_MAGIC && crc == ckm_crc32c(0, bytes, offsetof(struct ckm_frame, header_crc));
}

uint32_t ckm_datatype_bytes(uint8_t datatype)
{
    /* ncclDataType_t: int8 uint8 int32 uint32 int64 uint64 fp16 fp32 fp64 bf16 fp8e4m3 fp8e5m2 */
    static const uint8_t bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return datatype < sizeof bytes ? bytes[datatype] : 0;
}

static int check_sizes(const struct ckm_frame *h, uint64_t max_op_bytes, char *error, size_t size)
{
    uint32_t element = ckm_datatype_bytes(h->datatype);
    if (!element)
        return snprintf(error, size, "datatype %u is unknown", h->datatype);
    if (!h->op_count || h->op_count > max_op_bytes / element)
        return snprintf(error, size, "op_count %" PRIu64 " of %u bytes each: allowed are 1 to %" PRIu64 " bytes",
                        h->op_count, element, max_op_bytes);
    if (h->payload_len > CKM_MAX_PAYLOAD || h->payload_len > h->op_count * element || h->payload_len % element)
        return snprintf(error, size, "payload_len %u does not fit %" PRIu64 " elements of %u bytes", h->payload_len,
                        h->op_count, element);
    return 0;
}

static int check_place(const struct ckm_frame *h, char *error, size_t size)
{
    int is_first = (h->flags & CKM_FLAG_FIRST) != 0;
    if (h->nranks < 2 || !h->host_ranks || h->host_ranks >= h->nranks ||
        !ckm_is_boundary(h->ring_pos, is_first, h->host_ranks, h->nranks))
        return snprintf(error, size, "ring_pos %u of %u ranks, %u of them on rank 0's host, is not that of the %s rank",
                        h->ring_pos, h->nranks, h->host_ranks, is_first ? "first" : "last");
    if (!h->nchannels || h->channel >= CKM_MAX_CHANNELS)
        return snprintf(error, size, "channel %u of %u: allowed are less than %u", h->channel, h->nchannels,
                        CKM_MAX_CHANNELS);
    if (!h->slices_per_chunk)
        return snprintf(error, size, "slices_per_chunk is 0");
    struct ckm_place place = ckm_place(h->step, h->slices_per_chunk, h->ring_pos, h->nranks);
    if (!ckm_is_tagged(&place, is_first, h->host_ranks) || place.loop >= h->op_count)
        return snprintf(error, size,
                        "step %u of ring position %u is not tagged in an all-reduce of %" PRIu64 " elements", h->step,
                        h->ring_pos, h->op_count);
    return 0;
}

int ckm_header_check(const struct ckm_frame *h, uint64_t max_op_bytes, char *error, size_t size)
{
    const uint8_t flags = CKM_FLAG_TAGGED | CKM_FLAG_PAYLOAD_CRC;
    int bad;
    if (h->version != CKM_WIRE_VERSION)
        bad = snprintf(error, size, "version %u of the frame header, only %u is understood", h->version,
                       CKM_WIRE_VERSION);
    else if ((h->flags & ~CKM_FLAG_FIRST) != flags)
        bad = snprintf(error, size, "flags 0x%02x: must be 0x%02x", h->flags, flags);
    else if (h->protocol != PROTOCOL_SIMPLE)
        bad = snprintf(error, size, "protocol %u: only Simple (%u) carries plain data", h->protocol, PROTOCOL_SIMPLE);
    else
        bad = check_sizes(h, max_op_bytes, error, size) || check_place(h, error, size);
    return bad ? -1 : 0;
}
