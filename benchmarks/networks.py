"""What the benchmarks measure over: a plain bridge, or the product's own rack with switch and shadow."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from checkmate.lab import Lab, LabConfig, Placement, clean_stale
from checkmate.launch import Job, job_environment
from checkmate.nccl_plugin.bpf.loader import CounterProgram
from checkmate.services import Services

PREFIX = "ckmbench"


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

    def spawn(
        self, rank: int, script: str, argument: str, cpus: Sequence[int], stdin: int | None = None
    ) -> subprocess.Popen[bytes]:
        """Start ``script --worker ARGUMENT`` as a rank; its output can be read, it dies with this process."""
        node = self.nodes[rank]
        command = ["setpriv", "--pdeathsig", "KILL", "nsenter", f"--net=/run/netns/{node.netns}", "--"]
        if cpus:
            command = ["taskset", "--cpu-list", ",".join(map(str, cpus)), *command]
        env = {
            **os.environ,
            **self.env,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": node.interface,
            "CHECKMATE_IFNAME": f"={node.interface}",
        }
        return subprocess.Popen(
            [*command, sys.executable, script, "--worker", argument], env=env, stdin=stdin, stdout=subprocess.PIPE
        )


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
        yield Network(nodes, job_environment(topology, job, counter.map_path), services)


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
