"""What PCcheck's knobs do: N, writers, chunk size and staging memory, one at a time about a middle setting.

As PCcheck's sensitivity figures. Checkpoints of one size are saved back to back, as fast as slots become free: MB/s
that become durable, and how long a save holds the trainer up::

    python benchmarks/persist_sensitivity.py [--mib 64] [--saves 8] [--json] [--plot FILE]
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from baselines import PCcheck
from common import (
    MIB,
    Spread,
    add_output_options,
    add_storage_option,
    console,
    count,
    draw,
    print_json,
    progress,
    turns,
)
from matplotlib.axes import Axes
from rich.console import Console
from rich.table import Table

from checkmate.persist.engine import Options as EngineOptions


@dataclass(frozen=True)
class Setting:
    """``memory``: staging buffers, in checkpoints."""

    in_flight: int = 2
    writers: int = 2
    chunk_mib: int = 4
    memory: float = 1.0


KNOBS: dict[str, tuple[float, ...]] = {
    "in_flight": (1, 2, 3, 4),
    "writers": (1, 2, 4),
    "chunk_mib": (1, 4, 16),
    "memory": (0.25, 0.5, 1.0, 2.0),
}
TITLES = {"in_flight": "N", "writers": "writers", "chunk_mib": "chunk, MiB", "memory": "staging memory / checkpoint"}


@dataclass(frozen=True)
class Options:
    """``mib``: of a state. ``storage``: folder on the file system to write to."""

    mib: int
    saves: int
    repetitions: int
    storage: str


@dataclass(frozen=True)
class Measured:
    """One setting; one value for each repetition. ``waits``: seconds in ``save`` and before the next step."""

    setting: Setting
    mb_per_s: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)


def run(options: Options, step: Callable[[str], None]) -> list[Measured]:
    """Measure all settings, in turns."""
    settings = {str(setting): Measured(setting) for setting in all_settings()}
    parameter = torch.nn.Parameter(torch.randn(options.mib * MIB // 4))
    for repetition in range(options.repetitions):
        for name in turns(list(settings), repetition):
            _measure(options, parameter, settings[name])
            step(name)
    return list(settings.values())


def all_settings() -> list[Setting]:
    """The middle, and each knob's values with the others in the middle."""
    each = [replace(Setting(), **{knob: value}) for knob, values in KNOBS.items() for value in values]  # type: ignore[arg-type]
    return list(dict.fromkeys(each))


def _measure(options: Options, parameter: torch.nn.Parameter, measured: Measured) -> None:
    setting = measured.setting
    engine = EngineOptions(writers=setting.writers, chunk_bytes=setting.chunk_mib * MIB)
    optimizer = torch.optim.SGD([parameter])
    memory = int(setting.memory * options.mib * MIB)
    with tempfile.TemporaryDirectory(dir=options.storage, prefix="ckmbench") as storage:
        saver = PCcheck(Path(storage), lambda: {"p": parameter.detach()}, optimizer, setting.in_flight, engine, memory)
        for number in range(setting.in_flight + 1):  # every slot was written once
            saver.save(number)
        saver.finish()
        parameter.grad = torch.zeros_like(parameter)
        waited, start = saver.checkpointer.waited_s, time.perf_counter()
        for number in range(options.saves):
            saver.save(number)
            optimizer.step()  # of lr * 0: waits for the copy
        saver.finish()
        seconds = time.perf_counter() - start
        measured.mb_per_s.append(options.saves * options.mib * MIB / 1e6 / seconds)
        measured.waits.append((saver.checkpointer.waited_s - waited) / options.saves)
        saver.close()


def show(measured: list[Measured], options: Options, to: Console) -> None:
    """Print a table for each knob."""
    for knob, values in KNOBS.items():
        table = Table(TITLES[knob], title=f"{options.saves} checkpoints of {options.mib} MiB back to back")
        table.add_column("MB/s durable", justify="right")
        table.add_column("ms of waiting for a save", justify="right")
        for value, one in zip(values, of_knob(measured, knob), strict=True):
            waits = Spread.of([1e3 * wait for wait in one.waits])
            table.add_row(f"{value:g}", Spread.of(one.mb_per_s).text(0), waits.text(1))
        to.print(table)


def of_knob(measured: list[Measured], knob: str) -> list[Measured]:
    """Those that differ in this knob alone."""
    wanted = [replace(Setting(), **{knob: value}) for value in KNOBS[knob]]  # type: ignore[arg-type]
    return [next(one for one in measured if one.setting == setting) for setting in wanted]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=count, default=64, help="size of a checkpoint")
    parser.add_argument("--saves", type=count, default=8, help="checkpoints in a repetition")
    parser.add_argument("--repetitions", type=count, default=3)
    add_storage_option(parser)
    add_output_options(parser)
    arguments = parser.parse_args()
    options = Options(arguments.mib, arguments.saves, arguments.repetitions, arguments.storage)
    to = console(arguments)
    with progress(to, "saving", options.repetitions * len(all_settings())) as step:
        measured = run(options, step)
    show(measured, options, to)

    def fill(axes: Axes, knob: str) -> None:
        rates = [Spread.of(one.mb_per_s).median for one in of_knob(measured, knob)]
        axes.plot(KNOBS[knob], rates, marker="o")
        axes.set(xlabel=TITLES[knob], ylabel="MB/s durable", ylim=(0, None))

    if arguments.plot:
        draw(arguments.plot, *(lambda axes, knob=knob: fill(axes, knob) for knob in KNOBS))  # type: ignore[misc]
    if arguments.json:
        print_json(options, measured=measured)


if __name__ == "__main__":
    main()
