/* What ingress finds out about a frame. */
#ifndef CHECKMATE_METADATA_P4
#define CHECKMATE_METADATA_P4

const bit<2> OTHER = 0;
const bit<2> TCP = 1;
const bit<2> MALFORMED = 2;

/* No multicast group has this number. */
const bit<16> NO_GROUP = 0;

struct metadata_t {
    bit<2> kind;
    bit<1> has_payload; /* of kind TCP */
    bit<1> tagged;
    bit<1> from_shadow;
    bit<1> refused;        /* from a shadow, and not for the registrar */
    bit<32> ip_difference; /* between the destination and the registrar */
    bit<16> port_difference;
    bit<16> group; /* of copies */
    bit<1> known;  /* the address is, and goes to port */
    bit<9> port;
    bit<16> flood_group;
    TARGET_METADATA
}

#endif
