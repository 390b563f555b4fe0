/* Engines of this process. A forked child must not hold their files: a lock lives as long as any copy of its file. */
#include <unistd.h>

#include "engine.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct ckp_engine *engines;

static void before_fork(void)
{
    pthread_mutex_lock(&lock);
}

static void after_fork(void)
{
    pthread_mutex_unlock(&lock);
}

static void in_child(void)
{
    for (struct ckp_engine *engine = engines; engine; engine = engine->next) {
        atomic_store(&engine->forked, 1);
        if (engine->storage->fd >= 0)
            close(engine->storage->fd);
    }
    engines = NULL;
    pthread_mutex_unlock(&lock);
}

static void watch_forks(void)
{
    pthread_atfork(before_fork, after_fork, in_child);
}

void ckp_register(struct ckp_engine *engine)
{
    pthread_once(&once, watch_forks);
    pthread_mutex_lock(&lock);
    engine->next = engines;
    engines = engine;
    pthread_mutex_unlock(&lock);
}

void ckp_unregister(struct ckp_engine *engine)
{
    struct ckp_engine **link = &engines;

    pthread_mutex_lock(&lock);
    while (*link != engine)
        link = &(*link)->next;
    *link = engine->next;
    pthread_mutex_unlock(&lock);
}
