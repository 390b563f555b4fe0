/* What a file holds, found out from its bytes alone. */
#ifndef CHECKMATE_PERSIST_RECOVER_H
#define CHECKMATE_PERSIST_RECOVER_H

#include "format.h"
#include "storage.h"

/* A slot as the engine knows it. */
struct ckp_slot {
    struct ckp_checkpoint info; /* valid while `complete` */
    uint64_t meta_offset;       /* in the slot */
    uint32_t meta_crc;
    uint32_t *table; /* checksums of the chunks; owned */
    int complete;
    int dirty;    /* the header on storage may be other than zeros; guarded by the commit lock */
    int busy;     /* a ticket writes to it */
    int prepared; /* of this engine, and neither published nor discarded yet */
    uint32_t holds;
};

struct ckp_found {
    struct ckp_superblock super;
    struct ckp_slot *slots; /* super.slots of them; owned */
    uint64_t sequence;      /* of the newest commit record, 0: none */
    uint32_t record;        /* where it is */
    uint64_t committed;     /* counter that it names, 0: none */
    uint64_t latest;        /* counter of the newest committed checkpoint that is there; 0: none */
    uint64_t issued;        /* no higher counter was ever used */
    uint64_t warnings;
    char warning[512]; /* the first */
};

/* Only reads. Damage to one checkpoint is a warning; a file that can not be trusted is an error. */
int ckp_recover(struct ckp_storage *storage, struct ckp_found *found, struct ckp_error *error);
void ckp_found_free(struct ckp_found *found);

/* The slot holds the checkpoint that its header describes; not published. */
void ckp_slot_fill(struct ckp_slot *slot, const struct ckp_slot_header *header);

/* Counter of the newest complete checkpoint up to `limit` that was published; 0: none. */
uint64_t ckp_newest(const struct ckp_slot *slots, uint32_t count, uint64_t limit);

#endif
