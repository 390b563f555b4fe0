"""What the benchmarks share: alternating turns, medians with their spread, tables, plots and JSON."""

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

T = TypeVar("T")
MIB = 1 << 20
WIDTH = 150
"""Of tables in a file."""


@dataclass(frozen=True)
class Spread:
    """Median, quartiles and extremes of some values."""

    median: float
    lower: float
    upper: float
    least: float
    greatest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        if len(values) == 1:
            return cls(*values * 5)
        lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, lower, upper, min(values), max(values))

    def text(self, digits: int) -> str:
        """Median (quartiles)."""
        return f"{self.median:.{digits}f} ({self.lower:.{digits}f} to {self.upper:.{digits}f})"


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Of neighbours in time, so that a slow moment of the machine meets both."""
    return Spread.of([a / b for a, b in zip(ours, theirs, strict=True)])


def turns(names: Sequence[T], repetition: int) -> list[T]:
    """The order of a repetition: each name comes first in turn, and every other repetition runs backwards."""
    shift = repetition % len(names)
    order = [*names[shift:], *names[:shift]]
    return order if repetition % 2 == 0 else order[::-1]


def at_least(least: int) -> Callable[[str], int]:
    """For an option's value that must be a whole number, ``least`` or more."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text}: must be a whole number, {least} or more")
        return int(text)

    return parse


count = at_least(1)


def numbers(text: str) -> tuple[int, ...]:
    """Of the form "1,4,16"; none, too."""
    return tuple(at_least(0)(part) for part in text.split(",") if part)


def counts(text: str) -> tuple[int, ...]:
    """Of the form "1,4,16", at least one, each at least 1."""
    return tuple(map(count, text.split(",")))


def amount(text: str) -> float:
    """An option's value that must be more than 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: must be a number greater than 0")
    return value


def folder(text: str) -> str:
    """An option's value that must be an existing folder."""
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text}: is no folder; make it first, or choose another")
    return text


def add_storage_option(parser: argparse.ArgumentParser) -> None:
    """``--storage``."""
    parser.add_argument("--storage", type=folder, default=".", help="folder on the file system to write to")


def add_output_options(parser: argparse.ArgumentParser, plot: bool = True) -> None:
    """``--json`` and ``--plot``."""
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    if plot:
        parser.add_argument("--plot", type=Path, metavar="FILE", help="write a plot to this file (.png, .svg, .pdf)")


def add_kinds_option(parser: argparse.ArgumentParser, kinds: Sequence[str]) -> None:
    """``--kinds``: those of ``kinds`` to measure; all by default."""

    def choose(text: str) -> tuple[str, ...]:
        chosen = tuple(text.split(","))
        if not set(chosen) <= set(kinds):
            raise argparse.ArgumentTypeError(f"{text}: choose of {', '.join(kinds)}")
        return chosen

    parser.add_argument("--kinds", type=choose, default=tuple(kinds), help=f"with commas, of {', '.join(kinds)}")


def add_placement_options(parser: argparse.ArgumentParser) -> None:
    """``--cpus`` and ``--rack-cpus``: by default half of the CPUs each; both empty: anywhere."""
    cpus = sorted(os.sched_getaffinity(0))
    half = len(cpus) // 2
    parser.add_argument("--cpus", type=numbers, default=tuple(cpus[:half]), help="CPUs of the nodes, with commas")
    parser.add_argument(
        "--rack-cpus", type=numbers, default=tuple(cpus[half:]) if half else (), help="CPUs of the rack"
    )


def console(arguments: argparse.Namespace) -> Console:
    """Where tables and progress go: beside the JSON object, not before it."""
    to = Console(stderr=arguments.json)
    return to if to.is_terminal else Console(stderr=arguments.json, width=WIDTH)


@contextmanager
def progress(to: Console, what: str, total: int) -> Iterator[Callable[[str], None]]:
    """A bar; calling it says what was done and moves it on by one."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=to, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda text: bar.update(task, advance=1, description=f"{what}: {text}")


def print_json(options: Any, **results: Any) -> None:
    """One object: the inputs, the machine and the results (dataclasses, or lists and mappings of them)."""
    print(json.dumps({"options": options, "machine": machine(), **results}, default=_plain))
    sys.stdout.flush()


def machine() -> dict[str, Any]:
    """What absolute figures depend on."""
    return {"cpus": sorted(os.sched_getaffinity(0)), "kernel": os.uname().release, "load": round(os.getloadavg()[0], 1)}


def draw(path: Path, *fills: Callable[[Axes], None]) -> None:
    """A figure with a pair of axes for each function, side by side."""
    figure = Figure(figsize=(6 * len(fills), 4), layout="constrained")
    for fill, axes in zip(fills, figure.subplots(1, len(fills), squeeze=False)[0], strict=True):
        fill(axes)
    figure.savefig(path)


def run_as_root(main: Callable[[], None], name: str) -> None:
    """Call ``main`` where namespaces and BPF can be had; Ctrl-C ends it, after its clean-up, without a traceback."""
    if name != "__main__":
        return
    if os.geteuid() != 0:
        raise SystemExit("network namespaces and BPF need root: run this as root")
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    return asdict(value)
