/* Loads the plugin's tables and initialises them for one communicator, in NCCL's order: net, then profiler. */
#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>

#include "engine.h"

__attribute__((format(printf, 5, 6))) static void log_line(nccl_log_level_t level, unsigned long subsys,
                                                           const char *file, int line, const char *format, ...)
{
    (void)subsys, (void)file, (void)line;
    if (level > NCCL_LOG_WARN)
        return;
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    fprintf(stderr, "checkmate ring: %s\n", text);
}

static nccl_result_t no_network_events(void **handle, int type, void *parent, int64_t id, void *data)
{
    (void)handle, (void)type, (void)parent, (void)id, (void)data;
    return NCCL_SUCCESS;
}

int ckm_plugin_load(struct ckm_plugin *plugin, const char *path, char *error, size_t error_bytes)
{
    /* Never closed: the plugin's counters and registrations belong to the process. */
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        snprintf(error, error_bytes, "cannot load the net plugin %s: %s", path, dlerror());
        return -1;
    }
    plugin->net = dlsym(library, "ncclNetPlugin_v11");
    plugin->profiler = dlsym(library, "ncclProfiler_v5");
    *(void **)&plugin->net_wait = dlsym(library, "checkmate_net_wait");
    if (plugin->net && plugin->net_wait)
        return 0;
    snprintf(error, error_bytes, "the net plugin %s has no %s", path,
             plugin->net ? "checkmate_net_wait" : "ncclNetPlugin_v11");
    return -1;
}

static int check_devices(struct ckm_ring *ring, char *error, size_t error_bytes)
{
    const struct nccl_net_v11 *net = ring->plugin.net;
    int ndev = 0;
    nccl_result_t result = net->devices(&ndev);
    if (result != NCCL_SUCCESS || ndev < 1) {
        snprintf(error, error_bytes, "net plugin %s: no device (%s); CHECKMATE_IFNAME selects the interfaces",
                 net->name, ckm_result_text(result));
        return -1;
    }
    for (int dev = 0; dev < ndev; dev++) {
        struct nccl_net_properties_v11 props = {0};
        result = net->getProperties(dev, &props);
        if (result != NCCL_SUCCESS || !(props.ptrSupport & NCCL_PTR_HOST)) {
            snprintf(error, error_bytes, "net plugin %s: device %d takes no host memory (%s)", net->name, dev,
                     ckm_result_text(result));
            return -1;
        }
    }
    for (uint32_t c = 0; c < ring->config.nchannels; c++)
        ring->channels[c].send.dev = ring->channels[c].recv.dev = (int)(c % (uint32_t)ndev);
    return 0;
}

int ckm_plugin_open(struct ckm_ring *ring, char *error, size_t error_bytes)
{
    const struct ckm_ring_config *config = &ring->config;
    if (ckm_plugin_load(&ring->plugin, config->plugin, error, error_bytes))
        return -1;
    struct nccl_net_config_v10 net_config = {.trafficClass = -1};
    nccl_result_t result =
        ring->plugin.net->init(&ring->net_ctx, config->comm_id, &net_config, log_line, no_network_events);
    if (result != NCCL_SUCCESS) {
        snprintf(error, error_bytes, "net plugin %s: init failed: %s", ring->plugin.net->name, ckm_result_text(result));
        return -1;
    }
    if (check_devices(ring, error, error_bytes))
        return -1;
    if (ring->plugin.profiler &&
        ring->plugin.profiler->init(&ring->prof_ctx, config->comm_id, &ring->mask, ring->name, (int)config->nranks,
                                    (int)config->nranks, (int)config->rank, log_line) != NCCL_SUCCESS)
        ring->plugin.profiler = NULL; /* as NCCL: go on without */
    return 0;
}
