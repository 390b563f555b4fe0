"""Frames as Linux hands them over between offloads: larger than any MTU, their checksums not yet computed.

Only a software switch sees such frames; on a wire they are finished. Only one in the kernel can finish them.
"""

import contextlib
import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from ptf import frames
from ptf.frames import NOP, TIMESTAMP, counter, patched, tcp
from ptf.model import Headers, checksums_valid, ones_sum, parse
from ptf.rules import rules
from ptf.target import SwitchUnderTest

from checkmate.p4.ebpf.netdev import Namespace

pytestmark = pytest.mark.root

_SOL_PACKET = 263
_PACKET_VNET_HDR = 15
_NEEDS_CSUM, _GSO_TCPV4 = 1, 1
_ETH_P_ALL = 3
_TCP_AT = 34
_CHECK_AT = 16
SEGMENT = 1400


@pytest.fixture(scope="module")
def switch(ebpf: SwitchUnderTest) -> SwitchUnderTest:
    ebpf.program(rules())
    return ebpf


@contextlib.contextmanager
def offloading_socket(switch: SwitchUnderTest, port: int) -> Iterator[socket.socket]:
    """A raw socket whose frames begin with a virtio_net_hdr, which says what is left to be done."""
    rack = switch.rack
    with contextlib.ExitStack() as stack:
        namespace = stack.enter_context(contextlib.closing(Namespace(rack.far_netns[port])))
        with namespace.entered():
            raw = stack.enter_context(socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0))
        raw.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
        raw.bind((rack.far_interface, 0))
        yield raw


def unfinished(frame: bytes) -> bytes:
    """The frame as TCP hands it down: the checksum field holds the sum of the pseudo header only."""
    headers = parse(frame)
    assert isinstance(headers, Headers)
    length = len(frame) - headers.tcp
    pseudo = frame[headers.ip + 12 : headers.ip + 20] + struct.pack(">HH", 6, length)
    return patched(frame, headers.tcp + _CHECK_AT, struct.pack(">H", ones_sum(pseudo)))


def with_header(frame: bytes, header_bytes: int, segment: int) -> bytes:
    """Prefix the virtio_net_hdr of an unfinished frame; ``segment``: payload bytes per segment, 0 for a single one."""
    kind = _GSO_TCPV4 if segment else 0
    return struct.pack("=BBHHHH", _NEEDS_CSUM, kind, header_bytes, segment, _TCP_AT, _CHECK_AT) + frame


OPTIONS: dict[str, list[Any]] = {
    "option alone": [counter(5000)],
    "with timestamps": [NOP, NOP, TIMESTAMP, counter(5000)],
}


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("seq", [7, 0xFFFFFFFF - 5000])
def test_a_super_packet_stays_whole_and_its_copy_is_cut_right(switch: SwitchUnderTest, case: str, seq: int) -> None:
    payload = bytes(range(251)) * 120
    frame = unfinished(tcp(1, 2, OPTIONS[case], payload, seq=seq))
    header_bytes = len(frame) - len(payload)
    segments = -(-len(payload) // SEGMENT)
    before = switch.counters()
    with offloading_socket(switch, 1) as raw:
        raw.send(with_header(frame, header_bytes, SEGMENT))
        out = switch.exchange()
    assert out[2] == [frame]
    assert len(out[5]) == segments
    received = b""
    for index, copy in enumerate(out[5]):
        headers = parse(copy)
        assert isinstance(headers, Headers)
        assert checksums_valid(copy)
        assert headers.seq == (seq + 5000 + index * SEGMENT) & 0xFFFFFFFF
        received += copy[header_bytes:]
    assert received == payload
    after = switch.counters()
    wire = (segments, len(payload) + segments * header_bytes)
    for name, port in (("CheckmateIngress.tagged_in", 1), ("CheckmateEgress.copies_out", 5)):
        old = before.ports[name].get(port, (0, 0))
        new = after.ports[name][port]
        assert (new[0] - old[0], new[1] - old[1]) == wire, name


@pytest.mark.parametrize("case", OPTIONS)
def test_a_checksum_left_to_the_nic_is_computed_for_the_copy(switch: SwitchUnderTest, case: str) -> None:
    frame = unfinished(tcp(1, 2, OPTIONS[case], b"payload of odd size"))
    with offloading_socket(switch, 1) as raw:
        raw.send(with_header(frame, 0, 0))
        out = switch.exchange()
    assert out[2] == [frame]
    (copy,) = out[5]
    assert checksums_valid(copy)


def test_two_copies_of_a_super_packet(switch: SwitchUnderTest) -> None:
    payload = bytes(20 * SEGMENT)
    frame = unfinished(tcp(3, 1, payload=payload))
    with offloading_socket(switch, 3) as raw:
        raw.send(with_header(frame, len(frame) - len(payload), SEGMENT))
        out = switch.exchange()
    assert out[1] == [frame]
    for port in (5, 6):
        assert len(out[port]) == 20
        assert all(checksums_valid(copy) for copy in out[port])
        assert all(copy[:6] == frames.mac_number(port).to_bytes(6, "big") for copy in out[port])


def test_an_offload_left_on_corrupts_nothing(running_switch: SwitchUnderTest) -> None:
    """A switch outside the kernel passes on what is not finished: the checksum tells, and the data is right."""
    running_switch.program(rules())
    payload = b"payload of odd size"
    frame = unfinished(tcp(1, 2, payload=payload))
    with offloading_socket(running_switch, 1) as raw:
        raw.send(with_header(frame, 0, 0))
        out = running_switch.exchange()
    assert out[2] == [frame]
    (copy,) = out[5]
    assert checksums_valid(copy) is (running_switch.name == "ebpf")
    assert copy.endswith(payload)
