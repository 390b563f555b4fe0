"""Time of one checkpoint, from the call until it is durable, by size: every way of saving, and what the device can do.

As PCcheck's figure of the time to persist a checkpoint. Training stands still; in brackets: until the call returns.
The last column but one is a plain C writer: ``dd`` with O_DIRECT and a flush, with the engine's block size::

    python benchmarks/persist_time.py [--sizes 16,64,256] [--json] [--plot FILE]
"""

import argparse
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from baselines import SAVERS, NoSaver, PCcheck, Saver, make
from common import (
    MIB,
    Spread,
    add_kinds_option,
    add_output_options,
    add_storage_option,
    console,
    count,
    counts,
    draw,
    print_json,
    progress,
    turns,
)
from matplotlib.axes import Axes
from rich.console import Console
from rich.table import Table

PLAIN = "dd"
BLOCK_MIB = 4


@dataclass(frozen=True)
class Options:
    """``sizes``: MiB of a state. ``storage``: folder on the file system to write to."""

    kinds: tuple[str, ...]
    sizes: tuple[int, ...]
    repetitions: int
    storage: str


@dataclass(frozen=True)
class Measured:
    """Of one size, by kind, one value for each repetition: seconds until durable, and until the call returned."""

    mib: int
    seconds: dict[str, list[float]]
    waits: dict[str, list[float]]


def run(options: Options, mib: int, step: Callable[[str], None]) -> Measured:
    """Measure one size."""
    parameter = torch.nn.Parameter(torch.randn(mib * MIB // 4))
    optimizer = torch.optim.SGD([parameter])
    seconds: dict[str, list[float]] = {name: [] for name in (*options.kinds, PLAIN)}
    waits: dict[str, list[float]] = {name: [] for name in options.kinds}
    with ExitStack() as stack:
        storage = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.storage, prefix="ckmbench")))
        savers = {name: _make(name, storage, parameter, optimizer) for name in options.kinds}
        for saver in savers.values():
            stack.callback(saver.close)
            _save(saver, 0)
        for repetition in range(options.repetitions):
            for name in turns((*options.kinds, PLAIN), repetition):
                if name == PLAIN:
                    seconds[name].append(_plain(storage, mib))
                    continue
                wait, whole = _save(savers[name], repetition + 1)
                waits[name].append(wait)
                seconds[name].append(whole)
            step(f"{mib} MiB")
    return Measured(mib, seconds, waits)


def _make(name: str, storage: Path, parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> Saver:
    def state() -> dict[str, Any]:
        return {"model": {"parameter": parameter.detach()}}

    return make(name, storage, state, optimizer, in_flight=1)


def _save(saver: Saver, step: int) -> tuple[float, float]:
    start = time.perf_counter()
    saver.save(step)
    wait = time.perf_counter() - start
    saver.finish()
    return wait, time.perf_counter() - start


def _plain(storage: Path, mib: int) -> float:
    """Into a file that is there, as the savers' are."""
    blocks = max(1, mib // BLOCK_MIB)
    flags = ["conv=fdatasync,notrunc", "oflag=direct", f"bs={mib // blocks}M", f"count={blocks}"]
    command = ["dd", "if=/dev/zero", f"of={storage / 'plain'}", *flags]
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    return time.perf_counter() - start


def show(measured: list[Measured], options: Options, to: Console) -> None:
    """Print a table."""
    table = Table(
        title="Time of one checkpoint, ms until durable (until the call returns)",
        caption=f"medians of {options.repetitions}",
    )
    table.add_column("MiB", justify="right")
    for name in (*options.kinds, PLAIN):
        table.add_column(name, justify="right")
    table.add_column(f"PCcheck to {PLAIN}", justify="right")
    for one in measured:
        cells = [
            f"{1e3 * Spread.of(one.seconds[name]).median:,.0f} ({1e3 * Spread.of(one.waits[name]).median:,.0f})"
            for name in options.kinds
        ]
        plain = Spread.of(one.seconds[PLAIN]).median
        ratio = plain / Spread.of(one.seconds[PCcheck.name]).median
        table.add_row(str(one.mib), *cells, f"{1e3 * plain:,.0f}", f"{ratio:.2f}")
    to.print(table)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=counts, default=(16, 64, 256), help="MiB, with commas")
    parser.add_argument("--repetitions", type=count, default=5)
    add_storage_option(parser)
    add_kinds_option(parser, tuple(name for name in SAVERS if name != NoSaver.name))
    add_output_options(parser)
    arguments = parser.parse_args()
    kinds = tuple(dict.fromkeys((PCcheck.name, *arguments.kinds)))
    options = Options(kinds, arguments.sizes, arguments.repetitions, arguments.storage)
    to = console(arguments)
    with progress(to, "saving", len(options.sizes) * options.repetitions) as step:
        measured = [run(options, mib, step) for mib in options.sizes]
    show(measured, options, to)

    def fill(axes: Axes) -> None:
        for name in (*options.kinds, PLAIN):
            axes.plot(options.sizes, [Spread.of(one.seconds[name]).median for one in measured], marker="o", label=name)
        axes.set(xscale="log", yscale="log", xlabel="MiB", ylabel="seconds until durable")
        axes.legend(fontsize=7)

    if arguments.plot:
        draw(arguments.plot, fill)
    if arguments.json:
        print_json(options, measured=measured)


if __name__ == "__main__":
    main()
