/* Parser states, included in the parser of each target after its own states; they begin at parse_ethernet.
 *
 * The option is always the last one in the TCP header (its last 8 bytes): the states skip what comes before, whatever
 * it is. What they skip is kept in headers: a deparser sends only what was extracted. A frame that ends within a
 * header, and an IPv4 header that can't be one, stop the parser; whether they are malformed is for ingress to say.
 * The macros EXTRACTED_IPV4, EXTRACTED_TCP and EXTRACTED_OPTION are for targets that compute checksums here.
 */
    state parse_ethernet {
        packet.extract(hdr.ethernet);
        transition select(hdr.ethernet.ether_type) {
            TYPE_VLAN: parse_vlan;
            TYPE_IPV4: parse_ipv4;
            default: accept;
        }
    }

    state parse_vlan {
        packet.extract(hdr.vlan);
        transition select(hdr.vlan.ether_type) {
            TYPE_IPV4: parse_ipv4;
            default: accept;
        }
    }

    state parse_ipv4 {
        packet.extract(hdr.ipv4);
        EXTRACTED_IPV4;
        transition select(hdr.ipv4.version, hdr.ipv4.ihl) {
            (IP_VERSION, 5): parse_protocol;
            (IP_VERSION, 6): parse_ip_1;
            (IP_VERSION, 7): parse_ip_2;
            (IP_VERSION, 8): parse_ip_2;
            (IP_VERSION, 9): parse_ip_4;
            (IP_VERSION, 10): parse_ip_4;
            (IP_VERSION, 11): parse_ip_4;
            (IP_VERSION, 12): parse_ip_4;
            (IP_VERSION, 13): parse_ip_8;
            (IP_VERSION, 14): parse_ip_8;
            (IP_VERSION, 15): parse_ip_8;
            default: accept;
        }
    }

    state parse_ip_8 {
        packet.extract(hdr.ip_options.eight);
        transition select(hdr.ipv4.ihl) {
            14: parse_ip_1;
            15: parse_ip_2;
            default: parse_protocol;
        }
    }

    state parse_ip_4 {
        packet.extract(hdr.ip_options.four);
        transition select(hdr.ipv4.ihl) {
            10: parse_ip_1;
            11: parse_ip_2;
            12: parse_ip_2;
            default: parse_protocol;
        }
    }

    state parse_ip_2 {
        packet.extract(hdr.ip_options.two);
        transition select(hdr.ipv4.ihl) {
            8: parse_ip_1;
            12: parse_ip_1;
            default: parse_protocol;
        }
    }

    state parse_ip_1 {
        packet.extract(hdr.ip_options.one);
        transition parse_protocol;
    }

    state parse_protocol {
        transition select(hdr.ipv4.fragment, hdr.ipv4.protocol) {
            (0, PROTOCOL_TCP): parse_tcp;
            default: accept;
        }
    }

    state parse_tcp {
        packet.extract(hdr.tcp);
        EXTRACTED_TCP;
        transition select(hdr.tcp.data_offset) {
            7: parse_option;
            8: parse_tcp_1;
            9: parse_tcp_2;
            10: parse_tcp_2;
            11: parse_tcp_4;
            12: parse_tcp_4;
            13: parse_tcp_4;
            14: parse_tcp_4;
            15: parse_tcp_8;
            default: accept; /* no room for the option; 6 words leave one in the payload, which is sent as it is */
        }
    }

    state parse_tcp_8 {
        packet.extract(hdr.tcp_options.eight);
        transition parse_option;
    }

    state parse_tcp_4 {
        packet.extract(hdr.tcp_options.four);
        transition select(hdr.tcp.data_offset) {
            12: parse_tcp_1;
            13: parse_tcp_2;
            14: parse_tcp_2;
            default: parse_option;
        }
    }

    state parse_tcp_2 {
        packet.extract(hdr.tcp_options.two);
        transition select(hdr.tcp.data_offset) {
            10: parse_tcp_1;
            14: parse_tcp_1;
            default: parse_option;
        }
    }

    state parse_tcp_1 {
        packet.extract(hdr.tcp_options.one);
        transition parse_option;
    }

    state parse_option {
        packet.extract(hdr.option);
        EXTRACTED_OPTION;
        transition accept;
    }
