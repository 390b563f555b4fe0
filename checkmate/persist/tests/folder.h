/* Files for tests, on the file system of TMPDIR; gone afterwards. */
#ifndef CHECKMATE_PERSIST_FOLDER_H
#define CHECKMATE_PERSIST_FOLDER_H

#include "check.h"

/* A new folder; removed with all that is in it when the process that made it exits. */
const char *folder_make(void);

/* The path of a name in it; overwritten by the next call with the same `place`, 0 to 3. */
const char *folder_path(unsigned place, const char *name);

struct ckp_engine *open_file(const char *path, const struct ckp_options *options);

#endif
