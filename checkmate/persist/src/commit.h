/* Metadata on storage: slots' headers and commit records. All under the commit lock, without the other. */
#ifndef CHECKMATE_PERSIST_COMMIT_H
#define CHECKMATE_PERSIST_COMMIT_H

#include "engine.h"

/* Name a complete checkpoint in the next commit record, unless a newer one is committed. */
int ckp_commit_slot(struct ckp_engine *engine, struct ckp_slot *slot, uint32_t *state, struct ckp_error *error);

/* Write the next commit record: `slot` NULL for none. */
int ckp_write_record(struct ckp_engine *engine, const struct ckp_slot *slot, struct ckp_error *error);

/* Make the headers of `slots` zeros, durably. */
int ckp_clear_headers(struct ckp_engine *engine, struct ckp_slot *const *slots, uint32_t count,
                      struct ckp_error *error);

/* A failed flush may have lost any write before it: every ticket that wrote fails with it. */
int ckp_flush(struct ckp_engine *engine, const char *what, struct ckp_error *error);

#endif
