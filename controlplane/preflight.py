"""What a job needs of a machine, checked by trying it; nothing is changed and nothing is left behind."""

import ctypes
import errno
import os
import platform
import shutil
import socket
import struct
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from checkmate.config import CheckmateError
from checkmate.p4.ebpf import netdev
from checkmate.topology import Topology

_COMMANDS = {"ip": "iproute2", "tc": "iproute2", "ethtool": "ethtool", "nsenter": "util-linux", "unshare": "util-linux"}
_LIBRARIES = {"libbpf.so.1": "libbpf1"}
_TIMEOUT_S = 10

# linux/bpf.h: commands, types of maps and programs; the system call's number by machine.
_BPF_CALLS = {"x86_64": 321, "aarch64": 280}
_BPF_MAP_CREATE, _BPF_PROG_LOAD = 0, 5
_BPF_MAP_TYPE_ARRAY = 2
_BPF_PROGRAMS = {3: ("tc programs", "CONFIG_NET_CLS_BPF"), 13: ("sock_ops programs", "CONFIG_CGROUP_BPF")}
_RETURN_0 = struct.pack("<QQ", 0xB7, 0x95)
_ATTR_BYTES = 128

_SHADOW_PORT = ("tx", "tso", "gso")
_SHADOW_NIC = ("gro",)
_BMV2_PORT = ("tx", "rx", "tso", "gso", "gro")
_BMV2_HOST = ("tx", "tso", "gso")


@dataclass(frozen=True)
class Finding:
    """One thing that was checked. ``problem``: what is wrong and what to do, None when nothing is."""

    what: str
    problem: str | None = None


def check_machine(mounts: bool = True) -> list[Finding]:
    """What the software switch, the counter option and the shadow need of the kernel and of Debian's packages.

    ``mounts`` False: file systems need not be mounted, only known to the kernel.
    """
    return [
        *(_command(name, package) for name, package in _COMMANDS.items()),
        *(_library(name, package) for name, package in _LIBRARIES.items()),
        _root(),
        _try("BPF maps", _create_map, "CONFIG_BPF_SYSCALL"),
        *(
            _try(f"BPF {what}", lambda kind=kind: _load_program(kind), option)  # type: ignore[misc]
            for kind, (what, option) in _BPF_PROGRAMS.items()
        ),
        _mount("BPF file system", "bpf", "CONFIG_BPF_SYSCALL", "mount -t bpf bpf /sys/fs/bpf", mounts),
        _mount("control groups v2", "cgroup2", "CONFIG_CGROUPS", "mount -t cgroup2 none /sys/fs/cgroup", mounts),
        _try("raw sockets (AF_PACKET)", _open_packet_socket, "CONFIG_PACKET"),
        *_links(),
    ]


def check_offloads(topology: Topology) -> list[Finding]:
    """Whether veths that carry copies finish frames before a shadow or BMv2 reads them.

    Only interfaces that exist on this machine are looked at. A real NIC finishes frames by itself.
    """
    wanted = list(_wanted_offloads(topology))
    return [finding for netns, name, off in wanted if (finding := _offloads(netns, name, off))]


def require(findings: Iterable[Finding]) -> None:
    """Raise a CheckmateError with all problems, if there are any."""
    problems = [f"  {finding.what}: {finding.problem}" for finding in findings if finding.problem]
    if problems:
        raise CheckmateError("\n".join(["this machine is not ready:", *problems]))


def _command(name: str, package: str) -> Finding:
    there = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    return Finding(f"command {name}", None if there else f"missing; apt-get install {package}")


def _library(name: str, package: str) -> Finding:
    try:
        ctypes.CDLL(name)
    except OSError:
        return Finding(f"library {name}", f"missing; apt-get install {package}")
    return Finding(f"library {name}")


def _root() -> Finding:
    problem = None if os.geteuid() == 0 else "network namespaces, BPF and raw sockets need it; run with sudo"
    return Finding("root", problem)


def _try(what: str, action: Callable[[], None], option: str) -> Finding:
    """Problem of an action that fails with an OSError: missing rights or a kernel without ``option``."""
    try:
        action()
    except PermissionError as error:
        return Finding(what, f"{error.strerror}; run as root, and in a container with CAP_BPF and CAP_NET_ADMIN")
    except OSError as error:
        return Finding(what, f"{error.strerror}; the kernel needs {option}")
    return Finding(what)


def _mount(what: str, kind: str, option: str, command: str, needed: bool) -> Finding:
    if f"\t{kind}\n" not in Path("/proc/filesystems").read_text():
        return Finding(what, f"unknown to the kernel; it needs {option}")
    mounted = not needed or any(line.split()[2] == kind for line in Path("/proc/mounts").read_text().splitlines())
    return Finding(what, None if mounted else f"not mounted; {command}")


def _open_packet_socket() -> None:
    socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0).close()


def _create_map() -> None:
    _bpf(_BPF_MAP_CREATE, struct.pack("=IIII", _BPF_MAP_TYPE_ARRAY, 4, 4, 1))


def _load_program(kind: int) -> None:
    code, licence = ctypes.create_string_buffer(_RETURN_0), ctypes.create_string_buffer(b"GPL")
    _bpf(_BPF_PROG_LOAD, struct.pack("=IIQQ", kind, 2, ctypes.addressof(code), ctypes.addressof(licence)))


def _bpf(command: int, attributes: bytes) -> None:
    """One bpf(2) call whose file descriptor is closed at once; raises OSError."""
    number = _BPF_CALLS.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"{platform.machine()} machines are not supported")
    buffer = ctypes.create_string_buffer(attributes, _ATTR_BYTES)
    descriptor = ctypes.CDLL(None, use_errno=True).syscall(number, command, buffer, _ATTR_BYTES)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.close(descriptor)


def _links() -> Iterator[Finding]:
    """Namespaces, veths and clsact, tried in a namespace that vanishes with its process."""
    script = (
        "echo namespace; ip link add ckm0 type veth peer name ckm1 || exit 1; echo veth; "
        "tc qdisc add dev ckm0 clsact || exit 1; echo clsact"
    )
    try:
        done = subprocess.run(
            ["unshare", "--net", "sh", "-c", script], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        reached, said = done.stdout.split(), done.stderr.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        reached, said = [], str(error)
    for step, what, option in (
        ("namespace", "network namespaces", "CONFIG_NET_NS"),
        ("veth", "veth links", "CONFIG_VETH (modprobe veth)"),
        ("clsact", "tc's clsact", "CONFIG_NET_SCH_INGRESS (modprobe sch_ingress)"),
    ):
        yield Finding(what, None if step in reached else f"{said or 'not tried'}; it needs root and {option}")


def _wanted_offloads(topology: Topology) -> Iterator[tuple[str | None, str, tuple[str, ...]]]:
    """(namespace, interface, offloads that must be off) of every interface that matters."""
    switch = topology.switch
    shadow_ports = {nic.port for shadow in topology.shadows for nic in shadow.nics}
    for port, name in switch.interfaces.items():
        if switch.target == "bmv2":
            yield switch.netns, name, _BMV2_PORT
        elif port in shadow_ports:
            yield switch.netns, name, _SHADOW_PORT
    for host in topology.hosts if switch.target == "bmv2" else ():
        for nic in host.nics:
            yield host.netns, nic.name, _BMV2_HOST
    for shadow in topology.shadows:
        for nic in shadow.nics:
            yield shadow.netns, nic.name, _SHADOW_NIC


def _offloads(netns: str | None, name: str, off: tuple[str, ...]) -> Finding | None:
    """What is to be said of one interface; None when it is not on this machine or not a veth."""
    try:
        with closing(netdev.Namespace(netns)) as namespace, namespace.entered():
            netdev.interface_index(name)
            on = netdev.enabled_offloads(name, off) if netdev.driver(name) == "veth" else None
    except CheckmateError:
        return None
    if on is None:
        return None
    inside = f"ip netns exec {netns} " if netns else ""
    command = f"{inside}ethtool -K {name} {' '.join(f'{offload} off' for offload in on)}"
    problem = f"{', '.join(on)} on: frames would be read without checksums or merged; run `{command}`"
    return Finding(f"offloads of {name}{f' in {netns}' if netns else ''}", problem if on else None)
