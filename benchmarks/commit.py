"""Time from the last packet of an iteration to its commit, by model size, on a training job over the eBPF switch.

``examples/train.py`` trains with four ranks; the shadow says of each of its newest steps when the last packet of its
gradients was taken in, when the step was begun and when it was committed. *Waiting* is mostly the trainer's time: the
boundary of a step is taken at the next forward, so that what is restored is of one moment. *Step* is the shadow's own.
Nodes and rack have CPUs of their own. Run as root::

    python benchmarks/commit.py [--params 1000000,3000000,10000000] [--steps 40] [--json]
"""

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import (
    Spread,
    add_output_options,
    add_placement_options,
    console,
    count,
    counts,
    print_json,
    progress,
    run_as_root,
)
from networks import rack
from rich.console import Console
from rich.table import Table

from checkmate import examples
from checkmate.config import CheckmateError
from checkmate.lab import Placement

JOB_S = 600.0
SETS = 4
MOST_STEPS = 64
"""Newest steps that a shadow tells of."""
SKIPPED = 3
"""First steps of a job: DDP cuts its buckets anew, the optimizer makes its state."""


@dataclass(frozen=True)
class Options:
    """``params``: sizes of the model."""

    params: tuple[int, ...]
    ranks: int
    mtu: int
    steps: int
    cpus: tuple[int, ...]
    rack_cpus: tuple[int, ...]


@dataclass(frozen=True)
class Measured:
    """Seconds, one value for each step; ``gaps`` of the shadow."""

    params: int
    wait_s: list[float]
    step_s: list[float]
    gaps: int

    @property
    def total_s(self) -> list[float]:
        """From the last packet to the commit."""
        return [wait + step for wait, step in zip(self.wait_s, self.step_s, strict=True)]


def run(options: Options, to: Console) -> Iterator[Measured]:
    """A job for each size. Raises CheckmateError when one fails or the shadow did not commit all of its steps."""
    with progress(to, "training", len(options.params)) as done:
        for params in options.params:
            yield measure(options, params)
            done(f"{params} parameters")


def measure(options: Options, params: int) -> Measured:
    """One job, with a shadow of its own."""
    placement = Placement(options.cpus, options.rack_cpus) if options.cpus and options.rack_cpus else None
    with rack(options.ranks, options.mtu, placement, SETS) as network:
        services = network.services
        assert services is not None
        arguments = [f"--steps={options.steps}", f"--params={params}"]
        process = services.run(Path(examples.TRAIN), arguments, log="job.log", max_restarts=0)
        if process.wait(JOB_S):
            raise CheckmateError(f"the job failed:\n{services.lab.log_tail('job.log')}")
        status = services.shadow_status()
        if status is None or status["committed"] != options.steps:
            raise CheckmateError(f"the shadow did not commit all steps: {status}")
        newest = [step for step in status["newest_steps"] if step["step"] > SKIPPED]
        return Measured(
            params, [step["wait_s"] for step in newest], [step["step_s"] for step in newest], status["gap_count"]
        )


def show(results: list[Measured], options: Options, to: Console) -> None:
    """A row for each size."""
    table = Table(title=f"Last packet to commit: {options.ranks} ranks, MTU {options.mtu}, ms, median (quartiles)")
    for name in ("parameters", "steps", "waiting", "step", "last packet to commit", "gaps"):
        table.add_column(name, justify="right")
    for measured in results:
        parts = (measured.wait_s, measured.step_s, measured.total_s)
        texts = [Spread.of([1000 * value for value in part]).text(1) for part in parts]
        table.add_row(f"{measured.params:,}", str(len(measured.step_s)), *texts, str(measured.gaps))
    to.print(table)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=counts, default=(1_000_000, 3_000_000, 10_000_000), help="with commas")
    parser.add_argument("--ranks", type=count, default=4)
    parser.add_argument("--mtu", type=int, choices=(1500, 9000), default=9000)
    parser.add_argument("--steps", type=count, default=40, help=f"of each job, {SKIPPED + 1} to {MOST_STEPS}")
    add_placement_options(parser)
    add_output_options(parser, plot=False)
    arguments = parser.parse_args()
    if not SKIPPED < arguments.steps <= MOST_STEPS:
        parser.error(f"--steps {arguments.steps}: allowed are {SKIPPED + 1} to {MOST_STEPS}")
    options = Options(
        arguments.params, arguments.ranks, arguments.mtu, arguments.steps, arguments.cpus, arguments.rack_cpus
    )
    to = console(arguments)
    results = list(run(options, to))
    show(results, options, to)
    if arguments.json:
        rows: list[dict[str, Any]] = [asdict(measured) for measured in results]
        print_json(asdict(options), results=rows)


run_as_root(main, __name__)
