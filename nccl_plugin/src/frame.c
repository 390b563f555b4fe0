#include "frame.h"

#include <stddef.h>

#include "checkmate/crc32c.h"

const char *ckm_frame_check(const struct ckm_frame *frame, bool tagged)
{
    if (frame->magic != CKM_WIRE_MAGIC)
        return "the stream is out of step: no frame where one should start";
    if (frame->version != CKM_WIRE_VERSION)
        return "the peer speaks another version of the frame format; use the same plugin on all nodes";
    if (frame->header_crc != ckm_crc32c(0, frame, offsetof(struct ckm_frame, header_crc)))
        return "a frame header is damaged";
    if (frame->payload_len > CKM_MAX_PAYLOAD)
        return "a frame claims to be larger than any can be";
    if (tagged != ((frame->flags & CKM_FLAG_TAGGED) != 0))
        return "a frame came on the wrong flow";
    return NULL;
}
