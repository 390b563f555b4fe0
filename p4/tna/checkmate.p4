/* The switch for Tofino 1 (architecture TNA). What it does is in p4/shared; here is how this target does it: ingress
 * does not know a frame's length and can't compute with header lengths, egress sees the frame anew, and checksums are
 * taken apart by the parser and put together by the deparser. */
#include <core.p4>
#include <tna.p4>

#include "../shared/constants.p4"
#include "../shared/headers.p4"

/* What ingress tells egress, in front of the frame. */
header bridge_t {
    bit<16> group; /* of copies */
    @padding bit<7> reserved;
    bit<9> ingress_port;
}

#define TARGET_METADATA bridge_t bridge;
#include "../shared/metadata.p4"

/* The residues are the checksums without what a rewrite changes. */
struct egress_metadata_t {
    bridge_t bridge;
    bit<1> rewritten;
    bit<16> ip_residue;
    bit<16> tcp_residue;
}

#define ENTRY_COUNTER(name) DirectCounter<bit<64>>(CounterType_t.PACKETS_AND_BYTES) name
#define COUNT_ENTRY(name)   name.count()
#define PORT_COUNTER(name)  Counter<bit<64>, PortId_t>(PORTS, CounterType_t.PACKETS_AND_BYTES) name

/* Ingress */

parser CheckmateIngressParser(packet_in packet, out headers_t hdr, out metadata_t meta,
                              out ingress_intrinsic_metadata_t ig_intr_md) {
    state start {
        packet.extract(ig_intr_md);
        packet.advance(PORT_METADATA_SIZE);
        meta.kind = OTHER;
        meta.has_payload = 0;
        meta.from_shadow = 0;
        meta.refused = 0;
        meta.tagged = 0;
        meta.known = 0;
        meta.port = 0;
        meta.group = NO_GROUP;
        meta.flood_group = NO_GROUP;
        meta.ip_difference = 0;
        meta.port_difference = 0;
        meta.bridge.setInvalid();
        transition parse_ethernet;
    }
#define EXTRACTED_IPV4
#define EXTRACTED_TCP
#define EXTRACTED_OPTION
#include "../shared/parser.p4"
#undef EXTRACTED_IPV4
#undef EXTRACTED_TCP
#undef EXTRACTED_OPTION
}

#define PAIR(ihl, words)                                                                                               \
    (true, ihl, words, 0 .. 4 * (ihl + words) - 1): malformed();                                                       \
    (true, ihl, words, 4 * (ihl + words) .. 4 * (ihl + words)): tcp(0);

#define PAIRS(ihl)                                                                                                     \
    (false, ihl, _, 0 .. 4 * ihl - 1): malformed();                                                                    \
    PAIR(ihl, 5) PAIR(ihl, 6) PAIR(ihl, 7) PAIR(ihl, 8) PAIR(ihl, 9) PAIR(ihl, 10) PAIR(ihl, 11) PAIR(ihl, 12)         \
    PAIR(ihl, 13) PAIR(ihl, 14) PAIR(ihl, 15)

/* Whether the lengths in an IPv4 and a TCP header agree. A match-action unit can't add a shifted field to another one,
 * but it can look all of their 121 pairs up, with the total length, in one stage. */
control CheckLengths(in headers_t hdr, inout metadata_t meta, in ingress_intrinsic_metadata_from_parser_t parsed) {
    @hidden
    action malformed() {
        meta.kind = MALFORMED;
    }

    @hidden
    action tcp(bit<1> has_payload) {
        meta.kind = TCP;
        meta.has_payload = has_payload;
    }

    @hidden
    table lengths {
        key = {
            hdr.tcp.isValid(): ternary;
            hdr.ipv4.ihl: ternary;
            hdr.tcp.data_offset: ternary;
            hdr.ipv4.total_length: range;
        }
        actions = {
            malformed;
            tcp;
            NoAction;
        }
        const entries = {
            (_, 0 &&& 12, _, _): malformed();
            (_, 4, _, _): malformed();
            (true, _, 0 &&& 12, _): malformed();
            (true, _, 4, _): malformed();
            PAIRS(5)
            PAIRS(6)
            PAIRS(7)
            PAIRS(8)
            PAIRS(9)
            PAIRS(10)
            PAIRS(11)
            PAIRS(12)
            PAIRS(13)
            PAIRS(14)
            PAIRS(15)
            (true, _, _, _): tcp(1);
        }
        const default_action = NoAction;
    }

    apply {
        if (parsed.parser_err != PARSER_ERROR_OK || (hdr.ipv4.isValid() && hdr.ipv4.version != IP_VERSION)) {
            malformed();
        } else if (hdr.ipv4.isValid()) {
            lengths.apply();
        }
    }
}

#define INGRESS_PORT         ig_intr_md.ingress_port
#define COUNT(name, port)    name.count(port)
#define CHECK_LENGTHS        CheckLengths.apply(hdr, meta, ig_intr_md_from_prsr)
#define SEND_TO_PORT(port)   ig_intr_md_for_tm.ucast_egress_port = port
#define SEND_TO_GROUP(group) ig_intr_md_for_tm.mcast_grp_a = group
#define DROP                 ig_intr_md_for_dprsr.drop_ctl = 1
#define TELL_EGRESS                                                                                                    \
    meta.bridge.setValid();                                                                                            \
    meta.bridge.group = meta.group;                                                                                    \
    meta.bridge.ingress_port = ig_intr_md.ingress_port
#define SEND_COPIES(group)                                                                                             \
    SEND_TO_GROUP(group);                                                                                              \
    ig_intr_md_for_tm.qid = (QueueId_t)TAGGED_CLASS;                                                                     \
    ig_intr_md_for_tm.ingress_cos = TAGGED_CLASS

control CheckmateIngress(inout headers_t hdr, inout metadata_t meta, in ingress_intrinsic_metadata_t ig_intr_md,
                         in ingress_intrinsic_metadata_from_parser_t ig_intr_md_from_prsr,
                         inout ingress_intrinsic_metadata_for_deparser_t ig_intr_md_for_dprsr,
                         inout ingress_intrinsic_metadata_for_tm_t ig_intr_md_for_tm) {
#include "../shared/ingress.p4"
}

control CheckmateIngressDeparser(packet_out packet, inout headers_t hdr, in metadata_t meta) {
    apply {
        packet.emit(meta.bridge);
        packet.emit(hdr);
    }
}

#undef INGRESS_PORT
#undef COUNT
#undef DROP

/* Egress */

parser CheckmateEgressParser(packet_in packet, out headers_t hdr, out egress_metadata_t meta,
                             out egress_intrinsic_metadata_t eg_intr_md) {
    Checksum() ip_checksum;
    Checksum() tcp_checksum;

    state start {
        packet.extract(eg_intr_md);
        packet.extract(meta.bridge);
        meta.rewritten = 0;
        meta.ip_residue = 0;
        meta.tcp_residue = 0;
        transition parse_ethernet;
    }
#define EXTRACTED_IPV4                                                                                                 \
    ip_checksum.subtract({hdr.ipv4.checksum, hdr.ipv4.dst_addr});                                                      \
    tcp_checksum.subtract({hdr.ipv4.dst_addr})
#define EXTRACTED_TCP tcp_checksum.subtract({hdr.tcp.seq, hdr.tcp.checksum})
#define EXTRACTED_OPTION                                                                                               \
    ip_checksum.subtract_all_and_deposit(meta.ip_residue);                                                             \
    tcp_checksum.subtract_all_and_deposit(meta.tcp_residue)
#include "../shared/parser.p4"
}

#define INGRESS_PORT             meta.bridge.ingress_port
#define GROUP                    meta.bridge.group
#define EGRESS_PORT              eg_intr_md.egress_port
#define EGRESS_RID               eg_intr_md.egress_rid
#define COUNT(name, port)        name.count(port, sizeInBytes(meta.bridge))
#define UPDATE_CHECKSUMS(dst_ip) meta.rewritten = 1
#define DROP                     eg_intr_md_for_dprsr.drop_ctl = 1

control CheckmateEgress(inout headers_t hdr, inout egress_metadata_t meta, in egress_intrinsic_metadata_t eg_intr_md,
                        in egress_intrinsic_metadata_from_parser_t eg_intr_md_from_prsr,
                        inout egress_intrinsic_metadata_for_deparser_t eg_intr_md_for_dprsr,
                        inout egress_intrinsic_metadata_for_output_port_t eg_intr_md_for_oport) {
#include "../shared/egress.p4"
}

control CheckmateEgressDeparser(packet_out packet, inout headers_t hdr, in egress_metadata_t meta) {
    Checksum() ip_checksum;
    Checksum() tcp_checksum;

    apply {
        if (meta.rewritten == 1) {
            hdr.ipv4.checksum = ip_checksum.update({hdr.ipv4.dst_addr, meta.ip_residue});
            hdr.tcp.checksum = tcp_checksum.update({hdr.ipv4.dst_addr, hdr.tcp.seq, meta.tcp_residue});
        }
        packet.emit(hdr);
    }
}

/* A stage writes a container of the PHV once: notes of tables that share no container can be taken in one stage. */
@pa_solitary("ingress", "meta.tagged")
@pa_solitary("ingress", "meta.known")
@pa_solitary("ingress", "meta.refused")
@pa_solitary("ingress", "meta.from_shadow")
@pa_solitary("ingress", "meta.kind")
@pa_solitary("ingress", "meta.has_payload")
Pipeline(CheckmateIngressParser(), CheckmateIngress(), CheckmateIngressDeparser(), CheckmateEgressParser(),
         CheckmateEgress(), CheckmateEgressDeparser()) pipe;

@egress_intrinsic_metadata_opt
@pkginfo(name="checkmate", version="1.0.0")
Switch(pipe) main;
