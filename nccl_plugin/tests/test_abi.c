/* The library as NCCL finds it: loaded with dlopen, every version's tables there and every entry filled. */
#include <dlfcn.h>

#include "nccl/net_abi.h"
#include "nccl/profiler_abi.h"
#include "test.h"

static void check_table(void *library, const char *symbol, size_t bytes)
{
    void **table = dlsym(library, symbol);

    if (!table) {
        fprintf(stderr, "%s is missing\n", symbol);
        exit(1);
    }
    for (size_t i = 0; i < bytes / sizeof(void *); i++)
        if (!table[i]) {
            fprintf(stderr, "entry %zu of %s is empty\n", i, symbol);
            exit(1);
        }
    CHECK(strcmp(table[0], "Checkmate") == 0);
}

int main(void)
{
    void *library = dlopen(LIB, RTLD_NOW | RTLD_LOCAL);
    CHECK(library);
    check_table(library, "ncclNetPlugin_v8", sizeof(struct nccl_net_v8));
    check_table(library, "ncclNetPlugin_v9", sizeof(struct nccl_net_v9));
    check_table(library, "ncclNetPlugin_v10", sizeof(struct nccl_net_v10));
    check_table(library, "ncclNetPlugin_v11", sizeof(struct nccl_net_v11));
    check_table(library, "ncclNetPlugin_v12", sizeof(struct nccl_net_v12));
    check_table(library, "ncclProfiler_v2", sizeof(struct nccl_profiler_v2));
    check_table(library, "ncclProfiler_v3", sizeof(struct nccl_profiler_v3));
    check_table(library, "ncclProfiler_v4", sizeof(struct nccl_profiler_v4));
    check_table(library, "ncclProfiler_v5", sizeof(struct nccl_profiler_v5));
    check_table(library, "ncclProfiler_v6", sizeof(struct nccl_profiler_v6));
    CHECK(!dlsym(library, "ckm_net_isend")); /* nothing internal is exported */
    CHECK_EQ(dlclose(library), 0);
    return 0;
}
