"""What the switch does with single frames, frame kind by frame kind, and with its rules changed under traffic."""

from collections.abc import Callable
from typing import Any

import pytest
from ptf import frames
from ptf.frames import NOP, REGISTRAR, REGISTRAR_TCP, TIMESTAMP, counter, patched, tcp
from ptf.model import Headers, checksums_valid, parse
from ptf.rules import COPY_MAC, GROUPS, HEARTBEATS, address, rules
from ptf.target import SHADOW_PORTS, TRAINER_PORTS, SwitchUnderTest
from scapy.layers.inet import IP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import ARP, Dot1AD, Dot1Q, Ether
from scapy.packet import Raw

from checkmate import config
from checkmate.controlplane.reconcile import batches, reconcile
from checkmate.controlplane.target import Kind, TargetError, Update
from checkmate.plan import Multicast, Replica

pytestmark = pytest.mark.root

IP_AT, TCP_AT = 14, 34
SACK = ("SAck", (1000, 2000))


@pytest.fixture(scope="module")
def switch(running_switch: SwitchUnderTest) -> SwitchUnderTest:
    running_switch.program(rules())
    return running_switch


@pytest.fixture
def reprogrammed(switch: SwitchUnderTest) -> Any:
    yield switch
    switch.program(rules())


def copied(switch: SwitchUnderTest, frame: bytes, source: int = 1, target: int = 2, *shadows: int) -> None:
    """The frame reaches the next rank as it is, and each shadow once, rewritten, with valid checksums."""
    shadows = shadows or (5,)
    out = switch.expect((source, frame))
    assert {port: len(got) for port, got in out.items() if got} == {target: 1} | dict.fromkeys(shadows, 1)
    assert out[target] == [frame]
    sent = parse(frame)
    for shadow in shadows:
        (received,) = out[shadow]
        headers = parse(received)
        assert isinstance(sent, Headers)
        assert isinstance(headers, Headers)
        assert headers.seq == sent.counter
        assert headers.dst_ip == address(shadow)
        assert received[:6] == frames.mac_number(shadow).to_bytes(6, "big")
        assert received[6:12] == (COPY_MAC | shadow).to_bytes(6, "big")
        assert checksums_valid(received)
        assert len(received) == len(frame)


def forwarded(switch: SwitchUnderTest, frame: bytes, *counts: str, source: int = 1, target: int = 2) -> None:
    """The frame reaches its destination as it is, nobody else, and just these counters of its port move."""
    before = switch.counters()
    out = switch.expect((source, frame))
    assert {port: got for port, got in out.items() if got} == {target: [frame]}
    after = switch.counters()
    for name in ("tagged_in", "tagged_without_option", "malformed", "group_missing", "dropped"):
        full = f"CheckmateIngress.{name}"
        moved = after.ports[full].get(source, (0, 0))[0] - before.ports[full].get(source, (0, 0))[0]
        assert moved == (name in counts), name


COPIED: dict[str, Callable[[], bytes]] = {
    "option alone": lambda: tcp(1, 2),
    "timestamps before it": lambda: tcp(1, 2, [NOP, NOP, TIMESTAMP, counter()]),
    "SACK before it": lambda: tcp(1, 2, [NOP, NOP, SACK, counter()]),
    "timestamps and SACK before it": lambda: tcp(1, 2, [NOP, NOP, TIMESTAMP, NOP, NOP, SACK, counter()]),
    "longest TCP header": lambda: tcp(1, 2, [NOP] * 32 + [counter()]),
    "IPv4 options": lambda: tcp(1, 2, ip_fields={"options": [("\x94\x04\0\0")]}),
    "longest headers": lambda: tcp(1, 2, [NOP] * 32 + [counter()], ip_fields={"options": "\x01" * 40}),
    "VLAN tag": lambda: tcp(1, 2, vlans=[42]),
    "VLAN tag 0 with priority": lambda: (
        bytes(Ether(src=frames.mac(1), dst=frames.mac(2)) / Dot1Q(prio=5, vlan=0, type=0x0800)) + tcp(1, 2)[IP_AT:]
    ),
    "other DSCP bits too": lambda: tcp(1, 2, tos=0xFC),
    "ECN bits too": lambda: tcp(1, 2, tos=frames.TOS | 3),
    "one byte": lambda: tcp(1, 2, payload=b"x"),
    "one byte, padded to the least frame": lambda: tcp(1, 2, payload=b"x").ljust(80, b"\0"),
    "odd length": lambda: tcp(1, 2, payload=b"abc"),
    "full frame": lambda: tcp(1, 2, payload=bytes(1448)),
    "jumbo frame": lambda: tcp(1, 2, payload=bytes(range(256)) * 35),
    "FIN and PSH": lambda: tcp(1, 2, flags="FPA"),
    "urgent data": lambda: tcp(1, 2, flags="UA", urgptr=3),
    "DF": lambda: tcp(1, 2, ip_fields={"flags": "DF"}),
    "no counter yet": lambda: tcp(1, 2, [counter(-7)], seq=7),
    "wrap of seq + value": lambda: tcp(1, 2, [counter(0x20)], seq=0xFFFFFFF0),
    "largest value": lambda: tcp(1, 2, [counter(0xFFFFFFFF)], seq=0xFFFFFFFF),
    "sum is 0": lambda: tcp(1, 2, [counter(-0xFFFFFFF0)], seq=0xFFFFFFF0),
}


@pytest.mark.parametrize("case", COPIED)
def test_tagged_frames_are_copied(switch: SwitchUnderTest, case: str) -> None:
    copied(switch, COPIED[case]())


def test_two_shadows_get_a_copy_each(switch: SwitchUnderTest) -> None:
    copied(switch, tcp(3, 1), 3, 1, 5, 6)


def test_every_rank_has_its_own_shadow_port(switch: SwitchUnderTest) -> None:
    copied(switch, tcp(2, 3), 2, 3, 6)


def _cut_option() -> bytes:
    """The option's bytes are there, but the header ends in their middle."""
    frame = tcp(1, 2)
    return patched(frame, TCP_AT + 12, bytes([6 << 4]))


FORWARDED: dict[str, tuple[Callable[[], bytes], tuple[str, ...]]] = {
    "no option": (lambda: tcp(1, 2, []), ("tagged_in", "tagged_without_option")),
    "timestamps only": (lambda: tcp(1, 2, [NOP, NOP, TIMESTAMP]), ("tagged_in", "tagged_without_option")),
    "option not last": (lambda: tcp(1, 2, [counter(), NOP, NOP, TIMESTAMP]), ("tagged_in", "tagged_without_option")),
    "option cut": (_cut_option, ("tagged_in", "tagged_without_option")),
    "the fixed header's end read as an option": (
        lambda: patched(tcp(1, 2, [NOP] * 4, urgptr=0x434B, chksum=0xFD08), TCP_AT + 20, bytes(4)),
        ("tagged_in", "tagged_without_option"),
    ),
    "another ExID": (lambda: tcp(1, 2, [(253, b"XX" + bytes(4))]), ("tagged_in", "tagged_without_option")),
    "another kind": (lambda: tcp(1, 2, [(254, b"CK" + bytes(4))]), ("tagged_in", "tagged_without_option")),
    "another length": (lambda: tcp(1, 2, [NOP, (253, b"CK" + bytes(3))]), ("tagged_in", "tagged_without_option")),
    "pure ACK": (lambda: tcp(1, 2, payload=b""), ()),
    "pure ACK, padded": (lambda: tcp(1, 2, [], payload=b"").ljust(60, b"\0"), ()),
    "SYN": (lambda: tcp(1, 2, payload=b"", flags="S"), ()),
    "not tagged": (lambda: tcp(1, 2, tos=0), ()),
    "all DSCP bits but the tag": (lambda: tcp(1, 2, tos=(0x3F & ~frames.TAG) << 2), ()),
    "first fragment": (lambda: tcp(1, 2, ip_fields={"flags": "MF"}), ()),
    "later fragment": (lambda: tcp(1, 2, ip_fields={"frag": 3}), ()),
    "two VLAN tags": (lambda: tcp(1, 2, vlans=[1, 2]), ()),
    "UDP": (
        lambda: bytes(
            Ether(src=frames.mac(1), dst=frames.mac(2))
            / IP(src=frames.ip(1), dst=frames.ip(2), tos=frames.TOS)
            / UDP(sport=1, dport=2)
            / Raw(b"x" * 40)
        ),
        (),
    ),
    "IPv6": (
        lambda: bytes(Ether(src=frames.mac(1), dst=frames.mac(2)) / IPv6(tc=frames.TOS) / Raw(tcp(1, 2)[TCP_AT:])),
        (),
    ),
    "ARP": (lambda: bytes(Ether(src=frames.mac(1), dst=frames.mac(2)) / ARP(op=2)), ()),
    "unknown type": (lambda: bytes(Ether(src=frames.mac(1), dst=frames.mac(2), type=0x88B5) / Raw(b"?" * 50)), ()),
    "no room for IPv4": (lambda: tcp(1, 2)[:20], ("malformed",)),
    "Ethernet header only": (lambda: tcp(1, 2)[:14], ("malformed",)),
    "Ethernet header only, unknown type": (lambda: tcp(1, 2)[:12] + b"\x88\xb5", ()),
    "IPv4 header cut": (lambda: tcp(1, 2)[:33], ("malformed",)),
    "IPv4 version 6": (lambda: patched(tcp(1, 2), IP_AT, b"\x65"), ("malformed",)),
    "IPv4 header too short": (lambda: patched(tcp(1, 2, ack=0x50 << 24), IP_AT, b"\x44"), ("malformed",)),
    "IPv4 header too long": (lambda: patched(tcp(1, 2, payload=b""), IP_AT, b"\x4f"), ("malformed",)),
    "IPv4 length beyond the frame": (lambda: patched(tcp(1, 2), IP_AT + 2, b"\x05\xdc"), ("malformed",)),
    "IPv4 length 0": (lambda: patched(tcp(1, 2), IP_AT + 2, b"\0\0"), ("malformed",)),
    "IPv4 length within its header": (lambda: patched(tcp(1, 2), IP_AT + 2, b"\0\x13"), ("malformed",)),
    "TCP header cut": (lambda: patched(tcp(1, 2), IP_AT + 2, b"\0\x27"), ("malformed",)),
    "TCP header too short": (lambda: patched(tcp(1, 2), TCP_AT + 12, b"\x40"), ("malformed",)),
    "TCP header of 0": (lambda: patched(tcp(1, 2), TCP_AT + 12, b"\0"), ("malformed",)),
    "TCP header beyond the packet": (lambda: patched(tcp(1, 2), TCP_AT + 12, b"\xf0"), ("malformed",)),
    "malformed with a VLAN tag": (lambda: patched(tcp(1, 2, vlans=[3]), IP_AT + 4, b"\x44"), ("malformed",)),
}


@pytest.mark.parametrize("case", FORWARDED)
def test_other_frames_are_forwarded(switch: SwitchUnderTest, case: str) -> None:
    build, counts = FORWARDED[case]
    forwarded(switch, build(), *counts)


def test_a_pair_without_heartbeat_is_forwarded(switch: SwitchUnderTest) -> None:
    forwarded(switch, tcp(2, 1), "tagged_in", source=2, target=1)


@pytest.mark.parametrize("offset", [IP_AT + 10, TCP_AT + 16], ids=["IPv4", "TCP"])
def test_wrong_checksums_stay_wrong(switch: SwitchUnderTest, offset: int) -> None:
    frame = patched(tcp(1, 2), offset, b"\x12\x34")
    out = switch.expect((1, frame))
    assert out[2] == [frame]
    assert not checksums_valid(out[5][0])


def test_broadcast_and_unknown_addresses_reach_all_but_sender_and_shadows(switch: SwitchUnderTest) -> None:
    arp = bytes(Ether(src=frames.mac(1), dst="ff:ff:ff:ff:ff:ff") / ARP(pdst=frames.ip(2)))
    unknown = patched(tcp(1, 2), 0, bytes.fromhex("020000009999"))
    for frame in (arp, unknown):
        for sender in TRAINER_PORTS:
            out = switch.expect((sender, frame))
            assert {port: got for port, got in out.items() if got} == {
                port: [frame] for port in TRAINER_PORTS if port != sender
            }


def test_replica_ids_mean_nothing_to_flooding(reprogrammed: SwitchUnderTest) -> None:
    reprogrammed.program(rules(flood_rid=config.SHADOW_RID))
    out = reprogrammed.expect((1, patched(tcp(1, 2), 0, b"\xff" * 6)))
    assert sorted(port for port, got in out.items() if got) == [2, 3, 4]


def test_nothing_goes_back_where_it_came_from(switch: SwitchUnderTest) -> None:
    assert not any(switch.expect((2, tcp(1, 2, tos=0))).values())


def _registration(**fields: Any) -> bytes:
    return tcp(5, REGISTRAR, [], dport=REGISTRAR_TCP, tos=0, **fields)


FROM_SHADOW: dict[str, tuple[Callable[[], bytes], bool]] = {
    "registration": (_registration, True),
    "registration SYN": (lambda: _registration(payload=b"", flags="S"), True),
    "registration with a VLAN tag": (lambda: _registration(vlans=[7]), True),
    "ACK to a rank": (lambda: tcp(5, 1, [], payload=b""), False),
    "tagged data to a rank": (lambda: tcp(5, 1), False),
    "another port of the registrar": (lambda: tcp(5, REGISTRAR, [], dport=22), False),
    "registrar's port at another address": (lambda: tcp(5, 1, [], dport=REGISTRAR_TCP), False),
    "fragment for the registrar": (lambda: _registration(ip_fields={"frag": 1}), False),
    "malformed for the registrar": (lambda: patched(_registration(), TCP_AT + 12, b"\0"), False),
    "UDP to the registrar": (
        lambda: bytes(
            Ether(src=frames.mac(5), dst=frames.mac(REGISTRAR))
            / IP(src=frames.ip(5), dst=frames.ip(REGISTRAR))
            / UDP(dport=REGISTRAR_TCP)
            / Raw(b"x" * 30)
        ),
        False,
    ),
    "ARP": (lambda: bytes(Ether(src=frames.mac(5), dst="ff:ff:ff:ff:ff:ff") / ARP(pdst=frames.ip(1))), False),
    "IPv6": (lambda: bytes(Ether(src=frames.mac(5), dst=frames.mac(1)) / IPv6() / Raw(b"x" * 20)), False),
}


@pytest.mark.parametrize("case", FROM_SHADOW)
def test_only_registration_comes_out_of_a_shadow_port(switch: SwitchUnderTest, case: str) -> None:
    build, passes = FROM_SHADOW[case]
    out = switch.expect((5, build()))
    assert {port: len(got) for port, got in out.items() if got} == ({REGISTRAR: 1} if passes else {})


def test_what_is_forwarded_to_a_shadow_port_is_not_rewritten(switch: SwitchUnderTest) -> None:
    forwarded(switch, tcp(REGISTRAR, 5, [], sport=REGISTRAR_TCP, tos=0), source=REGISTRAR, target=5)


def test_a_group_that_is_not_configured_only_costs_the_copy(reprogrammed: SwitchUnderTest) -> None:
    reprogrammed.program(rules(heartbeats=HEARTBEATS | {(1, 2): 99}))
    forwarded(reprogrammed, tcp(1, 2), "tagged_in", "group_missing")
    reprogrammed.program(rules(groups=GROUPS | {10: ()}))
    forwarded(reprogrammed, tcp(1, 2), "tagged_in", "group_missing")
    reprogrammed.program(rules())
    copied(reprogrammed, tcp(1, 2))


def test_a_group_that_is_not_declared_live_makes_no_copies(reprogrammed: SwitchUnderTest) -> None:
    reprogrammed.program(rules(live=(11, 12)))
    forwarded(reprogrammed, tcp(1, 2), "tagged_in", "group_missing")
    copied(reprogrammed, tcp(2, 3), 2, 3, 6)


def test_a_group_that_is_deleted_under_traffic(reprogrammed: SwitchUnderTest) -> None:
    held = {number: replicas for number, replicas in GROUPS.items() if number != 10}
    for _ in range(3):
        reprogrammed.program(rules(groups=held))
        forwarded(reprogrammed, tcp(1, 2), "tagged_in", "group_missing")
        reprogrammed.program(rules())
        copied(reprogrammed, tcp(1, 2))


@pytest.mark.parametrize("left", [None, ()])
def test_a_live_group_that_is_gone_or_empty(reprogrammed: SwitchUnderTest, left: tuple[Replica, ...] | None) -> None:
    """What no controller of ours does: its next pass is what ends it where the data path can't see it."""
    groups = {number: replicas for number, replicas in GROUPS.items() if number != 10}
    reprogrammed.program(rules(groups=groups if left is None else groups | {10: left}, live=GROUPS))
    if reprogrammed.sees_missing_groups:
        forwarded(reprogrammed, tcp(1, 2), "tagged_in", "group_missing")
    else:
        assert not reprogrammed.exchange((1, tcp(1, 2)))
    reconcile(reprogrammed.control, rules())
    reprogrammed.rules = rules()
    copied(reprogrammed, tcp(1, 2))


def test_no_frame_is_lost_between_any_two_writes_of_the_control_plane(reprogrammed: SwitchUnderTest) -> None:
    """Shadows come and go: after each single update, a tagged frame of each pair of ranks reaches the next rank."""
    missing = "CheckmateIngress.group_missing"
    before = reprogrammed.counters().ports[missing]
    for goal in (rules(groups={}, heartbeats={}), rules()):
        for batch in batches(reprogrammed.control.read(), goal):
            for update in batch:
                reprogrammed.control.apply([update])
                sent = {target: (source, tcp(source, target)) for source, target in HEARTBEATS}
                out = reprogrammed.exchange(*sent.values())
                assert {port: out[port] for port in sent} == {port: [frame] for port, (_, frame) in sent.items()}
        assert reprogrammed.control.read() == goal
    assert reprogrammed.counters().ports[missing] == before
    reprogrammed.rules = rules()


def test_an_entry_that_leads_to_no_group_is_reported_and_repaired(reprogrammed: SwitchUnderTest) -> None:
    reprogrammed.program(rules(heartbeats=HEARTBEATS | {(1, 2): 99}))
    forwarded(reprogrammed, tcp(1, 2), "tagged_in", "group_missing")
    outcome = reconcile(reprogrammed.control, rules())
    assert [entry.group for entry in outcome.dangling] == [99]
    reprogrammed.rules = rules()
    copied(reprogrammed, tcp(1, 2))


def test_a_copy_that_cannot_be_rewritten_is_not_sent(reprogrammed: SwitchUnderTest) -> None:
    reprogrammed.program(rules(rewrites=(6,)))
    out = reprogrammed.expect((1, tcp(1, 2)))
    assert {port: len(got) for port, got in out.items() if got} == {2: 1}


def test_rules_written_again_make_no_second_copy(reprogrammed: SwitchUnderTest) -> None:
    again = [Update(Kind.MODIFY, item) for item in rules().items if getattr(item, "match", True)]
    for _ in range(2):
        reprogrammed.control.apply(again)
        copied(reprogrammed, tcp(1, 2))
    with pytest.raises(TargetError, match="ALREADY_EXISTS"):
        reprogrammed.control.apply([Update(Kind.INSERT, Multicast(10, GROUPS[10]))])
    if reprogrammed.name == "ebpf":
        twice = Multicast(10, (*GROUPS[10], Replica(5, config.SHADOW_RID + 1)))
        with pytest.raises(TargetError, match="INVALID_ARGUMENT"):
            reprogrammed.control.apply([Update(Kind.MODIFY, twice)])
    copied(reprogrammed, tcp(1, 2))


def test_a_shadow_that_joins_and_leaves(reprogrammed: SwitchUnderTest) -> None:
    both = GROUPS | {10: (*GROUPS[10], Replica(6, config.SHADOW_RID))}
    for _ in range(2):
        reprogrammed.program(rules(groups=both))
        copied(reprogrammed, tcp(1, 2), 1, 2, *SHADOW_PORTS)
        reprogrammed.program(rules())
        copied(reprogrammed, tcp(1, 2))


def test_priority_tags_of_service_providers_are_just_forwarded(switch: SwitchUnderTest) -> None:
    frame = (
        bytes(Ether(src=frames.mac(1), dst=frames.mac(2)) / Dot1AD(vlan=5) / Dot1Q(vlan=6, type=0x0800))
        + tcp(1, 2)[IP_AT:]
    )
    forwarded(switch, frame)
