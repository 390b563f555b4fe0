"""What the benchmarks measure over: a plain bridge, or the product's own rack with switch and shadow."""

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from checkmate.config import CheckmateError
from checkmate.lab import Lab, LabConfig, Placement, clean_stale
from checkmate.launch import Job, job_environment
from checkmate.nccl_plugin.bpf.loader import CounterProgram
from checkmate.services import Services
from checkmate.train.settings import SHADOWS

PREFIX = "ckmbench"
LOG_LINES = 30


@dataclass(frozen=True)
class Node:
    """Where a rank runs: a network namespace, its interface, its address."""

    netns: str
    interface: str
    address: str


@dataclass(frozen=True)
class Network:
    """Nodes for ranks, and what all ranks find in their environment. ``services``: of a network with a shadow."""

    nodes: Sequence[Node]
    env: Mapping[str, str] = field(default_factory=dict)
    services: Services | None = None


class Ranks:
    """One process for each node, running inside ``with``; each line that they print is a JSON object.

    ``command``: arguments of Python, by rank. ``env``: changes to the environment; None removes a variable.
    """

    def __init__(
        self,
        network: Network,
        command: Callable[[int], Sequence[str]],
        cpus: Sequence[int],
        env: Mapping[str, str | None] | None = None,
    ) -> None:
        self._network, self._command, self._cpus, self._env = network, command, cpus, env or {}

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix=PREFIX))
            self._logs = [Path(directory, f"{rank}.log") for rank in range(len(self._network.nodes))]
            self._processes: list[subprocess.Popen[bytes]] = []
            stack.callback(self._kill)
            for rank in range(len(self._network.nodes)):
                self._processes.append(self._spawn(rank))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def send(self, **values: Any) -> None:
        """Write one JSON object to the standard input of every rank."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(values).encode() + b"\n")

    def reports(self, rank: int, timeout_s: float) -> Iterator[dict[str, Any]]:
        """What a rank prints, until it ends. Raises CheckmateError when it fails, or is silent for too long."""
        process = self._processes[rank]
        assert process.stdout is not None
        pending = b""
        while select.select([process.stdout], [], [], timeout_s)[0]:
            data = os.read(process.stdout.fileno(), 1 << 16)
            *lines, pending = (pending + data).split(b"\n")
            yield from map(json.loads, lines)
            if not data and process.wait() == 0:
                return
            if not data:
                break
        log = "\n".join(self._logs[rank].read_text(errors="replace").splitlines()[-LOG_LINES:])
        state = "is silent" if process.poll() is None else f"failed with status {process.returncode}"
        raise CheckmateError(f"rank {rank} {state}; it said:\n{log}")

    def _spawn(self, rank: int) -> subprocess.Popen[bytes]:
        node = self._network.nodes[rank]
        command = ["setpriv", "--pdeathsig", "KILL", "nsenter", f"--net=/run/netns/{node.netns}", "--"]
        if self._cpus:
            command = ["taskset", "--cpu-list", ",".join(map(str, self._cpus)), *command]
        env: dict[str, str | None] = {
            **os.environ,
            **self._network.env,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": node.interface,
            "CHECKMATE_IFNAME": f"={node.interface}",
            **self._env,
        }
        with self._logs[rank].open("w") as log:
            return subprocess.Popen(
                [*command, sys.executable, *self._command(rank)],
                env={name: value for name, value in env.items() if value is not None},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
            )

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.communicate()


@contextmanager
def bridge(ranks: int, mtu: int) -> Iterator[Network]:
    """One namespace for each rank and one for a bridge, joined by veths; all removed at the end."""
    _delete_stale()
    prefix = f"{PREFIX}{os.getpid()}"
    hub = f"{prefix}-hub"
    nodes = [Node(f"{prefix}-r{r}", "eth0", f"10.2.0.{10 + r}") for r in range(ranks)]
    with ExitStack() as stack:
        stack.callback(_delete, [hub, *(node.netns for node in nodes)])
        _ip(*(f"netns add {name}" for name in [hub, *(node.netns for node in nodes)]))
        _ip("link add br0 type bridge", f"link set br0 mtu {mtu} up", netns=hub)
        for r, node in enumerate(nodes):
            _ip(f"link add eth0 netns {node.netns} mtu {mtu} type veth peer name p{r} netns {hub} mtu {mtu}")
            _ip(f"link set p{r} master br0", f"link set p{r} up", netns=hub)
            _ip(f"addr add {node.address}/24 dev eth0", "link set eth0 up", "link set lo up", netns=node.netns)
        yield Network(nodes)


@contextmanager
def rack(ranks: int, mtu: int, placement: Placement | None, sets: int) -> Iterator[Network]:
    """The demo's rack: the eBPF switch, its controller and a shadow that holds ``sets`` iterations."""
    clean_stale()
    with Lab(LabConfig(ranks, mtu, job="bench", placement=placement)) as lab, CounterProgram.load(lab.bpf) as counter:
        services = Services(lab, ["--sets", str(sets)]).start()
        topology = lab.topology
        job = Job(services.topology_file, Path())
        nodes = [Node(str(host.netns), host.nics[0].name, host.nics[0].ip) for host in topology.hosts]
        env = job_environment(topology, job, counter.map_path)
        yield Network(nodes, env | {SHADOWS: topology.controls(topology.groups[0])}, services)


def _ip(*lines: str, netns: str | None = None) -> None:
    selector = ["-n", netns] if netns else []
    subprocess.run(["ip", *selector, "-batch", "-"], input="\n".join(lines), text=True, check=True)


def _delete(names: Sequence[str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _delete_stale() -> None:
    """Namespaces of runs that were killed."""
    for path in Path("/run/netns").glob(f"{PREFIX}*-*"):
        pid = path.name.removeprefix(PREFIX).split("-")[0]
        if pid.isdigit() and not Path("/proc", pid).exists():
            _delete([path.name])
