#include "draft.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "error.h"

int ckp_open_direct(const char *path, int flags)
{
    int fd = open(path, flags | O_CLOEXEC | O_DIRECT, 0644);

    return fd < 0 && errno == EINVAL ? open(path, flags | O_CLOEXEC, 0644) : fd;
}

static int no_space(const struct ckp_draft *draft, int reason, uint64_t bytes, const struct statvfs *space,
                    struct ckp_error *error)
{
    return ckp_fail(error, reason,
                    "the file needs %" PRIu64 " bytes, %s has %" PRIu64 " free: use fewer slots, or another folder",
                    bytes, draft->folder, (uint64_t)space->f_bavail * space->f_frsize);
}

/* So that no save fails for want of space later. An allocation that fails may fill the disk first: it is not tried. */
static int allocate(const struct ckp_draft *draft, uint64_t bytes, struct ckp_error *error)
{
    struct statvfs space;
    int known = statvfs(draft->folder, &space) == 0 && space.f_blocks;

    if (known && bytes / space.f_frsize > space.f_bfree)
        return no_space(draft, ENOSPC, bytes, &space, error);
    if (fallocate(draft->fd, 0, 0, (off_t)bytes) == 0)
        return 0;
    if (errno == EOPNOTSUPP && ftruncate(draft->fd, (off_t)bytes) == 0)
        return 0;
    if (known && (errno == ENOSPC || errno == EFBIG || errno == EDQUOT))
        return no_space(draft, errno, bytes, &space, error);
    return ckp_fail_errno(error, errno, "allocating %" PRIu64 " bytes", bytes);
}

static int open_named(struct ckp_draft *draft)
{
    snprintf(draft->temporary, sizeof draft->temporary, "%s/.checkmate-XXXXXX", draft->folder);
    int fd = mkostemp(draft->temporary, O_DIRECT | O_CLOEXEC);
    if (fd < 0 && errno == EINVAL)
        fd = mkostemp(draft->temporary, O_CLOEXEC);
    if (fd < 0)
        draft->temporary[0] = 0;
    return fd;
}

int ckp_draft_open(struct ckp_draft *draft, const char *folder, uint64_t bytes, struct ckp_error *error)
{
    int result;

    *draft = (struct ckp_draft){0};
    snprintf(draft->folder, sizeof draft->folder, "%s", folder);
    draft->fd = ckp_open_direct(folder, O_TMPFILE | O_RDWR);
    if (draft->fd < 0 && (errno == EOPNOTSUPP || errno == EISDIR))
        draft->fd = open_named(draft);
    if (draft->fd < 0)
        return ckp_fail_errno(error, errno, "making a file in %s", folder);
    result = allocate(draft, bytes, error);
    if (result) {
        ckp_draft_drop(draft);
        close(draft->fd);
    }
    return result;
}

static int give_name(const struct ckp_draft *draft, const char *path)
{
    char link_path[64];

    if (draft->temporary[0])
        return link(draft->temporary, path);
    snprintf(link_path, sizeof link_path, "/proc/self/fd/%d", draft->fd);
    return linkat(AT_FDCWD, link_path, AT_FDCWD, path, AT_SYMLINK_FOLLOW);
}

int ckp_draft_place(struct ckp_draft *draft, const char *path, struct ckp_error *error)
{
    int folder, failed;

    if (fsync(draft->fd) || give_name(draft, path))
        return ckp_fail_errno(error, errno, "creating the file");
    ckp_draft_drop(draft);
    folder = open(draft->folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    failed = folder < 0 || fsync(folder) ? errno : 0;
    if (folder >= 0)
        close(folder);
    if (!failed)
        return 0;
    unlink(path);
    return ckp_fail_errno(error, failed, "making the file's name durable");
}

void ckp_draft_drop(struct ckp_draft *draft)
{
    if (draft->temporary[0])
        unlink(draft->temporary);
    draft->temporary[0] = 0;
}
