/* The check that every received frame header passes before a field of it is used. */
#ifndef CHECKMATE_FRAME_H
#define CHECKMATE_FRAME_H

#include <stdbool.h>

#include "checkmate/wire.h"

/* NULL when the header is sound, else what is wrong with it. `tagged`: which flow it came on. */
const char *ckm_frame_check(const struct ckm_frame *frame, bool tagged);

#endif
