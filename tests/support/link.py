"""What packet tests of one connection need: two namespaces joined by a veth pair, and what crosses it as packets."""

import contextlib
import ctypes
import os
import socket
import struct
import subprocess
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

DSCP_TAG = 0x20
OPTION = struct.Struct(">BBHI")
OPTION_KIND, OPTION_LENGTH, OPTION_EXID = 253, 8, 0x434B
SENDER, RECEIVER = "10.77.0.1", "10.77.0.2"
_ETH_P_ALL = 3
_SO_RCVBUFFORCE = 33
_PACKET_STATISTICS = 6
_SOL_PACKET = 263

_PACKET_IGNORE_OUTGOING = 23
_MODULUS = 1 << 32

# Classic BPF for tc: one packet in %d, at random (SKF_AD_RANDOM), is shot, the others go on to the next filter.
_LOSSY = "5,32 0 0 4294963256,148 0 0 %d,21 0 1 0,6 0 0 2,6 0 0 4294967295"
_PREFERENCE = "1"


def run(*command: str) -> None:
    """Run a command; what it wrote is in the error when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


@dataclass(frozen=True)
class Rack:
    """Two namespaces; each has its end of the link as ``eth0``."""

    sender: str
    receiver: str

    def command(self, netns: str, *command: str | Path) -> list[str]:
        """The command, in a namespace, with the mounts of this one (``ip netns exec`` would hide cgroups)."""
        return ["nsenter", f"--net=/run/netns/{netns}", "--", *map(str, command)]

    def lose(self, one_in: int) -> None:
        """Drop packets at random on both ends, behind the capture."""
        for netns in (self.sender, self.receiver):
            run("tc", "-n", netns, "qdisc", "add", "dev", "eth0", "clsact")
            lose(netns, "eth0", one_in)


def lose(netns: str, interface: str, one_in: int, direction: str = "ingress") -> None:
    """Drop packets at random on an interface that has a clsact qdisc, behind a capture, before any other filter."""
    place = ["dev", interface, direction, "pref", _PREFERENCE]
    run("tc", "-n", netns, "filter", "add", *place, "bpf", "da", "bytecode", _LOSSY % one_in)


def stop_losing(netns: str, interface: str, direction: str = "ingress") -> None:
    """Undo ``lose``."""
    run("tc", "-n", netns, "filter", "del", "dev", interface, direction, "pref", _PREFERENCE)


@contextlib.contextmanager
def rack(mtu: int, offload: bool) -> Iterator[Rack]:
    """Both namespaces, removed at the end."""
    pair = Rack(f"ckmplug{os.getpid()}s", f"ckmplug{os.getpid()}r")
    with contextlib.ExitStack() as stack:
        for netns in (pair.sender, pair.receiver):
            run("ip", "netns", "add", netns)
            stack.callback(run, "ip", "netns", "del", netns)
        peer = ["peer", "name", "eth0", "netns", pair.receiver]
        run("ip", "-n", pair.sender, "link", "add", "eth0", "type", "veth", *peer)
        for netns, address in ((pair.sender, SENDER), (pair.receiver, RECEIVER)):
            run("ip", "-n", netns, "addr", "add", f"{address}/24", "dev", "eth0")
            run("ip", "-n", netns, "link", "set", "eth0", "mtu", str(mtu), "up")
            switch = "on" if offload else "off"
            run(*pair.command(netns, "ethtool", "-K", "eth0", "tso", switch, "gso", switch, "gro", switch))
        yield pair


@dataclass
class Packet:
    """One TCP packet over IPv4. ``option``: value of the counter option, None without one."""

    source: str
    target: str
    ports: tuple[int, int]
    dscp: int
    seq: int
    flags: int
    payload: bytes
    option: int | None
    last: bool
    """The option is the last 8 bytes of the header."""


def parse(frame: bytes) -> Packet | None:
    """A packet from its Ethernet frame; None for anything but TCP over IPv4."""
    if frame[12:14] != b"\x08\x00" or frame[23] != socket.IPPROTO_TCP:
        return None
    ip_bytes = (frame[14] & 15) * 4
    total = int.from_bytes(frame[16:18]) or len(frame) - 14
    tcp = frame[14 + ip_bytes : 14 + total]
    header = tcp[: (tcp[12] >> 4) * 4]
    option = _find_option(header[20:])
    return Packet(
        source=socket.inet_ntoa(frame[26:30]),
        target=socket.inet_ntoa(frame[30:34]),
        ports=struct.unpack(">HH", tcp[:4]),
        dscp=frame[15] >> 2,
        seq=int.from_bytes(tcp[4:8]),
        flags=tcp[13],
        payload=tcp[len(header) :],
        option=option,
        last=option is not None and header[-8:] == OPTION.pack(OPTION_KIND, OPTION_LENGTH, OPTION_EXID, option),
    )


def _find_option(options: bytes) -> int | None:
    at = 0
    while at < len(options) and options[at] != 0:
        if options[at] == 1:
            at += 1
            continue
        length = options[at + 1]
        if options[at] == OPTION_KIND:
            kind, size, exid, value = OPTION.unpack(options[at : at + OPTION_LENGTH])
            assert (kind, size, exid) == (OPTION_KIND, OPTION_LENGTH, OPTION_EXID)
            return int(value)
        at += length
    return None


def stream(tagged: Iterable[Packet]) -> bytes:
    """What a shadow sees: the payloads at the places that the option tells. Retransmissions must agree."""
    return _assemble(((packet.seq + _option(packet)) % _MODULUS, packet.payload) for packet in tagged)


def copied_stream(copies: Iterable[Packet]) -> bytes:
    """What a shadow gets: the payloads at the places that the sequence numbers of the copies tell."""
    return _assemble((packet.seq, packet.payload) for packet in copies)


def _option(packet: Packet) -> int:
    assert packet.option is not None
    return packet.option


def _assemble(parts: Iterable[tuple[int, bytes]]) -> bytes:
    out, filled = bytearray(), bytearray()
    for at, payload in parts:
        end = at + len(payload)
        if end > len(out):
            out.extend(bytes(end - len(out)))
            filled.extend(bytes(end - len(filled)))
        if any(filled[at:end]):
            assert all(out[i] == byte for i, byte in enumerate(payload, at) if filled[i])
        out[at:end] = payload
        filled[at:end] = b"\1" * len(payload)
    assert all(filled), "the counters leave a hole"
    return bytes(out)


@dataclass
class Capture:
    """All frames on an interface of a namespace while the context is open; ``interface`` None: on all of them.

    ``incoming``: only those that come in. ``frames``: (interface, frame), in order.
    """

    netns: str
    interface: str | None = "eth0"
    incoming: bool = False
    frames: list[tuple[str, bytes]] = field(default_factory=list)

    def __enter__(self) -> "Capture":
        self._socket = _socket_in(self.netns, self.interface, self.incoming)
        self._thread = threading.Thread(target=self._read)
        self._stop = False
        self._thread.start()
        return self

    def _read(self) -> None:
        self._socket.settimeout(0.2)
        while True:
            try:
                frame, address = self._socket.recvfrom(1 << 17)
            except TimeoutError:
                if self._stop:
                    return
            else:
                self.frames.append((address[0], frame))

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()
        _, dropped = struct.unpack("II", self._socket.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8))
        self._socket.close()
        assert dropped == 0, f"the capture lost {dropped} packets"

    def packets(self, interface: str | None = None) -> list[Packet]:
        """TCP packets, on all interfaces or one, in order of arrival."""
        frames = (frame for name, frame in self.frames if interface in (None, name))
        return [packet for frame in frames if (packet := parse(frame))]


def _socket_in(netns: str, interface: str | None, incoming: bool) -> socket.socket:
    """A packet socket of another namespace, made in a thread of its own."""
    made: list[socket.socket] = []

    def make() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        with Path(f"/run/netns/{netns}").open() as file:
            assert libc.setns(file.fileno(), 0) == 0
        sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0 if interface else socket.htons(_ETH_P_ALL))
        sock.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 256 << 20)
        sock.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, incoming)
        if interface:
            sock.bind((interface, _ETH_P_ALL))
        made.append(sock)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return made[0]
