"""Goodput under preemptions: useful iterations a second when machines are taken away as in a trace.

As PCcheck's goodput figures, twice. Really: a process trains, is killed (SIGKILL) at the moments of the trace, started
again and goes on from its newest checkpoint, read from storage (its page cache went with the machine); what counts is
the iteration that it has reached in the end. By the model (``checkmate.costmodel.goodput``): from what these runs took
for an iteration, a write and a restart. The first hours of the trace are squeezed into each run, so that a short one
meets several failures. A new process is a fork: restarts are cheaper than a cluster's, for all ways alike. Interval 0
is what a way chooses itself: CheckFreq by its profile, PCcheck by T_w/(N·q·t); others have no such rule. Gemini is left
out: its other machine is a child of the killed process::

    python benchmarks/persist_goodput.py [--intervals 10,50,0] [--seconds 60] [--trace FILE] [--json] [--plot FILE]
"""

import argparse
import itertools
import multiprocessing
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import preemptions as traces
import torch
from baselines import CheckFreq, Gemini, NoSaver, PCcheck, add_saver_options, drop_cache, make
from common import (
    Spread,
    add_output_options,
    amount,
    console,
    count,
    draw,
    numbers,
    print_json,
    progress,
    ratios,
    turns,
)
from disk import add_limit_options, mbps, write_limit
from matplotlib.axes import Axes
from rich.console import Console
from rich.table import Table
from workloads import Training, add_training_options, seconds

from checkmate.costmodel import goodput, min_interval

START_S = 120.0
"""For a process to do its first iteration."""
BUDGET = 1.05
"""q: how much longer PCcheck's rule lets an iteration take."""
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
    repetitions: int
    storage: str
    write_mbps: float
    write_iterations: float


@dataclass(frozen=True)
class Measured:
    """One run of one way. Rates are useful iterations a second; times in seconds, means over the run.

    ``write_s``: while training stood still.
    """

    kind: str
    interval: int
    failures: int
    goodput: float
    modelled: float
    iteration_s: float
    write_s: float
    restart_s: float


Runs = dict[tuple[str, int], list[Measured]]
"""By way and interval as it was asked for, in order of repetition."""


class _Board:
    """What a training process leaves behind when it is killed: a few numbers in shared memory."""

    def __init__(self) -> None:
        self.step = _FORK.Value("q", 0, lock=False)
        self.iterations = _FORK.Value("q", 0, lock=False)
        self.seconds = _FORK.Value("d", 0.0, lock=False)
        self.started = _FORK.Value("d", 0.0, lock=False)


def run(options: Options, kind: str, interval: int, write_s: float) -> Measured:
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
                drop_cache(Path(storage))
                process = _start(options, kind, interval, storage, board)
                restarts.append(board.started.value - killed)
            time.sleep(max(0.0, begin + options.seconds - time.monotonic()))
            useful, duration = board.step.value - done, time.monotonic() - begin
        finally:
            _kill(process)
    iteration_s = board.seconds.value / max(1, board.iterations.value)
    restart_s = sum(restarts) / len(restarts) if restarts else 0.0
    every = NEVER if kind == NoSaver.name else interval
    modelled = goodput(failures, duration, iteration_s, every, write_s, restart_s)
    return Measured(kind, interval, len(failures), useful / duration, modelled, iteration_s, write_s, restart_s)


def measure(options: Options, to: Console) -> Runs:
    """All ways in turns, on a disk as slow as was asked for."""
    training = Training(options.model, options.params, options.batch)
    iteration_s = training.iteration_s()
    rate = mbps(options.write_mbps, training.nbytes, iteration_s, options.write_iterations)
    with write_limit(options.storage, rate):
        known = {kind: alone(options, kind, iteration_s) for kind in options.kinds}
        wanted = {
            (kind, interval): interval or known[kind][1]
            for interval, kind in itertools.product(options.intervals, options.kinds)
            if interval or known[kind][1]
        }
        measured: Runs = {key: [] for key in wanted}
        with progress(to, "training", len(wanted) * options.repetitions) as step:
            for repetition in range(options.repetitions):
                for kind, interval in turns(list(wanted), repetition):
                    measured[kind, interval].append(run(options, kind, wanted[kind, interval], known[kind][0]))
                    step(f"{kind}, every {wanted[kind, interval]}")
    return measured


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
    saver = make(kind, Path(storage), training.state, training.optimizer, options.in_flight)
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
            saver.save(step)
        board.seconds.value += time.monotonic() - start
        board.iterations.value += 1


def alone(options: Options, kind: str, iteration_s: float) -> tuple[float, int]:
    """Seconds of a write while training stands still, and the interval that the way chooses (0: it has no rule).

    Afterwards all that it loads at first use is there for processes that are forked.
    """
    training = Training(options.model, options.params, options.batch)
    training.step()
    update_s = seconds(training.optimizer.step)
    with tempfile.TemporaryDirectory(dir=options.storage, prefix="ckmbench") as storage:
        saver = make(kind, Path(storage), training.state, training.optimizer, options.in_flight)

        def save() -> None:
            saver.save(0)
            saver.finish()

        save()
        write_s = seconds(save)  # the file is there
        chosen = saver.profile(iteration_s, update_s) if isinstance(saver, CheckFreq) else 0
        saver.load()
        saver.close()
    if kind == PCcheck.name:
        chosen = min_interval(write_s, options.in_flight, BUDGET, iteration_s)
    return write_s, chosen


def show(measured: Runs, options: Options, to: Console) -> None:
    """Print a table, and what PCcheck gains on CheckFreq."""
    table = Table(
        title=f"Goodput: {options.model}, about {options.params:,} parameters, the first {options.hours:g} hours of "
        f"{options.trace.name} in {options.seconds:g} s",
        caption="useful iterations a second; the model uses the iteration, write and restart times of the same run",
    )
    headings = ("checkpoints", "every", "failures", "goodput", "by the model", "iteration ms", "write s", "restart s")
    for heading in headings:
        table.add_column(heading, justify="right")
    for runs in measured.values():
        one = runs[0]
        texts = [
            Spread.of([getattr(one, name) * factor for one in runs]).text(digits)
            for name, factor, digits in (
                ("goodput", 1, 2), ("modelled", 1, 2), ("iteration_s", 1e3, 0), ("write_s", 1, 2), ("restart_s", 1, 2),
            )
        ]  # fmt: skip
        table.add_row(one.kind, str(one.interval), str(one.failures), *texts)
    to.print(table)
    for (kind, interval), runs in measured.items():
        ours = measured.get((PCcheck.name, interval))
        if kind == CheckFreq.name and ours:
            really, modelled = (ratios([f(o) for o in ours], [f(o) for o in runs]) for f in (_goodput, _modelled))
            where = f"every {interval}" if interval else "each as often as it chooses"
            to.print(f"PCcheck to CheckFreq, {where}: {really.text(2)}; by the model {modelled.text(2)}")


def _goodput(one: Measured) -> float:
    return one.goodput


def _modelled(one: Measured) -> float:
    return one.modelled


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_training_options(parser, params=10_000_000, batch=1)
    parser.add_argument("--intervals", type=numbers, default=(10, 50), help="in iterations; 0: as each way chooses")
    parser.add_argument("--seconds", type=amount, default=60.0, help="of each run")
    parser.add_argument("--hours", type=amount, default=1.0, help="of the trace")
    parser.add_argument("--trace", type=Path, default=traces.SPOT, help="lines of seconds,machines")
    parser.add_argument("--repetitions", type=count, default=1)
    add_limit_options(parser)
    add_saver_options(parser, leave_out=Gemini.name)
    add_output_options(parser)
    arguments = parser.parse_args()
    try:
        traces.failures(arguments.trace)
    except (OSError, ValueError) as error:
        parser.error(f"--trace: {error}")
    options = Options(**{name: getattr(arguments, name) for name in Options.__dataclass_fields__})
    to = console(arguments)
    torch.set_num_threads(1)
    measured = measure(options, to)
    show(measured, options, to)

    def plotted(what: str, of: Callable[[Measured], float]) -> Callable[[Axes], None]:
        def fill(axes: Axes) -> None:
            for kind in options.kinds:
                runs = [runs for (name, interval), runs in measured.items() if name == kind and interval]
                values = [statistics.median(map(of, one)) for one in runs]
                axes.plot([one[0].interval for one in runs], values, marker="o", label=kind)
            axes.set(xlabel="iterations between checkpoints", ylabel="useful iterations/s", title=what, ylim=(0, None))
            axes.legend(fontsize=7)

        return fill

    if arguments.plot:
        draw(
            arguments.plot,
            plotted("really killed and resumed", _goodput),
            plotted("by the model", _modelled),
        )
    if arguments.json:
        print_json(options, measured=list(itertools.chain(*measured.values())))


if __name__ == "__main__":
    main()
