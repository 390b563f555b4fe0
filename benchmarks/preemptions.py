"""Preemption traces: how many machines of a job there were, and when.

A trace is a file of lines "seconds,machines"; lines that begin with # say where it is from. A drop is a failure of the
job; a rise is none, nor is the first line. ``traces/spot-64.csv`` was made by this file::

    python benchmarks/preemptions.py > benchmarks/traces/spot-64.csv
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

SPOT = Path(__file__).parent / "traces/spot-64.csv"
MACHINES = 64
HOURS = 24
PREEMPTIONS = 127
"""In a day on 64 GPUs of a cloud's spot machines, as PCcheck (ASPLOS 2025) cites."""
SEED = 2025


def failures(path: Path) -> list[float]:
    """Seconds since the first line of each drop. Raises ValueError naming a line that makes no sense."""
    rows = list(_rows(path))
    if not rows:
        raise ValueError(f"{path} holds no line of the form seconds,machines")
    start = rows[0][0]
    drops = [now - start for (_, had), (now, has) in itertools.pairwise(rows) if has < had]
    if any(later[0] < earlier[0] for earlier, later in itertools.pairwise(rows)):
        raise ValueError(f"{path}: the times must not decrease")
    return drops


def scaled(times: Sequence[float], window_s: float, to_s: float) -> list[float]:
    """The failures of the first ``window_s`` seconds of a trace, as of a run of ``to_s`` seconds."""
    return [time * to_s / window_s for time in times if time < window_s]


def _rows(path: Path) -> Iterator[tuple[float, int]]:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            try:
                seconds, machines = line.split(",")
                yield float(seconds), int(machines)
            except ValueError:
                raise ValueError(f"{path}:{number}: {line!r} is not of the form seconds,machines") from None


def make() -> Iterator[str]:
    """Lines of a trace: preemptions at random moments, machines come back after some minutes."""
    draw = random.Random(SEED)
    yield f"# Made by benchmarks/preemptions.py with seed {SEED}, not recorded: {PREEMPTIONS} preemptions at"
    yield f"# uniformly random moments of {HOURS} hours on {MACHINES} machines, a rate that PCcheck (ASPLOS 2025)"
    yield "# cites for spot machines; a machine comes back after 5 minutes on average."
    drops = [draw.uniform(0, HOURS * 3600) for _ in range(PREEMPTIONS)]
    changes = [(when, -1) for when in drops] + [(when + draw.expovariate(1 / 300), 1) for when in drops]
    machines = MACHINES
    yield f"0,{machines}"
    for when, change in sorted(changes):
        machines += change
        if when < HOURS * 3600:
            yield f"{when:.0f},{machines}"


if __name__ == "__main__":
    print("\n".join(make()))
