"""A tagged flow of real kernel sockets through the switch: the stream arrives, and the shadow gets the same bytes."""

import contextlib
import ctypes
import os
import secrets
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from ptf import frames
from ptf.model import Headers, checksums_valid, parse
from ptf.rules import rules
from ptf.target import SwitchUnderTest
from ptf.wire import MTU, Wire

from checkmate.nccl_plugin.bpf.loader import CounterProgram
from checkmate.p4.ebpf.netdev import Namespace

pytestmark = pytest.mark.root

SENDER, RECEIVER, SHADOW = 1, 2, 5
TCP_PORT = 5001
STREAM_BYTES = 1 << 20
HEADERS = 14
SMALL_WINDOW = 1 << 15
"""Keeps the frames on their way below the 64 that BMv2's queues hold."""
TIMEOUT_S = 20
_WANTED = 1


@pytest.fixture(scope="module")
def switch(running_switch: SwitchUnderTest) -> Iterator[SwitchUnderTest]:
    """The switch, with hosts that have addresses at the ports of the two ranks."""
    running_switch.program(rules())
    rack = running_switch.rack
    for port in (SENDER, RECEIVER):
        at, name = ("ip", "-n", rack.far_netns[port]), rack.far_interface
        subprocess.run([*at, "link", "set", name, "address", frames.mac(port)], check=True)
        subprocess.run([*at, "addr", "add", f"{frames.ip(port)}/24", "dev", name], check=True)
    yield running_switch
    offload(running_switch, "on")
    for port in (SENDER, RECEIVER):
        subprocess.run(["ip", "-n", rack.far_netns[port], "addr", "flush", "dev", rack.far_interface], check=True)


@pytest.fixture(scope="module")
def counter_map(bpffs: Path) -> Iterator[Path]:
    """The pinned map of the program that writes the counter option."""
    with CounterProgram.load(bpffs) as program:
        yield program.map_path


def register(counter_map: Path, connection: socket.socket, base: int) -> None:
    """Ask for the counter option on a socket that is not connected yet."""
    lib = ctypes.CDLL("libbpf.so.1", use_errno=True)
    descriptor = lib.bpf_obj_get(os.fsencode(counter_map))
    assert descriptor >= 0, os.strerror(ctypes.get_errno())
    key, value = ctypes.c_int(connection.fileno()), struct.pack("=III", base, 0, _WANTED)
    try:
        assert lib.bpf_map_update_elem(descriptor, ctypes.byref(key), value, ctypes.c_uint64(0)) == 0
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def inside(switch: SwitchUnderTest, port: int) -> Iterator[None]:
    """Run a block in the namespace of the host at a port."""
    with contextlib.closing(Namespace(switch.rack.far_netns[port])) as namespace, namespace.entered():
        yield


def offload(switch: SwitchUnderTest, setting: str) -> None:
    """Turn the hosts' offloads ``on`` or ``off``."""
    command = ["ethtool", "-K", switch.rack.far_interface, "tx", setting, "tso", setting, "gso", setting]
    for port in (SENDER, RECEIVER):
        with inside(switch, port):
            subprocess.run(command, check=True, capture_output=True)


def transfer(switch: SwitchUnderTest, counter_map: Path, data: bytes, base: int, segment: int | None) -> bytes:
    """Send data over a tagged connection; what the receiver got."""
    received = bytearray()
    with inside(switch, RECEIVER):
        listener = socket.create_server((frames.ip(RECEIVER), TCP_PORT))
    if switch.name == "bmv2":
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_WINDOW)
    with inside(switch, SENDER):
        sender = socket.socket()

    def receive() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(TIMEOUT_S)
            while chunk := connection.recv(1 << 16):
                received.extend(chunk)

    with listener, sender:
        listener.settimeout(TIMEOUT_S)
        sender.settimeout(TIMEOUT_S)
        sender.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, frames.TOS)
        if segment:
            sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, segment)
        register(counter_map, sender, base)
        thread = threading.Thread(target=receive)
        thread.start()
        sender.connect((frames.ip(RECEIVER), TCP_PORT))
        sender.sendall(data)
        sender.shutdown(socket.SHUT_WR)
        thread.join(TIMEOUT_S)
    return bytes(received)


def mac_bytes(port: int) -> bytes:
    """Ethernet address of the host at a port."""
    return frames.mac_number(port).to_bytes(6, "big")


def reassembled(copies: list[bytes], base: int, size: int) -> bytes:
    """The stream that the copies carry; every byte must be there."""
    stream, seen = bytearray(size), bytearray(size)
    for copy in copies:
        headers = parse(copy)
        assert isinstance(headers, Headers)
        assert checksums_valid(copy)
        at = (headers.seq - base) & 0xFFFFFFFF
        end = headers.ip + int.from_bytes(copy[headers.ip + 2 : headers.ip + 4], "big")
        stream[at : at + headers.payload_bytes] = copy[end - headers.payload_bytes : end]
        seen[at : at + headers.payload_bytes] = b"\1" * headers.payload_bytes
    assert len(stream) == size
    assert all(seen), f"{seen.count(0)} bytes are missing"
    return bytes(stream)


@pytest.mark.parametrize("base", [0, 0xFFFFFFFF - STREAM_BYTES // 2], ids=["from 0", "across the wrap"])
@pytest.mark.parametrize("segment", [None, 1400], ids=["jumbo", "small segments"])
@pytest.mark.parametrize("setting", ["on", "off"], ids=["offloads on", "offloads off"])
def test_a_tagged_flow(
    switch: SwitchUnderTest, counter_map: Path, base: int, segment: int | None, setting: str
) -> None:
    if setting == "on" and switch.name != "ebpf":
        pytest.skip("only a switch in the kernel takes frames that are not finished")
    rack = switch.rack
    offload(switch, setting)
    data = secrets.token_bytes(STREAM_BYTES)
    for wire in switch.wires.values():
        wire.drain()
    with contextlib.closing(Wire(rack.far_netns[SENDER], rack.far_interface, outgoing=True)) as tap:
        before = switch.counters()
        assert transfer(switch, counter_map, data, base, segment) == data
        left = switch.exchange()
        sent, arrived = (
            [frame for frame in seen if frame[:12] == mac_bytes(RECEIVER) + mac_bytes(SENDER)]
            for seen in (tap.drain(), left[RECEIVER])
        )
    assert sorted(arrived) == sorted(sent)  # CPUs may deliver out of order
    assert (max(map(len, arrived)) > MTU + HEADERS) is (setting == "on"), "super-packets were not what was tested"
    copies = left[SHADOW]
    assert reassembled(copies, base, len(data)) == data
    after = switch.counters()
    moved = {
        name: after.ports[name].get(port, (0, 0))[0] - before.ports[name].get(port, (0, 0))[0]
        for name, port in (
            ("CheckmateIngress.tagged_in", SENDER),
            ("CheckmateIngress.tagged_without_option", SENDER),
            ("CheckmateEgress.copies_out", SHADOW),
        )
    }
    assert list(moved.values()) == [len(copies), 0, len(copies)]
