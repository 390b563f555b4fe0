#include "check.h"

int save(struct ckp_engine *engine, uint64_t step, uint64_t bytes, uint32_t publish, uint64_t *counter, uint32_t *state,
         struct ckp_error *error)
{
    uint8_t *data = malloc(bytes + 1);
    int result = ckp_begin(engine, step, bytes, sizeof step, WAIT_MS, counter, error);

    CHECK(data);
    fill_content(data, step, bytes);
    if (!result) {
        result = give(engine, *counter, 0, data, bytes, error);
        if (!result)
            result = ckp_finish(engine, *counter, &step, sizeof step, publish, error);
        if (!result)
            result = ckp_wait(engine, *counter, WAIT_MS, state, error);
        else /* it failed before: the ticket is still there */
            CHECK_EQ(ckp_wait(engine, *counter, WAIT_MS, state, error), result);
    }
    free(data);
    return result;
}

int is_intact(struct ckp_engine *engine, const struct ckp_checkpoint *checkpoint)
{
    uint8_t *data = malloc(checkpoint->data_bytes + 1);
    struct ckp_error error;
    uint64_t step;
    int intact;

    CHECK(data);
    intact = checkpoint->meta_bytes == sizeof step &&
             !ckp_read(engine, checkpoint->counter, 0, data, checkpoint->data_bytes, &error) &&
             !ckp_read_meta(engine, checkpoint->counter, &step, sizeof step, &error) && step == checkpoint->step &&
             has_content(data, checkpoint->step, checkpoint->data_bytes);
    free(data);
    return intact;
}

void close_engine(struct ckp_engine *engine)
{
    OK(ckp_close(engine, WAIT_MS, &error));
    ckp_free(engine);
}
