/* The receive thread: bursts from all ports into the core, asleep when there is nothing. */
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <rte_errno.h>
#include <rte_ethdev.h>
#include <rte_mbuf.h>

#include "api.h"
#include "eal.h"
#include "netdev.h"
#include "port.h"

#define MAX_PORTS    8u
#define BURST        64
#define MBUFS        1024u /* for each port: virtual ports hold none */
#define PCI_MBUFS    8192u
#define MBUF_CACHE   128u
#define MAX_SLEEP_US 1000000u
/* After a packet woke the thread, so long more may gather: a wake-up costs as much as several packets. */
#define GATHER_NS 100000
/* Ports without a descriptor to wait on are looked at after a sleep that doubles between these. */
#define MIN_BACKOFF_US 20u
#define MAX_BACKOFF_US 2000u
/* Before what else the processor has to do: what waits too long is lost. As far as it is permitted. */
#define NICER 10

struct ckm_ports {
    struct ckm_core *core;
    const struct ckm_port_config *configs; /* while opening */
    uint32_t n, memory_mb;
    int huge_pages;
    struct ckm_port ports[MAX_PORTS];
    struct rte_mempool *pool;
    pthread_t thread;
    sem_t opened;
    int failed;
    char *error;
    size_t error_size;
    atomic_int stop;
    int stop_fd;
};

static int create_pool(struct ckm_ports *ports)
{
    static atomic_uint number;
    char name[32];
    uint32_t mbufs = 0, room = 0;
    for (uint32_t i = 0; i < ports->n; i++) {
        uint32_t needed = ckm_port_room(ports->configs[i].mtu);
        room = needed > room ? needed : room;
        mbufs += ports->configs[i].pci ? PCI_MBUFS : MBUFS;
    }
    snprintf(name, sizeof name, "checkmate_rx%u", number++);
    ports->pool =
        rte_pktmbuf_pool_create(name, mbufs, MBUF_CACHE, 0, (uint16_t)(room + RTE_PKTMBUF_HEADROOM), SOCKET_ID_ANY);
    if (!ports->pool)
        snprintf(ports->error, ports->error_size, "%u packet buffers of %u bytes: %s; raise memory_mb (now %u)", mbufs,
                 room, rte_strerror(rte_errno), ports->memory_mb);
    return ports->pool ? 0 : -1;
}

static int open_one(struct ckm_ports *ports, uint32_t i)
{
    const struct ckm_port_config *config = &ports->configs[i];
    int previous = ckm_netns_enter(config->netns, ports->error, ports->error_size);
    if (previous == -1)
        return -1;
    int failed = ckm_port_open(&ports->ports[i], config, ports->pool, ports->error, ports->error_size);
    ckm_netns_leave(previous);
    return failed;
}

static int open_all(struct ckm_ports *ports)
{
    if (create_pool(ports))
        return -1;
    for (uint32_t i = 0; i < ports->n; i++)
        if (open_one(ports, i))
            return -1;
    return 0;
}

static void close_all(struct ckm_ports *ports)
{
    for (uint32_t i = 0; i < ports->n; i++)
        ckm_port_close(&ports->ports[i]);
    rte_mempool_free(ports->pool);
}

static unsigned receive_from(struct ckm_ports *ports, const struct ckm_port *port)
{
    struct rte_mbuf *mbufs[BURST];
    const uint8_t *packets[BURST];
    uint32_t lengths[BURST];
    unsigned n = rte_eth_rx_burst(port->id, 0, mbufs, BURST);
    for (unsigned i = 0; i < n; i++) {
        packets[i] = rte_pktmbuf_mtod(mbufs[i], const uint8_t *);
        lengths[i] = rte_pktmbuf_data_len(mbufs[i]);
    }
    if (n) {
        ckm_core_feed(ports->core, packets, lengths, n, ckm_now_us());
        rte_pktmbuf_free_bulk(mbufs, n);
    }
    return n;
}

/* A port whose interface went away or down says so once. */
static void report_failure(struct ckm_ports *ports, const struct ckm_port *port)
{
    int error = 0;
    socklen_t length = sizeof error;
    char reason[128];
    if (getsockopt(port->fd, SOL_SOCKET, SO_ERROR, &error, &length) || !error)
        return;
    snprintf(reason, sizeof reason, "receive port %s failed: %s", port->name, strerror(error));
    ckm_core_report(ports->core, reason, "whatever arrives until it is up again");
}

/* Sleeps until a packet comes, at most timeout_us. */
static void wait_for_packets(struct ckm_ports *ports, uint64_t timeout_us)
{
    struct pollfd fds[MAX_PORTS + 1] = {{.fd = ports->stop_fd, .events = POLLIN}};
    struct timespec timeout = {(time_t)(timeout_us / 1000000u), (long)(timeout_us % 1000000u) * 1000};
    for (uint32_t i = 0; i < ports->n; i++)
        fds[i + 1] = (struct pollfd){.fd = ports->ports[i].fd, .events = POLLIN};
    if (ppoll(fds, ports->n + 1, &timeout, NULL) <= 0)
        return;
    for (uint32_t i = 0; i < ports->n; i++)
        if (fds[i + 1].revents & (POLLERR | POLLHUP | POLLNVAL))
            report_failure(ports, &ports->ports[i]);
    nanosleep(&(struct timespec){.tv_nsec = GATHER_NS}, NULL);
}

static uint64_t longest_sleep(const struct ckm_ports *ports, uint64_t *backoff_us)
{
    for (uint32_t i = 0; i < ports->n; i++)
        if (ports->ports[i].fd < 0) {
            *backoff_us = *backoff_us ? *backoff_us * 2 : MIN_BACKOFF_US;
            *backoff_us = *backoff_us < MAX_BACKOFF_US ? *backoff_us : MAX_BACKOFF_US;
            return *backoff_us;
        }
    return MAX_SLEEP_US;
}

static void receive_all(struct ckm_ports *ports)
{
    uint64_t backoff_us = 0;
    while (!ports->stop) {
        unsigned n = 0;
        for (uint32_t i = 0; i < ports->n; i++)
            n += receive_from(ports, &ports->ports[i]);
        if (n) {
            backoff_us = 0;
            continue;
        }
        uint64_t drops = 0;
        for (uint32_t i = 0; i < ports->n; i++)
            drops += ckm_port_drops(&ports->ports[i]);
        ckm_core_note_idle(ports->core, drops);
        uint64_t next_us = ckm_core_tick(ports->core, ckm_now_us());
        uint64_t sleep_us = longest_sleep(ports, &backoff_us);
        wait_for_packets(ports, next_us < sleep_us ? next_us : sleep_us);
    }
}

static void *run(void *argument)
{
    struct ckm_ports *ports = argument;
    pthread_setname_np(pthread_self(), "checkmate-rx");
    setpriority(PRIO_PROCESS, 0, getpriority(PRIO_PROCESS, 0) - NICER); /* on Linux, of this thread alone */
    ports->failed =
        ckm_eal_enter(ports->configs, ports->n, ports->memory_mb, ports->huge_pages, ports->error, ports->error_size);
    if (ports->failed) {
        sem_post(&ports->opened);
        return NULL;
    }
    int failed = ports->failed = open_all(ports);
    sem_post(&ports->opened);
    if (!failed)
        receive_all(ports);
    close_all(ports);
    ckm_eal_leave();
    return NULL;
}

/* The thread takes no signals: they are for the application. */
static int start_thread(struct ckm_ports *ports)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&ports->thread, NULL, run, ports);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return failed;
}

static void destroy(struct ckm_ports *ports)
{
    if (ports->stop_fd >= 0)
        close(ports->stop_fd);
    sem_destroy(&ports->opened);
    free(ports);
}

struct ckm_ports *ckm_ports_open(struct ckm_core *core, const struct ckm_port_config *configs, uint32_t n,
                                 uint32_t memory_mb, int huge_pages, char *error, size_t error_size)
{
    if (n == 0 || n > MAX_PORTS) {
        snprintf(error, error_size, "%u receive ports: 1 to %u are possible", n, MAX_PORTS);
        return NULL;
    }
    struct ckm_ports *ports = calloc(1, sizeof *ports);
    if (!ports) {
        snprintf(error, error_size, "out of memory");
        return NULL;
    }
    ports->core = core;
    ports->configs = configs;
    ports->n = n;
    ports->memory_mb = memory_mb;
    ports->huge_pages = huge_pages;
    ports->error = error;
    ports->error_size = error_size;
    sem_init(&ports->opened, 0, 0);
    ports->stop_fd = eventfd(0, EFD_CLOEXEC);
    int failed = ports->stop_fd < 0 ? errno : start_thread(ports);
    if (failed) {
        snprintf(error, error_size, "the receive thread could not be started: %s", strerror(failed));
        destroy(ports);
        return NULL;
    }
    while (sem_wait(&ports->opened))
        ;
    if (ports->failed) {
        pthread_join(ports->thread, NULL);
        destroy(ports);
        return NULL;
    }
    return ports;
}

void ckm_ports_close(struct ckm_ports *ports)
{
    ports->stop = 1;
    eventfd_write(ports->stop_fd, 1);
    pthread_join(ports->thread, NULL);
    destroy(ports);
}
