#include "counter_map.h"

#include <errno.h>
#include <linux/bpf.h>
#include <pthread.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "checkmate/counter.h"
#include "log.h"
#include "param.h"

static pthread_once_t once = PTHREAD_ONCE_INIT;
static int map = -1;

static int bpf(int command, union bpf_attr *attr)
{
    return (int)syscall(SYS_bpf, command, attr, sizeof *attr);
}

static bool is_counter_map(int fd)
{
    struct bpf_map_info info = {0};
    union bpf_attr attr = {.info = {.bpf_fd = (uint32_t)fd, .info_len = sizeof info, .info = (uintptr_t)&info}};
    return bpf(BPF_OBJ_GET_INFO_BY_FD, &attr) == 0 && info.type == BPF_MAP_TYPE_SK_STORAGE &&
           info.value_size == sizeof(struct ckm_counter);
}

static void open_map(void)
{
    const char *path = ckm_param_text(CKM_COUNTER_MAP);
    union bpf_attr attr = {.pathname = (uintptr_t)path};

    if (!*path) {
        CKM_WARN("CHECKMATE_COUNTER_MAP is not set: nothing is tagged, no iteration reaches a shadow");
        return;
    }
    map = bpf(BPF_OBJ_GET, &attr);
    if (map < 0) {
        CKM_WARN("cannot open CHECKMATE_COUNTER_MAP=%s: %s; nothing is tagged. Load the counter program and let this "
                 "user read and write the map",
                 path, strerror(errno));
    } else if (!is_counter_map(map)) {
        CKM_WARN("CHECKMATE_COUNTER_MAP=%s is not this version's socket map; nothing is tagged", path);
        close(map);
        map = -1;
    }
}

bool ckm_counter_register(int socket)
{
    struct ckm_counter counter = {.base = 0, .state = CKM_COUNTER_WANTED};
    union bpf_attr attr = {.key = (uintptr_t)&socket, .value = (uintptr_t)&counter};

    pthread_once(&once, open_map);
    if (map < 0)
        return false;
    attr.map_fd = (uint32_t)map;
    if (bpf(BPF_MAP_UPDATE_ELEM, &attr) == 0)
        return true;
    CKM_WARN("cannot register a connection in CHECKMATE_COUNTER_MAP: %s; it will not be tagged", strerror(errno));
    return false;
}

bool ckm_counter_armed(int socket)
{
    struct ckm_counter counter = {0};
    union bpf_attr attr = {.map_fd = (uint32_t)map, .key = (uintptr_t)&socket, .value = (uintptr_t)&counter};
    return map >= 0 && bpf(BPF_MAP_LOOKUP_ELEM, &attr) == 0 && counter.state == CKM_COUNTER_ARMED;
}
