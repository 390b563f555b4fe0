"""All-reduce bus bandwidth: what tagging and mirroring cost, and the checkmate backend against torch's gloo.

Ranks are processes in network namespaces: every byte crosses kernel TCP, as between hosts. Over ``--network switch``
(the eBPF switch, a controller and a running shadow) three kinds of all-reduce take turns: *tagged* (every final chunk
is copied to the shadow, which reassembles and checks it), *untagged* and *gloo*; over ``--network bridge`` the last
two. The shadow waits for a seed meanwhile: it takes part with all but the optimizer. Bus bandwidth is 2(N-1)/N x bytes
/ time, as in nccl-tests. ``--cpus`` and ``--rack-cpus`` keep the nodes' work (processes, kernel) and the rack's
(switch, shadow) apart, as on separate machines. Run as root::

    python benchmarks/allreduce.py [--network bridge] [--sizes 1,4,16,64] [--repetitions 9] [--json] [--plot FILE]
"""

import argparse
import copy
import json
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from common import (
    MIB,
    Spread,
    add_kinds_option,
    add_output_options,
    add_placement_options,
    console,
    count,
    counts,
    draw,
    print_json,
    progress,
    ratios,
    run_as_root,
    turns,
)
from matplotlib.axes import Axes
from networks import Network, Ranks, bridge, rack
from rich.console import Console
from rich.table import Table

from checkmate.config import CheckmateError
from checkmate.lab import Placement
from checkmate.nccl_plugin.binding import Plugin
from checkmate.nccl_plugin.ring.backend import CHANNELS, DEFAULT_CHANNELS, DEFAULT_SLICE_BYTES, SLICE_BYTES
from checkmate.services import Services
from checkmate.train.client import Client
from checkmate.train.settings import Settings

PORT = 29500
TAGGED, UNTAGGED, GLOO = KINDS = ("tagged", "untagged", "gloo")
COMPARED = ((TAGGED, UNTAGGED), (TAGGED, GLOO), (UNTAGGED, GLOO))
TARGETS = {"tagged/untagged": 0.95, "tagged/gloo": 1.0}
SETS = 8
"""Iterations that the shadow may hold: without a seed it keeps all but one as long as it can."""
BEGIN_S = 10.0
SILENCE_S = 180.0
DRAIN_S = 30.0


@dataclass(frozen=True)
class Options:
    """One measurement: ``sizes`` in bytes, ``repetitions`` blocks of about ``block_s`` for each kind and size.

    ``cpus`` and ``rack_cpus``: where nodes and rack run; empty: anywhere.
    """

    network: str
    kinds: tuple[str, ...]
    ranks: int
    mtu: int
    sizes: tuple[int, ...]
    repetitions: int
    block_s: float
    channels: int
    slice_bytes: int
    cpus: tuple[int, ...]
    rack_cpus: tuple[int, ...]


@dataclass(frozen=True)
class Mirrored:
    """Payload that ranks tagged and that the shadow received and verified; packets and bytes that got lost."""

    tagged_bytes: int
    received_bytes: int
    drops: int
    gaps: int


@dataclass(frozen=True)
class Measured:
    """``seconds`` per all-reduce, by size and kind, one value for each repetition; ``cpu_seconds``: of all ranks."""

    seconds: dict[int, dict[str, list[float]]]
    cpu_seconds: dict[int, dict[str, list[float]]]
    mirrored: Mirrored | None


def run(options: Options, to: Console) -> Measured:
    """Measure. Raises CheckmateError when a rank fails."""
    seconds: dict[int, dict[str, list[float]]] = {size: {kind: [] for kind in options.kinds} for size in options.sizes}
    cpu_seconds = copy.deepcopy(seconds)

    def command(rank: int) -> list[str]:
        job = {"rank": rank, "master": network.nodes[0].address, **asdict(options)}
        return [__file__, "--worker", json.dumps(job)]

    total = len(options.sizes) * len(options.kinds) * options.repetitions
    with _network(options) as network, Ranks(network, command, options.cpus) as ranks:
        tagged_bytes = 0
        with progress(to, "all-reduce", total) as step:
            for rank in range(options.ranks):
                for report in ranks.reports(rank, SILENCE_S):
                    tagged_bytes += report.get("tagged_bytes", 0)
                    if "seconds" in report:
                        seconds[report["size"]][report["kind"]].append(report["seconds"])
                        cpu_seconds[report["size"]][report["kind"]].append(report["cpu_seconds"])
                        step(f"{report['size'] / MIB:g} MiB {report['kind']}")
        return Measured(seconds, cpu_seconds, _mirrored(network.services, tagged_bytes) if network.services else None)


def _network(options: Options) -> AbstractContextManager[Network]:
    if options.network == "bridge":
        return bridge(options.ranks, options.mtu)
    placement = Placement(options.cpus, options.rack_cpus) if options.cpus and options.rack_cpus else None
    return rack(options.ranks, options.mtu, placement, SETS)


def _mirrored(services: Services, tagged_bytes: int) -> Mirrored:
    """What the shadow got, once all has arrived that can."""
    end = time.monotonic() + DRAIN_S
    while True:
        status = services.shadow_status()
        if status is None:
            raise CheckmateError(f"the shadow does not answer any more:\n{services.lab.log_tail('shadow.log')}")
        counts = status["receiver"]
        if counts["payload_bytes"] >= tagged_bytes or time.monotonic() > end:
            return Mirrored(tagged_bytes, counts["payload_bytes"], counts["driver_drops"], counts["gaps"])
        time.sleep(0.1)


class _Worker:
    """One rank: the same buffer, reduced by each kind in turn."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._job = job
        self._rank = job["rank"]
        limit = timedelta(seconds=120)
        master = f"tcp://{job['master']}:{PORT}"
        os.environ |= {CHANNELS: str(job["channels"]), SLICE_BYTES: str(job["slice_bytes"])}
        dist.init_process_group(
            "checkmate", init_method=master, rank=self._rank, world_size=job["ranks"], timeout=limit
        )
        self._groups = dict.fromkeys(job["kinds"], dist.group.WORLD)
        if GLOO in self._groups:
            self._groups[GLOO] = dist.new_group(backend="gloo", timeout=limit)
        self._plugin = Plugin()
        self._iteration = 0
        if TAGGED in self._groups:
            self._plugin.set_incarnation(self._begin())

    def run(self) -> None:
        """All sizes; rank 0 prints a line for each block, every rank its tagged bytes at the end."""
        for size in self._job["sizes"]:
            self._measure(torch.ones(size // 4), size)
        self._say(tagged_bytes=self._plugin.counters().tagged_bytes)
        dist.barrier()
        dist.destroy_process_group()

    def _begin(self) -> int:
        """The shadow takes frames of an incarnation that rank 0 opened."""
        number = torch.zeros(1, dtype=torch.int64)
        if self._rank == 0:
            settings = Settings.from_environment()
            number[0] = Client(settings, settings.shadows[0], 0, self._job["ranks"]).begin(0, BEGIN_S).incarnation
        dist.broadcast(number, 0)
        return int(number)

    def _measure(self, tensor: torch.Tensor, size: int) -> None:
        slowest = max(self._block(kind, tensor, 2)[0] for kind in self._groups)
        count = torch.tensor(max(2, int(self._job["block_s"] / slowest)))
        dist.broadcast(count, 0)
        for repetition in range(self._job["repetitions"]):
            for kind in turns(list(self._groups), repetition):
                seconds, cpu_seconds = self._block(kind, tensor, int(count))
                if self._rank == 0:
                    self._say(size=size, kind=kind, seconds=seconds, cpu_seconds=cpu_seconds)

    def _block(self, kind: str, tensor: torch.Tensor, count: int) -> tuple[float, float]:
        """Seconds and all ranks' CPU seconds per all-reduce, of ``count`` in a row."""
        group = self._groups[kind]
        if kind == TAGGED:
            self._plugin.register_bucket(tensor.data_ptr(), tensor.nbytes, 0)
        dist.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        for _ in range(count):
            self._iteration += kind == TAGGED
            self._plugin.set_iteration(self._iteration)
            dist.all_reduce(tensor, group=group)
        elapsed, cpu = time.perf_counter() - start, torch.tensor([time.process_time() - cpu_start])
        self._plugin.unregister_buckets()
        tensor.fill_(1.0)
        dist.all_reduce(cpu)
        return elapsed / count, float(cpu) / count

    @staticmethod
    def _say(**values: Any) -> None:
        print(json.dumps(values), flush=True)


def _work(text: str) -> None:
    job = json.loads(text)
    torch.set_num_threads(1)
    _Worker(job).run()


@dataclass(frozen=True)
class Row:
    """Result for one size: bus bandwidths in MB/s, and ratios of neighbouring blocks ("tagged/untagged", …).

    ``cpu_ratios``: of the ranks' CPU time for each byte, the other way round: above one is better.
    """

    bytes: int
    bandwidth: dict[str, Spread]
    ratios: dict[str, Spread]
    cpu_ratios: dict[str, Spread]


def summarise(measured: Measured, ranks: int) -> list[Row]:
    """Rows by size."""
    rows = []
    for size, by_kind in measured.seconds.items():
        rates = {
            kind: [2 * (ranks - 1) / ranks * size / value / 1e6 for value in values] for kind, values in by_kind.items()
        }
        cpu = measured.cpu_seconds[size]
        pairs = [(a, b) for a, b in COMPARED if a in rates and b in rates]
        rows.append(
            Row(
                size,
                {kind: Spread.of(values) for kind, values in rates.items()},
                {f"{a}/{b}": ratios(rates[a], rates[b]) for a, b in pairs},
                {f"{a}/{b}": ratios(cpu[b], cpu[a]) for a, b in pairs},
            )
        )
    return rows


def overall(by_size: Sequence[dict[str, Spread]]) -> dict[str, float]:
    """Geometric means of ratios over all sizes."""
    return {name: statistics.geometric_mean([ratio[name].median for ratio in by_size]) for name in by_size[0]}


def show(rows: Sequence[Row], options: Options, mirrored: Mirrored | None, to: Console) -> None:
    """Print a table."""
    where = f"ranks on CPUs {options.cpus or 'any'}"
    where += f", switch and shadow on {options.rack_cpus or 'any'}" if options.network == "switch" else ""
    table = Table(
        title=f"All-reduce bus bandwidth in MB/s, {options.ranks} ranks, {options.network}, MTU {options.mtu}, "
        f"{options.channels} channels, slices of {options.slice_bytes >> 10} KiB",
        caption=f"median (quartiles) of {options.repetitions} blocks in turn; {where}; "
        "CPU: the same ratio of bytes for each second of the ranks' CPU time",
    )
    for heading in ("MiB", *rows[0].bandwidth, *rows[0].ratios):
        table.add_column(heading, justify="right")
    for row in rows:
        rates = [spread.text(0) for spread in row.bandwidth.values()]
        table.add_row(f"{row.bytes / MIB:g}", *rates, *(spread.text(2) for spread in row.ratios.values()))
    blanks = [""] * len(rows[0].bandwidth)
    table.add_section()
    table.add_row("all", *blanks, *(f"{value:.2f}" for value in overall([row.ratios for row in rows]).values()))
    cpu = overall([row.cpu_ratios for row in rows])
    table.add_row("CPU", *blanks, *(f"{value:.2f}" for value in cpu.values()))
    goals = [TARGETS.get(name) for name in cpu]
    table.add_row("target", *blanks, *(f"≥ {goal:.2f}" if goal else "" for goal in goals))
    to.print(table)
    if mirrored:
        to.print(
            f"tagged {mirrored.tagged_bytes:,} bytes; the shadow received and verified {mirrored.received_bytes:,}, "
            f"{mirrored.drops} packets dropped, {mirrored.gaps} gaps"
        )


def plot(rows: Sequence[Row], axes: Axes) -> None:
    """Bandwidth against size, with the quartiles of the blocks."""
    sizes = [row.bytes / MIB for row in rows]
    for name in rows[0].bandwidth:
        spreads = [row.bandwidth[name] for row in rows]
        axes.plot(sizes, [spread.median for spread in spreads], marker="o", label=name)
        axes.fill_between(sizes, [spread.lower for spread in spreads], [spread.upper for spread in spreads], alpha=0.2)
    axes.set(xscale="log", xlabel="buffer (MiB)", ylabel="bus bandwidth (MB/s)", ylim=(0, None))
    axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axes.legend()


def main() -> None:
    """Parse the command line, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=("switch", "bridge"), default="switch")
    parser.add_argument("--ranks", type=count, default=4)
    parser.add_argument("--mtu", type=int, default=1500)
    parser.add_argument("--sizes", type=counts, default=(1, 2, 4, 8, 16, 32, 64), help="MiB, with commas")
    parser.add_argument("--repetitions", type=count, default=9)
    parser.add_argument("--block-s", type=float, default=0.4)
    parser.add_argument("--channels", type=count, default=DEFAULT_CHANNELS)
    parser.add_argument("--slice-bytes", type=int, default=DEFAULT_SLICE_BYTES)
    add_kinds_option(parser, KINDS)
    add_placement_options(parser)
    add_output_options(parser)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        _work(arguments.worker)
        return
    kinds = tuple(kind for kind in arguments.kinds if kind != TAGGED or arguments.network == "switch")
    given = {name: value for name, value in vars(arguments).items() if name in Options.__dataclass_fields__}
    options = Options(**{**given, "kinds": kinds, "sizes": tuple(size * MIB for size in arguments.sizes)})
    to = console(arguments)
    measured = run(options, to)
    rows = summarise(measured, options.ranks)
    show(rows, options, measured.mirrored, to)
    if arguments.plot:
        draw(arguments.plot, lambda axes: plot(rows, axes))
    if arguments.json:
        print_json(
            asdict(options), rows=rows, overall=overall([row.ratios for row in rows]), mirrored=measured.mirrored
        )


run_as_root(main, __name__)
