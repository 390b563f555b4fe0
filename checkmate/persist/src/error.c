#include "error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

int ckp_fail(struct ckp_error *error, int code, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    error->code = -code;
    vsnprintf(error->text, sizeof error->text, format, args);
    va_end(args);
    return -code;
}

int ckp_fail_errno(struct ckp_error *error, int number, const char *format, ...)
{
    va_list args;
    size_t used;

    va_start(args, format);
    error->code = -number;
    vsnprintf(error->text, sizeof error->text, format, args);
    va_end(args);
    used = strlen(error->text);
    snprintf(error->text + used, sizeof error->text - used, ": %s", strerrordesc_np(number));
    return -number;
}
