"""A rack in network namespaces on one machine: the embedded default of the demo, the tests and the benchmarks.

Every host (of one rank or more), the shadow, the switch and the management network get a namespace of their own::

    PREFIX-r0 … PREFIX-rN   eth0 … ──► switch ports 1 … N        mgmt0 ──► management bridge
    PREFIX-shadow0 …        rx0, rx1 ──► switch ports N+1 …      mgmt0 ──► management bridge
    PREFIX-switch           p1 …                                 mgmt0 ──► management bridge
    PREFIX-mgmt             br0, the bridge; the launcher and the controller run here

All of it is removed when the lab closes. A lab whose owner was killed (its lock is free) is removed by the next
``clean_stale``.
"""

import fcntl
import ipaddress
import os
import re
import secrets
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, NoReturn, Self

from checkmate import config
from checkmate.config import CheckmateError
from checkmate.topology import Endpoint, Group, Host, Nic, Shadow, Switch, Topology

ROOT = Path("/run/checkmate")
_PREFIX = re.compile(r"ckm\d+(-\d+)?")
_STOP_SECONDS = 10.0
_FIRST_TABLE = 100
"""Number of the routing table of a host's first NIC."""
_DROP_ALL = "1,6 0 0 2,"  # classic BPF of one instruction: return TC_ACT_SHOT
_STEER = 'for mask in /sys/class/net/*/queues/rx-*/rps_cpus; do echo "$1" > "$mask" || exit; done'
_BMV2_WINDOW_FRAMES = 24
"""Receive buffers for BMv2, in frames, of which the kernel offers half: its queues hold 64 and drop what is more."""
_MOUNTS = {"bpf": "mode=0700", "cgroup2": "nosuid"}
_COMMANDS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "ethtool": "ethtool",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "taskset": "util-linux",
    "mount": "mount",
    "sysctl": "procps",
}


@dataclass(frozen=True)
class Placement:
    """CPUs of the training nodes and CPUs of all the rest (switch, shadow, controller).

    Each side's processes run there, and so does what the kernel does for packets that arrive at its interfaces.
    """

    nodes: tuple[int, ...]
    rack: tuple[int, ...]


@dataclass(frozen=True)
class LabConfig:
    """Size of a lab: ``ranks``, ``shadows``, links of ``mtu`` bytes, switch ``target`` ("ebpf" or "bmv2").

    ``ranks_per_host``: ranks that share a host, which has ``nics`` interfaces; the last host may have fewer ranks.
    ``groups``: data-parallel groups of equal size. Consecutive ranks are in the same one, as those of a pipeline's
    stages; ``interleaved``: in different ones, as with tensor parallelism and HSDP, and where a host has several ranks
    it has as many of each group. ``shadows``: of each group, or, where groups share hosts, of all of them.
    ``placement`` None: everything runs where the kernel puts it.
    """

    ranks: int = 4
    mtu: int = 1500
    target: str = "ebpf"
    job: str = "lab"
    placement: Placement | None = None
    ranks_per_host: int = 1
    nics: int = 1
    shadows: int = 1
    groups: int = 1
    interleaved: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.ranks_per_host < self.ranks:
            raise CheckmateError(
                f"{self.ranks} ranks, {self.ranks_per_host} on each host: the job needs two hosts or more; "
                f"allowed: 1 to {self.ranks - 1} on each"
            )
        if self.groups < 1 or self.ranks % self.groups or self.ranks // self.groups < config.MIN_RANKS:
            raise CheckmateError(
                f"{self.ranks} ranks cannot be {self.groups} groups of equal size with {config.MIN_RANKS} ranks or "
                "more; change one of the two"
            )
        uneven = self.ranks_per_host % self.groups or self.ranks % self.ranks_per_host
        if self.shares_hosts and (uneven or not self.interleaved):
            raise CheckmateError(
                f"{self.groups} groups, {self.ranks_per_host} of {self.ranks} ranks on each host: groups share hosts "
                "only when they are interleaved and each host has as many ranks of each; take interleaved groups and "
                f"multiples of {self.groups} that divide {self.ranks}, or one rank on each host"
            )

    @property
    def shares_hosts(self) -> bool:
        """Each host has ranks of all groups, which then have the same shadows."""
        return self.groups > 1 and self.ranks_per_host > 1


def lab_topology(lab: LabConfig, prefix: str, directory: Path) -> Topology:
    """Topology of a lab whose namespaces begin with ``prefix``."""
    hosts = tuple(_lab_host(lab, prefix, h) for h in range(-(-lab.ranks // lab.ranks_per_host)))
    first = len(hosts) * lab.nics + 1
    sets_of_shadows = 1 if lab.shares_hosts else lab.groups
    shadows = tuple(_lab_shadow(prefix, first, s) for s in range(lab.shadows * sets_of_shadows))
    ports = range(1, first + 2 * len(shadows))
    names = [host.name for host in hosts for _ in range(host.ranks)]
    size = lab.ranks // lab.groups
    return Topology(
        job=lab.job,
        mtu=lab.mtu,
        token_file=directory / "token",
        registrar=Endpoint("10.255.0.1", config.REGISTRATION_PORT),
        switch=Switch(
            target=lab.target,
            p4runtime=Endpoint("10.255.0.2", config.P4RUNTIME_PORT),
            interfaces={port: f"p{port}" for port in ports},
            netns=f"{prefix}-switch",
        ),
        hosts=hosts,
        shadows=shadows,
        groups=tuple(
            Group(
                f"dp{g}",
                tuple(names[g :: lab.groups] if lab.interleaved else names[g * size :][:size]),
                tuple(shadow.name for shadow in shadows[g % sets_of_shadows * lab.shadows :][: lab.shadows]),
            )
            for g in range(lab.groups)
        ),
    )


def _lab_host(lab: LabConfig, prefix: str, index: int) -> Host:
    numbers = [index * lab.nics + i for i in range(lab.nics)]
    nics = tuple(Nic(f"eth{i}", _mac(1, n), f"10.1.0.{10 + n}", 1 + n) for i, n in enumerate(numbers))
    ranks = min(lab.ranks_per_host, lab.ranks - index * lab.ranks_per_host)
    return Host(f"node{index}", f"10.255.0.{10 + index}", nics, f"{prefix}-r{index}", ranks)


def _lab_shadow(prefix: str, first_port: int, index: int) -> Shadow:
    numbers = (2 * index, 2 * index + 1)
    nics = tuple(Nic(f"rx{i}", _mac(2, n), f"10.1.0.{200 + n}", first_port + n) for i, n in enumerate(numbers))
    return Shadow(f"shadow{index}", f"10.255.0.{100 + index}", nics, f"{prefix}-shadow{index}")


def _mac(kind: int, index: int) -> str:
    return f"02:c4:ec:00:{kind:02x}:{index:02x}"


class Lab:
    """Context manager that builds the namespaces and owns the processes in them.

    ``topology``: what was built; ``directory``: state, logs and sockets of this lab, mode 0700.
    Raises CheckmateError without root or when a command is missing; nothing is left behind then.
    """

    def __init__(self, lab: LabConfig, keep: bool = False, say: Callable[[str], None] = lambda _: None) -> None:
        self._config = lab
        self._keep = keep
        self._say = say
        self._stack = ExitStack()
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        _require_root()
        self.prefix, self.directory = _claim_directory()
        try:
            self._lock = self._stack.enter_context(_locked(self.directory))
            self._stack.callback(_remove_lab, self.prefix, self.directory, self._keep)
            self.topology = lab_topology(self._config, self.prefix, self.directory)
            self._write_token()
            self._temporary.mkdir()
            self._say(
                f"creates namespaces {self.prefix}-*, state in {self.directory}; all removed at exit"
                + (f", but for {self.directory}" if self._keep else "")
            )
            self._build()
            self._stack.callback(self._stop_all)
        except BaseException:
            with _signals_ignored():
                self._stack.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with _signals_ignored():
            self._stack.close()

    @property
    def management(self) -> str:
        """Namespace of the launcher and the controller."""
        return f"{self.prefix}-mgmt"

    @property
    def bpf(self) -> Path:
        """A BPF file system of this lab alone."""
        return self.directory / "bpf"

    @property
    def _temporary(self) -> Path:
        return self.directory / "tmp"

    def spawn(
        self,
        netns: str,
        argv: Sequence[str | Path],
        log: str,
        env: Mapping[str, str] | None = None,
        *,
        trains: bool = False,
        stdin: int | None = subprocess.DEVNULL,
    ) -> subprocess.Popen[bytes]:
        """Start a process in a namespace; it dies with this one, and its output goes to DIRECTORY/LOG.

        ``trains``: it belongs to the training nodes, which decides about its CPUs. ``stdin`` as for ``Popen``.
        """
        command = ["setpriv", "--pdeathsig", "KILL", "nsenter", f"--net=/run/netns/{netns}", "--", *map(str, argv)]
        if placement := self._config.placement:
            cpus = placement.nodes if trains else placement.rack
            command = ["taskset", "--cpu-list", ",".join(map(str, cpus)), *command]
        with (self.directory / log).open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=output,
                stderr=subprocess.STDOUT,
                # What they and torch leave there goes with the lab, even if it is killed.
                env={**os.environ, "TMPDIR": str(self._temporary), **(env or {})},
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def log_tail(self, log: str, lines: int = 15) -> str:
        """Last lines of a process's output, for error messages."""
        path = self.directory / log
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else "(no output)"

    def _write_token(self) -> None:
        descriptor = os.open(self.topology.token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as token:
            token.write(secrets.token_hex(32))

    def _build(self) -> None:
        topology = self.topology
        switch = topology.switch.netns
        assert switch is not None
        nodes: list[Host | Shadow] = [*topology.hosts, *topology.shadows]
        namespaces = [self.management, switch, *(node.netns for node in nodes if node.netns)]
        lines = [f"netns add {name}" for name in namespaces]
        for node in nodes:
            for nic in node.nics:
                lines.append(
                    f"link add {nic.name} netns {node.netns} address {nic.mac} mtu {topology.mtu} type veth "
                    f"peer name {topology.switch.interfaces[nic.port]} netns {switch} mtu {topology.mtu}"
                )
        members = {node.netns: node.management_ip for node in nodes} | {switch: topology.switch.p4runtime.host}
        for number, name in enumerate(members):
            lines.append(f"link add mgmt0 netns {name} type veth peer name m{number} netns {self.management}")
        _ip_batch(lines)
        self._configure_management(len(members))
        for name, address in members.items():
            assert name is not None
            _ip_batch([f"addr add {address}/24 dev mgmt0", "link set mgmt0 up", "link set lo up"], name)
        for host in topology.hosts:
            _ip_batch([line for nic in host.nics for line in (f"addr add {nic.ip}/24 dev {nic.name}",)], host.netns)
        for name in namespaces:
            _sysctl(name, "net.ipv6.conf.all.disable_ipv6=1")
        if topology.switch.target == "bmv2":
            window = _BMV2_WINDOW_FRAMES * topology.mtu
            for host in topology.hosts:
                _sysctl(host.netns, f"net.ipv4.tcp_rmem=4096 {window} {window}")
        self._bring_links_up(nodes, switch)
        for host in topology.hosts:
            _route_by_source(host)
        if self._config.placement:
            self._steer_packets(self._config.placement)
        # Mounts of our own: whether and where the machine has them varies, and nothing of ours is left in its.
        for kind, options in _MOUNTS.items():
            (self.directory / kind).mkdir()
            _run("mount", "-t", kind, "-o", options, "checkmate", str(self.directory / kind))

    def _configure_management(self, members: int) -> None:
        lines = ["link set lo up", "link add br0 type bridge", "link set br0 up"]
        lines.append(f"addr add {self.topology.registrar.host}/24 dev br0")
        for number in range(members):
            lines += [f"link set m{number} master br0", f"link set m{number} up"]
        _ip_batch(lines, self.management)

    def _bring_links_up(self, nodes: Sequence[Host | Shadow], switch: str) -> None:
        for node in nodes:
            _ip_batch([f"link set {nic.name} up" for nic in node.nics], node.netns)
        _ip_batch([f"link set {name} up" for name in self.topology.switch.interfaces.values()], switch)
        software = self.topology.switch.target == "bmv2"
        for node in nodes:
            for nic in node.nics:
                if isinstance(node, Shadow):
                    # Its packet socket has seen a frame by then; the IP layer would look up a route for each.
                    tc = ("nsenter", f"--net=/run/netns/{node.netns}", "tc")
                    _run(*tc, "qdisc", "add", "dev", nic.name, "clsact")
                    _run(*tc, "filter", "add", "dev", nic.name, "ingress", "bpf", "bytecode", _DROP_ALL, "da")
                # A shadow must get packets of at most the MTU with valid checksums: the kernel segments before it.
                if software or isinstance(node, Shadow):
                    port = self.topology.switch.interfaces[nic.port]
                    offloads = ["tx", "off", "tso", "off", "gso", "off"]
                    _run("nsenter", f"--net=/run/netns/{switch}", "ethtool", "-K", port, *offloads)
                if software:
                    offloads = ["tx", "off", "rx", "off", "tso", "off", "gso", "off", "gro", "off"]
                    _run("nsenter", f"--net=/run/netns/{node.netns}", "ethtool", "-K", nic.name, *offloads)

    def _steer_packets(self, placement: Placement) -> None:
        """Receive packet steering: which CPUs work on what arrives at an interface, whoever sent it."""
        topology = self.topology
        at_nodes = [host.netns for host in topology.hosts]
        at_rack = [topology.switch.netns, *(shadow.netns for shadow in topology.shadows), self.management]
        for namespaces, cpus in ((at_nodes, placement.nodes), (at_rack, placement.rack)):
            mask = _cpu_mask(cpus)
            for netns in namespaces:
                assert netns is not None
                _run("ip", "netns", "exec", netns, "sh", "-c", _STEER, "sh", mask)  # with this namespace's /sys

    def _stop_all(self) -> None:
        for process in reversed(self._processes):
            stop(process)


def stop(process: subprocess.Popen[bytes], seconds: float = _STOP_SECONDS) -> int:
    """Ask the process to end, kill what is left of its session after ``seconds``; returns its exit status.

    One that had ended before is left alone: its number may be another group's by now.
    """
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.wait(seconds)


def clean_stale() -> list[str]:
    """Remove what labs left behind whose owner is gone; returns their prefixes."""
    removed = []
    for directory in sorted(ROOT.glob("ckm*")) if os.geteuid() == 0 else []:
        if not _PREFIX.fullmatch(directory.name):
            continue
        with suppress(BlockingIOError, FileNotFoundError), _locked(directory):
            if (directory / "keep").exists():
                continue
            removed.append(directory.name)
            _remove_lab(directory.name, directory, keep=False)
    return removed


def _route_by_source(host: Host) -> None:
    """Where a host has several NICs in one network, what is sent from the address of one leaves through that one."""
    if len(host.nics) < 2:
        return
    for setting in ("arp_ignore=1", "arp_announce=2"):
        _sysctl(host.netns, f"net.ipv4.conf.all.{setting}")
    for table, nic in enumerate(host.nics, _FIRST_TABLE):
        network = ipaddress.ip_interface(f"{nic.ip}/24").network
        rules = [
            f"route add {network} dev {nic.name} src {nic.ip} table {table}",
            f"rule add from {nic.ip} table {table}",
        ]
        _ip_batch(rules, host.netns)


def _require_root() -> None:
    if os.geteuid() != 0:
        raise CheckmateError("network namespaces and BPF need root: run this command as root (for example with sudo)")
    missing = {command: package for command, package in _COMMANDS.items() if shutil.which(command) is None}
    if missing:
        packages = " ".join(sorted(set(missing.values())))
        raise CheckmateError(f"missing commands {', '.join(missing)}: install the Debian packages {packages}")


def _cpu_mask(cpus: Sequence[int]) -> str:
    """As the kernel's files take it: hexadecimal, a comma after every 32 CPUs."""
    digits = f"{sum(1 << cpu for cpu in cpus):x}"
    digits = digits.zfill(-(-len(digits) // 8) * 8)
    return ",".join(digits[i : i + 8] for i in range(0, len(digits), 8))


def _claim_directory() -> tuple[str, Path]:
    for attempt in range(100):
        prefix = f"ckm{os.getpid()}" + (f"-{attempt}" if attempt else "")
        try:
            (ROOT / prefix).mkdir(mode=0o700, parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise CheckmateError(f"{ROOT / prefix} cannot be made: {error.strerror}; /run must be writable") from None
        return prefix, ROOT / prefix
    raise CheckmateError(f"{ROOT} holds 100 directories of process {os.getpid()}: remove them")


def _locked(directory: Path) -> IO[str]:
    """Lock that tells a live lab from a dead one; the kernel frees it with its owner. Raises BlockingIOError."""
    lock = (directory / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise
    return lock


def _remove_lab(prefix: str, directory: Path, keep: bool) -> None:
    namespaces = [path.name for path in Path("/run/netns").glob(f"{prefix}-*")]
    for name in namespaces:
        _kill_members(name)
    for name in namespaces:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
    for mount in (directory / kind for kind in _MOUNTS):
        if mount.exists():
            subprocess.run(["umount", "-l", mount], check=False, capture_output=True)
            with suppress(OSError):
                mount.rmdir()
    (directory / "token").unlink(missing_ok=True)
    shutil.rmtree(directory / "tmp", ignore_errors=True)
    if keep:
        (directory / "keep").touch()
    else:
        shutil.rmtree(directory, ignore_errors=True)
        with suppress(OSError):  # others' labs are there
            ROOT.rmdir()


def _kill_members(netns: str) -> None:
    for _ in range(50):
        pids = subprocess.run(
            ["ip", "netns", "pids", netns], check=False, capture_output=True, text=True
        ).stdout.split()
        if not pids:
            return
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.02)


def _sysctl(netns: str | None, setting: str) -> None:
    _run("nsenter", f"--net=/run/netns/{netns}", "sysctl", "-qw", setting)


def _ip_batch(lines: Sequence[str], netns: str | None = None) -> None:
    # Not `ip -n`, which remounts /sys and so fails in a chroot.
    inside = ["nsenter", f"--net=/run/netns/{netns}"] if netns else []
    _run(*inside, "ip", "-batch", "-", text="\n".join(lines) + "\n")


def _run(*argv: str, text: str | None = None) -> None:
    try:
        result = subprocess.run(argv, input=text, capture_output=True, text=True, check=False, timeout=60)
    except subprocess.TimeoutExpired:
        raise CheckmateError(f"`{' '.join(argv)}` did not end within 60 s: is the machine overloaded?") from None
    if result.returncode != 0:
        reason = result.stderr.strip() or result.stdout.strip()
        raise CheckmateError(f"`{' '.join(argv)}` failed: {reason}")


_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP end the block by KeyboardInterrupt: the first one; others can't disturb the clean-up.

    Those that the caller's shell had made us ignore stay ignored.
    """
    before = {number: signal.getsignal(number) for number in _ENDING}

    def interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
        for number in _ENDING:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _signals_ignored() -> Iterator[None]:
    """Keep Ctrl-C from this process and from the commands that it starts: both would break off a clean-up.

    A mask would not do: Python handles a signal that any thread was given. Only the main thread can be interrupted.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
