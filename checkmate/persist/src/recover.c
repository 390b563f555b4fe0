#include "recover.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checkmate/crc32c.h"
#include "error.h"

__attribute__((format(printf, 2, 3))) static void warn(struct ckp_found *found, const char *format, ...)
{
    va_list args;

    if (found->warnings++)
        return;
    va_start(args, format);
    vsnprintf(found->warning, sizeof found->warning, format, args);
    va_end(args);
}

static int read_block(struct ckp_storage *storage, uint64_t offset, union ckp_block *block, struct ckp_error *error)
{
    int result = storage->ops->read(storage, offset, block->bytes, sizeof block->bytes);

    if (result)
        return ckp_fail_errno(error, -result, "reading block at offset %" PRIu64, offset);
    return 0;
}

static int is_super(const union ckp_block *block)
{
    return memcmp(block->prefix.magic, CKP_SUPER_MAGIC, sizeof block->prefix.magic) == 0;
}

/* Neither the first superblock nor its copy is good. */
static int refuse(const union ckp_block blocks[CKP_SUPERBLOCKS], struct ckp_error *error)
{
    if (is_super(&blocks[0]) || is_super(&blocks[1]))
        return ckp_fail(error, CKP_DAMAGED, "the superblock and its copy are damaged: their checksums do not match");
    return ckp_fail(error, CKP_FOREIGN,
                    "this is not a checkpoint file: it does not begin with %.7s; choose another path", CKP_SUPER_MAGIC);
}

static int choose_super(struct ckp_found *found, const union ckp_block blocks[CKP_SUPERBLOCKS], struct ckp_error *error)
{
    int first = ckp_check(&blocks[0], CKP_SUPER_MAGIC) == CKP_BLOCK_GOOD;
    int second = ckp_check(&blocks[1], CKP_SUPER_MAGIC) == CKP_BLOCK_GOOD;

    for (uint32_t i = 0; i < CKP_SUPERBLOCKS; i++)
        if (ckp_sealed(&blocks[i], CKP_SUPER_MAGIC) && blocks[i].prefix.version != CKP_FORMAT)
            return ckp_fail(error, CKP_VERSION,
                            "the file has format version %" PRIu32 ", this Checkmate knows 1 to %u; use a newer one",
                            blocks[i].prefix.version, CKP_FORMAT);
    if (!first && !second)
        return refuse(blocks, error);
    if (first && second && memcmp(&blocks[0], &blocks[1], sizeof blocks[0]))
        return ckp_fail(error, CKP_FOREIGN, "the file is put together from several: its two superblocks differ");
    if (!first || !second)
        warn(found, "superblock %d of 2 is damaged, the other one is used", first ? 2 : 1);
    found->super = blocks[first ? 0 : 1].super;
    return 0;
}

static int read_super(struct ckp_storage *storage, struct ckp_found *found, struct ckp_error *error)
{
    union ckp_block blocks[CKP_SUPERBLOCKS] = {0};
    int result;

    if (storage->bytes == 0)
        return ckp_fail(error, CKP_FOREIGN,
                        "this is not a checkpoint file: it is empty; remove it, or choose another path");
    for (uint32_t i = 0; i < CKP_SUPERBLOCKS && storage->bytes >= (i + 1) * (uint64_t)CKP_BLOCK; i++)
        if ((result = read_block(storage, i * (uint64_t)CKP_BLOCK, &blocks[i], error)))
            return result;
    if ((result = choose_super(found, blocks, error)))
        return result;
    if (!ckp_sizes_fit(&found->super))
        return ckp_fail(error, CKP_DAMAGED, "the superblock's sizes do not fit together");
    if (storage->bytes != found->super.file_bytes)
        return ckp_fail(error, CKP_TRUNCATED,
                        "the file has %" PRIu64 " bytes and should have %" PRIu64 ": a part is missing", storage->bytes,
                        found->super.file_bytes);
    return 0;
}

static int ours(const struct ckp_found *found, const struct ckp_prefix *prefix)
{
    return memcmp(prefix->file, found->super.prefix.file, sizeof prefix->file) == 0;
}

/* `damaged`: a record is neither good nor untouched, so a newer commit than the other one's may have been there. */
static int read_records(struct ckp_storage *storage, struct ckp_found *found, int *damaged, struct ckp_error *error)
{
    union ckp_block block;
    int result;

    for (uint32_t i = 0; i < CKP_RECORDS; i++) {
        if ((result = read_block(storage, CKP_RECORDS_START + i * (uint64_t)CKP_BLOCK, &block, error)))
            return result;
        enum ckp_block_state state = ckp_check(&block, CKP_RECORD_MAGIC);
        if (state == CKP_BLOCK_BAD) {
            warn(found, "commit record %" PRIu32 " is damaged", i);
            *damaged = 1;
        }
        if (state != CKP_BLOCK_GOOD)
            continue;
        if (!ours(found, &block.prefix))
            return ckp_fail(error, CKP_FOREIGN,
                            "the file is put together from several: commit record %" PRIu32 " belongs to another one",
                            i);
        if (block.record.sequence > found->sequence) {
            found->sequence = block.record.sequence;
            found->record = i;
            found->committed = block.record.counter;
        }
        if (block.record.issued > found->issued)
            found->issued = block.record.issued;
    }
    return 0;
}

/* Does what the header says lie within the slot? */
static int header_fits(const struct ckp_superblock *super, const struct ckp_slot_header *header, uint32_t slot)
{
    uint64_t chunks;

    if (header->slot != slot || header->counter == 0 || header->data_bytes > super->data_bytes ||
        header->meta_bytes > super->meta_bytes || header->chunk_bytes == 0 || header->chunk_bytes % CKP_BLOCK)
        return 0;
    chunks = ckp_chunks(header->data_bytes, header->chunk_bytes);
    return header->table_offset == CKP_BLOCK &&
           header->meta_offset == CKP_BLOCK + ckp_round_up(chunks * sizeof(uint32_t)) &&
           header->meta_offset + ckp_round_up(header->meta_bytes) <= super->data_offset;
}

/* Checksums of chunks and metadata; *good says whether they are as the header says. */
static int read_tables(struct ckp_storage *storage, const struct ckp_superblock *super, struct ckp_slot *slot,
                       const struct ckp_slot_header *header, int *good, struct ckp_error *error)
{
    uint64_t table_bytes = ckp_chunks(header->data_bytes, header->chunk_bytes) * sizeof(uint32_t);
    uint64_t bytes = ckp_round_up(table_bytes) + ckp_round_up(header->meta_bytes);
    uint64_t start = ckp_slot_start(super, header->slot) + header->table_offset;
    uint8_t *area;
    int result;

    area = aligned_alloc(CKP_BLOCK, bytes + CKP_BLOCK); /* never of size 0 */
    slot->table = malloc(table_bytes + 1);
    if (!area || !slot->table) {
        free(area);
        return ckp_fail(error, ENOMEM, "no memory for the checksums of slot %" PRIu32, header->slot);
    }
    result = bytes ? storage->ops->read(storage, start, area, bytes) : 0;
    if (result) {
        free(area);
        return ckp_fail_errno(error, -result, "reading slot %" PRIu32, header->slot);
    }
    memcpy(slot->table, area, table_bytes);
    *good = ckm_crc32c(0, area, table_bytes) == header->table_crc &&
            ckm_crc32c(0, area + ckp_round_up(table_bytes), header->meta_bytes) == header->meta_crc;
    free(area);
    return 0;
}

void ckp_slot_fill(struct ckp_slot *slot, const struct ckp_slot_header *header)
{
    slot->info = (struct ckp_checkpoint){
        .counter = header->counter,
        .step = header->step,
        .data_bytes = header->data_bytes,
        .meta_bytes = header->meta_bytes,
        .chunk_bytes = header->chunk_bytes,
        .time_ns = header->time_ns,
        .slot = header->slot,
    };
    slot->meta_offset = header->meta_offset;
    slot->meta_crc = header->meta_crc;
    slot->complete = 1;
}

static int read_slot(struct ckp_storage *storage, struct ckp_found *found, uint32_t index, struct ckp_error *error)
{
    struct ckp_slot *slot = &found->slots[index];
    union ckp_block block;
    int good = 0, result;

    if ((result = read_block(storage, ckp_slot_start(&found->super, index), &block, error)))
        return result;
    enum ckp_block_state state = ckp_check(&block, CKP_SLOT_MAGIC);
    slot->dirty = state != CKP_BLOCK_EMPTY;
    if (state == CKP_BLOCK_GOOD && !ours(found, &block.prefix))
        return ckp_fail(error, CKP_FOREIGN,
                        "the file is put together from several: slot %" PRIu32 " belongs to another one", index);
    if (state == CKP_BLOCK_BAD || (state == CKP_BLOCK_GOOD && !header_fits(&found->super, &block.slot, index)))
        warn(found, "the header of slot %" PRIu32 " is damaged: its checkpoint is passed over", index);
    else if (state == CKP_BLOCK_GOOD) {
        if (block.slot.counter > found->issued)
            found->issued = block.slot.counter;
        if ((result = read_tables(storage, &found->super, slot, &block.slot, &good, error)))
            return result;
        if (good)
            ckp_slot_fill(slot, &block.slot);
        else if (block.slot.counter <= found->committed) /* else a power cut ended it before it was complete */
            warn(found,
                 "checkpoint %" PRIu64 " of step %" PRIu64 " in slot %" PRIu32
                 " is damaged: its checksums or metadata do not match",
                 block.slot.counter, block.slot.step, index);
    }
    return 0;
}

uint64_t ckp_newest(const struct ckp_slot *slots, uint32_t count, uint64_t limit)
{
    uint64_t newest = 0;

    for (uint32_t i = 0; i < count; i++)
        if (slots[i].complete && slots[i].info.published && slots[i].info.counter <= limit &&
            slots[i].info.counter > newest)
            newest = slots[i].info.counter;
    return newest;
}

int ckp_recover(struct ckp_storage *storage, struct ckp_found *found, struct ckp_error *error)
{
    int damaged = 0, result;

    *found = (struct ckp_found){0};
    if ((result = read_super(storage, found, error)) || (result = read_records(storage, found, &damaged, error)))
        return result;
    found->slots = calloc(found->super.slots, sizeof *found->slots);
    if (!found->slots)
        return ckp_fail(error, ENOMEM, "no memory for %" PRIu32 " slots", found->super.slots);
    for (uint32_t i = 0; i < found->super.slots; i++)
        if ((result = read_slot(storage, found, i, error))) {
            ckp_found_free(found);
            return result;
        }
    for (uint32_t i = 0; i < found->super.slots; i++)
        found->slots[i].info.published =
            found->slots[i].complete && (damaged || found->slots[i].info.counter <= found->committed);
    found->latest = ckp_newest(found->slots, found->super.slots, UINT64_MAX);
    if (found->latest < found->committed)
        warn(found, "the committed checkpoint %" PRIu64 " is not there any more", found->committed);
    return 0;
}

void ckp_found_free(struct ckp_found *found)
{
    for (uint32_t i = 0; found->slots && i < found->super.slots; i++)
        free(found->slots[i].table);
    free(found->slots);
    found->slots = NULL;
}
