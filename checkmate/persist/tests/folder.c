#include "folder.h"

#include <dirent.h>
#include <unistd.h>

static char folder[256];
static char paths[4][768];
static pid_t owner;

const char *folder_path(unsigned place, const char *name)
{
    snprintf(paths[place], sizeof paths[place], "%s/%s", folder, name);
    return paths[place];
}

static void remove_folder(void)
{
    DIR *entries = getpid() == owner ? opendir(folder) : NULL;

    if (!entries)
        return;
    for (struct dirent *entry; (entry = readdir(entries));)
        if (entry->d_name[0] != '.' || entry->d_name[1] > '.') {
            const char *path = folder_path(0, entry->d_name);
            if (unlink(path))
                rmdir(path);
        }
    closedir(entries);
    rmdir(folder);
}

const char *folder_make(void)
{
    const char *above = getenv("TMPDIR");

    snprintf(folder, sizeof folder, "%s/checkmate-persist-XXXXXX", above ? above : "/tmp");
    CHECK(mkdtemp(folder));
    owner = getpid();
    atexit(remove_folder);
    return folder;
}

struct ckp_engine *open_file(const char *path, const struct ckp_options *options)
{
    struct ckp_error error;
    struct ckp_engine *engine = ckp_open(path, options, &error);

    if (!engine)
        fprintf(stderr, "%s\n", error.text);
    CHECK(engine);
    return engine;
}
