"""How much checkpoints slow training down, by interval: PCcheck, six other ways, and none, on small models.

As PCcheck's figures of slowdown against interval. One process trains a model; blocks of iterations with one way of
saving take turns with blocks of the others, so that a slow moment of the machine meets all. torch computes with one
thread: the other CPUs are the checkpoints', as they are where a GPU computes. The batch is chosen such that writing one
checkpoint takes about ``--write-iterations`` iterations, unless it is given. Where the disk is too fast for that,
``--write-mbps auto`` slows it down::

    python benchmarks/persist_slowdown.py [--models opt,recommender] [--intervals 1,10,100] [--json] [--plot FILE]
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from baselines import NoSaver, PCcheck, Saver, add_saver_options, make
from common import (
    Spread,
    add_output_options,
    at_least,
    console,
    count,
    counts,
    draw,
    print_json,
    progress,
    turns,
)
from disk import add_limit_options, mbps, write_limit
from matplotlib.axes import Axes
from rich.console import Console
from rich.table import Table
from workloads import KINDS, Training

NONE = NoSaver.name
TARGET = 1.05
LEAST = 40
"""Iterations of a block, and two intervals at least."""


@dataclass(frozen=True)
class Options:
    """``batch`` 0: chosen. ``storage``: folder on the file system to write to."""

    models: tuple[str, ...]
    kinds: tuple[str, ...]
    intervals: tuple[int, ...]
    params: int
    batch: int
    write_iterations: float
    in_flight: int
    repetitions: int
    storage: str
    write_mbps: float


@dataclass(frozen=True)
class Measured:
    """One model. ``seconds``: of an iteration, by interval and kind, one value for each repetition."""

    model: str
    checkpoint_mb: float
    batch: int
    iteration_s: float
    write_s: float
    seconds: dict[int, dict[str, list[float]]]

    def slowdown(self, interval: int, kind: str) -> Spread:
        """Against the blocks without checkpoints of the same repetitions."""
        block = self.seconds[interval]
        return Spread.of([one / none for one, none in zip(block[kind], block[NONE], strict=True)])


def run(options: Options, model: str, step: Callable[[str], None]) -> Measured:
    """Measure one model."""
    with ExitStack() as stack:
        training = Training(model, options.params, options.batch or 1)
        rate = mbps(options.write_mbps, training.nbytes, training.iteration_s(), options.write_iterations)
        stack.enter_context(write_limit(options.storage, rate))
        storage = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.storage, prefix="ckmbench")))
        write_s, iteration_s, batch = calibrate(options, model, storage)
        training = Training(model, options.params, batch)
        savers = {
            name: make(name, storage, training.state, training.optimizer, options.in_flight) for name in options.kinds
        }
        for saver in savers.values():
            stack.callback(saver.close)
            block(training, saver, 1, 2)  # files are made, optimizer state is there
            saver.finish()
        seconds: dict[int, dict[str, list[float]]]
        seconds = {interval: {name: [] for name in options.kinds} for interval in options.intervals}
        for repetition in range(options.repetitions):
            for interval in options.intervals:
                for name in turns(options.kinds, repetition):
                    seconds[interval][name].append(block(training, savers[name], interval, max(LEAST, 2 * interval)))
                    savers[name].finish()
                step(f"{model}, every {interval}")
        return Measured(model, training.nbytes / 1e6, batch, iteration_s, write_s, seconds)


def block(training: Training, saver: Saver, interval: int, iterations: int) -> float:
    """Seconds of an iteration, with a save after the first and every ``interval`` after that."""
    start = time.perf_counter()
    for number in range(iterations):
        training.step()
        if number % interval == 0:
            saver.save(number)
    return (time.perf_counter() - start) / iterations


def calibrate(options: Options, model: str, storage: Path) -> tuple[float, float, int]:
    """Seconds of a write, of an iteration, and the batch."""
    batch = options.batch or 1
    while True:
        training = Training(model, options.params, batch)
        training.step()
        folder = storage / f"batch-{batch}"
        folder.mkdir()
        saver = PCcheck(folder, training.state, training.optimizer, options.in_flight)
        for number in range(4):
            saver.save(number)
            saver.finish()
        saver.close()
        write_s = Spread.of(saver.write_s[1:]).median
        iteration_s = training.iteration_s()
        if options.batch or iteration_s * options.write_iterations >= write_s or batch >= 1024:
            return write_s, iteration_s, batch
        batch *= 2


def show(measured: Measured, options: Options, to: Console) -> None:
    """Print a table."""
    ratio = measured.write_s / measured.iteration_s
    table = Table(
        title=f"{measured.model}: slowdown by checkpoints of {measured.checkpoint_mb:,.0f} MB; an iteration takes "
        f"{1e3 * measured.iteration_s:.0f} ms, one checkpoint's write {ratio:.1f} iterations",
        caption=f"median (quartiles) of {options.repetitions} blocks each, ratio to neighbouring blocks without "
        f"checkpoints; N = {options.in_flight}",
    )
    table.add_column("every")
    for name in options.kinds:
        if name != NONE:
            table.add_column(name, justify="right")
    for interval in options.intervals:
        row = [measured.slowdown(interval, name).text(2) for name in options.kinds if name != NONE]
        table.add_row(str(interval), *row)
    to.print(table)


def plot(measured: Sequence[Measured], options: Options) -> list[Callable[[Axes], None]]:
    """Slowdown against interval, one pair of axes for each model."""

    def fill(axes: Axes, one: Measured) -> None:
        for name in options.kinds:
            if name != NONE:
                medians = [one.slowdown(interval, name).median for interval in options.intervals]
                axes.plot(options.intervals, medians, marker="o", label=name)
        axes.axhline(TARGET, color="grey", linestyle=":")
        axes.set(xscale="log", xlabel="iterations between checkpoints", ylabel="slowdown", title=one.model)
        axes.legend(fontsize=7)

    return [lambda axes, one=one: fill(axes, one) for one in measured]  # type: ignore[misc]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models",
        type=lambda text: tuple(text.split(",")),
        default=KINDS,
        help=f"with commas, of {', '.join(KINDS)}",
    )
    parser.add_argument("--intervals", type=counts, default=(1, 5, 10, 25, 50, 100), help="in iterations, with commas")
    parser.add_argument("--params", type=count, default=20_000_000, help="about")
    parser.add_argument("--batch", type=at_least(0), default=0, help="samples of an iteration; 0: chosen")
    parser.add_argument("--repetitions", type=count, default=3)
    add_limit_options(parser)
    add_saver_options(parser)
    add_output_options(parser)
    arguments = parser.parse_args()
    if not set(arguments.models) <= set(KINDS):
        parser.error(f"--models {','.join(arguments.models)}: choose of {', '.join(KINDS)}")
    given: dict[str, Any] = {name: getattr(arguments, name) for name in Options.__dataclass_fields__}
    options = Options(**{**given, "kinds": tuple(dict.fromkeys((NONE, *arguments.kinds)))})
    torch.set_num_threads(1)
    to = console(arguments)
    measured = []
    total = len(options.models) * options.repetitions * len(options.intervals)
    with progress(to, "training", total) as step:
        for model in options.models:
            measured.append(run(options, model, step))
            show(measured[-1], options, to)
    if arguments.plot:
        draw(arguments.plot, *plot(measured, options))
    if arguments.json:
        print_json(options, measured=measured)


if __name__ == "__main__":
    main()
