/* Checkpoint files: create and open. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "draft.h"
#include "engine.h"
#include "error.h"

#define LOCK_WAIT_MS  2000
#define LOCK_PAUSE_MS 5

/* Put the path in front of a text. */
static int name(const char *path, struct ckp_error *error)
{
    struct ckp_error inner = *error;

    snprintf(error->text, sizeof error->text, "%.200s: %.300s", path, inner.text);
    return error->code;
}

static void folder_of(const char *path, char *folder, size_t room)
{
    const char *slash = strrchr(path, '/');

    if (!slash)
        snprintf(folder, room, ".");
    else
        snprintf(folder, room, "%.*s", slash == path ? 1 : (int)(slash - path), path);
}

int ckp_format(struct ckp_storage *storage, const struct ckp_superblock *super, struct ckp_error *error)
{
    union ckp_block block = {0};
    uint8_t file[16];
    int result = 0;

    if (getrandom(file, sizeof file, 0) != sizeof file)
        return ckp_fail_errno(error, errno, "getting random bytes");
    block.super = *super;
    block.super.time_ns = (uint64_t)time(NULL) * 1000000000u;
    ckp_seal(&block, CKP_SUPER_MAGIC, file);
    for (uint32_t i = 0; i < CKP_SUPERBLOCKS && !result; i++)
        result = ckp_write_now(storage, i * (uint64_t)CKP_BLOCK, block.bytes, sizeof block.bytes);
    if (!result)
        result = storage->ops->flush(storage);
    return result ? ckp_fail_errno(error, -result, "writing the superblock") : 0;
}

static int format_draft(struct ckp_draft *draft, const struct ckp_superblock *super, const char *path,
                        struct ckp_error *error)
{
    struct ckp_storage *storage = ckp_storage_open(draft->fd, CKP_PWRITE, 1, 0, error);
    int result;

    if (!storage)
        return error->code;
    result = ckp_format(storage, super, error);
    if (!result)
        result = ckp_draft_place(draft, path, error);
    storage->ops->close(storage);
    return result;
}

static int refuse_existing(const char *path, struct ckp_error *error)
{
    struct stat there;

    if (lstat(path, &there))
        return 0; /* what is wrong with the path shows when the file is made */
    if (S_ISDIR(there.st_mode))
        return ckp_fail(error, EISDIR, "is a directory: give the path of a file");
    return ckp_fail(error, EEXIST, "exists already: open it, or choose another path");
}

static int create(const char *path, const struct ckp_geometry *geometry, struct ckp_error *error)
{
    struct ckp_superblock super = {0};
    struct ckp_draft draft;
    char folder[4096];
    int result;

    folder_of(path, folder, sizeof folder);
    if ((result = ckp_plan_file(&super, geometry, error)) || (result = refuse_existing(path, error)) ||
        (result = ckp_draft_open(&draft, folder, super.file_bytes, error)))
        return result;
    result = format_draft(&draft, &super, path, error);
    ckp_draft_drop(&draft);
    return result;
}

int ckp_create(const char *path, const struct ckp_geometry *geometry, struct ckp_error *error)
{
    return create(path, geometry, error) ? name(path, error) : 0;
}

/* What io_uring still writes for a process that was killed holds its lock, for a moment. */
static int lock(int fd, int operation)
{
    const struct timespec pause = {.tv_nsec = LOCK_PAUSE_MS * 1000000};

    for (int waited = 0; flock(fd, operation | LOCK_NB); waited += LOCK_PAUSE_MS) {
        if (errno != EWOULDBLOCK || waited >= LOCK_WAIT_MS)
            return -1;
        nanosleep(&pause, NULL);
    }
    return 0;
}

/* An open and locked file, or -1. */
static int open_locked(const char *path, int read_only, struct ckp_error *error)
{
    struct stat file;
    int fd;

    if (stat(path, &file) == 0 && !S_ISREG(file.st_mode)) {
        ckp_fail(error, S_ISDIR(file.st_mode) ? EISDIR : CKP_FOREIGN, "is %s: give the path of a checkpoint file",
                 S_ISDIR(file.st_mode) ? "a directory" : "not a regular file");
        return -1;
    }
    fd = ckp_open_direct(path, read_only ? O_RDONLY : O_RDWR);
    if (fd < 0) {
        ckp_fail_errno(error, errno, "opening the checkpoint file for %s", read_only ? "reading" : "writing");
        return -1;
    }
    if (lock(fd, read_only ? LOCK_SH : LOCK_EX) == 0)
        return fd;
    if (errno == EWOULDBLOCK)
        ckp_fail(error, CKP_LOCKED, "is in use: another process, or another part of this one, has it open");
    else
        ckp_fail_errno(error, errno, "locking the checkpoint file");
    close(fd);
    return -1;
}

struct ckp_engine *ckp_open(const char *path, const struct ckp_options *options, struct ckp_error *error)
{
    struct ckp_engine *engine = NULL;
    struct ckp_storage *storage = NULL;
    struct ckp_options used;
    int fd = -1;

    if (!ckp_options_check(options, &used, error))
        fd = open_locked(path, (int)used.read_only, error);
    if (fd >= 0)
        storage = ckp_storage_open(fd, used.backend, used.writers, (int)used.read_only, error);
    if (storage)
        engine = ckp_start(storage, &used, error);
    if (!engine)
        name(path, error);
    return engine;
}
