"""Training throughput: a checkpoint of every iteration by Checkmate, by torch.save, by DCP's async_save, and none.

The model, optimizer and text of ``examples/train.py``, over the eBPF switch. All four kinds of training run as jobs of
their own, side by side, and take turns: a block of iterations of one while the others stand still, so that a slow
moment of the machine meets all. The nodes (ranks, and the kernel's work for their links) have CPUs of their own, as
have switch and shadow, as on separate machines. A block of Checkmate counts only if the shadow has committed all of
its iterations; one of ``async_save`` ends when the last save is done. Run as root::

    python benchmarks/training.py [--params 3000000] [--steps 10] [--repetitions 12] [--json] [--plot FILE]
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import (
    Spread,
    add_kinds_option,
    add_output_options,
    add_placement_options,
    console,
    count,
    draw,
    print_json,
    progress,
    ratios,
    run_as_root,
    turns,
)
from matplotlib.axes import Axes
from networks import Network, Ranks, rack
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler

from checkmate import examples
from checkmate.config import CheckmateError
from checkmate.lab import Placement
from checkmate.services import Services
from checkmate.train.settings import SHADOWS

sys.path.append(str(examples.TRAIN.parent))
from model import GPT, Text
from train import parameter_groups, save, warmup_cosine

NONE, CHECKMATE, SAVE, ASYNC = "none", "checkmate", "torch.save", "async_save"
VARIANTS = (NONE, CHECKMATE, SAVE, ASYNC)
TARGET = 0.97
TEXT = Path("/usr/share/common-licenses")
LR_STEPS = 1000
WARM_UP = 3
"""Steps before the first block: DDP cuts its buckets anew after the first."""
FIRST_PORT = 29600
SETS = 4
SILENCE_S = 300.0
COMMIT_S = 30.0


@dataclass(frozen=True)
class Options:
    """One measurement: ``repetitions`` blocks of ``steps`` iterations of each kind; ``storage``: where files go."""

    ranks: int
    mtu: int
    params: int
    batch: int
    block: int
    bucket_cap_mb: float
    steps: int
    repetitions: int
    storage: str
    kinds: tuple[str, ...]
    cpus: tuple[int, ...]
    rack_cpus: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Of one iteration, all ranks together."""
        return self.ranks * self.batch * self.block


@dataclass(frozen=True)
class Measured:
    """``seconds`` of one iteration by kind, one value for each repetition.

    ``cpu_seconds``: of all ranks' processes, of one iteration. ``lag_s``: longest time from the end of a block of
    Checkmate until the shadow had committed all of it.
    """

    seconds: dict[str, list[float]]
    cpu_seconds: dict[str, list[float]]
    lag_s: float
    committed: int
    drops: int
    gaps: int


def run(options: Options, to: Console) -> Measured:
    """Measure. Raises CheckmateError when a rank fails or the shadow does not commit every iteration."""
    seconds: dict[str, list[float]] = {name: [] for name in options.kinds}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in options.kinds}
    placement = Placement(options.cpus, options.rack_cpus) if options.cpus and options.rack_cpus else None
    with ExitStack() as stack:
        network = stack.enter_context(rack(options.ranks, options.mtu, placement, SETS))
        storage = stack.enter_context(tempfile.TemporaryDirectory(dir=options.storage, prefix="ckmbench"))
        assert network.services is not None
        watch = _Shadow(network.services)
        step = stack.enter_context(progress(to, "training", len(options.kinds) * (options.repetitions + 1)))
        jobs = {name: stack.enter_context(_Job(network, options, name, storage)) for name in options.kinds}
        for name, job in jobs.items():
            job.block(WARM_UP)
            step(f"{name} has started")
        for repetition in range(options.repetitions):
            for name in turns(options.kinds, repetition):
                elapsed, cpu = jobs[name].block(options.steps)
                seconds[name].append(elapsed / options.steps)
                cpu_seconds[name].append(cpu / options.steps)
                if name == CHECKMATE:
                    watch.wait_for(jobs[name].steps - 1)  # the newest is committed at the next forward
                step(name)
        return Measured(seconds, cpu_seconds, watch.longest_s, watch.committed, watch.drops, watch.gaps)


class _Shadow:
    """Looks whether the shadow keeps up."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self.longest_s = 0.0
        self.committed = self.drops = self.gaps = 0

    def wait_for(self, step: int) -> None:
        """Until this step is committed. Raises CheckmateError when it isn't, or an iteration was lost."""
        start = time.monotonic()
        while True:
            status = self._services.shadow_status()
            waited = time.monotonic() - start
            if status is None or status["gap_count"] or waited > COMMIT_S:
                log = self._services.lab.log_tail("shadow.log")
                raise CheckmateError(f"the shadow did not follow step {step}: {status and status['reason']}\n{log}")
            self.committed = status["committed"] or 0
            self.drops, self.gaps = status["receiver"]["driver_drops"], status["receiver"]["gaps"]
            if self.committed >= step:
                self.longest_s = max(self.longest_s, waited)
                return
            time.sleep(0.02)


class _Job:
    """The ranks of one kind of training, which stand still between blocks."""

    def __init__(self, network: Network, options: Options, name: str, storage: str) -> None:
        port = FIRST_PORT + VARIANTS.index(name)
        job = {"name": name, "master": f"tcp://{network.nodes[0].address}:{port}", **asdict(options)}
        job["storage"] = str(Path(storage, name))

        def command(rank: int) -> list[str]:
            worker = [__file__, "--worker", json.dumps({"rank": rank, **job})]
            return ["-P", "-m", "checkmate.train.bootstrap", *worker]

        env = {"PYTHONPATH": str(Path(__file__).parent)}
        self._ranks = Ranks(network, command, options.cpus, env if name == CHECKMATE else {**env, SHADOWS: None})
        self._world = options.ranks
        self.steps = 0

    def __enter__(self) -> "_Job":
        self._ranks.__enter__()
        self._reports = [self._ranks.reports(rank, SILENCE_S) for rank in range(self._world)]
        return self

    def __exit__(self, *error: object) -> None:
        self._ranks.__exit__(*error)

    def block(self, steps: int) -> tuple[float, float]:
        """Seconds of the slowest rank for this many iterations, and CPU seconds of all ranks."""
        self._ranks.send(steps=steps)
        self.steps += steps
        answers = [next(reports) for reports in self._reports]
        return max(answer["seconds"] for answer in answers), sum(answer["cpu_seconds"] for answer in answers)


class _Trainer:
    """One rank: ``examples/train.py`` in blocks, with a way to save the state after every iteration."""

    def __init__(self, job: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        rank, world = job["rank"], job["ranks"]
        dist.init_process_group("gloo", init_method=job["master"], rank=rank, world_size=world)
        torch.manual_seed(0)
        self._model = DistributedDataParallel(GPT(job["params"], job["block"]), bucket_cap_mb=job["bucket_cap_mb"])
        torch.manual_seed(1 + rank)
        self._optimizer = AdamW(parameter_groups(self._model), lr=1e-3, betas=(0.9, 0.95), fused=True)
        self._scheduler = LambdaLR(self._optimizer, lambda step: warmup_cosine(step, LR_STEPS))
        text = Text(TEXT, job["block"])
        self._sampler = DistributedSampler(text, world, rank, seed=0, drop_last=True)
        self._loader = DataLoader(text, job["batch"], sampler=self._sampler, drop_last=True)
        self._batches = self._draw()
        self._saver = _SAVERS[job["name"]](self._state, Path(job["storage"]), rank)

    def block(self, steps: int) -> dict[str, float]:
        """Time for this many iterations, with all that saving costs."""
        dist.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self._step()
            self._saver.save()
        self._saver.finish()
        return {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu_start}

    def _step(self) -> None:
        tokens, targets = next(self._batches)
        loss = self._model(tokens, targets)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self._scheduler.step()
        loss.item()

    def _draw(self) -> Iterator[tuple[Tensor, Tensor]]:
        epoch = 0
        while True:
            self._sampler.set_epoch(epoch)
            yield from self._loader
            epoch += 1

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer}


class _Saver:
    """Saves nothing: no checkpoints, or Checkmate's."""

    def __init__(self, state: Callable[[], dict[str, Any]], path: Path, rank: int) -> None:
        self._state, self._path, self._rank = state, path, rank

    def save(self) -> None:
        """After an iteration."""

    def finish(self) -> None:
        """At the end of a block: until the newest state is saved."""


class _TorchSave(_Saver):
    """Rank 0 writes a file."""

    def save(self) -> None:
        if self._rank == 0:
            save(self._state(), self._path)


class _AsyncSave(_Saver):
    """All ranks write their part in the background, over a group of their own, one save at a time."""

    def __init__(self, state: Callable[[], dict[str, Any]], path: Path, rank: int) -> None:
        super().__init__(state, path, rank)
        self._group = dist.new_group(backend="gloo")
        self._running: Any = None

    def save(self) -> None:
        self.finish()
        writer = dcp.FileSystemWriter(self._path)
        self._running = dcp.async_save(self._state(), storage_writer=writer, process_group=self._group)

    def finish(self) -> None:
        if self._running is not None:
            self._running.result()
            self._running = None


_SAVERS: dict[str, type[_Saver]] = {NONE: _Saver, CHECKMATE: _Saver, SAVE: _TorchSave, ASYNC: _AsyncSave}


def _work(text: str) -> None:
    trainer = _Trainer(json.loads(text))
    for line in sys.stdin:
        print(json.dumps(trainer.block(json.loads(line)["steps"])), flush=True)


@dataclass(frozen=True)
class Row:
    """Result for one kind: iterations and tokens a second, and the ratio to no checkpoints of neighbouring blocks.

    ``cpu_ms``: milliseconds of the ranks' CPU time for an iteration, ``cpu_ratio`` to no checkpoints.
    """

    name: str
    steps_per_s: Spread
    tokens_per_s: Spread
    ratio: Spread
    cpu_ms: Spread
    cpu_ratio: Spread


def summarise(measured: Measured, options: Options) -> list[Row]:
    """A row for each kind."""
    rates = {name: [1.0 / value for value in values] for name, values in measured.seconds.items()}
    return [
        Row(
            name,
            Spread.of(rates[name]),
            Spread.of([options.tokens * value for value in rates[name]]),
            ratios(rates[name], rates[NONE]),
            Spread.of([1e3 * value for value in measured.cpu_seconds[name]]),
            ratios(measured.cpu_seconds[name], measured.cpu_seconds[NONE]),
        )
        for name in rates
    ]


def show(rows: Sequence[Row], measured: Measured, options: Options, to: Console) -> None:
    """Print a table."""
    table = Table(
        title=f"Training with a checkpoint of every iteration: {options.ranks} ranks, about {options.params:,} "
        f"parameters, {options.tokens} tokens an iteration",
        caption=f"median (quartiles) of {options.repetitions} blocks of {options.steps} iterations in turn; "
        f"nodes on CPUs {options.cpus or 'any'}, switch and shadow on {options.rack_cpus or 'any'}",
    )
    headings = ("checkpoints", "iterations/s", "tokens/s", f"ratio to {NONE}", "target", "CPU ms", "CPU ratio")
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        goal = f"≥ {TARGET}" if row.name == CHECKMATE else ""
        rates = (row.steps_per_s.text(2), row.tokens_per_s.text(0), row.ratio.text(3))
        table.add_row(row.name, *rates, goal, row.cpu_ms.text(0), row.cpu_ratio.text(3))
    to.print(table)
    to.print(
        f"the shadow committed every iteration (step {measured.committed}), at most {measured.lag_s:.2f} s after the "
        f"block; {measured.drops} packets dropped, {measured.gaps} gaps"
    )


def plot(rows: Sequence[Row], axes: Axes) -> None:
    """Bars with the quartiles of the blocks."""
    medians = [row.steps_per_s.median for row in rows]
    below = [row.steps_per_s.median - row.steps_per_s.lower for row in rows]
    above = [row.steps_per_s.upper - row.steps_per_s.median for row in rows]
    axes.bar([row.name for row in rows], medians, yerr=(below, above), capsize=4)
    axes.set(ylabel="iterations/s")


def main() -> None:
    """Parse the command line, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=count, default=4)
    parser.add_argument("--mtu", type=int, default=1500)
    parser.add_argument("--params", type=count, default=3_000_000)
    parser.add_argument("--batch", type=count, default=2, help="windows per rank and iteration")
    parser.add_argument("--block", type=count, default=64, help="tokens per window")
    parser.add_argument("--bucket-cap-mb", type=float, default=2)
    parser.add_argument("--steps", type=count, default=10, help="iterations of a block")
    parser.add_argument("--repetitions", type=count, default=12)
    parser.add_argument("--storage", default="/var/tmp", help="directory on the disk that files are saved to")
    add_kinds_option(parser, VARIANTS)
    add_placement_options(parser)
    add_output_options(parser)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        _work(arguments.worker)
        return
    if NONE not in arguments.kinds:
        parser.error(f"--kinds: the others are compared with {NONE}")
    names = set(Options.__dataclass_fields__)
    options = Options(**{name: value for name, value in vars(arguments).items() if name in names})
    to = console(arguments)
    measured = run(options, to)
    rows = summarise(measured, options)
    show(rows, measured, options, to)
    if arguments.plot:
        draw(arguments.plot, lambda axes: plot(rows, axes))
    if arguments.json:
        print_json(asdict(options), rows=rows, measured=measured)


run_as_root(main, __name__)
