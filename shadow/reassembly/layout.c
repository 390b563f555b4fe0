#include "layout.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_LAYOUTS 256u
/* 4 Mi slots: a terabyte in NCCL's slices. More is a header that makes no sense. */
#define MAX_SLOTS (4u << 20)

struct ckm_signature ckm_signature_of(const struct ckm_frame *header)
{
    return (struct ckm_signature){
        .count = header->op_count,
        .nranks = header->nranks,
        .nchannels = header->nchannels,
        .datatype = header->datatype,
        .protocol = header->protocol,
        .slices_per_chunk = header->slices_per_chunk,
    };
}

int ckm_signature_equal(const struct ckm_signature *a, const struct ckm_signature *b)
{
    return a->count == b->count && a->nranks == b->nranks && a->nchannels == b->nchannels &&
           a->datatype == b->datatype && a->protocol == b->protocol && a->slices_per_chunk == b->slices_per_chunk;
}

static int by_place(const void *left, const void *right)
{
    const struct ckm_slice *a = left, *b = right;
    if (a->channel != b->channel)
        return a->channel < b->channel ? -1 : 1;
    if (a->loop != b->loop)
        return a->loop < b->loop ? -1 : 1;
    if (a->chunk != b->chunk)
        return a->chunk < b->chunk ? -1 : 1;
    return a->slice < b->slice ? -1 : a->slice > b->slice;
}

static size_t slots_per_loop(const struct ckm_signature *signature)
{
    return (size_t)signature->nranks * signature->slices_per_chunk;
}

/* Slots of each channel from its highest loop; the total, 0 when the channels or slots are too many. */
static uint64_t size_channels(struct ckm_layout *layout, const struct ckm_slice *sorted, size_t n)
{
    uint64_t total = 0;
    unsigned channels = 0;
    size_t i = 0;
    for (unsigned channel = 0; channel < CKM_MAX_CHANNELS; channel++) {
        layout->base[channel] = total;
        uint64_t loops = 0;
        for (; i < n && sorted[i].channel == channel; i++)
            loops = sorted[i].loop + 1ull;
        channels += loops > 0;
        total += loops * slots_per_loop(&layout->signature);
        if (total > MAX_SLOTS)
            return 0;
    }
    layout->base[CKM_MAX_CHANNELS] = total;
    return channels <= layout->signature.nchannels ? total : 0;
}

static int duplicate_at(const struct ckm_slice *sorted, size_t n, char *error, size_t error_size)
{
    for (size_t i = 1; i < n; i++)
        if (by_place(&sorted[i - 1], &sorted[i]) == 0) {
            snprintf(error, error_size, "channel %u loop %u chunk %u slice %u is there twice", sorted[i].channel,
                     sorted[i].loop, sorted[i].chunk, sorted[i].slice);
            return 1;
        }
    return 0;
}

/* Slices are sorted and whole, so that each is at its slot's index. */
static void fill_slots(struct ckm_layout *layout, const struct ckm_slice *sorted, size_t n)
{
    uint64_t offset = 0;
    for (size_t i = 0; i < n; i++) {
        layout->slots[i] = sorted[i];
        layout->slots[i].offset = offset;
        offset += sorted[i].length;
    }
}

int ckm_layout_learn(const struct ckm_signature *signature, struct ckm_slice *slices, size_t n, struct ckm_layout **out,
                     char *error, size_t error_size)
{
    qsort(slices, n, sizeof *slices, by_place);
    if (duplicate_at(slices, n, error, error_size))
        return -1;
    struct ckm_layout *layout = calloc(1, sizeof *layout);
    if (!layout) {
        snprintf(error, error_size, "out of memory");
        return -1;
    }
    layout->signature = *signature;
    layout->refs = 1;
    uint64_t total = size_channels(layout, slices, n);
    layout->slots = total == n ? calloc(total, sizeof *layout->slots) : NULL;
    if (layout->slots) {
        fill_slots(layout, slices, n);
        *out = layout;
        return 0;
    }
    snprintf(error, error_size, "more channels or slices than an operation on %u channels can have",
             signature->nchannels);
    free(layout);
    return total > n ? 1 : -1;
}

size_t ckm_layout_find(const struct ckm_layout *layout, uint16_t channel, const struct ckm_place *place)
{
    if (channel >= CKM_MAX_CHANNELS)
        return SIZE_MAX;
    uint64_t index = (uint64_t)place->loop * slots_per_loop(&layout->signature) +
                     (uint64_t)place->chunk * layout->signature.slices_per_chunk + place->slice;
    return index < layout->base[channel + 1] - layout->base[channel] ? layout->base[channel] + index : SIZE_MAX;
}

size_t ckm_layout_slots(const struct ckm_layout *layout)
{
    return layout->base[CKM_MAX_CHANNELS];
}

/* Every slice of a that holds bytes is in b, at the same place. */
static int is_within(const struct ckm_layout *a, const struct ckm_layout *b)
{
    for (size_t i = 0; i < ckm_layout_slots(a); i++) {
        const struct ckm_slice *s = &a->slots[i];
        struct ckm_place place = {.loop = s->loop, .chunk = s->chunk, .slice = s->slice};
        size_t j = s->length ? ckm_layout_find(b, s->channel, &place) : 0;
        if (s->length && (j == SIZE_MAX || b->slots[j].length != s->length || b->slots[j].offset != s->offset))
            return 0;
    }
    return 1;
}

int ckm_layout_equal(const struct ckm_layout *a, const struct ckm_layout *b)
{
    return is_within(a, b) && is_within(b, a);
}

void ckm_layout_unref(struct ckm_layout *layout)
{
    if (layout && --layout->refs == 0) {
        free(layout->slots);
        free(layout);
    }
}

struct ckm_layout *ckm_layouts_get(struct ckm_layout *known, const struct ckm_signature *signature)
{
    while (known && !ckm_signature_equal(&known->signature, signature))
        known = known->next;
    return known;
}

void ckm_layouts_put(struct ckm_layout **known, struct ckm_layout *layout)
{
    layout->refs++;
    layout->next = *known;
    *known = layout;
    struct ckm_layout **link = known;
    for (unsigned i = 0; *link && i < MAX_LAYOUTS; i++)
        link = &(*link)->next;
    ckm_layouts_clear(link);
}

void ckm_layouts_forget(struct ckm_layout **known, const struct ckm_signature *signature)
{
    struct ckm_layout **link = known;
    while (*link && !ckm_signature_equal(&(*link)->signature, signature))
        link = &(*link)->next;
    if (*link) {
        struct ckm_layout *layout = *link;
        *link = layout->next;
        ckm_layout_unref(layout);
    }
}

void ckm_layouts_clear(struct ckm_layout **known)
{
    while (*known) {
        struct ckm_layout *layout = *known;
        *known = layout->next;
        ckm_layout_unref(layout);
    }
}
