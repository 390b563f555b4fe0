/* A file that has no name yet: what is not finished leaves nothing behind. */
#ifndef CHECKMATE_PERSIST_DRAFT_H
#define CHECKMATE_PERSIST_DRAFT_H

#include <stdint.h>

#include "api.h"

struct ckp_draft {
    int fd;
    char folder[4096];
    char temporary[4200]; /* its name where the file system has no unnamed files, else empty */
};

/* open(2) with O_DIRECT, or without where the file system has none. */
int ckp_open_direct(const char *path, int flags);

/* A file of zeros, all its space allocated. */
int ckp_draft_open(struct ckp_draft *draft, const char *folder, uint64_t bytes, struct ckp_error *error);

/* Give it its name, which no other file has, and make that durable. */
int ckp_draft_place(struct ckp_draft *draft, const char *path, struct ckp_error *error);

/* What was not placed is gone. Leaves the file descriptor to its owner. */
void ckp_draft_drop(struct ckp_draft *draft);

#endif
