#include "reorder.h"

#include <stdlib.h>
#include <string.h>

static uint64_t end_of(const struct ckm_piece *piece)
{
    return piece->offset + piece->length;
}

/* Links a copy of the bytes in after prev (NULL: at the front). NULL when out of memory. */
static struct ckm_piece *insert_after(struct ckm_reorder *held, struct ckm_piece *prev, uint64_t offset,
                                      const uint8_t *data, uint32_t length, uint64_t now_us)
{
    struct ckm_piece *piece = malloc(sizeof *piece + length);
    if (!piece)
        return NULL;
    piece->offset = offset;
    piece->arrived_us = now_us;
    piece->length = length;
    memcpy(piece->data, data, length);
    piece->prev = prev;
    piece->next = prev ? prev->next : held->first;
    *(piece->next ? &piece->next->prev : &held->last) = piece;
    *(prev ? &prev->next : &held->first) = piece;
    held->bytes += sizeof *piece + length;
    return piece;
}

uint32_t ckm_reorder_insert(struct ckm_reorder *held, uint64_t offset, const uint8_t *data, uint32_t length,
                            uint64_t now_us)
{
    uint64_t end = offset + length;
    uint32_t kept = 0;
    /* From the back: what arrives behind a hole mostly arrives in order. */
    struct ckm_piece *prev = held->last;
    while (prev && prev->offset > offset)
        prev = prev->prev;
    uint64_t at = prev && end_of(prev) > offset ? end_of(prev) : offset;
    while (at < end) {
        struct ckm_piece *next = prev ? prev->next : held->first;
        uint64_t stop = next && next->offset < end ? next->offset : end;
        if (at < stop) {
            prev = insert_after(held, prev, at, data + (at - offset), (uint32_t)(stop - at), now_us);
            if (!prev)
                break;
            kept += prev->length;
        }
        if (stop == end)
            break;
        prev = next;
        at = end_of(next);
    }
    return kept;
}

void ckm_reorder_pop(struct ckm_reorder *held)
{
    struct ckm_piece *piece = held->first;
    held->first = piece->next;
    *(piece->next ? &piece->next->prev : &held->last) = NULL;
    held->bytes -= sizeof *piece + piece->length;
    free(piece);
}

void ckm_reorder_clear(struct ckm_reorder *held)
{
    while (held->first)
        ckm_reorder_pop(held);
}
