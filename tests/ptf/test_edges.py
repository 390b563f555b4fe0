"""Every option order, every length, every size: what lies between the single cases of test_switch."""

import contextlib
import itertools
import subprocess
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from ptf import frames
from ptf.frames import NOP, TIMESTAMP, counter, patched, tcp
from ptf.model import Model
from ptf.rules import GROUPS, HEARTBEATS, rules
from ptf.target import BURST, SwitchUnderTest
from ptf.wire import MTU

from checkmate.p4.shared import p4info

pytestmark = pytest.mark.root

IP_AT, TCP_AT = 14, 34
LARGEST = 9216
TCP_OPTION_BYTES = 40
COUNTER_BYTES = 8
BEFORE: dict[str, tuple[int, list[Any]]] = {
    "timestamps": (12, [NOP, NOP, TIMESTAMP]),
    "one SACK block": (12, [NOP, NOP, ("SAck", (1, 2))]),
    "two SACK blocks": (20, [NOP, NOP, ("SAck", (1, 2, 3, 4))]),
    "segment size": (4, [("MSS", 1460)]),
    "window scale": (4, [NOP, ("WScale", 7)]),
    "SACK permitted": (4, [NOP, NOP, ("SAckOK", b"")]),
    "padding": (4, [NOP] * 4),
    "unknown": (4, [(77, b"\xfd\x08")]),
}
"""Options that may stand before the counter, with their lengths, each filling whole words."""


@pytest.fixture(scope="module")
def switch(running_switch: SwitchUnderTest) -> SwitchUnderTest:
    running_switch.program(rules())
    return running_switch


def bursts(items: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """As many at a time as every switch's queues hold."""
    return (items[start : start + BURST] for start in range(0, len(items), BURST))


def copies(switch: SwitchUnderTest, sent: Sequence[bytes]) -> int:
    """How many copies the frames from port 1 make; each frame and copy must be as the model says."""
    return sum(len(switch.expect(*((1, frame) for frame in burst))[5]) for burst in bursts(sent))


def test_every_order_of_options(switch: SwitchUnderTest) -> None:
    sent = [
        tcp(1, 2, [option for name in order for option in BEFORE[name][1]] + [counter(index)])
        for size in range(4)
        for index, order in enumerate(itertools.permutations(BEFORE, size))
        if sum(BEFORE[name][0] for name in order) <= TCP_OPTION_BYTES - COUNTER_BYTES
    ]
    assert len(sent) > 200
    assert copies(switch, sent) == len(sent)


def test_every_order_with_the_counter_elsewhere_is_only_forwarded(switch: SwitchUnderTest) -> None:
    assert copies(switch, [tcp(1, 2, [counter(), *options]) for _, options in BEFORE.values()]) == 0


@pytest.mark.parametrize("ip_words", [0, 1, 10])
def test_every_length_of_the_headers(switch: SwitchUnderTest, ip_words: int) -> None:
    sent = [
        tcp(1, 2, [NOP] * (4 * words) + [counter(words)], payload, ip_fields={"options": "\x01" * (4 * ip_words)})
        for words in range(9)
        for payload in (b"x", b"xy", b"xyz", bytes(range(200)))
    ]
    assert copies(switch, sent) == len(sent)


def test_every_bit_of_the_option_s_head_matters(switch: SwitchUnderTest) -> None:
    frame, at = tcp(1, 2), TCP_AT + 20
    sent = [patched(frame, at + bit // 8, bytes([frame[at + bit // 8] ^ 1 << bit % 8])) for bit in range(32)]
    assert copies(switch, sent) == 0


def test_every_dscp_and_ecn_value(switch: SwitchUnderTest) -> None:
    tagged = [tos for tos in range(256) if tos >> 2 & frames.TAG]
    assert copies(switch, [tcp(1, 2, tos=tos) for tos in range(256)]) == len(tagged)


def test_checksums_at_the_two_zeros_of_ones_complement(switch: SwitchUnderTest) -> None:
    """Sent as 0 or 0xffff, right or wrong, and becoming so in the copy: the same bytes from every target."""
    model = Model(rules(), frozenset(switch.wires))
    (made,) = model.process(1, tcp(1, 2, payload=bytes(2)))[5]
    tcp_zero = tcp(1, 2, payload=made[TCP_AT + 16 : TCP_AT + 18])
    (made,) = model.process(1, tcp(1, 2, ip_fields={"id": 0}))[5]
    ip_zero = tcp(1, 2, ip_fields={"id": int.from_bytes(made[IP_AT + 10 : IP_AT + 12], "big")})
    sent = [tcp_zero, ip_zero, tcp(1, 2, [counter(0)]), tcp(1, 2, [counter(0)], seq=0), tcp(1, 2, [counter(1)], seq=0)]
    sent += [
        patched(frame, at, value)
        for frame in (tcp(1, 2), tcp_zero, ip_zero)
        for at in (IP_AT + 10, TCP_AT + 16)
        for value in (b"\0\0", b"\xff\xff")
    ]
    zero_copies = [model.process(1, frame)[5][0] for frame in (tcp_zero, ip_zero)]
    assert (zero_copies[0][TCP_AT + 16 : TCP_AT + 18], zero_copies[1][IP_AT + 10 : IP_AT + 12]) == (b"\0\0", b"\0\0")
    assert copies(switch, sent) == len(sent)


@pytest.mark.parametrize("vlans", [[], [9]], ids=["untagged", "VLAN"])
def test_every_cut_of_a_frame(switch: SwitchUnderTest, vlans: list[int]) -> None:
    frame = tcp(1, 2, [NOP, NOP, TIMESTAMP, counter()], vlans=vlans, ip_fields={"options": "\x01" * 4})
    least = 20 if vlans else 14  # Linux itself drops shorter ones with a VLAN tag
    assert copies(switch, [frame[:size] for size in range(least, len(frame))]) == 0


def test_every_ip_and_tcp_header_length(switch: SwitchUnderTest) -> None:
    frame = tcp(1, 2, [NOP] * 8 + [counter()], bytes(range(60)), urgptr=0x434B)
    lengths = [patched(frame, IP_AT, bytes([0x40 | words])) for words in range(16)]
    lengths += [patched(frame, TCP_AT + 12, bytes([words << 4])) for words in range(16)]
    assert copies(switch, lengths) == 2, "once each, where the header ends with the option"


@pytest.mark.parametrize("vlans", [[], [9]], ids=["untagged", "VLAN"])
def test_the_largest_frame(switch: SwitchUnderTest, vlans: list[int]) -> None:
    headers = len(tcp(1, 2, payload=b"", vlans=vlans))
    sent = [tcp(1, 2, payload=bytes(i % 256 for i in range(LARGEST - headers - cut)), vlans=vlans) for cut in (0, 1)]
    assert [len(frame) for frame in sent] == [LARGEST, LARGEST - 1]
    assert copies(switch, sent) == len(sent)


def test_a_giant_frame_is_lost_alone(switch: SwitchUnderTest) -> None:
    """Longer than the port takes: it goes nowhere, and what follows is treated as ever."""
    link = ("ip", "-n", switch.rack.far_netns[1], "link", "set", switch.rack.far_interface, "mtu")
    subprocess.run([*link, str(2 * MTU)], check=True)
    try:
        before = switch.counters()
        with contextlib.suppress(OSError):  # some links tell the sender
            switch.wires[1].send(tcp(1, 2, payload=bytes(MTU + 100)))
        out = switch.exchange((1, tcp(1, 2)))
        assert {port: len(got) for port, got in out.items()} == {2: 1, 5: 1}
        tagged = [now.ports["CheckmateIngress.tagged_in"].get(1, (0, 0))[0] for now in (before, switch.counters())]
        assert tagged[1] == tagged[0] + 1
    finally:
        subprocess.run([*link, str(MTU)], check=True)


COUNTED: dict[str, tuple[int, Callable[[], bytes], int]] = {
    "CheckmateIngress.tagged_in": (1, lambda: tcp(1, 2), 1),
    "CheckmateIngress.untagged": (1, lambda: tcp(1, 2, tos=0), 1),
    "CheckmateIngress.tagged_without_option": (1, lambda: tcp(1, 2, []), 1),
    "CheckmateIngress.group_missing": (2, lambda: tcp(2, 3), 2),
    "CheckmateIngress.shadow_dropped": (5, lambda: tcp(5, 1), 5),
    "CheckmateIngress.malformed": (1, lambda: tcp(1, 2)[:33], 1),
    "CheckmateIngress.dropped": (2, lambda: tcp(1, 2, tos=0), 2),
    "CheckmateEgress.copies_out": (1, lambda: tcp(1, 2), 5),
    "CheckmateEgress.rewrite_missing": (3, lambda: tcp(3, 1), 6),
}
"""The port that a frame enters by, the frame, and the port at which it is counted."""


@pytest.mark.parametrize("name", [counter.preamble.name for counter in p4info.load().counters])
def test_every_counter_counts_frames_and_bytes(running_switch: SwitchUnderTest, name: str) -> None:
    source, build, at = COUNTED[name]
    missing = {(2, 3): 99} if name.endswith(".group_missing") else {}
    rewrites = (5,) if name.endswith(".rewrite_missing") else (5, 6)
    running_switch.program(rules(heartbeats=HEARTBEATS | missing, rewrites=rewrites))
    frame = build()
    try:
        before = running_switch.counters().ports[name].get(at, (0, 0))
        for _ in range(3):
            running_switch.expect((source, frame))  # compares every counter with the model
        after = running_switch.counters().ports[name][at]
        assert after[0] - before[0] >= 3
        assert after[1] - before[1] >= 3 * len(frame)
    finally:
        running_switch.program(rules())


def test_every_group_copies_once_to_each_of_its_members(switch: SwitchUnderTest) -> None:
    for (source, target), group in HEARTBEATS.items():
        out = switch.expect((source, tcp(source, target)))
        assert {port: len(got) for port, got in out.items() if got} == {port: 1 for port, _ in GROUPS[group]}
