/* Numbers of the rules, the same on every target. Those of the TCP option repeat nccl_plugin/include/checkmate/wire.h,
 * the sizes p4/ebpf/maps.h, the class checkmate/config.py; tests/unit/test_p4_sources.py holds them together. */
#ifndef CHECKMATE_CONSTANTS_P4
#define CHECKMATE_CONSTANTS_P4

const bit<16> TYPE_IPV4 = 0x0800;
const bit<16> TYPE_VLAN = 0x8100;
const bit<8> PROTOCOL_TCP = 6;
const bit<4> IP_VERSION = 4;

const bit<8> OPTION_KIND = 253;
const bit<8> OPTION_LENGTH = 8;
const bit<16> OPTION_EXID = 0x434b;

/* Replica id of the frame itself; any other one names a rewrite entry. */
const bit<16> ORIGINAL_RID = 0;

/* Traffic class and queue of tagged frames, on the ports of next ranks and of shadows: the one that PFC pauses (policy
 * lossless), or that drops at the shadow's port (isolate). Everything else is in class 0. */
@noWarn("unused")
const bit<3> TAGGED_CLASS = 4;

#define PORTS           512
#define CLASSIFY_SIZE   64
#define HEARTBEAT_SIZE  4096
#define LIVE_GROUP_SIZE 1024
#define L2_FORWARD_SIZE 4096
#define REWRITE_SIZE    2048

#endif
