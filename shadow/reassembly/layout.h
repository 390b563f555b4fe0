/* Where each slice of an all-reduce stands in the bucket: learned from the first operation of a signature.
 *
 * Channels hold contiguous ranges in channel order, a channel its loops, a loop its chunks, a chunk its slices:
 * sorted so, the lengths' prefix sums are the offsets. Slices may be empty.
 */
#ifndef CHECKMATE_REASSEMBLY_LAYOUT_H
#define CHECKMATE_REASSEMBLY_LAYOUT_H

#include <stddef.h>
#include <stdint.h>

#include "checkmate/wire.h"

#define CKM_MAX_CHANNELS 256u

/* Operations that agree in all of these are cut alike. */
struct ckm_signature {
    uint64_t count;
    uint16_t nranks, nchannels;
    uint8_t datatype, protocol, slices_per_chunk;
};

struct ckm_slice {
    uint16_t channel;
    uint32_t loop, chunk, slice;
    uint32_t length;
    uint64_t offset; /* while learning: in the order of arrival; in a layout: in the bucket */
};

struct ckm_layout {
    struct ckm_layout *next;
    struct ckm_signature signature;
    uint32_t refs;
    uint64_t base[CKM_MAX_CHANNELS + 1]; /* first slot of each channel */
    struct ckm_slice *slots;             /* by channel, loop, chunk, slice */
};

struct ckm_signature ckm_signature_of(const struct ckm_frame *header);
int ckm_signature_equal(const struct ckm_signature *a, const struct ckm_signature *b);

/* Sorts slices into bucket order and builds the layout, with one reference, in *layout. Every loop of a channel has
 * all its slices, empty ones too. Returns 0; 1 when slices are missing; -1 with the reason in error when one is there
 * twice or there are more channels or slices than can be. */
int ckm_layout_learn(const struct ckm_signature *signature, struct ckm_slice *slices, size_t n,
                     struct ckm_layout **layout, char *error, size_t error_size);
/* Index into slots, SIZE_MAX when the layout has no such place. */
size_t ckm_layout_find(const struct ckm_layout *layout, uint16_t channel, const struct ckm_place *place);
size_t ckm_layout_slots(const struct ckm_layout *layout);
/* Alike in all slices that hold bytes: a channel of empty ones may not have been there yet when one was learned. */
int ckm_layout_equal(const struct ckm_layout *a, const struct ckm_layout *b);
void ckm_layout_unref(struct ckm_layout *layout);

/* The layouts known so far, newest first; bounded. */
struct ckm_layout *ckm_layouts_get(struct ckm_layout *known, const struct ckm_signature *signature);
void ckm_layouts_put(struct ckm_layout **known, struct ckm_layout *layout);
void ckm_layouts_forget(struct ckm_layout **known, const struct ckm_signature *signature);
void ckm_layouts_clear(struct ckm_layout **known);

#endif
