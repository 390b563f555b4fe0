/* The network interfaces that are NCCL's devices: those that CHECKMATE_IFNAME selects. */
#ifndef CHECKMATE_DEVICE_H
#define CHECKMATE_DEVICE_H

#include <net/if.h>
#include <netinet/in.h>
#include <stdbool.h>

struct ckm_device {
    char name[IF_NAMESIZE];
    char pci_path[256]; /* of the device in /sys; empty for virtual interfaces */
    struct sockaddr_in address;
    int speed;         /* Mbit/s */
    int mtu;           /* bytes */
    int socket_buffer; /* bytes; 0: left to the kernel */
};

/* Interfaces are looked up once, at the first call, in the order of their index. */
int ckm_devices(void);
const struct ckm_device *ckm_device(int dev); /* NULL when there is no such device */

/* Does `pattern`, with CHECKMATE_IFNAME's syntax, select the interface `name`? */
bool ckm_device_selected(const char *pattern, const char *name);

#endif
