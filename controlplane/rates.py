"""Counters over time: totals, what was added since the reading before, and rates."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from checkmate.controlplane.target import Count, Counters
from checkmate.plan import Key, Rules


class Rate(NamedTuple):
    """A counter's value, and what is added to it in a second."""

    total: Count
    packets_per_s: float
    bits_per_s: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            **self.total._asdict(),
            "packets_per_s": round(self.packets_per_s, 1),
            "bits_per_s": round(self.bits_per_s),
        }


@dataclass(frozen=True)
class Sample:
    """All counters at a moment (monotonic seconds)."""

    counters: Counters
    at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Traffic:
    """``ports``: counter's short name → switch port → rate; ``groups``: tagged frames that each group was given."""

    ports: Mapping[str, Mapping[int, Rate]]
    groups: Mapping[int, Rate]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "ports": {
                name: {str(port): rate.to_dict() for port, rate in cells.items()} for name, cells in self.ports.items()
            },
            "groups": {str(number): rate.to_dict() for number, rate in self.groups.items()},
        }


def traffic(rules: Rules, before: Sample, after: Sample) -> Traffic:
    """What passed between two samples. A counter that fell was reset by a restart, and counts from 0 again."""
    seconds = max(after.at - before.at, 1e-9)
    ports = {
        name.rpartition(".")[2]: {
            port: _rate(before.counters.ports.get(name, {}).get(port, Count(0, 0)), value, seconds)
            for port, value in cells.items()
        }
        for name, cells in after.counters.ports.items()
    }
    old, new = (_by_group(rules, sample.counters.entries) for sample in (before, after))
    return Traffic(
        ports, {number: _rate(old.get(number, Count(0, 0)), value, seconds) for number, value in new.items()}
    )


def _rate(before: Count, after: Count, seconds: float) -> Rate:
    base = before if after.packets >= before.packets else Count(0, 0)
    return Rate(after, (after.packets - base.packets) / seconds, 8 * (after.bytes - base.bytes) / seconds)


def _by_group(rules: Rules, entries: Mapping[Key, Count]) -> dict[int, Count]:
    groups = {entry.key: entry.group for entry in rules.entries if entry.group is not None}
    sums: dict[int, Count] = {}
    for key, count in entries.items():
        if (number := groups.get(key)) is not None:
            sums[number] = _add(sums.get(number, Count(0, 0)), count)
    return sums


def _add(one: Count, other: Count) -> Count:
    """Sum of two counters."""
    return Count(one.packets + other.packets, one.bytes + other.bytes)
