"""What a hop through the switch costs: frames a second, and the latency that it adds, mirrored to a shadow and not.

A raw socket at one node sends, others at the next node and at the shadow's port receive, in one thread. Frames a
second: at most ``--window`` are on their way, so that none is lost; each has to arrive, with its copy; the fastest of
many short streams counts, since others on the machine slow down the rest. Added latency: of frames sent one by one, the
median above that of a veth that joins the two nodes without a switch. Kinds take turns. BMv2 is measured where
``simple_switch_grpc`` is on PATH. Needs root and a C compiler::

    python benchmarks/hop.py [--payloads 64,1448,8932] [--repetitions 9] [--kinds direct,ebpf] [--json] [--plot FILE]
"""

import argparse
import contextlib
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cffi import FFI
from common import (
    Spread,
    add_kinds_option,
    add_output_options,
    console,
    count,
    counts,
    draw,
    print_json,
    progress,
    run_as_root,
    turns,
)
from matplotlib.axes import Axes
from rich.console import Console
from rich.table import Table
from scapy.layers.inet import IP, TCP
from scapy.layers.l2 import Ether

from checkmate.config import CheckmateError
from checkmate.controlplane.reconcile import reconcile
from checkmate.controlplane.targets.p4runtime import P4RuntimeTarget
from checkmate.lab import Lab, LabConfig, clean_stale
from checkmate.p4.ebpf.loader import Switch
from checkmate.p4.ebpf.netdev import Namespace
from checkmate.p4.ebpf.p4runtime_server import Server
from checkmate.p4.v1model import bmv2
from checkmate.plan import make_plan
from checkmate.topology import Endpoint, Topology

DIRECT = "direct"
MIRRORED = " mirrored"
KINDS = (DIRECT, "ebpf", f"ebpf{MIRRORED}", "bmv2", f"bmv2{MIRRORED}")
MTU = 9000
BLOCK_S = 0.003
"""Short, so that in some of them nothing else gets the CPU."""
HEADERS = 62
"""Ethernet, IPv4, TCP and the counter option."""
OPTION = (253, b"CK\0\0\0\0")
_SOL_PACKET = 263
_PACKET_IGNORE_OUTGOING = 23
_ETH_P_ALL = 3
_SO_RCVBUFFORCE = 33
_DECLARATIONS = """
double hop_stream(int from, const int *to, uint32_t receivers, const void *frame, uint32_t bytes, uint32_t count,
                  uint32_t window);
int hop_single(int from, const int *to, uint32_t receivers, const void *frame, uint32_t bytes, uint32_t count,
               uint64_t *ns);
"""


@dataclass(frozen=True)
class Options:
    """The command line's. A repetition: the fastest of ``blocks`` of about ``BLOCK_S``; the median of ``singles``."""

    kinds: tuple[str, ...]
    payloads: tuple[int, ...]
    repetitions: int
    window: int
    blocks: int
    singles: int


@dataclass(frozen=True)
class Way:
    """Sockets at the sender, and at all that receive its frames: the next node, then a shadow's port if mirrored."""

    source: socket.socket
    receivers: Sequence[socket.socket]
    addresses: tuple[str, str]
    tagged: bool

    def frame(self, payload: int) -> bytes:
        """A frame with a counter option; only the DSCP bit makes the switch copy it. No host has its addresses."""
        headers = Ether(src=self.addresses[0], dst=self.addresses[1]) / IP(
            src="192.0.2.1", dst="192.0.2.2", tos=0x80 if self.tagged else 0
        )
        return bytes(headers / TCP(flags="A", options=[OPTION]) / bytes(payload))


@dataclass(frozen=True)
class Row:
    """Of one kind and payload size: frames a second, seconds of a frame's way, and those above the direct way."""

    kind: str
    payload: int
    rate: Spread
    latency_us: Spread
    added_us: Spread | None


class Meter:
    """hop.c."""

    def __init__(self, directory: str, window: int) -> None:
        library = Path(directory) / "hop.so"
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, Path(__file__).with_suffix(".c")], check=True)
        self._ffi = FFI()
        self._ffi.cdef(_DECLARATIONS)
        self._lib = self._ffi.dlopen(str(library))
        self._window = window

    def stream(self, way: Way, payload: int, frames: int) -> float:
        """Frames a second."""
        seconds = self._lib.hop_stream(*self._arguments(way, payload), frames, self._window)
        if seconds < 0:
            raise CheckmateError(f"frames were lost: take a --window of less than {self._window}")
        return frames / float(seconds)

    def singles(self, way: Way, payload: int, frames: int) -> float:
        """Median microseconds of a frame's way."""
        taken = np.zeros(frames, np.uint64)
        if self._lib.hop_single(*self._arguments(way, payload), frames, self._ffi.from_buffer("uint64_t *", taken)):
            raise CheckmateError("a single frame was lost: is something wrong with the switch?")
        return float(np.median(taken)) / 1e3

    def _arguments(self, way: Way, payload: int) -> tuple[Any, ...]:
        frame = way.frame(payload)
        receivers = [receiver.fileno() for receiver in way.receivers]
        return way.source.fileno(), self._ffi.new("int[]", receivers), len(receivers), frame, len(frame)


def raw_socket(stack: ExitStack, netns: str | None, interface: str) -> socket.socket:
    """A packet socket that sees what arrives at an interface."""
    with contextlib.closing(Namespace(netns)) as namespace, namespace.entered():
        made = stack.enter_context(socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0))
        made.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 1 << 25)
        made.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
        made.bind((interface, _ETH_P_ALL))
    return made


def direct_way(stack: ExitStack, topology: Topology) -> Way:
    """A veth between the two nodes, as long as their lab lives."""
    near, far = (str(host.netns) for host in topology.hosts)
    ends = ("direct", "mtu", str(MTU), "netns")
    subprocess.run(["ip", "link", "add", *ends, near, "type", "veth", "peer", "name", *ends, far], check=True)
    for netns in (near, far):
        subprocess.run(["nsenter", f"--net=/run/netns/{netns}", "ip", "link", "set", "direct", "up"], check=True)
    sockets = [raw_socket(stack, netns, "direct") for netns in (near, far)]
    return Way(sockets[0], sockets[1:], ("02:00:00:00:00:01", "02:00:00:00:00:02"), tagged=False)


def switch_ways(stack: ExitStack, topology: Topology, target: str) -> dict[str, Way]:
    """The way from rank 0 to rank 1 through the switch, with and without the tag that has it copied."""
    (first, second), shadow = (host.nics[0] for host in topology.hosts), topology.shadows[0]
    source, following = (raw_socket(stack, host.netns, host.nics[0].name) for host in topology.hosts)
    mirror = raw_socket(stack, shadow.netns, shadow.nics[0].name)
    addresses = (first.mac, second.mac)
    return {
        target: Way(source, [following], addresses, tagged=False),
        target + MIRRORED: Way(source, [following, mirror], addresses, tagged=True),
    }


def start(stack: ExitStack, topology: Topology, target: str) -> None:
    """Start the switch with the rules of a plan whose shadow is alive."""
    switch = topology.switch
    address: Any
    if target == "bmv2":
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ckmhop"))
        address, device = f"unix:{folder}/p4runtime", bmv2.pipeline()
        stack.enter_context(bmv2.Bmv2(switch.interfaces, address, 1, switch.netns))
    else:
        datapath = stack.enter_context(Switch(switch.interfaces, switch.netns))
        address, device = Endpoint("127.0.0.1", stack.enter_context(Server(datapath, "127.0.0.1:0")).port), b""
    with contextlib.closing(P4RuntimeTarget(address, 1, device)) as control:
        control.connect()
        reconcile(control, make_plan(topology, {shadow.name for shadow in topology.shadows}).rules)


@contextlib.contextmanager
def ways(kinds: Sequence[str]) -> Iterator[dict[str, Way]]:
    """All ways of these kinds, side by side."""
    clean_stale()
    with ExitStack() as stack:
        found: dict[str, Way] = {}
        for target in ("ebpf", "bmv2"):
            if not any(kind.startswith(target) or (kind == DIRECT and target == "ebpf") for kind in kinds):
                continue
            lab = stack.enter_context(Lab(LabConfig(2, MTU, target, "hop")))
            found |= switch_ways(stack, lab.topology, target)
            start(stack, lab.topology, target)
            if target == "ebpf":
                found[DIRECT] = direct_way(stack, lab.topology)
        yield {kind: found[kind] for kind in kinds}


def run(options: Options, to: Console) -> list[Row]:
    """Measure all."""
    rows = []
    steps = len(options.payloads) * options.repetitions * len(options.kinds)
    with (
        tempfile.TemporaryDirectory() as directory,
        ways(options.kinds) as found,
        progress(to, "frames", steps) as advance,
    ):
        meter = Meter(directory, options.window)
        for payload in options.payloads:
            rows += _measure(meter, found, payload, options, advance)
    return rows


def _measure(
    meter: Meter, found: Mapping[str, Way], payload: int, options: Options, advance: Callable[[str], None]
) -> list[Row]:
    def rate(kind: str, frames: int) -> float:
        return max(meter.stream(found[kind], payload, frames) for _ in range(options.blocks))

    frames = {kind: int(rate(kind, 4 * options.window) * BLOCK_S) + options.window for kind in found}
    rates: dict[str, list[float]] = {kind: [] for kind in found}
    latencies: dict[str, list[float]] = {kind: [] for kind in found}
    for repetition in range(options.repetitions):
        for kind in turns(list(found), repetition):
            rates[kind].append(rate(kind, frames[kind]))
            latencies[kind].append(meter.singles(found[kind], payload, options.singles))
            advance(f"{kind}, {payload} bytes")
    return [
        Row(
            kind,
            payload,
            Spread.of(rates[kind]),
            Spread.of(latencies[kind]),
            _added(latencies, kind) if DIRECT in found else None,
        )
        for kind in found
    ]


def _added(latencies: Mapping[str, list[float]], kind: str) -> Spread:
    """Of neighbours in time."""
    return Spread.of([taken - base for taken, base in zip(latencies[kind], latencies[DIRECT], strict=True)])


def show(rows: Sequence[Row], options: Options, to: Console) -> None:
    """Print a table."""
    table = Table(
        title=f"One hop, from node to node; {options.window} frames at most on their way",
        caption=f"median (quartiles) of {options.repetitions} repetitions in turn, "
        f"each the fastest of {options.blocks} streams of {BLOCK_S * 1e3:g} ms and the median of {options.singles} "
        "frames one by one",
    )
    for heading in ("payload", "way", "frames a second", "Gbit/s", "µs for a frame", "µs added"):
        table.add_column(heading, justify="right")
    for row in rows:
        gigabits = row.rate.median * (row.payload + HEADERS) * 8 / 1e9
        added = row.added_us.text(1) if row.added_us and row.kind != DIRECT else ""
        table.add_row(str(row.payload), row.kind, row.rate.text(0), f"{gigabits:.2f}", row.latency_us.text(1), added)
    to.print(table)


def plot(rows: Sequence[Row], axes: Axes) -> None:
    """Frames a second against payload."""
    for kind in dict.fromkeys(row.kind for row in rows):
        mine = [row for row in rows if row.kind == kind]
        sizes = [row.payload for row in mine]
        axes.plot(sizes, [row.rate.median for row in mine], marker="o", label=kind)
        axes.fill_between(sizes, [row.rate.lower for row in mine], [row.rate.upper for row in mine], alpha=0.2)
    axes.set(xscale="log", yscale="log", xlabel="payload (bytes)", ylabel="frames a second")
    axes.legend()


def main() -> None:
    """Parse the command line, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--payloads", type=counts, default=(64, 1448, 8932), help="bytes behind the TCP header")
    parser.add_argument("--repetitions", type=count, default=9)
    parser.add_argument("--window", type=count, default=32, help="BMv2 queues 64 frames for a port")
    parser.add_argument("--blocks", type=count, default=25, help="streams of frames in a repetition")
    parser.add_argument("--singles", type=count, default=500, help="frames sent one by one in a repetition")
    available = KINDS if shutil.which(bmv2.BINARY) else tuple(kind for kind in KINDS if not kind.startswith("bmv2"))
    add_kinds_option(parser, available)
    add_output_options(parser)
    arguments = parser.parse_args()
    given = {name: value for name, value in vars(arguments).items() if name in Options.__dataclass_fields__}
    options = Options(**given)
    to = console(arguments)
    if available != KINDS:
        to.print(f"{bmv2.BINARY} is not on PATH: BMv2 is left out")
    rows = run(options, to)
    show(rows, options, to)
    if arguments.plot:
        draw(arguments.plot, lambda axes: plot(rows, axes))
    if arguments.json:
        print_json(asdict(options), rows=rows)


run_as_root(main, __name__)
