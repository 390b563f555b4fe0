"""Frames for the packet tests. A host's addresses follow from its port number."""

import struct
from collections.abc import Sequence
from typing import Any

from scapy.layers.inet import IP, TCP
from scapy.layers.l2 import Dot1Q, Ether
from scapy.packet import Raw

TAG = 0x20
TOS = TAG << 2
NOP: tuple[str, None] = ("NOP", None)
TIMESTAMP = ("Timestamp", (123, 456))
REGISTRAR = 4
"""Port of the host that shadows register at."""
REGISTRAR_TCP = 7702


def mac(port: int) -> str:
    """Ethernet address of the host at a port."""
    return f"02:00:00:00:01:{port:02x}"


def mac_number(port: int) -> int:
    """The same as an integer."""
    return 0x020000000100 | port


def ip(port: int) -> str:
    """IPv4 address of the host at a port."""
    return f"10.1.0.{port}"


def counter(value: int = 1000) -> tuple[int, bytes]:
    """The TCP option that carries a counter: ``value`` = counter - seq."""
    return 253, struct.pack(">HI", 0x434B, value & 0xFFFFFFFF)


def tcp(
    source: int,
    target: int,
    options: Sequence[Any] = (counter(),),
    payload: bytes = b"payload",
    *,
    tos: int = TOS,
    vlans: Sequence[int] = (),
    seq: int = 7,
    ip_fields: dict[str, Any] | None = None,
    **fields: Any,
) -> bytes:
    """A TCP/IPv4 frame between two hosts, with valid lengths and checksums unless fields say otherwise."""
    frame: Any = Ether(src=mac(source), dst=mac(target))
    for vlan in vlans:
        frame /= Dot1Q(vlan=vlan)
    for_ip: dict[str, Any] = {"src": ip(source), "dst": ip(target), "tos": tos} | (ip_fields or {})
    for_tcp: dict[str, Any] = {"sport": 40000, "dport": 50000, "seq": seq, "flags": "A", "options": list(options)}
    frame /= IP(**for_ip) / TCP(**(for_tcp | fields))
    return bytes(frame / Raw(payload)) if payload else bytes(frame)


def patched(frame: bytes, offset: int, value: bytes) -> bytes:
    """The frame with some bytes replaced; checksums are left as they are."""
    return frame[:offset] + value + frame[offset + len(value) :]
