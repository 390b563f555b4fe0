/* What the kernel knows of a network interface, and the namespaces that interfaces are in. */
#ifndef CHECKMATE_RX_NETDEV_H
#define CHECKMATE_RX_NETDEV_H

#include <stddef.h>
#include <stdint.h>

/* Moves this thread into a network namespace (a path). Returns a descriptor for ckm_netns_leave, -1 with the reason
 * in error. path NULL: stays, returns -2. */
int ckm_netns_enter(const char *path, char *error, size_t error_size);
void ckm_netns_leave(int previous);

/* Checks that packets of mtu bytes will do for an interface of this thread's namespace. Returns its index, -1 with
 * what to do in error. */
int ckm_netdev_check(const char *name, uint32_t mtu, char *error, size_t error_size);

#define CKM_MAX_FD 65536

struct ckm_fd_set {
    uint8_t open[CKM_MAX_FD];
};

void ckm_fds_list(struct ckm_fd_set *fds);
/* The packet socket on interface index that is open now and wasn't in before; -1: none. */
int ckm_fds_new_packet_socket(const struct ckm_fd_set *before, int index);
/* Packets that the socket's ring had no room for since the last call. */
uint32_t ckm_packet_drops(int fd);

#endif
