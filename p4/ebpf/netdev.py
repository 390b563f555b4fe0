"""Network interfaces and namespaces: what the switch has to know about its ports."""

import array
import contextlib
import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from checkmate.config import CheckmateError

_CLONE_NEWNET = 0x40000000
_NETNS_DIR = Path("/run/netns")

# linux/sockios.h, linux/ethtool.h, linux/if_packet.h
_SIOCETHTOOL = 0x8946
_ETHTOOL_GDRVINFO = 0x03
_DRVINFO_BYTES = 196
_DRVINFO_DRIVER = slice(4, 36)
_OFFLOADS = {"rx": 0x14, "tx": 0x16, "tso": 0x1E, "gso": 0x23, "gro": 0x2B}
_UNFINISHED = ("tx", "tso")
_SOL_PACKET = 263
_PACKET_ADD_MEMBERSHIP = 1
_PACKET_MR_PROMISC = 1


class Namespace:
    """A network namespace by its ``ip netns`` name, or this thread's for None; held open until closed.

    Raises CheckmateError when there is none of that name.
    """

    def __init__(self, name: str | None) -> None:
        path = Path("/proc/thread-self/ns/net") if name is None else _NETNS_DIR / name
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise CheckmateError(f"no network namespace {name}; `ip netns` lists those that exist") from None

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Run the block with this thread in the namespace."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _setns(self._descriptor)
            try:
                yield
            finally:
                _setns(before)
        finally:
            os.close(before)

    def close(self) -> None:
        """Let go of the namespace."""
        os.close(self._descriptor)


def _setns(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET) != 0:
        error = os.strerror(ctypes.get_errno())
        raise CheckmateError(f"cannot enter a network namespace ({error}); it needs CAP_SYS_ADMIN, run as root")


def interface_index(name: str) -> int:
    """Index of an interface of this thread's namespace; raises CheckmateError when there is none."""
    try:
        return socket.if_nametoindex(name)
    except OSError:
        raise CheckmateError(f"no network interface {name}; `ip link` lists those that exist") from None


def _ethtool(name: str, request: bytes) -> bytes:
    """One SIOCETHTOOL call; the request starts with the command and has room for the answer."""
    data = array.array("B", request)
    ifreq = struct.pack("16sP", name.encode(), data.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCETHTOOL, ifreq)
    return data.tobytes()


def driver(name: str) -> str:
    """Name of the interface's driver, for example ``veth``; empty when it does not tell."""
    try:
        answer = _ethtool(name, struct.pack("=I", _ETHTOOL_GDRVINFO).ljust(_DRVINFO_BYTES, b"\0"))
    except OSError:
        return ""
    return answer[_DRVINFO_DRIVER].split(b"\0")[0].decode()


def enabled_offloads(name: str, offloads: Iterable[str] = _UNFINISHED) -> list[str]:
    """Which of ``offloads`` are on, by ethtool's names: ``rx`` and ``tx`` (checksums), ``tso``, ``gso``, ``gro``."""
    return [
        offload
        for offload in offloads
        if struct.unpack("=II", _ethtool(name, struct.pack("=II", _OFFLOADS[offload], 0)))[1]
    ]


def check_shadow_port(name: str) -> None:
    """Refuse a veth towards a shadow that leaves checksums or segmentation to a NIC that is not there.

    A real NIC finishes such frames on their way out; behind a veth the shadow would read them unfinished. Without tx
    there is no tso either; gso only says that the kernel may segment, which it then does.
    """
    if driver(name) != "veth":
        return
    if offloads := enabled_offloads(name):
        raise CheckmateError(
            f"interface {name} faces a shadow and has offloads on ({', '.join(offloads)}): copies would reach the "
            f"shadow without checksums or larger than its MTU; run `ethtool -K {name} tx off`"
        )


def promiscuous(indexes: list[int]) -> socket.socket:
    """Make interfaces accept frames for any address, for as long as the returned socket is open."""
    holder = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    for index in indexes:
        membership = struct.pack("iHH8s", index, _PACKET_MR_PROMISC, 0, b"")
        holder.setsockopt(_SOL_PACKET, _PACKET_ADD_MEMBERSHIP, membership)
    return holder


def claim(index: int, name: str) -> socket.socket:
    """Claim an interface for this process until the returned socket is closed; one switch per interface.

    The claim is an abstract Unix socket: it belongs to the network namespace and goes away with its process.
    """
    holder = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        holder.bind(f"\0checkmate-switch-{index}")
    except OSError:
        holder.close()
        raise CheckmateError(f"interface {name} already belongs to a running switch; stop that one first") from None
    return holder
