"""All-reduce bus bandwidth: the checkmate backend (untagged) against torch's gloo, in one run, alternating.

Ranks are processes in network namespaces, joined by veths and a bridge: every byte crosses kernel TCP, as between
hosts. Bus bandwidth is 2(N-1)/N x bytes / time, as in nccl-tests. Run as root::

    python benchmarks/allreduce.py [--ranks 4] [--sizes 1,4,16,64] [--repetitions 7] [--json] [--plot FILE]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import checkmate.nccl_plugin.ring.backend  # noqa: F401
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

MIB = 1 << 20
PORT = 29500
PREFIX = "ckmbench"
BACKENDS = ("checkmate", "gloo")
BLOCK_SECONDS = 0.4


@dataclass(frozen=True)
class Node:
    """Where a rank runs: a network namespace, its interface, its address, and what to add to the environment."""

    netns: str
    interface: str
    address: str
    env: tuple[tuple[str, str], ...] = ()


NetworkFactory = Callable[[int, int], AbstractContextManager[Sequence[Node]]]
"""(ranks, mtu) -> context manager of the nodes: what ``run`` measures over."""


@dataclass(frozen=True)
class Options:
    """One measurement: ``sizes`` in bytes, ``repetitions`` blocks of each backend for each size."""

    ranks: int
    mtu: int
    sizes: tuple[int, ...]
    repetitions: int
    channels: int
    slice_bytes: int
    cpus: tuple[int, ...]


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


@contextmanager
def bridge(ranks: int, mtu: int) -> Iterator[Sequence[Node]]:
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
        yield nodes


def _spawn(node: Node, rank: int, master: str, options: Options, result: Path) -> "subprocess.Popen[bytes]":
    env = {
        **os.environ,
        **dict(node.env),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": node.interface,
        "CHECKMATE_IFNAME": f"={node.interface}",
        "CHECKMATE_CHANNELS": str(options.channels),
        "CHECKMATE_SLICE_BYTES": str(options.slice_bytes),
    }
    argv = ["nsenter", f"--net=/run/netns/{node.netns}", "--", sys.executable, __file__, "--worker"]
    argv += [json.dumps({"rank": rank, "master": master, "result": str(result), **asdict(options)})]
    return subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *argv], env=env)


def run(network: NetworkFactory, options: Options, timeout_s: float = 900.0) -> dict[int, dict[str, list[float]]]:
    """Seconds per all-reduce, by size and backend, one value for each repetition.

    Raises RuntimeError when a rank fails or time runs out.
    """
    with network(options.ranks, options.mtu) as nodes, tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        result = Path(directory, "result.json")
        workers = []
        for rank, node in enumerate(nodes):
            worker = _spawn(node, rank, nodes[0].address, options, result)
            stack.callback(worker.wait)
            stack.callback(worker.kill)
            workers.append(worker)
        end = time.monotonic() + timeout_s
        for rank, worker in enumerate(workers):
            if worker.wait(max(1.0, end - time.monotonic())) != 0:
                raise RuntimeError(f"rank {rank} failed with status {worker.returncode}")
        seconds = json.loads(result.read_text())
        return {int(size): by_backend for size, by_backend in seconds.items()}


def _worker(text: str) -> None:
    job = json.loads(text)
    if job["cpus"]:
        os.sched_setaffinity(0, {job["cpus"][job["rank"] % len(job["cpus"])]})
    torch.set_num_threads(1)
    limit = timedelta(seconds=120)
    address = f"tcp://{job['master']}:{PORT}"
    dist.init_process_group("checkmate", init_method=address, rank=job["rank"], world_size=job["ranks"], timeout=limit)
    groups = {"checkmate": dist.group.WORLD, "gloo": dist.new_group(backend="gloo", timeout=limit)}
    seconds = {size: _measure(groups, size, job["repetitions"]) for size in job["sizes"]}
    if job["rank"] == 0:
        Path(job["result"]).write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


def _measure(groups: dict[str, dist.ProcessGroup], size: int, repetitions: int) -> dict[str, list[float]]:
    tensor = torch.ones(size // 4)
    iterations = torch.zeros(1, dtype=torch.int64)

    def block(group: dist.ProcessGroup, count: int) -> float:
        dist.barrier(group=group)
        start = time.perf_counter()
        for _ in range(count):
            dist.all_reduce(tensor, group=group)
        elapsed = time.perf_counter() - start
        tensor.fill_(1.0)
        return elapsed / count

    slowest = max(block(group, 2) for group in groups.values())
    iterations[0] = max(2, int(BLOCK_SECONDS / slowest))
    dist.broadcast(iterations, 0)
    seconds: dict[str, list[float]] = {name: [] for name in groups}
    for repetition in range(repetitions):
        names = list(groups) if repetition % 2 == 0 else list(reversed(groups))
        for name in names:
            seconds[name].append(block(groups[name], int(iterations)))
    return seconds


@dataclass(frozen=True)
class Row:
    """Result for one size: median bus bandwidths in MB/s and the ratio of each pair of neighbouring blocks."""

    bytes: int
    bandwidth: dict[str, float]
    spread: dict[str, tuple[float, float]]
    ratio: float
    ratio_range: tuple[float, float]


def summarise(seconds: dict[int, dict[str, list[float]]], ranks: int) -> list[Row]:
    """Rows by size."""
    rows = []
    for size, by_backend in seconds.items():
        rates = {
            name: [2 * (ranks - 1) / ranks * size / value / 1e6 for value in values]
            for name, values in by_backend.items()
        }
        ratios = [ours / theirs for ours, theirs in zip(*(rates[name] for name in BACKENDS), strict=True)]
        rows.append(
            Row(
                bytes=size,
                bandwidth={name: statistics.median(values) for name, values in rates.items()},
                spread={name: (min(values), max(values)) for name, values in rates.items()},
                ratio=statistics.median(ratios),
                ratio_range=(min(ratios), max(ratios)),
            )
        )
    return rows


def show(rows: Sequence[Row], options: Options) -> None:
    """Print a table."""
    cpus = ", ".join(map(str, options.cpus)) if options.cpus else "all of " + _cpu_set()
    table = Table(
        title=f"all-reduce bus bandwidth, {options.ranks} ranks, MTU {options.mtu}, {options.channels} channels, "
        f"slices of {options.slice_bytes >> 10} KiB",
        caption=f"MB/s, median of {options.repetitions} alternating blocks (min to max); CPUs: {cpus}",
    )
    for heading in ("MiB", *BACKENDS, "ratio"):
        table.add_column(heading, justify="right")
    for row in rows:
        cells = [f"{row.bandwidth[b]:.0f} ({row.spread[b][0]:.0f} to {row.spread[b][1]:.0f})" for b in BACKENDS]
        ratio = f"{row.ratio:.2f} ({row.ratio_range[0]:.2f} to {row.ratio_range[1]:.2f})"
        table.add_row(f"{row.bytes / MIB:g}", *cells, ratio)
    Console().print(table)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw bandwidth against size, with the range of the blocks."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    sizes = [row.bytes / MIB for row in rows]
    for backend in BACKENDS:
        axes.plot(sizes, [row.bandwidth[backend] for row in rows], marker="o", label=backend)
        low, high = zip(*(row.spread[backend] for row in rows), strict=True)
        axes.fill_between(sizes, low, high, alpha=0.2)
    axes.set(xscale="log", xlabel="buffer (MiB)", ylabel="bus bandwidth (MB/s)", ylim=(0, None))
    axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axes.legend()
    figure.savefig(path)


def _cpu_set() -> str:
    return ", ".join(map(str, sorted(os.sched_getaffinity(0))))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


def main() -> None:
    """Parse the command line, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mtu", type=int, default=1500)
    parser.add_argument("--sizes", type=_numbers, default=(1, 2, 4, 8, 16, 32, 64), help="MiB, with commas")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--channels", type=int, default=2)
    parser.add_argument("--slice-bytes", type=int, default=MIB)
    parser.add_argument("--cpus", type=_numbers, default=(), help="CPUs that ranks are pinned to in turn")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--plot", type=Path, help="write a plot to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        _worker(arguments.worker)
        return
    if os.geteuid() != 0:
        raise SystemExit("network namespaces need root: run this as root")
    options = Options(
        ranks=arguments.ranks,
        mtu=arguments.mtu,
        sizes=tuple(size * MIB for size in arguments.sizes),
        repetitions=arguments.repetitions,
        channels=arguments.channels,
        slice_bytes=arguments.slice_bytes,
        cpus=arguments.cpus,
    )
    rows = summarise(run(bridge, options), options.ranks)
    show(rows, options)
    if arguments.plot:
        plot(rows, arguments.plot)
    if arguments.json:
        cpus = options.cpus or _numbers(_cpu_set())
        print(json.dumps({"options": {**asdict(options), "cpus": cpus}, "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
