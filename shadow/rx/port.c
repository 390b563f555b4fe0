#include "port.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include <rte_bus_vdev.h>
#include <rte_errno.h>
#include <rte_ethdev.h>

#include "netdev.h"

/* Ethernet header and a VLAN tag. */
#define LINK_BYTES 18u
/* The kernel's own header in front of each packet of a ring (TPACKET_V2, its address and alignment). */
#define RING_HEADER_BYTES 80u
#define BLOCK_BYTES       65536u
/* A burst at full speed needs 4096 packets, 32 MiB are enough for more of the small ones. */
#define MIN_RING_FRAMES 4096u
#define RING_BYTES      (32u << 20)
#define PCI_DESCRIPTORS 4096

uint32_t ckm_port_room(uint32_t mtu)
{
    uint32_t room = 2048; /* rings want powers of two */
    while (room < mtu + LINK_BYTES + RING_HEADER_BYTES)
        room *= 2;
    return room;
}

static uint32_t ring_frames(const struct ckm_port_config *config, uint32_t room)
{
    uint32_t per_block = room < BLOCK_BYTES ? BLOCK_BYTES / room : 1;
    uint32_t frames = config->ring_frames ? config->ring_frames : RING_BYTES / room;
    if (!config->ring_frames && frames < MIN_RING_FRAMES)
        frames = MIN_RING_FRAMES;
    return frames < per_block ? per_block : frames / per_block * per_block;
}

static int probe_interface(struct ckm_port *port, const struct ckm_port_config *config, char *error, size_t error_size)
{
    static atomic_uint number;
    static _Thread_local struct ckm_fd_set before;
    int index = ckm_netdev_check(config->name, config->mtu, error, error_size);
    if (index < 0)
        return -1;
    char args[256];
    uint32_t room = ckm_port_room(config->mtu);
    snprintf(port->device, sizeof port->device, "net_af_packet%u", number++);
    snprintf(args, sizeof args, "iface=%s,qpairs=1,blocksz=%u,framesz=%u,framecnt=%u", config->name,
             room < BLOCK_BYTES ? BLOCK_BYTES : room, room, ring_frames(config, room));
    ckm_fds_list(&before);
    int failed = rte_vdev_init(port->device, args);
    if (failed || rte_eth_dev_get_port_by_name(port->device, &port->id)) {
        snprintf(error, error_size,
                 "interface %s: a packet socket with a ring could not be opened (%s); it needs "
                 "CAP_NET_RAW (run as root)",
                 config->name, rte_strerror(-failed));
        return -1;
    }
    port->is_open = 1;
    port->fd = ckm_fds_new_packet_socket(&before, index);
    return 0;
}

static int probe_pci(struct ckm_port *port, const struct ckm_port_config *config, char *error, size_t error_size)
{
    char device[sizeof port->name];
    snprintf(device, sizeof device, "%s", config->name);
    device[strcspn(device, ",")] = 0;
    if (rte_eth_dev_get_port_by_name(device, &port->id)) {
        snprintf(error, error_size, "PCI port %s was not found: check the address and that its driver is installed",
                 config->name);
        return -1;
    }
    port->is_open = 1;
    return 0;
}

static int start(struct ckm_port *port, const struct ckm_port_config *config, struct rte_mempool *pool)
{
    struct rte_eth_dev_info info;
    struct rte_eth_conf conf = {0};
    uint16_t descriptors = PCI_DESCRIPTORS;
    int failed = rte_eth_dev_info_get(port->id, &info);
    /* The virtual port's room is its ring's; telling it an MTU would change the interface. */
    if (!failed && config->pci) {
        conf.rxmode.mtu = config->mtu;
        failed = config->mtu > info.max_mtu ? -E2BIG : 0;
    }
    if (!failed)
        failed = rte_eth_dev_configure(port->id, 1, 0, &conf);
    if (!failed)
        failed = rte_eth_dev_adjust_nb_rx_tx_desc(port->id, &descriptors, NULL);
    if (!failed)
        failed =
            rte_eth_rx_queue_setup(port->id, 0, descriptors, (unsigned)rte_eth_dev_socket_id(port->id), NULL, pool);
    if (!failed)
        failed = rte_eth_dev_start(port->id);
    /* Copies carry the shadow's address where the switch wrote it; behind a switch that did not, take all. */
    if (!failed && config->pci)
        failed = rte_eth_promiscuous_enable(port->id);
    return failed;
}

int ckm_port_open(struct ckm_port *port, const struct ckm_port_config *config, struct rte_mempool *pool, char *error,
                  size_t error_size)
{
    *port = (struct ckm_port){.fd = -1};
    snprintf(port->name, sizeof port->name, "%s", config->name);
    if ((config->pci ? probe_pci : probe_interface)(port, config, error, error_size))
        return -1;
    int failed = start(port, config, pool);
    if (failed == -E2BIG)
        snprintf(error, error_size, "port %s can't take packets of %u bytes: lower mtu, on the switch's port too",
                 config->name, config->mtu);
    else if (failed)
        snprintf(error, error_size, "port %s could not be started: %s", config->name, rte_strerror(-failed));
    return failed ? -1 : 0;
}

void ckm_port_close(struct ckm_port *port)
{
    if (!port->is_open)
        return;
    rte_eth_dev_stop(port->id);
    if (port->device[0])
        rte_vdev_uninit(port->device);
    else
        rte_eth_dev_close(port->id);
    port->is_open = 0;
}

uint64_t ckm_port_drops(struct ckm_port *port)
{
    if (port->fd >= 0)
        return ckm_packet_drops(port->fd);
    struct rte_eth_stats stats;
    if (rte_eth_stats_get(port->id, &stats))
        return 0;
    uint64_t missed = stats.imissed + stats.rx_nombuf;
    uint64_t drops = missed - port->imissed;
    port->imissed = missed;
    return drops;
}
