/* TCP sockets the way that all connections of the plugin need them. */
#ifndef CHECKMATE_SOCKET_H
#define CHECKMATE_SOCKET_H

#include <netinet/in.h>
#include <stdbool.h>
#include <stdint.h>

#include "nccl/common_abi.h"

/* Sent backwards on the plain connection by a receiver that has a grouped receive: messages with this tag come
 * faster than receives for them are posted, hold them (or go on). */
struct ckm_pause {
    uint32_t magic; /* CKM_PAUSE_MAGIC */
    int32_t tag;
    uint32_t paused;
};
#define CKM_PAUSE_MAGIC 0x504d4b43u /* "CKMP" */

/* Listens on `address` at a port of the kernel's choice, which is written back. `buffer`: bytes
 * of the send and receive buffers, 0 for the kernel's choice. Returns a socket or -1, errno. */
int ckm_socket_listen(struct sockaddr_in *address, int buffer);

/* Starts to connect from the address `from` to `to`. A tagged socket gets the DSCP mark and is registered for the
 * counter option first. Returns a socket or -1 with errno; ENODATA when the option is not to be had. */
int ckm_socket_connect(const struct sockaddr_in *from, const struct sockaddr_in *to, int buffer, bool tagged);

/* 1: connected; 0: not yet; -1: failed, errno says why. */
int ckm_socket_connected(int fd);

/* Accepts one connection; -1 with EAGAIN when there is none. */
int ckm_socket_accept(int listener, struct sockaddr_in *peer);

/* Has the peer left data or probes unacknowledged for longer than CHECKMATE_TIMEOUT_MS? */
bool ckm_socket_dead(int fd);

/* Logs that the connection with `peer` failed while `doing`, counts it, and returns NCCL's code for `error`
 * (an errno; 0: the peer closed it). */
nccl_result_t ckm_socket_failed(const char *doing, const char *peer, int error);

/* Closes a socket on which the peer may still be writing: at once that would reset the connection and lose what
 * the kernel has yet to send. So it is closed when the peer has closed it, or after CHECKMATE_TIMEOUT_MS, in a
 * later call of either function. */
void ckm_socket_retire(int fd);
void ckm_socket_reap(void);

int64_t ckm_now_ms(void);

#endif
