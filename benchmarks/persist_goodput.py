"""Goodput under preemptions: useful iterations a second when machines are taken away as in a trace.

As PCcheck's goodput figures, twice. Really: a process trains, is killed (SIGKILL) at the moments of the trace, started
again and goes on from its newest checkpoint; what counts is the iteration that it has reached in the end. By the model
(``checkmate.costmodel.goodput``): from what these runs took for an iteration, a write and a restart. The first hours of
the trace are squeezed into each run, so that a short one meets several failures. A new process is a fork: restarts are
cheaper than a cluster's, for all ways alike. Gemini is left out: its other machine is a child of the killed process::

    python benchmarks/persist_goodput.py [--intervals 10,50] [--seconds 60] [--trace FILE] [--json] [--plot FILE]
"""

import argparse
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import preemptions as traces
import torch
from baselines import SAVERS, Gemini, NoSaver, PCcheck, Saver
from common import add_kinds_option, add_output_options, console, draw, numbers, print_json, progress
from disk import add_limit_option, write_limit
from matplotlib.axes import Axes
from rich.console import Console
from rich.table import Table
from workloads import KINDS, Training

from checkmate.costmodel import goodput

START_S = 120.0
"""For a process to do its first iteration."""
NEVER = 1 << 40
"""Interval of no checkpoints: each failure takes all."""
_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Options:
    """``hours``: of the trace, squeezed into ``seconds``. ``storage``: folder on the file system to write to."""

    kinds: tuple[str, ...]
    model: str
    params: int
    batch: int
    intervals: tuple[int, ...]
    in_flight: int
    seconds: float
    hours: float
    trace: Path
    storage: str
    write_mbps: float


@dataclass(frozen=True)
class Measured:
    """One way at one interval. Rates are useful iterations a second; times in seconds, means over the run."""

    kind: str
    interval: int
    failures: int
    goodput: float
    modelled: float
    iteration_s: float
    write_s: float
    restart_s: float


class _Board:
    """What a training process leaves behind when it is killed: a few numbers in shared memory."""

    def __init__(self) -> None:
        self.step = _FORK.Value("q", 0, lock=False)
        self.iterations = _FORK.Value("q", 0, lock=False)
        self.seconds = _FORK.Value("d", 0.0, lock=False)
        self.started = _FORK.Value("d", 0.0, lock=False)
        self.saves = _FORK.Value("q", 0, lock=False)
        self.write_s = _FORK.Value("d", 0.0, lock=False)


def run(options: Options, kind: str, interval: int) -> Measured:
    """Train, kill, resume until the time is over."""
    failures = traces.scaled(traces.failures(options.trace), options.hours * 3600, options.seconds)
    board, restarts = _Board(), []
    with tempfile.TemporaryDirectory(dir=options.storage, prefix="ckmbench") as storage:
        process = _start(options, kind, interval, storage, board)
        begin, done = time.monotonic(), board.step.value
        try:
            for moment in failures:
                if (left := begin + moment - time.monotonic()) > 0:
                    time.sleep(left)
                _kill(process)
                killed = time.monotonic()
                process = _start(options, kind, interval, storage, board)
                restarts.append(board.started.value - killed)
            time.sleep(max(0.0, begin + options.seconds - time.monotonic()))
            useful, duration = board.step.value - done, time.monotonic() - begin
        finally:
            _kill(process)
    iteration_s = board.seconds.value / max(1, board.iterations.value)
    restart_s = sum(restarts) / len(restarts) if restarts else 0.0
    write_s = board.write_s.value
    every = NEVER if kind == NoSaver.name else interval
    modelled = goodput(failures, duration, iteration_s, every, write_s, restart_s)
    return Measured(kind, interval, len(failures), useful / duration, modelled, iteration_s, write_s, restart_s)


def _start(options: Options, kind: str, interval: int, storage: str, board: _Board) -> Any:
    board.started.value = 0.0
    process = _FORK.Process(target=_train, args=(options, kind, interval, storage, board), daemon=True)
    process.start()
    deadline = time.monotonic() + START_S
    while not board.started.value:
        if not process.is_alive() or time.monotonic() > deadline:
            raise SystemExit(f"{kind}: the training process did not start within {START_S:g} s")
        time.sleep(0.005)
    return process


def _kill(process: Any) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def _train(options: Options, kind: str, interval: int, storage: str, board: _Board) -> None:
    training = Training(options.model, options.params, options.batch)
    saver = _saver(options, kind, Path(storage), training)
    step = 0
    if found := saver.load():
        step = found[0]
        training.load(found[1]["state"] if "state" in found[1] else found[1])
    board.step.value = step
    while True:
        start = time.monotonic()
        training.step()
        step += 1
        board.step.value = step
        if not board.started.value:
            board.started.value = time.monotonic()
        if step % interval == 0:
            begin = time.monotonic()
            saver.save(step)
            board.saves.value += 1
            if board.saves.value == 2:  # alone, and the file is there: how long until it is durable
                saver.finish()
                board.write_s.value = time.monotonic() - begin
                continue
        board.seconds.value += time.monotonic() - start
        board.iterations.value += 1


def _saver(options: Options, kind: str, storage: Path, training: Training) -> Saver:
    if kind == PCcheck.name:
        return PCcheck(storage, training.state, training.optimizer, options.in_flight)
    return SAVERS[kind](storage, training.state, training.optimizer)


def show(measured: list[Measured], options: Options, to: Console) -> None:
    """Print a table."""
    table = Table(
        title=f"Goodput: {options.model}, about {options.params:,} parameters, the first {options.hours:g} hours of "
        f"{options.trace.name} in {options.seconds:g} s",
        caption="useful iterations a second; the model uses the iteration, write and restart times of the same run",
    )
    headings = ("checkpoints", "every", "failures", "goodput", "by the model", "iteration ms", "write s", "restart s")
    for heading in headings:
        table.add_column(heading, justify="right")
    for one in measured:
        cells = (one.goodput, one.modelled)
        table.add_row(
            one.kind, str(one.interval), str(one.failures), *(f"{value:.2f}" for value in cells),
            f"{1e3 * one.iteration_s:.0f}", f"{one.write_s:.2f}", f"{one.restart_s:.2f}",
        )  # fmt: skip
    to.print(table)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=KINDS, default="opt")
    parser.add_argument("--params", type=int, default=10_000_000)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--intervals", type=numbers, default=(10, 50))
    parser.add_argument("--in-flight", type=int, default=2, help="N of PCcheck")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run")
    parser.add_argument("--hours", type=float, default=1.0, help="of the trace")
    parser.add_argument("--trace", type=Path, default=traces.SPOT, help="lines of seconds,machines")
    parser.add_argument("--storage", default=".", help="folder on the file system to write to")
    add_limit_option(parser)
    add_kinds_option(parser, tuple(name for name in SAVERS if name != Gemini.name))
    add_output_options(parser)
    arguments = parser.parse_args()
    options = Options(**{name: getattr(arguments, name) for name in Options.__dataclass_fields__})
    to = console(arguments)
    torch.set_num_threads(1)
    Training(options.model, 1, 1).step()  # what torch loads at the first step is there when processes are forked
    measured = []
    total = len(options.kinds) * len(options.intervals)
    with write_limit(options.storage, options.write_mbps), progress(to, "training", total) as step:
        for interval in options.intervals:
            for kind in options.kinds:
                measured.append(run(options, kind, interval))
                step(f"{kind}, every {interval}")
    show(measured, options, to)

    def plotted(what: str, of: Callable[[Measured], float]) -> Callable[[Axes], None]:
        def fill(axes: Axes) -> None:
            for kind in options.kinds:
                values = [of(one) for one in measured if one.kind == kind]
                axes.plot(options.intervals, values, marker="o", label=kind)
            axes.set(xlabel="iterations between checkpoints", ylabel="useful iterations/s", title=what, ylim=(0, None))
            axes.legend(fontsize=7)

        return fill

    if arguments.plot:
        draw(
            arguments.plot,
            plotted("really killed and resumed", lambda one: one.goodput),
            plotted("by the model", lambda one: one.modelled),
        )
    if arguments.json:
        print_json(options, measured=measured)


if __name__ == "__main__":
    main()
