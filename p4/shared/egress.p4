/* What a replica becomes, included in control CheckmateEgress of each target.
 *
 * The target says how with macros: INGRESS_PORT, EGRESS_PORT, EGRESS_RID, GROUP, PORT_COUNTER, COUNT,
 * UPDATE_CHECKSUMS, DROP.
 * A copy without a rewrite entry would reach the shadow with the wrong sequence numbers: it is dropped.
 */
    PORT_COUNTER(copies_out);
    PORT_COUNTER(rewrite_missing);

    action to_shadow(bit<48> src_mac, bit<48> dst_mac, bit<32> dst_ip) {
        UPDATE_CHECKSUMS(dst_ip);
        hdr.ethernet.src_addr = src_mac;
        hdr.ethernet.dst_addr = dst_mac;
        hdr.ipv4.dst_addr = dst_ip;
        hdr.tcp.seq = hdr.tcp.seq + hdr.option.value;
    }

    table rewrite {
        key = {
            EGRESS_PORT: exact @name("egress_port");
            EGRESS_RID: exact @name("egress_rid");
        }
        actions = {
            to_shadow;
            @defaultonly NoAction;
        }
        const default_action = NoAction;
        size = REWRITE_SIZE;
    }

    apply {
        if (EGRESS_PORT == INGRESS_PORT) {
            DROP; /* a group may hold the port that a frame came from */
        } else if (GROUP != NO_GROUP && EGRESS_RID != ORIGINAL_RID) {
            if (rewrite.apply().hit) {
                COUNT(copies_out, EGRESS_PORT);
            } else {
                COUNT(rewrite_missing, EGRESS_PORT);
                DROP;
            }
        }
    }
