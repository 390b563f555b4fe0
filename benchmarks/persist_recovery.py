"""Time to recover: reading the newest checkpoint back, and the work that a failure undoes at most.

As PCcheck's recovery analysis. Each way loads the state that it saved, from storage: the page cache is dropped before
(Gemini's is in another process's memory). "rework" is what a failure at the worst moment undoes, in iterations, with a
checkpoint every ``--interval`` iterations and a write as long as was measured::

    python benchmarks/persist_recovery.py [--params 20000000] [--interval 10] [--json] [--plot FILE]
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from baselines import Gpm, NoSaver, PCcheck, Saver, TorchSave, add_saver_options, drop_cache, make
from common import Spread, add_output_options, console, count, draw, print_json, progress, turns
from matplotlib.axes import Axes
from rich.console import Console
from rich.table import Table
from workloads import Training, add_training_options

from checkmate.costmodel import worst_rework
from checkmate.tensors import is_same

SYNCHRONOUS = (TorchSave.name, Gpm.name)
"""Training goes on when the checkpoint is durable."""


@dataclass(frozen=True)
class Options:
    """``storage``: folder on the file system to write to."""

    kinds: tuple[str, ...]
    model: str
    params: int
    batch: int
    interval: int
    in_flight: int
    repetitions: int
    storage: str


@dataclass(frozen=True)
class Measured:
    """One way; one value for each repetition: seconds of a write and of a load."""

    kind: str
    in_flight: int
    writes: list[float] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)

    def rework(self, interval: int, iteration_s: float) -> float:
        """Iterations that a failure undoes at most."""
        return worst_rework(interval, Spread.of(self.writes).median, self.in_flight, iteration_s) / iteration_s


def run(options: Options, step: Callable[[str], None]) -> tuple[float, list[Measured]]:
    """Seconds of an iteration, and all ways in turns."""
    training = Training(options.model, options.params, options.batch)
    iteration_s = training.iteration_s()
    in_flight = {PCcheck.name: options.in_flight, **dict.fromkeys(SYNCHRONOUS, 0)}
    measured = {name: Measured(name, in_flight.get(name, 1)) for name in options.kinds}
    with ExitStack() as stack:
        storage = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.storage, prefix="ckmbench")))
        savers: dict[str, Saver] = {}
        for name in options.kinds:
            savers[name] = make(name, storage, training.state, training.optimizer, options.in_flight)
            stack.callback(savers[name].close)
            savers[name].save(0)
            savers[name].finish()
        for repetition in range(options.repetitions):
            for name in turns(options.kinds, repetition):
                _measure(training, savers[name], repetition + 1, measured[name])
                step(name)
    return iteration_s, list(measured.values())


def _measure(training: Training, saver: Saver, number: int, measured: Measured) -> None:
    start = time.perf_counter()
    saver.save(number)
    saver.finish()
    measured.writes.append(time.perf_counter() - start)
    drop_cache(saver.folder)
    start = time.perf_counter()
    found = saver.load()
    measured.loads.append(time.perf_counter() - start)
    assert found and found[0] == number, f"{saver.name} found {found and found[0]}, not {number}"
    for name, tensor in training.model.state_dict().items():
        assert is_same(tensor, found[1]["model"][name]), f"{saver.name}: {name} differs"


def show(iteration_s: float, measured: list[Measured], options: Options, to: Console) -> None:
    """Print a table."""
    table = Table(
        title=f"Recovery: {options.model}, about {options.params:,} parameters, {1e3 * iteration_s:.0f} ms an "
        f"iteration, a checkpoint every {options.interval}",
        caption=f"median (quartiles) of {options.repetitions}; every state was compared bit for bit",
    )
    for heading in ("checkpoints", "write, s", "load, s", "rework, iterations", "in all at worst, s"):
        table.add_column(heading, justify="right")
    for one in measured:
        rework = one.rework(options.interval, iteration_s)
        loads = Spread.of(one.loads)
        whole = loads.median + rework * iteration_s
        table.add_row(one.kind, Spread.of(one.writes).text(2), loads.text(2), f"{rework:.0f}", f"{whole:.1f}")
    to.print(table)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_training_options(parser, params=20_000_000, batch=2)
    parser.add_argument("--interval", type=count, default=10, help="iterations between checkpoints")
    parser.add_argument("--repetitions", type=count, default=3)
    add_saver_options(parser, leave_out=NoSaver.name)
    add_output_options(parser)
    arguments = parser.parse_args()
    options = Options(**{name: getattr(arguments, name) for name in Options.__dataclass_fields__})
    torch.set_num_threads(1)
    to = console(arguments)
    with progress(to, "recovering", options.repetitions * len(options.kinds)) as step:
        iteration_s, measured = run(options, step)
    show(iteration_s, measured, options, to)

    def fill(axes: Axes) -> None:
        names = [one.kind for one in measured]
        loads = [Spread.of(one.loads).median for one in measured]
        rework = [one.rework(options.interval, iteration_s) * iteration_s for one in measured]
        axes.barh(names, loads, label="load")
        axes.barh(names, rework, left=loads, label="work done again, at most")
        axes.set(xlabel="seconds")
        axes.legend()

    if arguments.plot:
        draw(arguments.plot, fill)
    if arguments.json:
        print_json(options, iteration_s=iteration_s, measured=measured)


if __name__ == "__main__":
    main()
