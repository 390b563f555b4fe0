/* What ingress finds out about a frame. */
#ifndef CHECKMATE_METADATA_P4
#define CHECKMATE_METADATA_P4

const bit<2> OTHER = 0;
const bit<2> TCP = 1;
const bit<2> MALFORMED = 2;

struct metadata_t {
    bit<2> kind;
    bit<1> has_payload; /* of kind TCP */
    bit<1> from_shadow;
    bit<1> tagged;
    bit<1> copied; /* goes to group: rids mean something */
    bit<1> known;  /* goes to port, unless copied */
    bit<9> port;
    bit<16> group;
    bit<16> flood_group; /* goes to it, unless copied or known; 0: none */
    bit<32> ip_difference; /* between the destination and the registrar; 0: none */
    bit<16> port_difference;
    TARGET_METADATA
}

#endif
