/* Headers of the frames that the rules look at. */
#ifndef CHECKMATE_HEADERS_P4
#define CHECKMATE_HEADERS_P4

header ethernet_t {
    bit<48> dst_addr;
    bit<48> src_addr;
    bit<16> ether_type;
}

header vlan_t {
    bit<16> tag;
    bit<16> ether_type;
}

header ipv4_t {
    bit<4> version;
    bit<4> ihl;
    bit<6> dscp;
    bit<2> ecn;
    bit<16> total_length;
    bit<16> identification;
    bit<2> reserved_and_df;
    bit<14> fragment; /* more-fragments flag and fragment offset */
    bit<8> ttl;
    bit<8> protocol;
    bit<16> checksum;
    bit<32> src_addr;
    bit<32> dst_addr;
}

header tcp_t {
    bit<16> src_port;
    bit<16> dst_port;
    bit<32> seq;
    bit<32> ack;
    bit<4> data_offset;
    bit<12> flags;
    bit<16> window;
    bit<16> checksum;
    bit<16> urgent;
}

/* The last 8 bytes of the TCP header, whatever they are: counter = seq + value where kind, length and ExID are ours. */
header option_t {
    bit<8> kind;
    bit<8> length;
    bit<16> exid;
    bit<32> value;
}

/* Up to 10 words of 32 bits that are only carried along, in the order of their extraction. */
header words8_t {
    bit<256> words;
}

header words4_t {
    bit<128> words;
}

header words2_t {
    bit<64> words;
}

header words1_t {
    bit<32> words;
}

struct words_t {
    words8_t eight;
    words4_t four;
    words2_t two;
    words1_t one;
}

struct headers_t {
    ethernet_t ethernet;
    vlan_t vlan;
    ipv4_t ipv4;
    words_t ip_options;
    tcp_t tcp;
    words_t tcp_options;
    option_t option;
}

#endif
