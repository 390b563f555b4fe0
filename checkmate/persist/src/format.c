#include "format.h"

#include <errno.h>
#include <string.h>

#include "checkmate/crc32c.h"
#include "error.h"

static uint32_t checksum(const union ckp_block *block)
{
    union ckp_block copy = *block;

    copy.prefix.crc = 0;
    return ckm_crc32c(0, copy.bytes, sizeof copy.bytes);
}

void ckp_seal(union ckp_block *block, const char *magic, const uint8_t file[16])
{
    memcpy(block->prefix.magic, magic, sizeof block->prefix.magic);
    memcpy(block->prefix.file, file, sizeof block->prefix.file);
    block->prefix.version = CKP_FORMAT;
    block->prefix.crc = checksum(block);
}

static int all_zero(const union ckp_block *block)
{
    return block->bytes[0] == 0 && memcmp(block->bytes, block->bytes + 1, sizeof block->bytes - 1) == 0;
}

int ckp_sealed(const union ckp_block *block, const char *magic)
{
    return memcmp(block->prefix.magic, magic, sizeof block->prefix.magic) == 0 && block->prefix.crc == checksum(block);
}

enum ckp_block_state ckp_check(const union ckp_block *block, const char *magic)
{
    if (all_zero(block))
        return CKP_BLOCK_EMPTY;
    return ckp_sealed(block, magic) && block->prefix.version == CKP_FORMAT ? CKP_BLOCK_GOOD : CKP_BLOCK_BAD;
}

/* The table has room for chunks of a single block, so that any chunk size can be used later. */
static void place(struct ckp_superblock *super)
{
    uint64_t table = ckp_round_up(super->data_bytes / CKP_BLOCK * sizeof(uint32_t));

    super->data_offset = CKP_BLOCK + table + super->meta_bytes;
    super->slot_bytes = super->data_offset + super->data_bytes;
    super->file_bytes = CKP_SLOTS_START + super->slots * super->slot_bytes;
}

int ckp_plan_file(struct ckp_superblock *super, const struct ckp_geometry *geometry, struct ckp_error *error)
{
    if (geometry->slots < 2 || geometry->slots > CKP_MAX_SLOTS)
        return ckp_fail(error, EINVAL,
                        "slots is %u: it must be 2 to %u, one more than the N checkpoints that may be in flight",
                        geometry->slots, CKP_MAX_SLOTS);
    if (geometry->data_bytes < 1 || geometry->data_bytes > CKP_MAX_DATA)
        return ckp_fail(error, EINVAL, "data_bytes is %llu: it must be 1 to %llu",
                        (unsigned long long)geometry->data_bytes, CKP_MAX_DATA);
    if (geometry->meta_bytes > CKP_MAX_META)
        return ckp_fail(error, EINVAL, "meta_bytes is %llu: it must be at most %llu",
                        (unsigned long long)geometry->meta_bytes, CKP_MAX_META);
    super->block_bytes = CKP_BLOCK;
    super->slots = geometry->slots;
    super->data_bytes = ckp_round_up(geometry->data_bytes);
    super->meta_bytes = ckp_round_up(geometry->meta_bytes);
    place(super);
    return 0;
}

int ckp_sizes_fit(const struct ckp_superblock *super)
{
    struct ckp_superblock expected = *super;

    if (super->block_bytes != CKP_BLOCK || super->slots < 2 || super->slots > CKP_MAX_SLOTS || super->data_bytes < 1 ||
        super->data_bytes > CKP_MAX_DATA || super->data_bytes % CKP_BLOCK || super->meta_bytes > CKP_MAX_META ||
        super->meta_bytes % CKP_BLOCK)
        return 0;
    place(&expected);
    return memcmp(&expected, super, sizeof expected) == 0;
}
