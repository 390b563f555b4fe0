"""A switch as tables for a terminal."""

from collections.abc import Iterable, Sequence

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

from checkmate.controlplane.inspection import Inspection
from checkmate.controlplane.rates import Rate, Traffic
from checkmate.controlplane.verify import Verdict

_PORT_COUNTERS = ("tagged_in", "copies_out", "untagged")
"""Shown with rates; any other only where it is not 0."""

_STYLES = {"ok": "green", "wrong": "bold red", "not seen": "yellow"}
_PREFIXES = ("", "k", "M", "G", "T")


def status_tables(inspection: Inspection) -> Lines:
    """All that ``checkmate switch status`` shows."""
    return Lines(
        _switch(inspection), _ports(inspection), _groups(inspection), _usage(inspection), *_red(inspection.problems)
    )


def traffic_tables(inspection: Inspection, traffic: Traffic) -> Lines:
    """Counters and rates by group and by port."""
    groups = _table("group", "for", "tagged frames", "frames/s", "bit/s", title="groups")
    meanings = inspection.plan.group_names
    for number, rate in sorted(traffic.groups.items()):
        groups.add_row(str(number), meanings.get(number, ""), *_cells(rate))
    ports = _table("port", "of", "counter", "frames", "frames/s", "bit/s", title="ports")
    for name in (*_PORT_COUNTERS, *sorted(traffic.ports.keys() - set(_PORT_COUNTERS))):
        for port, rate in sorted(traffic.ports.get(name, {}).items()):
            ports.add_row(str(port), inspection.name(port), name, *_cells(rate))
    return Lines(groups, ports)


def verdict_table(inspection: Inspection, verdicts: Sequence[Verdict], problems: Sequence[str]) -> Lines:
    """A line for each group; what is wrong below."""
    table = _table("group", "for", "members", "probes", "tagged frames", "result", title="every group copies once")
    for verdict in verdicts:
        outcome = Text(verdict.outcome, _STYLES[verdict.outcome])
        members = ", ".join(_place(inspection, port) for port, _ in verdict.group.replicas)
        number, counts = str(verdict.group.id), (str(verdict.probes), str(verdict.tagged))
        table.add_row(number, verdict.meaning, members, *counts, outcome)
    lines = (f"group {verdict.group.id}: {text}" for verdict in verdicts for text in verdict.problems)
    return Lines(table, *_red(lines), *_red(problems))


def _switch(inspection: Inspection) -> Table:
    switch = inspection.topology.switch
    primary: dict[bool | None, str | Text] = {
        True: "connected",
        False: Text("none", "red"),
        None: "unknown: the switch does not tell",
    }
    table = _table("switch", "", title=f"{inspection.topology.job}: {switch.target} at {switch.p4runtime}")
    table.add_row("pipeline", inspection.pipeline)
    table.add_row("primary controller", primary[inspection.primary])
    table.add_row("copies to", ", ".join(inspection.plan.live) or "no shadow")
    return table


def _ports(inspection: Inspection) -> Table:
    table = _table("port", "of", "role", title="ports")
    roles = inspection.roles()
    for port in sorted(roles.keys() | inspection.plan.ports.keys()):
        table.add_row(str(port), inspection.name(port) or "another job", roles.get(port, Text("none", "red")))
    return table


def _groups(inspection: Inspection) -> Table:
    table = _table("group", "for", "members", title="multicast groups")
    for group in inspection.rules.groups:
        members = ", ".join(f"{_place(inspection, port)} rid {rid}" for port, rid in group.replicas)
        table.add_row(str(group.id), inspection.meaning(group) or "another job", members or Text("none", "red"))
    return table


def _usage(inspection: Inspection) -> Table:
    table = _table("resource", "used", "limit", title="all jobs together")
    for use in inspection.usage:
        table.add_row(use.what, str(use.used), str(use.limit))
    return table


def _red(lines: Iterable[str]) -> list[RenderableType]:
    return [Text(line, "bold red") for line in lines]


def _place(inspection: Inspection, port: int) -> str:
    return f"{inspection.name(port) or 'port'} ({port})"


def _cells(rate: Rate) -> tuple[str, str, str]:
    return f"{rate.total.packets:,}", _short(rate.packets_per_s), _short(rate.bits_per_s)


def _short(value: float) -> str:
    """Three digits and a decimal prefix."""
    power = 0
    while value >= 1000 and power < len(_PREFIXES) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.3g}{_PREFIXES[power]}"


def _table(*headers: str, title: str) -> Table:
    """In a narrow window values are folded: a cut address says nothing."""
    return Table(*(Column(header, overflow="fold") for header in headers), title=title)
