/* What the C tests share: random numbers, contents that tell their step. */
#ifndef CHECKMATE_PERSIST_CHECK_H
#define CHECKMATE_PERSIST_CHECK_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "assertions.h"
#include "engine.h"

#define WAIT_MS 60000 /* longer than anything takes on a busy machine */

/* A call that must work. */
#define OK(call)                                                                                                       \
    do {                                                                                                               \
        struct ckp_error error = {0};                                                                                  \
        if ((call) < 0) {                                                                                              \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, error.text);                                 \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

/* A call that must fail with this code, and say so. */
#define REFUSED(expected, call)                                                                                        \
    do {                                                                                                               \
        struct ckp_error error = {0};                                                                                  \
        CHECK_EQ(call, -(expected));                                                                                   \
        CHECK_EQ(error.code, -(expected));                                                                             \
        CHECK(error.text[0]);                                                                                          \
    } while (0)

static inline uint64_t random_next(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

/* The byte at `offset` of the checkpoint of `step`. */
static inline uint8_t content(uint64_t step, uint64_t offset)
{
    uint64_t x = (step * 1000003u + offset) * 0x9e3779b97f4a7c15u;
    return (uint8_t)(x >> 56);
}

static inline void fill_content(uint8_t *data, uint64_t step, uint64_t bytes)
{
    for (uint64_t i = 0; i < bytes; i++)
        data[i] = content(step, i);
}

static inline int has_content(const uint8_t *data, uint64_t step, uint64_t bytes)
{
    for (uint64_t i = 0; i < bytes; i++)
        if (data[i] != content(step, i))
            return 0;
    return 1;
}

/* Give one part. */
static inline int give(struct ckp_engine *engine, uint64_t ticket, uint64_t offset, const void *data, uint64_t bytes,
                       struct ckp_error *error)
{
    return ckp_write(engine, ticket, &(struct ckp_part){offset, data, bytes}, 1, error);
}

/* Save a checkpoint in one piece, with its step as metadata; returns the ticket's result. */
int save(struct ckp_engine *engine, uint64_t step, uint64_t bytes, uint32_t publish, uint64_t *counter, uint32_t *state,
         struct ckp_error *error);

/* Every byte and the metadata of a checkpoint are those of its step. */
int is_intact(struct ckp_engine *engine, const struct ckp_checkpoint *checkpoint);

void close_engine(struct ckp_engine *engine);

#endif
