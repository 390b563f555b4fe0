/* Which headers a library was built from. Every library of ours that Python calls has one. */
#include <stdint.h>

__attribute__((visibility("default"))) extern const uint64_t checkmate_abi;
const uint64_t checkmate_abi = CHECKMATE_ABI;
