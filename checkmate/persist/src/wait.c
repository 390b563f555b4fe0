#include <errno.h>
#include <time.h>

#include "engine.h"
#include "error.h"

#define NS_PER_S 1000000000ll

struct timespec ckp_deadline(int64_t timeout_ms)
{
    struct timespec now;
    int64_t ns;

    clock_gettime(CLOCK_MONOTONIC, &now);
    ns = now.tv_nsec + timeout_ms % 1000 * 1000000;
    now.tv_sec += timeout_ms / 1000 + ns / NS_PER_S;
    now.tv_nsec = ns % NS_PER_S;
    return now;
}

void ckp_cond_init(pthread_cond_t *cond)
{
    pthread_condattr_t attributes;

    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &attributes);
    pthread_condattr_destroy(&attributes);
}

int ckp_wait_change(struct ckp_engine *engine, const struct timespec *deadline)
{
    return pthread_cond_timedwait(&engine->change, &engine->lock, deadline);
}

int ckp_enter(struct ckp_engine *engine, struct ckp_error *error)
{
    if (atomic_load(&engine->forked))
        return ckp_fail(error, CKP_CLOSED, "the checkpoint file was opened by the parent of this process");
    pthread_mutex_lock(&engine->lock);
    if (!engine->closed)
        return 0;
    pthread_mutex_unlock(&engine->lock);
    return ckp_fail(error, CKP_CLOSED, "the checkpoint file is closed");
}

int ckp_enter_write(struct ckp_engine *engine, struct ckp_error *error)
{
    int result = ckp_enter(engine, error);

    if (result)
        return result;
    if (!engine->options.read_only && !engine->closing)
        return 0;
    pthread_mutex_unlock(&engine->lock);
    if (engine->options.read_only)
        return ckp_fail(error, CKP_READ_ONLY, "the checkpoint file was opened for reading only");
    return ckp_fail(error, CKP_CLOSED, "the checkpoint file is being closed");
}
