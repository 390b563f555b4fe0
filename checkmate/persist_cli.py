"""``checkmate persist``: look into checkpoint files, check them, turn them into other formats, probe a device."""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from checkmate.config import CheckmateError

if TYPE_CHECKING:
    from checkmate.persist.engine import About, Checkpoint, Engine

app = typer.Typer(
    help="Checkpoint files: list, verify, export, import; tune.", no_args_is_help=True, rich_markup_mode=None
)

CheckpointPath = Annotated[Path, typer.Argument(metavar="PATH", help="Checkpoint file; no process may be writing it.")]
Step = Annotated[int | None, typer.Option(help="Step of the checkpoint; default: the newest that verifies.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


class Format(StrEnum):
    """Of exports and imports."""

    safetensors = "safetensors"
    dcp = "dcp"
    torch = "torch"


@app.command("list")
def list_command(path: CheckpointPath, as_json: Json = False) -> None:
    """Show the complete checkpoints of a file, newest first. Does not read their data: see verify."""
    from checkmate.persist.file import reading  # noqa: PLC0415

    with reading(path) as engine:
        found, about = engine.list(), engine.about()
    if as_json:
        _print_json({"path": str(path), "slots": about.slots, "checkpoints": [asdict(one) for one in found]})
        return
    table = Table("step", "bytes", "complete since", "committed", title=f"{path}: {about.slots} slots", box=None)
    for one in found:
        table.add_row(*_columns(one), "yes" if one.published else "no")
    Console().print(table)
    _print_warning(about)


@app.command()
def verify(path: CheckpointPath, as_json: Json = False) -> None:
    """Read all checkpoints of a file and compare all checksums. Exit code 1: there is damage; it is named."""
    from checkmate.persist.checkpointer import examine  # noqa: PLC0415
    from checkmate.persist.file import reading  # noqa: PLC0415

    with reading(path) as engine:
        findings, about = [examine(engine, one) for one in engine.list()], engine.about()
    if as_json:
        checkpoints = [asdict(finding) for finding in findings]
        _print_json({"path": str(path), "checkpoints": checkpoints, "warning": about.warning or None})
    else:
        table = Table("step", "bytes", "complete since", "found", box=None)
        for finding in findings:
            problem = Text(finding.problem, "red") if finding.problem else Text("ok", "green")
            table.add_row(*_columns(finding.checkpoint), problem)
        Console().print(table)
        _print_warning(about)
    if about.warning or any(finding.problem for finding in findings):
        raise typer.Exit(1)


@app.command("export")
def export_command(
    path: CheckpointPath,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="File to write; with --format dcp a folder.")],
    step: Step = None,
    into: Annotated[Format, typer.Option("--format", help="torch: a file for torch.load.")] = Format.safetensors,
) -> None:
    """Write a checkpoint's state in a format that others read. OUT must not exist yet."""
    from checkmate.persist import interchange  # noqa: PLC0415
    from checkmate.persist.file import reading  # noqa: PLC0415

    if out.exists():
        raise CheckmateError(f"{out} exists: choose another name, or remove it first")
    if not out.parent.is_dir():
        raise CheckmateError(f"{out}: the folder {out.parent} does not exist; make it first")
    with reading(path) as engine:
        found, state = _load(engine, path, step)
    try:
        interchange.write(out, state, into)
    except OSError as error:
        raise CheckmateError(f"{out}: {error.strerror or error}") from None
    _print_json({"step": found, "path": str(out)})


@app.command("import")
def import_command(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="What to read; with --format dcp a folder.")],
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Checkpoint file to add it to; made if missing.")],
    step: Annotated[int, typer.Option(min=0, help="Step that it is of.")],
    of: Annotated[Format, typer.Option("--format", help="torch: a file of torch.save.")] = Format.safetensors,
    trust: Annotated[bool, typer.Option("--trust", help="Needed for dcp: it may run code when it is read.")] = False,
) -> None:
    """Add a state from another format to a checkpoint file."""
    from checkmate.persist import interchange  # noqa: PLC0415
    from checkmate.persist.checkpointer import Checkpointer  # noqa: PLC0415

    if of is Format.dcp and not trust:
        raise CheckmateError("--format dcp holds pickles, which may run any code: give --trust if you trust its source")
    readers: dict[Format, Callable[[Path], Any]] = {
        Format.safetensors: interchange.read_safetensors,
        Format.dcp: interchange.read_dcp,
        Format.torch: interchange.read_torch,
    }
    try:
        state = readers[of](source)
    except CheckmateError:
        raise
    except Exception as error:  # of torch: many kinds
        raise CheckmateError(f"{source} cannot be read as {of}: {error}") from None
    with Checkpointer(path) as checkpointer:
        saved = checkpointer.save(state, step).result()
    _print_json({"step": saved.step, "bytes": saved.nbytes, "path": str(path)})


@app.command("tune")
def tune_command(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Checkpoint file, or where one will be.")],
    mib: Annotated[int, typer.Option(min=4, help="Size of each test write.")] = 64,
    as_json: Json = False,
) -> None:
    """Probe the device of PATH for some seconds: chunk size, writers, back end, checkpoints in flight. It is kept."""
    from checkmate.persist.tune import MIB, tune, tuning_path  # noqa: PLC0415

    if path.is_dir():
        raise CheckmateError(f"{path} is a directory: give the path of a checkpoint file")
    if not path.parent.is_dir():
        raise CheckmateError(f"{path}: the folder {path.parent} does not exist; make it first")
    tuning = tune(path, nbytes=mib * MIB)
    if as_json:
        _print_json(asdict(tuning))
        return
    Console().print(
        f"chunks of {tuning.chunk_bytes // MIB} MiB, {tuning.writers} writers, back end {tuning.backend.name.lower()}, "
        f"{tuning.in_flight} in flight: "
        f"{tuning.rate / 1e6:,.0f} MB/s; kept in {tuning_path(path)}",
        soft_wrap=True,
        highlight=False,
    )


def _load(engine: "Engine", path: Path, step: int | None) -> tuple[int, Any]:
    from checkmate.persist.file import read_state  # noqa: PLC0415

    held = engine.list()
    found = engine.newest() if step is None else next((one for one in held if one.step == step), None)
    if found is None:
        steps = sorted(one.step for one in held)
        which = "that verifies" if step is None else f"of --step {step}"
        raise CheckmateError(f"{path} holds no checkpoint {which}; it holds {steps or 'none'}")
    return found.step, read_state(engine, found, "cpu")


def _print_warning(about: "About") -> None:
    if about.warning:
        Console(stderr=True).print(Text(f"passed over: {about.warning}", "yellow"))


def _columns(checkpoint: "Checkpoint") -> tuple[str, str, str]:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(checkpoint.time_ns / 1e9))
    return str(checkpoint.step), f"{checkpoint.data_bytes:,}", since


def _print_json(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
