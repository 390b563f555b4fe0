/* Errors of the engine: a code and a text that names the thing to fix. */
#ifndef CHECKMATE_PERSIST_ERROR_H
#define CHECKMATE_PERSIST_ERROR_H

#include "api.h"

/* Fill in `error` and return -code; `code` is an errno or an enum ckp_code. */
__attribute__((format(printf, 3, 4))) int ckp_fail(struct ckp_error *error, int code, const char *format, ...);

/* The same for a system call: ": " and the meaning of the errno are added. */
__attribute__((format(printf, 3, 4))) int ckp_fail_errno(struct ckp_error *error, int number, const char *format, ...);

#endif
