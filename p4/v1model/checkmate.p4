/* The switch for BMv2's simple_switch_grpc (architecture v1model). What it does is in p4/shared; here is how this
 * target does it: BMv2 knows a frame's length in ingress, and has no incremental checksums. */
#include <core.p4>
#include <v1model.p4>

#define TARGET_METADATA

#include "../shared/constants.p4"
#include "../shared/headers.p4"
#include "../shared/metadata.p4"

const bit<4> IP_MIN_WORDS = 5;
const bit<4> TCP_MIN_WORDS = 5;

#define PORT_COUNTER(name)   counter(PORTS, CounterType.packets_and_bytes) name
#define COUNT(name, port)    name.count((bit<32>)port)
#define ENTRY_COUNTER(name)  direct_counter(CounterType.packets_and_bytes) name
#define COUNT_ENTRY(name)    /* counted by its table */

#define INGRESS_PORT         standard_metadata.ingress_port
#define SEND_TO_PORT(port)   standard_metadata.egress_spec = port
#define SEND_TO_GROUP(group) standard_metadata.mcast_grp = group
#define SEND_COPIES(group)   SEND_TO_GROUP(group) /* in class 0: BMv2 drops what it has no queue for */
#define DROP                 mark_to_drop(standard_metadata)
#define TELL_EGRESS          /* it has the metadata of ingress */

#define EGRESS_PORT          standard_metadata.egress_port
#define EGRESS_RID           standard_metadata.egress_rid
#define GROUP                meta.group

/* Nothing is computed while parsing. */
#define EXTRACTED_IPV4
#define EXTRACTED_TCP
#define EXTRACTED_OPTION

parser CheckmateParser(packet_in packet, out headers_t hdr, inout metadata_t meta,
                       inout standard_metadata_t standard_metadata) {
    state start {
        meta.kind = OTHER;
        transition parse_ethernet;
    }
#include "../shared/parser.p4"
}

/* Checksums are not verified: a wrong one is the receiver's to see, in the copy too. */
control CheckmateVerify(inout headers_t hdr, inout metadata_t meta) {
    apply {
    }
}

control CheckLengths(in headers_t hdr, inout metadata_t meta, in standard_metadata_t standard_metadata) {
    apply {
        bit<32> headers = (bit<32>)hdr.ethernet.minSizeInBytes();
        if (hdr.vlan.isValid()) {
            headers = headers + (bit<32>)hdr.vlan.minSizeInBytes();
        }
        bit<32> available = standard_metadata.packet_length - headers;
        bit<32> total = (bit<32>)hdr.ipv4.total_length;
        bit<32> ip_bytes = (bit<32>)hdr.ipv4.ihl << 2;
        bit<32> tcp_bytes = (bit<32>)hdr.tcp.data_offset << 2;
        if (standard_metadata.parser_error != error.NoError) {
            meta.kind = MALFORMED;
        } else if (hdr.ipv4.isValid()) {
            if (hdr.ipv4.version != IP_VERSION || hdr.ipv4.ihl < IP_MIN_WORDS || total < ip_bytes || total > available) {
                meta.kind = MALFORMED;
            } else if (hdr.tcp.isValid()) {
                if (hdr.tcp.data_offset < TCP_MIN_WORDS || total < ip_bytes + tcp_bytes) {
                    meta.kind = MALFORMED;
                } else {
                    meta.kind = TCP;
                    meta.has_payload = (bit<1>)(total > ip_bytes + tcp_bytes);
                }
            }
        }
    }
}

#define CHECK_LENGTHS CheckLengths.apply(hdr, meta, standard_metadata)

control CheckmateIngress(inout headers_t hdr, inout metadata_t meta, inout standard_metadata_t standard_metadata) {
#include "../shared/ingress.p4"
}

/* RFC 1624 on what is changed only, so that a wrong checksum stays wrong. */
bit<16> updated(in bit<16> checksum, in bit<32> before, in bit<32> after) {
    bit<32> sum = (bit<32>)(~checksum) + (bit<32>)(~before[31:16]) + (bit<32>)(~before[15:0]) +
                  (bit<32>)after[31:16] + (bit<32>)after[15:0];
    sum = (sum >> 16) + (sum & 0xffff);
    sum = (sum >> 16) + (sum & 0xffff);
    return ~sum[15:0];
}

#define UPDATE_CHECKSUMS(dst_ip) \
    hdr.ipv4.checksum = updated(hdr.ipv4.checksum, hdr.ipv4.dst_addr, dst_ip); \
    hdr.tcp.checksum = updated(hdr.tcp.checksum, hdr.ipv4.dst_addr, dst_ip); \
    hdr.tcp.checksum = updated(hdr.tcp.checksum, hdr.tcp.seq, hdr.tcp.seq + hdr.option.value)

control CheckmateEgress(inout headers_t hdr, inout metadata_t meta, inout standard_metadata_t standard_metadata) {
#include "../shared/egress.p4"
}

control CheckmateCompute(inout headers_t hdr, inout metadata_t meta) {
    apply {
    }
}

control CheckmateDeparser(packet_out packet, in headers_t hdr) {
    apply {
        packet.emit(hdr);
    }
}

@pkginfo(name="checkmate", version="1.0.0")
V1Switch(CheckmateParser(), CheckmateVerify(), CheckmateIngress(), CheckmateEgress(), CheckmateCompute(),
         CheckmateDeparser()) main;
