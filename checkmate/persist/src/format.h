/* The file, byte by byte: README.md describes it. Integers are little-endian, positions are offsets.
 *
 *   block 0, 1     superblock and its copy, written once
 *   block 2, 3     commit records, written in turn
 *   then           N+1 slots: header block | checksums of chunks, metadata | data
 */
#ifndef CHECKMATE_PERSIST_FORMAT_H
#define CHECKMATE_PERSIST_FORMAT_H

#include <stdint.h>

#include "api.h"

#define CKP_BLOCK         4096u /* unit of all positions and sizes in a file */
#define CKP_FORMAT        1u
#define CKP_SUPERBLOCKS   2u
#define CKP_RECORDS       2u
#define CKP_SUPER_MAGIC   "CKMPERS\n"
#define CKP_RECORD_MAGIC  "CKMCOMM\n"
#define CKP_SLOT_MAGIC    "CKMSLOT\n"
#define CKP_MAX_SLOTS     1024u
#define CKP_MAX_DATA      (1ull << 50)
#define CKP_MAX_META      (1ull << 30)
#define CKP_RECORDS_START (CKP_SUPERBLOCKS * CKP_BLOCK)
#define CKP_SLOTS_START   ((CKP_SUPERBLOCKS + CKP_RECORDS) * CKP_BLOCK)

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the file is little-endian");

/* Every block with a checksum begins like this, in every version of the format. */
struct ckp_prefix {
    char magic[8];
    uint32_t version;
    uint32_t crc;     /* CRC32C of the whole block, this field taken as 0 */
    uint8_t file[16]; /* random; the same in all blocks of one file */
};

struct ckp_superblock {
    struct ckp_prefix prefix;
    uint32_t block_bytes;
    uint32_t slots;
    uint64_t file_bytes;
    uint64_t slot_bytes;
    uint64_t data_offset; /* in a slot */
    uint64_t data_bytes;  /* capacity of a slot, whole blocks */
    uint64_t meta_bytes;  /* capacity of a slot, whole blocks */
    uint64_t time_ns;
};

struct ckp_record {
    struct ckp_prefix prefix;
    uint64_t sequence; /* the record with the higher one counts */
    uint64_t counter;  /* newest committed checkpoint; 0: none */
    uint64_t issued;   /* highest counter given out so far */
    uint32_t slot;
    uint32_t reserved;
};

struct ckp_slot_header {
    struct ckp_prefix prefix;
    uint64_t counter;
    uint64_t step;
    uint64_t data_bytes;
    uint64_t meta_bytes;
    uint64_t chunk_bytes;
    uint64_t time_ns;
    uint64_t table_offset; /* in the slot: one CRC32C for each chunk, over its blocks with the padding of zeros */
    uint64_t meta_offset;  /* in the slot */
    uint32_t table_crc;
    uint32_t meta_crc;
    uint32_t slot;
    uint32_t reserved;
};

_Static_assert(sizeof(struct ckp_prefix) == 32, "prefix");
_Static_assert(sizeof(struct ckp_superblock) == 88, "superblock");
_Static_assert(sizeof(struct ckp_record) == 64, "commit record");
_Static_assert(sizeof(struct ckp_slot_header) == 112, "slot header");

/* A block in memory, aligned for direct I/O. */
union ckp_block {
    _Alignas(CKP_BLOCK) uint8_t bytes[CKP_BLOCK];
    struct ckp_prefix prefix;
    struct ckp_superblock super;
    struct ckp_record record;
    struct ckp_slot_header slot;
};

enum ckp_block_state { CKP_BLOCK_GOOD, CKP_BLOCK_EMPTY, CKP_BLOCK_BAD };

static inline uint64_t ckp_round_up(uint64_t bytes)
{
    return (bytes + CKP_BLOCK - 1) / CKP_BLOCK * CKP_BLOCK;
}

/* Chunks of `chunk_bytes` that hold `bytes`. */
static inline uint64_t ckp_chunks(uint64_t bytes, uint64_t chunk_bytes)
{
    return (bytes + chunk_bytes - 1) / chunk_bytes;
}

/* Bytes of chunk `index`, without padding. */
static inline uint64_t ckp_chunk_size(uint64_t bytes, uint64_t chunk_bytes, uint64_t index)
{
    uint64_t left = bytes - index * chunk_bytes;
    return left < chunk_bytes ? left : chunk_bytes;
}

static inline uint64_t ckp_slot_start(const struct ckp_superblock *super, uint32_t slot)
{
    return CKP_SLOTS_START + slot * super->slot_bytes;
}

/* Set magic, version and the file's identity; then the checksum over all that the block holds. */
void ckp_seal(union ckp_block *block, const char *magic, const uint8_t file[16]);

/* Checksum and magic, of any version. */
int ckp_sealed(const union ckp_block *block, const char *magic);

/* Checksum and magic, of this version. All zeros is EMPTY. */
enum ckp_block_state ckp_check(const union ckp_block *block, const char *magic);

/* Positions and sizes of a new file. */
int ckp_plan_file(struct ckp_superblock *super, const struct ckp_geometry *geometry, struct ckp_error *error);

/* Do a good superblock's sizes fit together? */
int ckp_sizes_fit(const struct ckp_superblock *super);

#endif
