#include "netdev.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <linux/if_packet.h>

int ckm_netns_enter(const char *path, char *error, size_t error_size)
{
    if (!path)
        return -2;
    int previous = open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC);
    int wanted = open(path, O_RDONLY | O_CLOEXEC);
    int failed = previous < 0 || wanted < 0 || setns(wanted, CLONE_NEWNET);
    if (failed)
        snprintf(error, error_size, "network namespace %s: %s%s", path, strerror(errno),
                 errno == EPERM ? "; entering one needs CAP_SYS_ADMIN (run as root)" : "");
    if (wanted >= 0)
        close(wanted);
    if (failed && previous >= 0)
        close(previous);
    return failed ? -1 : previous;
}

void ckm_netns_leave(int previous)
{
    if (previous < 0)
        return;
    /* The descriptor is of this thread's own namespace: going back can't be refused. */
    if (setns(previous, CLONE_NEWNET))
        abort();
    close(previous);
}

static int query(int fd, const char *name, struct ifreq *request, unsigned long what)
{
    memset(request, 0, sizeof *request);
    snprintf(request->ifr_name, sizeof request->ifr_name, "%s", name);
    return ioctl(fd, what, request);
}

static int check(int fd, const char *name, uint32_t mtu, char *error, size_t error_size)
{
    struct ifreq request;
    if (strlen(name) >= IFNAMSIZ || query(fd, name, &request, SIOCGIFINDEX)) {
        snprintf(error, error_size, "interface %s: %s; check its name and network namespace", name, strerror(errno));
        return -1;
    }
    int index = request.ifr_ifindex;
    if (query(fd, name, &request, SIOCGIFFLAGS) || !(request.ifr_flags & IFF_UP)) {
        snprintf(error, error_size, "interface %s is down: run `ip link set %s up`", name, name);
        return -1;
    }
    if (query(fd, name, &request, SIOCGIFMTU) || (uint32_t)request.ifr_mtu > mtu) {
        snprintf(error, error_size,
                 "interface %s has MTU %d, but the receiver is set up for packets of %u bytes and would lose longer "
                 "ones: set its mtu to %d, or run `ip link set %s mtu %u` on both ends",
                 name, request.ifr_mtu, mtu, request.ifr_mtu, name, mtu);
        return -1;
    }
    return index;
}

int ckm_netdev_check(const char *name, uint32_t mtu, char *error, size_t error_size)
{
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        snprintf(error, error_size, "interface %s: %s", name, strerror(errno));
        return -1;
    }
    int index = check(fd, name, mtu, error, error_size);
    close(fd);
    return index;
}

void ckm_fds_list(struct ckm_fd_set *fds)
{
    memset(fds, 0, sizeof *fds);
    DIR *directory = opendir("/proc/self/fd");
    if (!directory)
        return;
    for (struct dirent *entry; (entry = readdir(directory)) != NULL;) {
        unsigned long fd = strtoul(entry->d_name, NULL, 10);
        if (entry->d_name[0] != '.' && fd < CKM_MAX_FD)
            fds->open[fd] = 1;
    }
    closedir(directory);
}

static int is_packet_socket_on(int fd, int index)
{
    struct sockaddr_ll address;
    socklen_t length = sizeof address;
    return getsockname(fd, (struct sockaddr *)&address, &length) == 0 && address.sll_family == AF_PACKET &&
           address.sll_ifindex == index;
}

int ckm_fds_new_packet_socket(const struct ckm_fd_set *before, int index)
{
    static _Thread_local struct ckm_fd_set now;
    ckm_fds_list(&now);
    for (int fd = 0; fd < CKM_MAX_FD; fd++)
        if (now.open[fd] && !before->open[fd] && is_packet_socket_on(fd, index))
            return fd;
    return -1;
}

uint32_t ckm_packet_drops(int fd)
{
    struct tpacket_stats stats;
    socklen_t length = sizeof stats;
    /* Reading sets the kernel's counters to zero. */
    return getsockopt(fd, SOL_PACKET, PACKET_STATISTICS, &stats, &length) ? 0 : stats.tp_drops;
}
