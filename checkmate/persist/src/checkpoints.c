/* Complete checkpoints: list, keep, publish, discard. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>

#include "commit.h"
#include "engine.h"
#include "error.h"

struct ckp_slot *ckp_slot_find(struct ckp_engine *engine, uint64_t counter, struct ckp_error *error)
{
    for (uint32_t i = 0; i < engine->file.super.slots; i++)
        if (engine->file.slots[i].complete && engine->file.slots[i].info.counter == counter)
            return &engine->file.slots[i];
    ckp_fail(error, CKP_NOT_FOUND, "there is no complete checkpoint %" PRIu64 ", or its slot was reused", counter);
    return NULL;
}

static int newest_first(const void *a, const void *b)
{
    uint64_t left = ((const struct ckp_checkpoint *)a)->counter, right = ((const struct ckp_checkpoint *)b)->counter;

    return (left < right) - (left > right);
}

int ckp_list(struct ckp_engine *engine, struct ckp_checkpoint *checkpoints, uint32_t room)
{
    struct ckp_checkpoint all[CKP_MAX_SLOTS];
    struct ckp_error error;
    uint32_t count = 0;
    int result = ckp_enter(engine, &error);

    if (result)
        return result;
    for (uint32_t i = 0; i < engine->file.super.slots; i++)
        if (engine->file.slots[i].complete)
            all[count++] = engine->file.slots[i].info;
    pthread_mutex_unlock(&engine->lock);
    qsort(all, count, sizeof *all, newest_first);
    for (uint32_t i = 0; i < count && i < room; i++)
        checkpoints[i] = all[i];
    return (int)count;
}

int ckp_hold(struct ckp_engine *engine, uint64_t counter, struct ckp_error *error)
{
    struct ckp_slot *slot;
    int result = ckp_enter(engine, error);

    if (result)
        return result;
    if ((slot = ckp_slot_find(engine, counter, error)))
        slot->holds++;
    pthread_mutex_unlock(&engine->lock);
    return slot ? 0 : error->code;
}

void ckp_release(struct ckp_engine *engine, uint64_t counter)
{
    struct ckp_error error;
    struct ckp_slot *slot;

    if (ckp_enter(engine, &error))
        return;
    if ((slot = ckp_slot_find(engine, counter, &error)) && slot->holds) {
        slot->holds--;
        pthread_cond_broadcast(&engine->change);
    }
    pthread_mutex_unlock(&engine->lock);
}

/* Find a slot to change, and keep others from reusing it meanwhile. The commit lock is taken. */
static struct ckp_slot *claim(struct ckp_engine *engine, uint64_t counter, int exclusive, struct ckp_error *error)
{
    struct ckp_slot *slot;

    if (ckp_enter_write(engine, error))
        return NULL;
    slot = ckp_slot_find(engine, counter, error);
    if (slot && (slot->busy || (exclusive && slot->holds))) {
        ckp_fail(error, EBUSY, "checkpoint %" PRIu64 " is in use", counter);
        slot = NULL;
    }
    if (slot)
        slot->busy = 1;
    pthread_mutex_unlock(&engine->lock);
    return slot;
}

static void give_back(struct ckp_engine *engine, struct ckp_slot *slot)
{
    pthread_mutex_lock(&engine->lock);
    slot->busy = 0;
    pthread_cond_broadcast(&engine->change);
    pthread_mutex_unlock(&engine->lock);
}

int ckp_publish(struct ckp_engine *engine, uint64_t counter, uint32_t *state, struct ckp_error *error)
{
    struct ckp_slot *slot;
    int result;

    if (atomic_load(&engine->forked))
        return ckp_enter(engine, error);
    pthread_mutex_lock(&engine->commit_lock);
    slot = claim(engine, counter, 0, error);
    result = slot ? ckp_commit_slot(engine, slot, state, error) : error->code;
    if (slot)
        give_back(engine, slot);
    pthread_mutex_unlock(&engine->commit_lock);
    return result;
}

static struct ckp_slot *newest_but(struct ckp_engine *engine, uint64_t counter)
{
    struct ckp_error error;

    return ckp_slot_find(engine, ckp_newest(engine->file.slots, engine->file.super.slots, counter - 1), &error);
}

/* When the newest goes, the one before it is committed first. */
static int step_back(struct ckp_engine *engine, uint64_t counter, struct ckp_error *error)
{
    struct ckp_slot *before;
    int result;

    pthread_mutex_lock(&engine->lock);
    before = newest_but(engine, counter);
    pthread_mutex_unlock(&engine->lock);
    result = ckp_write_record(engine, before, error);
    if (result)
        return result;
    pthread_mutex_lock(&engine->lock);
    engine->file.latest = before ? before->info.counter : 0;
    pthread_mutex_unlock(&engine->lock);
    return 0;
}

static int discard(struct ckp_engine *engine, struct ckp_slot *slot, struct ckp_error *error)
{
    int result = 0;

    if (slot->info.counter == engine->file.latest)
        result = step_back(engine, slot->info.counter, error);
    if (!result)
        result = ckp_clear_headers(engine, &slot, 1, error);
    if (result)
        return result;
    slot->dirty = 0;
    pthread_mutex_lock(&engine->lock);
    slot->complete = 0;
    slot->prepared = 0;
    free(slot->table);
    slot->table = NULL;
    pthread_mutex_unlock(&engine->lock);
    return 0;
}

int ckp_discard(struct ckp_engine *engine, uint64_t counter, struct ckp_error *error)
{
    struct ckp_slot *slot;
    int result;

    if (atomic_load(&engine->forked))
        return ckp_enter(engine, error);
    pthread_mutex_lock(&engine->commit_lock);
    slot = claim(engine, counter, 1, error);
    result = slot ? discard(engine, slot, error) : error->code;
    if (slot)
        give_back(engine, slot);
    pthread_mutex_unlock(&engine->commit_lock);
    return result;
}
