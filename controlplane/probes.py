"""Probe frames: what a rank's tagged traffic looks like to the switch, and nothing to anybody who receives it.

A probe carries a valid frame header of incarnation 0, which no job has: a shadow skips it as stale. It is for an
address of TEST-NET-1 (RFC 5737) with a time to live of 1, so that a host's kernel drops it. Its channel counter is 0.
"""

import array
import contextlib
import ipaddress
import secrets
import socket
import struct
from dataclasses import dataclass

from checkmate import wire
from checkmate.config import CheckmateError
from checkmate.p4.ebpf.netdev import Namespace
from checkmate.topology import Nic, mac_to_int

SOURCE_IP = int(ipaddress.IPv4Address("192.0.2.1"))
TARGET_IP = int(ipaddress.IPv4Address("192.0.2.2"))
_FIRST_TCP_PORT = 1024
_SEQ = 0xFFFFFFF0
"""The counter, 0, is reached only by wrapping around: what a switch must get right."""

_ETHERNET = struct.Struct(">6s6sH")
_IPV4 = struct.Struct(">BBHHHBBHII")
_TCP = struct.Struct(">HHIIBBHHH")
_OPTION = struct.Struct(">BBHI")
_ETHERTYPE_IPV4 = 0x0800
_ACK = 0x10

_ETH_P_ALL = 3
_SO_ATTACH_FILTER = 26
_SO_RCVBUFFORCE = 33
_SOL_PACKET = 263
_PACKET_IGNORE_OUTGOING = 23
_SNAPLEN = 2048
_RECEIVE_BYTES = 1 << 22
_ONLY_PROBES = (
    (0x28, 0, 0, 12),  # ldh the Ethernet type
    (0x15, 0, 3, _ETHERTYPE_IPV4),
    (0x20, 0, 0, 26),  # ld the IPv4 source
    (0x15, 0, 1, SOURCE_IP),
    (0x06, 0, 0, _SNAPLEN),  # take it
    (0x06, 0, 0, 0),
)
"""Classic BPF: a live job's frames never reach us."""


@dataclass(frozen=True)
class Addresses:
    """What the switch changes in a copy: MAC addresses, destination (integers) and TCP sequence number."""

    src_mac: int
    dst_mac: int
    dst_ip: int
    seq: int


@dataclass(frozen=True)
class Probe:
    """One frame from ``source`` to ``target``, told from every other by its ``nonce``."""

    source: Nic
    target: Nic
    dscp: int
    nonce: bytes

    @classmethod
    def new(cls, source: Nic, target: Nic, dscp: int) -> "Probe":
        """With a nonce that no other has."""
        return cls(source, target, dscp, secrets.token_bytes(16))

    def sent(self) -> bytes:
        """As the source sends it and the next rank must get it."""
        return self._build(Addresses(mac_to_int(self.source.mac), mac_to_int(self.target.mac), TARGET_IP, _SEQ))

    def copied(self, src_mac: int, dst_mac: int, dst_ip: int) -> bytes:
        """As a shadow must get it, whose rewrite entry has these addresses."""
        return self._build(Addresses(src_mac, dst_mac, dst_ip, 0))

    def _build(self, to: Addresses) -> bytes:
        payload = wire.frame(self.nonce, incarnation=0)
        option = _OPTION.pack(wire.TCPOPT_KIND, wire.TCPOPT_LEN, wire.TCPOPT_EXID, -_SEQ & 0xFFFFFFFF)
        words = (_TCP.size + len(option)) // 4
        ports = _FIRST_TCP_PORT + self.source.port, _FIRST_TCP_PORT + self.target.port
        tcp = _TCP.pack(*ports, to.seq, 0, words << 4, _ACK, 1, 0, 0) + option + payload
        pseudo = struct.pack(">IIHH", SOURCE_IP, to.dst_ip, socket.IPPROTO_TCP, len(tcp))
        tcp = _with_checksum(tcp, 16, pseudo)
        length = _IPV4.size + len(tcp)
        ip = _IPV4.pack(0x45, self.dscp << 2, length, 0, 0x4000, 1, socket.IPPROTO_TCP, 0, SOURCE_IP, to.dst_ip)
        ethernet = _ETHERNET.pack(to.dst_mac.to_bytes(6, "big"), to.src_mac.to_bytes(6, "big"), _ETHERTYPE_IPV4)
        return ethernet + _with_checksum(ip, 10) + tcp


def _with_checksum(data: bytes, offset: int, pseudo: bytes = b"") -> bytes:
    """Internet checksum (RFC 1071) of ``pseudo`` and ``data`` put into ``data`` at ``offset``."""
    text = pseudo + data + b"\0" * (len(data) % 2)
    total = sum(struct.unpack(f">{len(text) // 2}H", text))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return data[:offset] + struct.pack(">H", ~total & 0xFFFF) + data[offset + 2 :]


class Tap:
    """A raw socket on an interface that sends probes and sees those that arrive; closed by ``close``.

    ``netns``: ``ip netns`` name, None for this thread's. Raises CheckmateError without the right, or the interface.
    """

    def __init__(self, netns: str | None, interface: str) -> None:
        with contextlib.closing(Namespace(netns)) as namespace, namespace.entered():
            try:
                self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_NONBLOCK, 0)
            except PermissionError:
                raise CheckmateError("probes need raw sockets (CAP_NET_RAW): run as root") from None
            try:
                self._prepare(interface)
            except OSError as error:
                self._socket.close()
                raise CheckmateError(
                    f"interface {interface}: {error.strerror}; the topology must name one of this machine that is up"
                ) from None

    def fileno(self) -> int:
        """For select()."""
        return self._socket.fileno()

    def send(self, frame: bytes) -> None:
        """Put a frame on the wire; raises CheckmateError when the interface is down."""
        try:
            self._socket.send(frame)
        except OSError as error:
            raise CheckmateError(f"a probe could not be sent: {error.strerror}; is the interface up?") from None

    def receive(self) -> bytes | None:
        """The next frame that has arrived, None when there is none."""
        try:
            return self._socket.recv(_SNAPLEN)
        except BlockingIOError:
            return None

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _prepare(self, interface: str) -> None:
        program = b"".join(struct.pack("HBBI", *instruction) for instruction in _ONLY_PROBES)
        held = array.array("B", program)  # stays where it is until the kernel has read it
        attached = struct.pack("HP", len(_ONLY_PROBES), held.buffer_info()[0])
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, attached)
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _RECEIVE_BYTES)
        self._socket.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
        self._socket.bind((interface, _ETH_P_ALL))
