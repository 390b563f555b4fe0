/* Where a frame goes, included in control CheckmateIngress of each target.
 *
 * Tables only take notes; the end of apply sends. The target says how with macros: INGRESS_PORT, PORT_COUNTER,
 * ENTRY_COUNTER, COUNT_ENTRY, COUNT, CHECK_LENGTHS, SEND_TO_PORT, SEND_TO_GROUP, SEND_COPIES, DROP, TELL_EGRESS.
 */
    PORT_COUNTER(tagged_in);
    PORT_COUNTER(untagged);
    PORT_COUNTER(tagged_without_option);
    PORT_COUNTER(group_missing);
    PORT_COUNTER(shadow_dropped);
    PORT_COUNTER(malformed);
    PORT_COUNTER(dropped);
    ENTRY_COUNTER(heartbeat_counter);

    action mark_tagged() {
        meta.tagged = 1;
    }

    table classify {
        key = {
            hdr.ipv4.dscp: ternary @name("ipv4.dscp");
        }
        actions = {
            mark_tagged;
            @defaultonly NoAction;
        }
        const default_action = NoAction;
        size = CLASSIFY_SIZE;
    }

    action trainer_port() {
    }

    action shadow_port(bit<32> registrar_ip, bit<16> registrar_port) {
        meta.from_shadow = 1;
        meta.refused = 1; /* unless it is registration */
        meta.ip_difference = hdr.ipv4.dst_addr ^ registrar_ip;
        meta.port_difference = hdr.tcp.dst_port ^ registrar_port;
    }

    table port_role {
        key = {
            INGRESS_PORT: exact @name("ingress_port");
        }
        actions = {
            trainer_port;
            shadow_port;
        }
        const default_action = trainer_port;
        size = PORTS;
    }

    action replicate(bit<16> group) {
        COUNT_ENTRY(heartbeat_counter);
        meta.group = group;
    }

    table heartbeat {
        key = {
            INGRESS_PORT: exact @name("ingress_port");
            hdr.ethernet.dst_addr: exact @name("ethernet.dst_addr");
        }
        actions = {
            replicate;
            @defaultonly NoAction;
        }
        const default_action = NoAction;
        counters = heartbeat_counter;
        size = HEARTBEAT_SIZE;
    }

    action group_is_live() {
    }

    action group_is_not_live() {
        meta.group = NO_GROUP;
    }

    /* A replication engine drops what is for a group that it does not have, and nothing here can ask it. So a group is
     * used only while the control plane says that it is there. */
    table live_group {
        key = {
            meta.group: exact @name("group");
        }
        actions = {
            group_is_live;
            @defaultonly group_is_not_live;
        }
        const default_action = group_is_not_live;
        size = LIVE_GROUP_SIZE;
    }

    action forward(bit<9> port) {
        meta.known = 1;
        meta.port = port;
    }

    action flood(bit<16> group) {
        meta.flood_group = group;
    }

    action drop() {
    }

    table l2_forward {
        key = {
            hdr.ethernet.dst_addr: exact @name("ethernet.dst_addr");
        }
        actions = {
            forward;
            flood;
            drop;
        }
        default_action = drop;
        size = L2_FORWARD_SIZE;
    }

    apply {
        CHECK_LENGTHS;
        port_role.apply();
        classify.apply();
        l2_forward.apply();
        if (meta.ip_difference == 0) { /* one condition for both is more than Tofino compares at once */
            if (meta.kind == TCP && meta.port_difference == 0) {
                meta.refused = 0;
            }
        }
        if (meta.from_shadow == 1) {
            if (meta.refused == 1) {
                COUNT(shadow_dropped, INGRESS_PORT);
            }
        } else if (meta.kind == MALFORMED) {
            COUNT(malformed, INGRESS_PORT);
        } else if (meta.has_payload == 1 && meta.tagged == 1) {
            COUNT(tagged_in, INGRESS_PORT);
            if (hdr.option.isValid() && hdr.option.kind == OPTION_KIND && hdr.option.length == OPTION_LENGTH &&
                hdr.option.exid == OPTION_EXID) {
                if (heartbeat.apply().hit) {
                    live_group.apply();
                    if (meta.group == NO_GROUP) {
                        COUNT(group_missing, INGRESS_PORT);
                    }
                }
            } else {
                COUNT(tagged_without_option, INGRESS_PORT);
            }
        } else {
            COUNT(untagged, INGRESS_PORT);
        }

        if (meta.refused == 1) {
            DROP;
        } else if (meta.group != NO_GROUP) {
            SEND_COPIES(meta.group);
        } else if (meta.known == 1 && meta.port != INGRESS_PORT) {
            SEND_TO_PORT(meta.port);
        } else if (meta.known == 0 && meta.flood_group != NO_GROUP) {
            SEND_TO_GROUP(meta.flood_group);
        } else {
            COUNT(dropped, INGRESS_PORT);
            DROP;
        }
        TELL_EGRESS;
    }
