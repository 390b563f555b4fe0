"""``checkmate switch``: run a software switch; look at a switch, its counters, and whether it copies as it must."""

import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import islice
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from checkmate.config import CheckmateError
from checkmate.topology import Topology, load_topology

if TYPE_CHECKING:
    from checkmate.controlplane.inspection import Inspection
    from checkmate.controlplane.rates import Traffic
    from checkmate.controlplane.targets.p4runtime import P4RuntimeTarget
    from checkmate.controlplane.verify import Verdict

app = typer.Typer(help="The switch: run a software one, look at any.", no_args_is_help=True, rich_markup_mode=None)

TopologyFile = Annotated[Path, typer.Option("--topology", "-t", metavar="FILE", help="Topology of the job (YAML).")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object on a line, instead of tables.")]


@app.command()
def up(topology: TopologyFile) -> None:
    """Run the software switch of a topology, eBPF or BMv2, with its P4Runtime server, until SIGTERM."""
    from checkmate.p4.ebpf import p4runtime_server  # noqa: PLC0415
    from checkmate.p4.v1model import bmv2  # noqa: PLC0415

    switch = load_topology(topology).switch
    software = {"ebpf": p4runtime_server.serve, "bmv2": bmv2.serve}
    if switch.target not in software:
        raise CheckmateError(f"switch.target is {switch.target!r}: this command runs {' and '.join(software)} only")
    if not switch.interfaces:
        raise CheckmateError("switch.interfaces is missing: a software switch needs a map of port: interface name")
    software[switch.target](switch.interfaces, str(switch.p4runtime), switch.device_id, switch.netns)


@app.command()
def status(topology: TopologyFile, as_json: Json = False) -> None:
    """Show what the switch holds: pipeline, controller, ports and roles, groups and members, how full its tables are.

    Read over P4Runtime beside the running controller, without disturbing it.

    JSON has "job", "target", "address", "pipeline" (ours, another, none), "primary" (null: the switch does not tell),
    "shadows" (that it copies to), "ports", "groups", "usage", "problems".

    Exit codes: 0, all is as planned for the shadows that the switch copies to; 1, something is not, and is named;
    2, the switch cannot be read.
    """
    from checkmate.controlplane.view import status_tables  # noqa: PLC0415

    job = load_topology(topology)
    with _reading(job) as target:
        inspection = inspect_switch(job, target)
    if as_json:
        _print_json(inspection.to_dict())
    else:
        Console().print(status_tables(inspection))
    if inspection.problems:
        raise typer.Exit(1)


@app.command()
def counters(
    topology: TopologyFile,
    interval: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between two readings.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Read over one interval, print, and end.")] = False,
    as_json: Json = False,
) -> None:
    """Show the counters of each group and port with their rates, until Ctrl-C.

    Without a terminal, or with --json, every interval is printed anew. A group's counter is what its heartbeat entries
    were given: each such frame is copied once to every member.

    JSON has "ports": counter, port; and "groups": number; each with "packets", "bytes", "packets_per_s", "bits_per_s".

    Exit codes: 0; 2, the switch cannot be read.
    """
    from checkmate.controlplane.view import traffic_tables  # noqa: PLC0415

    job, console = load_topology(topology), Console()
    with _reading(job) as target, suppress(KeyboardInterrupt):
        inspection = inspect_switch(job, target)
        readings = islice(_readings(inspection, target, interval), 1 if once else None)
        if as_json:
            for traffic in readings:
                _print_json(traffic.to_dict())
        elif once or not console.is_terminal:
            for traffic in readings:
                console.print(traffic_tables(inspection, traffic))
        else:
            with Live(console=console, auto_refresh=False) as live:
                for traffic in readings:
                    live.update(traffic_tables(inspection, traffic), refresh=True)


@app.command()
def verify(
    topology: TopologyFile,
    node: Annotated[
        str | None, typer.Option(metavar="HOST", help="This machine is that host of the topology: send its probes.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0, max=3600, help="Watch a job's own traffic for so long where no probe can be sent.")
    ] = 5.0,
    as_json: Json = False,
) -> None:
    """Check that every group copies exactly once to exactly its members, on an idle or a running switch.

    Sends a tagged frame for each pair of ranks out of the ranks' own interfaces, and looks what arrives at all members
    and anywhere else, byte for byte; compares the switch's counters, too. Probes disturb nobody: a host's kernel drops
    them (an address of 192.0.2.0/24, time to live 1), a shadow skips them (a header that belongs to no job).

    In a lab all of that is done at once, in its namespaces. On a rack run it on each host, as root, with --node HOST:
    what leaves the switch is then judged by its counters. Anywhere else the counters are compared for --seconds of a
    job's traffic.

    JSON has "problems" and "groups", each with "group", "for", "probes", "tagged" (frames that the switch was given
    meanwhile), "outcome" (ok, wrong, not seen) and "problems".

    Exit codes: 0, every group was seen to be right; 1, one is wrong, and is named; 2, the switch cannot be read, or
    there was no traffic to judge a group by.
    """
    from checkmate.controlplane.verify import Verification, taps  # noqa: PLC0415
    from checkmate.controlplane.view import verdict_table  # noqa: PLC0415

    job = load_topology(topology)
    with _reading(job) as target, taps(job, node) as (opened, sources):
        inspection = inspect_switch(job, target)
        verification = Verification(inspection, target)
        verification.start()
        if sources:
            verification.probe(opened, sources)
        else:
            sleep(seconds)
        verdicts = [verdict for verdict in verification.finish() if node is None or verdict.probes or verdict.problems]
    if as_json:
        groups = [verdict.to_dict() for verdict in verdicts]
        _print_json({"problems": verification.problems, "groups": groups})
    else:
        Console().print(verdict_table(inspection, verdicts, verification.problems))
    if verification.problems or any(verdict.problems for verdict in verdicts):
        raise typer.Exit(1)
    _require_traffic(topology, job, verdicts)


def _require_traffic(file: Path, job: Topology, verdicts: "Sequence[Verdict]") -> None:
    if not verdicts:
        raise CheckmateError("no group copies to a shadow, so there is nothing to verify; start a shadow")
    if unseen := sum(not verdict.tagged for verdict in verdicts):
        commands = [f"  on {host.name}: checkmate switch verify -t {file} --node {host.name}" for host in job.hosts]
        raise CheckmateError(
            "\n".join([f"{unseen} of {len(verdicts)} groups had no traffic to judge them by; run, as root:", *commands])
        )


@contextmanager
def _reading(job: Topology) -> "Iterator[P4RuntimeTarget]":
    """The switch, to be read only."""
    from checkmate.controlplane.targets.p4runtime import P4RuntimeTarget  # noqa: PLC0415

    with closing(P4RuntimeTarget(job.switch.p4runtime, job.switch.device_id, job=job.job)) as target:
        yield target


def inspect_switch(job: Topology, target: "P4RuntimeTarget") -> "Inspection":
    """See ``inspection.inspect``."""
    from checkmate.controlplane.inspection import inspect  # noqa: PLC0415

    return inspect(job, target)


def _readings(inspection: "Inspection", target: "P4RuntimeTarget", interval: float) -> "Iterator[Traffic]":
    """What passed in one interval after the other; the groups are those of its end."""
    from checkmate.controlplane.rates import Sample, traffic  # noqa: PLC0415

    ports = list(inspection.plan.ports)
    before = Sample(target.counters(ports))
    while True:
        sleep(interval)
        after = Sample(target.counters(ports))
        yield traffic(target.read(), before, after)
        before = after


def _print_json(value: dict[str, Any]) -> None:
    typer.echo(json.dumps(value))
