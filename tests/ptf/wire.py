"""The far ends of a switch's ports, and raw frames on them."""

import contextlib
import os
import select
import socket
import struct
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from checkmate.p4.ebpf.netdev import Namespace

MTU = 9600
_ETH_P_ALL = 3
_SO_RCVBUFFORCE = 33
_SOL_PACKET = 263
_PACKET_AUXDATA = 8
_PACKET_IGNORE_OUTGOING = 23
_AUXDATA = struct.Struct("=IIIHHHH")
_VLAN_VALID = 1 << 4
_SNAPLEN = 1 << 17
_ADDRESSES = 12


class Wire:
    """A raw socket on the interface at the far end of a port; ``outgoing``: it also sees what the host sends."""

    def __init__(self, netns: str, interface: str, *, outgoing: bool = False) -> None:
        with contextlib.closing(Namespace(netns)) as namespace, namespace.entered():
            self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 1 << 26)
            self._socket.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, not outgoing)
            self._socket.setsockopt(_SOL_PACKET, _PACKET_AUXDATA, 1)
            self._socket.bind((interface, _ETH_P_ALL))

    def fileno(self) -> int:
        """For select()."""
        return self._socket.fileno()

    def send(self, frame: bytes) -> None:
        """Put a frame on the wire."""
        self._socket.send(frame)

    def receive(self) -> bytes | None:
        """The next frame that has arrived, its VLAN tag in place; None when there is none."""
        try:
            frame, control, _, _ = self._socket.recvmsg(_SNAPLEN, 128, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        for _, _, data in control:
            status, _, _, _, _, tci, protocol = _AUXDATA.unpack(data[: _AUXDATA.size])
            if status & _VLAN_VALID:
                return frame[:_ADDRESSES] + struct.pack(">HH", protocol, tci) + frame[_ADDRESSES:]
        return frame

    def drain(self) -> list[bytes]:
        """All frames that have arrived."""
        return list(iter(self.receive, None))

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def wait_readable(wires: Mapping[int, Wire], timeout_s: float) -> None:
    """Wait until a frame is there on any wire."""
    select.select(list(wires.values()), [], [], timeout_s)


@dataclass(frozen=True)
class Rack:
    """A switch's namespace and a namespace at the far end of each port, joined by veths."""

    switch_netns: str
    interfaces: Mapping[int, str]
    far_netns: Mapping[int, str]
    far_interface: str = "far0"


@contextlib.contextmanager
def rack(ports: range, shadow_ports: frozenset[int], name: str = "ptf") -> Iterator[Rack]:
    """Build a rack and remove it again; interfaces are up, quiet and take frames of ``MTU`` bytes."""
    prefix = f"ckm{name}{os.getpid()}"
    built = Rack(f"{prefix}s", {port: f"p{port}" for port in ports}, {port: f"{prefix}n{port}" for port in ports})
    try:
        for netns in (built.switch_netns, *built.far_netns.values()):
            _run("ip", "netns", "add", netns)
            with contextlib.closing(Namespace(netns)) as namespace, namespace.entered():
                Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1")
        for port in ports:
            _join(built, port, offloads=port not in shadow_ports)
        yield built
    finally:
        for netns in (built.switch_netns, *built.far_netns.values()):
            subprocess.run(["ip", "netns", "del", netns], check=False, capture_output=True)


def _join(built: Rack, port: int, offloads: bool) -> None:
    near, far = built.interfaces[port], built.far_interface
    _run(
        *("ip", "-n", built.switch_netns, "link", "add", near, "mtu", str(MTU), "type", "veth"),
        *("peer", "name", far, "mtu", str(MTU), "netns", built.far_netns[port]),
    )
    if not offloads:
        _run("ip", "netns", "exec", built.switch_netns, "ethtool", "-K", near, "tx", "off")
    _run("ip", "-n", built.switch_netns, "link", "set", near, "up")
    _run("ip", "-n", built.far_netns[port], "link", "set", far, "up")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def settle(deadline_s: float) -> Iterator[float]:
    """Remaining seconds until a deadline; ends when it has passed."""
    end = time.monotonic() + deadline_s
    while (left := end - time.monotonic()) > 0:
        yield left
