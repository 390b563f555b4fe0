#include "device.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <limits.h>
#include <linux/ethtool.h>
#include <linux/sockios.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "log.h"
#include "param.h"

#define MAX_DEVICES   32
#define DEFAULT_SPEED 10000 /* Mbit/s, for interfaces that do not tell theirs */
#define DEFAULT_NAMES "^lo,docker"

static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct ckm_device devices[MAX_DEVICES];
static int ndevices;

bool ckm_device_selected(const char *pattern, const char *name)
{
    bool exclude = *pattern == '^';
    bool exact = pattern[exclude] == '=';
    const char *item = pattern + exclude + exact;

    while (*item) {
        size_t length = strcspn(item, ",");
        if (length && strncmp(item, name, length) == 0 && (!exact || name[length] == 0))
            return !exclude;
        item += length + (item[length] == ',');
    }
    return exclude;
}

static long sysfs_number(const char *name, const char *file)
{
    char path[128];
    long value = -1;

    snprintf(path, sizeof path, "/sys/class/net/%s/%s", name, file);
    FILE *f = fopen(path, "re");
    if (f && fscanf(f, "%ld", &value) != 1)
        value = -1;
    if (f)
        fclose(f);
    return value;
}

/* A process that has entered a network namespace may still see another one's /sys: an interface there counts
 * only if its index is the same. */
static bool in_sysfs(const char *name)
{
    return sysfs_number(name, "ifindex") == (long)if_nametoindex(name);
}

static int query_speed(int sock, const char *name)
{
    struct ethtool_cmd command = {.cmd = ETHTOOL_GSET};
    struct ifreq request = {0};
    long speed = in_sysfs(name) ? sysfs_number(name, "speed") : -1;

    if (speed <= 0) {
        snprintf(request.ifr_name, sizeof request.ifr_name, "%s", name);
        request.ifr_data = (void *)&command;
        if (ioctl(sock, SIOCETHTOOL, &request) == 0)
            speed = (int)ethtool_cmd_speed(&command);
    }
    return speed > 0 ? (int)speed : DEFAULT_SPEED;
}

static int query_mtu(int sock, const char *name)
{
    struct ifreq request = {0};

    snprintf(request.ifr_name, sizeof request.ifr_name, "%s", name);
    return ioctl(sock, SIOCGIFMTU, &request) == 0 ? request.ifr_mtu : 0;
}

static void query_pci_path(const char *name, char *out, size_t bytes)
{
    char path[128], real[PATH_MAX];

    snprintf(path, sizeof path, "/sys/class/net/%s/device", name);
    *out = 0;
    if (in_sysfs(name) && realpath(path, real) && strlen(real) < bytes)
        strcpy(out, real);
}

static void add_devices(const struct ifaddrs *all, const char *pattern, int sock)
{
    for (const struct ifaddrs *i = all; i && ndevices < MAX_DEVICES; i = i->ifa_next) {
        bool known = false;
        if (!i->ifa_addr || i->ifa_addr->sa_family != AF_INET || !(i->ifa_flags & IFF_UP))
            continue;
        for (int d = 0; d < ndevices; d++)
            known |= strcmp(devices[d].name, i->ifa_name) == 0;
        if (known || !ckm_device_selected(pattern, i->ifa_name))
            continue;
        struct ckm_device *device = &devices[ndevices++];
        snprintf(device->name, sizeof device->name, "%s", i->ifa_name);
        memcpy(&device->address, i->ifa_addr, sizeof device->address);
        device->speed = query_speed(sock, device->name);
        device->mtu = query_mtu(sock, device->name);
        query_pci_path(device->name, device->pci_path, sizeof device->pci_path);
        device->socket_buffer = (int)ckm_param_number(CKM_SOCKET_BUFFER);
    }
}

static int by_index(const void *a, const void *b)
{
    unsigned x = if_nametoindex(((const struct ckm_device *)a)->name);
    unsigned y = if_nametoindex(((const struct ckm_device *)b)->name);
    return x < y ? -1 : x > y;
}

static void find_devices(void)
{
    const char *pattern = ckm_param_text(CKM_IFNAME);
    int sock = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    struct ifaddrs *all = NULL;

    if (getifaddrs(&all) == 0) {
        add_devices(all, *pattern ? pattern : DEFAULT_NAMES, sock);
        if (!ndevices && !*pattern)
            add_devices(all, "^", sock); /* loopback, on a machine that has nothing else */
        freeifaddrs(all);
    }
    if (sock >= 0)
        close(sock);
    qsort(devices, (size_t)ndevices, sizeof *devices, by_index);
    if (!ndevices)
        CKM_WARN("no interface that is up and has an IPv4 address matches CHECKMATE_IFNAME=%s", pattern);
    for (int d = 0; d < ndevices; d++) {
        char text[INET_ADDRSTRLEN];
        inet_ntop(AF_INET, &devices[d].address.sin_addr, text, sizeof text);
        CKM_INFO("device %d: %s %s, %d Mbit/s, MTU %d, %s", d, devices[d].name, text, devices[d].speed, devices[d].mtu,
                 *devices[d].pci_path ? devices[d].pci_path : "virtual");
    }
}

int ckm_devices(void)
{
    pthread_once(&once, find_devices);
    return ndevices;
}

const struct ckm_device *ckm_device(int dev)
{
    return dev >= 0 && dev < ckm_devices() ? devices + dev : NULL;
}
