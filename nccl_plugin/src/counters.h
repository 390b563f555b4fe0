/* Process-wide counters; struct checkmate_counters in checkmate/api.h says what each one means. */
#ifndef CHECKMATE_COUNTERS_H
#define CHECKMATE_COUNTERS_H

#include <stdatomic.h>

#include "checkmate/api.h"

struct ckm_counters {
    _Atomic uint64_t tagged_frames, tagged_bytes, plain_frames, plain_bytes, received_frames, received_bytes;
    _Atomic uint64_t tagged_ops, untagged[CHECKMATE_REASONS], tagged_connections, plain_connections, errors;
};

extern struct ckm_counters ckm_counters;

#define CKM_COUNT(field, amount) atomic_fetch_add_explicit(&ckm_counters.field, (amount), memory_order_relaxed)

/* Counts one case of `reason` and logs the first one: as a warning where a registered bucket is concerned. */
void ckm_untagged(enum checkmate_reason reason);

#endif
