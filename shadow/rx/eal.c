#include "eal.h"

#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <rte_eal.h>
#include <rte_errno.h>
#include <rte_lcore.h>

#define MAX_ARGS 64
#define ARG_SIZE 1024

struct args {
    char *argv[MAX_ARGS + 1];
    char text[MAX_ARGS][ARG_SIZE];
    int argc;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int is_up, has_pci;

static void add(struct args *args, const char *text)
{
    if (args->argc == MAX_ARGS)
        return;
    snprintf(args->text[args->argc], ARG_SIZE, "%s", text);
    args->argv[args->argc] = args->text[args->argc];
    args->argc++;
}

/* One lcore that floats over the processors that the thread may use anyway: EAL then pins nothing. */
static void add_lcore(struct args *args)
{
    char text[ARG_SIZE];
    cpu_set_t allowed;
    int used = snprintf(text, sizeof text, "0@(");
    const char *comma = "";
    sched_getaffinity(0, sizeof allowed, &allowed);
    for (int cpu = 0; cpu < CPU_SETSIZE && used < ARG_SIZE - 16; cpu++)
        if (CPU_ISSET(cpu, &allowed)) {
            used += snprintf(text + used, sizeof text - (size_t)used, "%s%d", comma, cpu);
            comma = ",";
        }
    snprintf(text + used, sizeof text - (size_t)used, ")");
    add(args, "--lcores");
    add(args, text);
}

static void add_memory(struct args *args, uint32_t memory_mb, int huge_pages)
{
    char text[16];
    snprintf(text, sizeof text, "%u", memory_mb);
    add(args, "-m");
    add(args, text);
    if (huge_pages) {
        add(args, "--in-memory");
    } else {
        add(args, "--no-huge");
        add(args, "--no-shconf");
    }
}

static int add_devices(struct args *args, const struct ckm_port_config *ports, uint32_t n)
{
    int pci = 0;
    for (uint32_t i = 0; i < n; i++)
        if (ports[i].pci) {
            add(args, "-a");
            add(args, ports[i].name);
            pci = 1;
        }
    if (!pci)
        add(args, "--no-pci");
    return pci;
}

/* A name of our own for what EAL keeps in the file system, which is an empty directory. */
static void add_prefix(struct args *args)
{
    char text[32];
    snprintf(text, sizeof text, "checkmate-%d", (int)getpid());
    add(args, "--file-prefix");
    add(args, text);
}

/* Nobody needs it after start, and nobody would remove it later. In use by others, the upper one stays. */
static void remove_runtime_dir(void)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s", rte_eal_get_runtime_dir());
    char *slash = strrchr(path, '/');
    if (rmdir(path) || !slash)
        return;
    *slash = 0;
    rmdir(path);
}

static int start(const struct ckm_port_config *ports, uint32_t n, uint32_t memory_mb, int huge_pages, char *error,
                 size_t error_size)
{
    struct args args = {.argc = 0};
    add(&args, "checkmate-shadow");
    add(&args, "--no-telemetry");
    add(&args, "--log-level=4"); /* errors */
    add_lcore(&args);
    add_memory(&args, memory_mb, huge_pages);
    add_prefix(&args);
    has_pci = add_devices(&args, ports, n);
    if (rte_eal_init(args.argc, args.argv) < 0) {
        snprintf(error, error_size, "DPDK could not be set up: %s%s", rte_strerror(rte_errno),
                 huge_pages ? "; huge_pages needs reserved huge pages (vm.nr_hugepages)" : "");
        return -1;
    }
    remove_runtime_dir();
    is_up = 1;
    return 0;
}

static int join(const struct ckm_port_config *ports, uint32_t n, char *error, size_t error_size)
{
    for (uint32_t i = 0; i < n; i++)
        if (ports[i].pci && !has_pci) {
            snprintf(error, error_size,
                     "PCI port %s: DPDK was set up without PCI devices in this process; start the "
                     "receiver that has them first",
                     ports[i].name);
            return -1;
        }
    if (rte_lcore_id() == LCORE_ID_ANY && rte_thread_register()) {
        snprintf(error, error_size, "too many receive threads in one process: %s", rte_strerror(rte_errno));
        return -1;
    }
    return 0;
}

int ckm_eal_enter(const struct ckm_port_config *ports, uint32_t n, uint32_t memory_mb, int huge_pages, char *error,
                  size_t error_size)
{
    pthread_mutex_lock(&lock);
    int result = is_up ? join(ports, n, error, error_size) : start(ports, n, memory_mb, huge_pages, error, error_size);
    pthread_mutex_unlock(&lock);
    return result;
}

void ckm_eal_leave(void)
{
    /* The thread that set EAL up has its lcore for good: a thread that registered gives its back. */
    if (rte_lcore_id() != rte_get_main_lcore())
        rte_thread_unregister();
}
