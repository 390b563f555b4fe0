"""The ``checkmate`` command.

Exit codes: 0 success; 1 the result is not what it must be (the demo's states differ); 2 wrong usage, input or
environment, or a job that failed: the text on standard error says what to fix.
"""

import json
import logging
import os
import sys
from collections.abc import Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from checkmate import config
from checkmate.config import CheckmateError
from checkmate.persist_cli import Format
from checkmate.persist_cli import app as persist_app
from checkmate.plan_cli import plan
from checkmate.status import blocks, query, status_sockets
from checkmate.status import export as export_state
from checkmate.switch_cli import app as switch_app
from checkmate.topology import load_topology

app = typer.Typer(
    name="checkmate",
    help=__doc__,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
log = logging.getLogger("checkmate")

TopologyFile = Annotated[Path, typer.Option("--topology", "-t", metavar="FILE", help="Topology of the job (YAML).")]
Socket = Annotated[Path, typer.Option(metavar="PATH", help="Unix socket that serves status as JSON.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


class SwitchKind(StrEnum):
    """Software switches that a demo can run on."""

    ebpf = "ebpf"
    bmv2 = "bmv2"


Shadows = Annotated[int, typer.Option(min=1, max=4, help="Shadows, each with a shard of the parameters.")]
RanksPerHost = Annotated[
    int, typer.Option(min=1, max=7, help="Ranks on each training node, which is a network namespace.")
]


@app.command()
def demo(
    ranks: Annotated[int, typer.Option(min=2, max=8, help="Training processes.")] = 4,
    ranks_per_host: RanksPerHost = 1,
    shadows: Shadows = 1,
    steps: Annotated[int, typer.Option(min=2, help="Optimizer steps.")] = 40,
    params: Annotated[int, typer.Option(min=100_000, help="Approximate number of model parameters.")] = 3_000_000,
    mtu: Annotated[int, typer.Option(help=f"MTU of all links: one of {config.MTU_CHOICES}.")] = 1500,
    channels: Annotated[int, typer.Option(min=1, max=16, help="Rings of each all-reduce.")] = 2,
    switch: Annotated[SwitchKind, typer.Option(help="Software switch.")] = SwitchKind.ebpf,
    kill: Annotated[
        str, typer.Option(metavar="none|random|RANK@STEP", help="Which rank gets SIGKILL, and in which step.")
    ] = "random",
    seed: Annotated[int, typer.Option(help="Seed of the model, the data order and the random kill.")] = 0,
    keep: Annotated[bool, typer.Option("--keep", help="Keep logs and final states, and say where.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Last line: one JSON object with the results.")] = False,
) -> None:
    """Train, checkpoint every iteration, kill a rank, restore from the shadow, compare bit for bit.

    Trains a small GPT on the licence texts in /usr/share/common-licenses with DistributedDataParallel. Every host, the
    switch and the shadow live in network namespaces of this machine; nothing outside them is touched and all is removed
    at the end. Needs root. Exit code 1 if the restored run differs in one bit from a run that never failed.
    """
    from checkmate.demo import DemoOptions, run_demo  # noqa: PLC0415 - keeps --help fast

    options = DemoOptions(
        ranks, steps, params, mtu, channels, ranks_per_host, shadows, switch.value, kill, seed, keep, as_json
    )
    if not run_demo(options, Console(stderr=as_json)):
        raise typer.Exit(1)


@app.command()
def lab(
    ranks: Annotated[int, typer.Option(min=2, max=8, help="Training processes.")] = 4,
    ranks_per_host: RanksPerHost = 1,
    shadows: Shadows = 1,
    mtu: Annotated[int, typer.Option(help=f"MTU of all links: one of {config.MTU_CHOICES}.")] = 1500,
    switch: Annotated[SwitchKind, typer.Option(help="Software switch.")] = SwitchKind.ebpf,
    groups: Annotated[
        int,
        typer.Option(min=1, max=4, help="Data-parallel groups, each with shadows of its own unless they share hosts."),
    ] = 1,
    interleaved: Annotated[
        bool,
        typer.Option(
            "--interleaved",
            help="Consecutive ranks are in different groups, as tensor parallelism and HSDP have it; otherwise in the "
            "same, as the stages of a pipeline.",
        ),
    ] = False,
) -> None:
    """Build the demo's rack for scripts of your own, and keep it until Ctrl-C. Needs root.

    Switch, controller and shadows run in network namespaces of this machine. Prints the commands to use it with.
    """
    from checkmate.lab import LabConfig  # noqa: PLC0415
    from checkmate.services import serve_lab  # noqa: PLC0415

    if mtu not in config.MTU_CHOICES:
        raise CheckmateError(f"--mtu {mtu}: allowed are {' and '.join(map(str, config.MTU_CHOICES))}")
    lab_config = LabConfig(
        ranks,
        mtu,
        switch.value,
        ranks_per_host=ranks_per_host,
        shadows=shadows,
        groups=groups,
        interleaved=interleaved,
    )
    serve_lab(lab_config, partial(Console().print, soft_wrap=True, markup=False, highlight=False))


@app.command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run_command(
    topology: TopologyFile,
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="Any PyTorch DDP script, unmodified.")],
    args: Annotated[list[str] | None, typer.Argument(help="The script's own arguments.")] = None,
    node: Annotated[str | None, typer.Option(help="Host of the topology that this machine is.")] = None,
    channels: Annotated[int, typer.Option(min=1, max=32, help="Rings of each all-reduce (CPU back end).")] = 2,
    max_restarts: Annotated[int, typer.Option(min=0, help="Restarts of all ranks before the job fails.")] = 3,
    bpf: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory on a BPF file system for the counter map.")
    ] = Path("/sys/fs/bpf"),
    no_attach: Annotated[bool, typer.Option("--no-attach", help="Same transport, no checkpointing at all.")] = False,
    logs: Annotated[Path | None, typer.Option(metavar="DIR", help="Directory for each rank's output.")] = None,
) -> None:
    """Start SCRIPT on every rank and restart all ranks from the shadow when one dies."""
    from checkmate.launch import Job, run_job  # noqa: PLC0415

    run_job(
        Job(
            topology_file=topology,
            script=script,
            args=tuple(args or ()),
            channels=channels,
            max_restarts=max_restarts,
            bpf=None if no_attach else bpf,
            attach=not no_attach,
            node=node,
            logs=logs,
        )
    )


app.add_typer(switch_app, name="switch")
app.add_typer(persist_app, name="persist")


@app.command()
def controller(
    topology: TopologyFile,
    socket: Socket,
    standby: Annotated[
        bool,
        typer.Option("--standby", help="Wait until the switch has no other controller of this job, then take over."),
    ] = False,
) -> None:
    """Keep the switch in step with the plan and register shadows, until SIGTERM."""
    from checkmate.controlplane.controller import Controller  # noqa: PLC0415

    Controller(load_topology(topology), socket, standby=standby).run()


@app.command()
def shadow(
    topology: TopologyFile,
    name: Annotated[str, typer.Option(help="Which shadow of the topology this is.")],
    socket: Socket,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of the optimizers, of all groups; default: cores - 1.")
    ] = None,
    sets: Annotated[int, typer.Option(min=2, help="Iterations whose gradients are held at most.")] = 32,
    gradient_gb: Annotated[
        float | None, typer.Option(min=0.01, help="Bound of held gradients in GB; default: a quarter of the memory.")
    ] = None,
) -> None:
    """Receive gradients and keep the state of a shadow, until SIGTERM. Runs in the shadow's network namespace."""
    from checkmate.controlplane.registrar_client import RegistrarClient  # noqa: PLC0415
    from checkmate.shadow.daemon import ShadowConfig, run_shadow  # noqa: PLC0415
    from checkmate.shadow.rx.receiver import RxConfig  # noqa: PLC0415

    job = load_topology(topology)
    node = job.shadow(name)
    token = job.read_token()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    rx = RxConfig(
        ifaces=[(nic.name, None) for nic in node.nics],
        mtu=job.mtu,
        sets=sets,
        pool_bytes=int(gradient_gb * 1e9) if gradient_gb else memory // 4,
        dscp=job.dscp_tag,
    )
    groups = job.followed(node)
    if not groups:
        raise CheckmateError(f"shadow {name} is in no group of {topology}: name it in the shadows of one")
    configs = [
        ShadowConfig(job.job, token, job.control(node, group), path, rx, threads, group=group.name)
        for group, path in zip(groups, status_sockets(socket, [group.name for group in groups]), strict=True)
    ]
    macs = [nic.mac for nic in node.nics]
    run_shadow(configs, lambda: RegistrarClient(job.registrar, job.job, name, macs, token))


app.command()(plan)


@app.command()
def preflight(
    topology: Annotated[Path | None, typer.Option("--topology", "-t", help="Also check this job's links.")] = None,
    as_json: Json = False,
) -> None:
    """Check that this machine has what Checkmate needs; exit code 1 if something is missing."""
    from checkmate.controlplane.preflight import check_machine, check_offloads  # noqa: PLC0415

    findings = [*check_machine(), *(check_offloads(load_topology(topology)) if topology else [])]
    if as_json:
        print_json({finding.what: finding.problem for finding in findings})
    else:
        table = Table("needed", "found", box=None)
        for finding in findings:
            table.add_row(finding.what, Text(finding.problem, "red") if finding.problem else Text("ok", "green"))
        Console().print(table)
    if any(finding.problem for finding in findings):
        raise typer.Exit(1)


@app.command()
def status(
    socket: Annotated[Path, typer.Argument(metavar="SOCKET", help="Status socket of a shadow or a controller.")],
    each_block: Annotated[
        bool, typer.Option("--blocks", help="Of a shadow: when each block of its state was last proved equal.")
    ] = False,
) -> None:
    """Show the status of a running shadow or controller as JSON."""
    print_json(blocks(socket) if each_block else query(socket))


@app.command()
def export(
    sockets: Annotated[
        list[Path], typer.Argument(metavar="SOCKET", help="Status socket of a shadow, or of all shadows of a group.")
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="File to write; with --format dcp a folder, which must not exist.")
    ],
    into: Annotated[Format, typer.Option("--format", help="torch: a file for torch.load.")] = Format.torch,
) -> None:
    """Write the shadows' committed state, {"model", "optimizer", "step"}, as plain PyTorch has it. Training goes on.

    One shadow of several holds a shard; all of them together make one file.
    """
    if out.is_dir():
        raise CheckmateError(f"{out} exists: choose another name, or remove it first")
    if not out.parent.is_dir():
        raise CheckmateError(f"{out}: the folder {out.parent} does not exist; make it first")
    if into is Format.torch and len(sockets) == 1:
        step = export_state(sockets[0], out)
    else:
        step = _export_through_torch(sockets, out, into)
    print_json({"step": step, "path": str(out)})


def _export_through_torch(sockets: Sequence[Path], out: Path, into: Format) -> int:
    """The shadows write what they can write fast; to convert and to join it is this process's work."""
    from checkmate import parts  # noqa: PLC0415
    from checkmate.persist import interchange  # noqa: PLC0415

    try:
        with parts.exported(sockets, out.parent) as state:
            interchange.write(out, state, into)
    except OSError as error:
        raise CheckmateError(f"{out}: {error.strerror or error}") from None
    return int(state["step"])


@app.command()
def costmodel(
    params: Annotated[float, typer.Option(help="Model parameters.")] = 405e9,
    bytes_per_param: Annotated[float, typer.Option(help="Bytes of a checkpoint for each parameter.")] = 6,
    gpus: Annotated[int, typer.Option(help="GPUs of the job.")] = 16_384,
    hours: Annotated[float, typer.Option(help="Length of the run.")] = 54 * 24,
    failures: Annotated[float, typer.Option(help="Interruptions of the job in that time.")] = 419,
    storage_gb_per_s: Annotated[float, typer.Option(help="Write rate of all storage together, 10⁹ bytes/s.")] = 2000,
    iteration_s: Annotated[float, typer.Option(help="Seconds of an iteration.")] = 4.58,
    shards: Annotated[int, typer.Option(help="Data-parallel groups: tensor times pipeline ranks.")] = 128,
    shadow_share: Annotated[float, typer.Option(help="Cost of shadows and ports, fraction of the whole.")] = 0.003125,
    in_flight: Annotated[int, typer.Option(help="N: overlapping checkpoints.")] = 2,
    write_s: Annotated[float | None, typer.Option(help="T_w of an overlapping checkpoint; none: not shown.")] = None,
    slowdown: Annotated[float, typer.Option(help="q: factor that overlap may slow an iteration by.")] = 1.05,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Write plots (.png, .svg, .pdf).")] = None,
    as_json: Json = False,
) -> None:
    """What checkpoints cost a cluster, and what the papers say it costs. Defaults: the Llama 3 405B run."""
    from checkmate import costreport  # noqa: PLC0415
    from checkmate.costmodel import Cluster  # noqa: PLC0415

    wanted = {"--gpus": gpus, "--hours": hours, "--failures": failures, "--storage-gb-per-s": storage_gb_per_s}
    for option, value in wanted.items():
        if not value > 0:
            raise CheckmateError(f"{option} {value:g}: it must be more than 0")
    rate, storage = failures / (gpus * hours), 1e9 * storage_gb_per_s
    cluster = Cluster(params, bytes_per_param, gpus, hours, rate, storage, iteration_s, shards, shadow_share)
    overlap = costreport.Overlap(in_flight, write_s or 0.0, slowdown)
    overlap.interval(iteration_s)  # refuses what makes no sense, shown or not
    shown = None if write_s is None else overlap
    outcomes = costreport.published()
    if plot:
        costreport.draw(plot, cluster)
    if as_json:
        print_json(costreport.as_dict(cluster, shown, outcomes))
    else:
        Console().print(costreport.figures_table(cluster, shown), costreport.outcomes_table(outcomes), sep="\n\n")


def fail(error: CheckmateError) -> int:
    """Print the error for a person; returns the exit code."""
    Console(stderr=True, soft_wrap=True).print(f"checkmate: {error}", style="bold red", markup=False, highlight=False)
    return 2


def print_json(value: dict[str, Any]) -> None:
    """One object on one line."""
    sys.stdout.write(json.dumps(value) + "\n")


def main() -> None:
    """Run the command line; CheckmateError becomes a message and exit code 2."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        app(standalone_mode=True)
    except CheckmateError as error:
        sys.exit(fail(error))
