#include "param.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checkmate/api.h"
#include "log.h"

struct param {
    const char *name, *fallback, *help;
    long least, most; /* of numbers; text has least > most */
    char value[4096];
    long number;
};

#define TEXT 1, 0

static struct param params[CKM_PARAMS] = {
    [CKM_IFNAME] = {"CHECKMATE_IFNAME", "",
                    "Interfaces to use as devices: name prefixes separated by commas; a leading ^ excludes them, a "
                    "leading = asks for exact names. Empty: all that are up, but for loopback and docker*.",
                    TEXT, "", 0},
    [CKM_COUNTER_MAP] = {"CHECKMATE_COUNTER_MAP", "",
                         "Path of the pinned socket map of the program that writes the counter option. Empty: nothing "
                         "is tagged.",
                         TEXT, "", 0},
    [CKM_DSCP] = {"CHECKMATE_DSCP", "0x20", "DSCP of the tagged flow (6 bits).", 1, 63, "", 0},
    [CKM_TIMEOUT_MS] = {"CHECKMATE_TIMEOUT_MS", "60000",
                        "Milliseconds until a handshake that does not finish, or a peer that no longer acknowledges "
                        "data, is an error.",
                        100, 86400000, "", 0},
    [CKM_SOCKET_BUFFER] = {"CHECKMATE_SOCKET_BUFFER", "0",
                           "Bytes of the send and of the receive buffer of a connection. 0: the kernel adapts them.", 0,
                           1 << 30, "", 0},
    [CKM_HOST_RANKS] =
        {"CHECKMATE_HOST_RANKS", "",
         "Ranks of the data-parallel communicator on each of its hosts, in the order of the ranks, "
         "separated by commas: 4,4 for eight ranks on two hosts. Empty: each rank has a host of its own.",
         TEXT, "", 0},
    [CKM_GROUP] = {"CHECKMATE_GROUP", "",
                   "Name of the data-parallel group: a shadow of several groups tells their frames apart by it.", TEXT,
                   "", 0},
};

static pthread_once_t once = PTHREAD_ONCE_INIT;

static int parse(const struct param *p, const char *text, long *number)
{
    char *end;

    errno = 0;
    *number = strtol(text, &end, 0);
    return errno == 0 && end != text && *end == 0 && *number >= p->least && *number <= p->most;
}

static void load(struct param *p)
{
    const char *text = getenv(p->name);
    int is_text = p->least > p->most;

    if (!text)
        text = p->fallback;
    if (is_text ? strlen(text) >= sizeof p->value : !parse(p, text, &p->number)) {
        CKM_WARN("%s=%s is not usable (numbers: %ld to %ld; text: under %zu bytes); using \"%s\"", p->name, text,
                 p->least, p->most, sizeof p->value, p->fallback);
        text = p->fallback;
        parse(p, text, &p->number);
    }
    snprintf(p->value, sizeof p->value, "%s", text);
}

void ckm_param_reload(void)
{
    for (int i = 0; i < CKM_PARAMS; i++)
        load(&params[i]);
}

const char *ckm_param_text(enum ckm_param param)
{
    pthread_once(&once, ckm_param_reload);
    return params[param].value;
}

long ckm_param_number(enum ckm_param param)
{
    pthread_once(&once, ckm_param_reload);
    return params[param].number;
}

int checkmate_get_param(int index, struct checkmate_param *out)
{
    if (index < 0 || index >= CKM_PARAMS)
        return -1;
    *out = (struct checkmate_param){params[index].name, ckm_param_text((enum ckm_param)index), params[index].fallback,
                                    params[index].help};
    return 0;
}
