"""``checkmate plan``: check an inventory, show its plan, compare it with what a switch holds."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from checkmate import checked
from checkmate.config import CheckmateError
from checkmate.plan import Plan, diff, make_plan, receivers
from checkmate.topology import Endpoint, Topology, load_topology

NONE = "none"
"""As the only value of ``--live``: no shadow is alive."""


def plan(
    inventory: Annotated[
        Path, typer.Argument(metavar="INVENTORY", help="Topology of the job (YAML); deploy/inventories has four.")
    ],
    live: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Shadow taken to be alive; repeat it for more. none: no shadow. Default: all."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write a picture of the rack, as SVG; replaces FILE.")
    ] = None,
    tofino_setup: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Also write the script that sets up a Tofino's ports and queues; replaces FILE."
        ),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--diff", help="Print how the live switch differs from the plan instead of the plan.")
    ] = False,
    switch: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Compare with this switch, not the inventory's.")
    ] = None,
) -> None:
    """Check an inventory and show what its switch will hold.

    Reads INVENTORY, checks all of it, and reports everything that is wrong at once, each with its line and what to
    do. If nothing is, prints the plan: multicast groups, heartbeat, rewrite and forwarding entries, queues, and how
    much of the switch that takes. The same inventory always gives the same output. Nothing is written to any switch.

    With --diff the plan is compared with what the switch of the inventory holds, read over P4Runtime beside a running
    controller, without disturbing it: lines with - are held, lines with + are planned. A switch copies only for
    shadows that are alive: name those with --live.

    --tofino-setup writes what P4Runtime does not cover (ports, FEC, flow control, buffers) as a Python script with
    every value explained, for bfshell of the switch's SDE: bfshell -b FILE.

    JSON has "schema": 1, "job", "target", "policy", "live_shadows", "ports", "group_names", "entries", "groups",
    "queues", "usage"; with --diff "equal", "removed", "changed", "added".

    Exit codes: 0, and with --diff the switch holds the plan; 1, it does not (--diff only); 2, the inventory is wrong, a
    limit of the switch is exceeded, a file cannot be written, or the switch cannot be read.

    \b
    checkmate plan deploy/inventories/testbed.yaml --svg rack.svg
    checkmate plan rack.yaml --json | jq .usage
    checkmate plan rack.yaml --diff --live shadow0 || echo "the switch holds something else"
    """
    topology = load_topology(inventory)
    the_plan = make_plan(topology, _alive(topology, live or []))
    if switch is not None and not compare:
        raise CheckmateError(f"--switch {switch}: only used with --diff; add it or leave this out")
    files: list[tuple[str, Path, str]] = []
    if svg is not None:
        from checkmate.planning.svg import draw  # noqa: PLC0415

        files.append(("--svg", svg, draw(topology, the_plan)))
    if tofino_setup is not None:
        from checkmate.planning.tofino import setup_script  # noqa: PLC0415

        files.append(("--tofino-setup", tofino_setup, setup_script(topology, the_plan)))
    for option, path, text in files:
        _write(option, path, text)
    if compare:
        _compare(topology, the_plan, _address(topology, switch), as_json)
    elif as_json:
        typer.echo(json.dumps(the_plan.to_dict()))
    else:
        from checkmate.planning.tables import tables  # noqa: PLC0415

        Console().print(tables(the_plan))


def _alive(topology: Topology, names: list[str]) -> frozenset[str]:
    if names == [NONE]:
        return frozenset()
    return frozenset(names or (shadow.name for shadow in topology.shadows))


def _write(option: str, path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CheckmateError(f"{option} {path}: {error.strerror}; name a file that can be written") from None
    Console(stderr=True, soft_wrap=True).print(f"wrote {path}", markup=False, highlight=False)


def _address(topology: Topology, switch: str | None) -> Endpoint:
    if switch is None:
        return topology.switch.p4runtime
    try:
        return checked.endpoint(switch)
    except checked.Wrong as wrong:
        raise CheckmateError(f"--switch {switch}: {wrong}") from None


def _compare(topology: Topology, the_plan: Plan, address: Endpoint, as_json: bool) -> None:
    """Print the difference; exit code 1 when there is one."""
    from checkmate.controlplane.ownership import scope  # noqa: PLC0415
    from checkmate.controlplane.targets.p4runtime import P4RuntimeTarget  # noqa: PLC0415

    target = P4RuntimeTarget(address, topology.switch.device_id)
    try:
        everything = target.read()
    finally:
        target.close()
    held, wanted = scope(everything, the_plan.rules, topology.job)
    difference = diff(held, wanted)
    if as_json:
        typer.echo(json.dumps(difference.to_dict()))
    elif difference:
        typer.echo(str(difference))
        copied = receivers(topology, held)
        if copied != set(the_plan.live):
            options = " ".join(f"--live {name}" for name in sorted(copied)) or f"--live {NONE}"
            typer.echo(f"the switch copies to {', '.join(sorted(copied)) or 'no shadow'}: for that plan give {options}")
    else:
        typer.echo(f"the switch at {address} holds the plan")
    if difference:
        raise typer.Exit(1)
