"""``checkmate demo``: train, kill a rank, restore from the shadow, compare bit for bit with a run that never failed."""

import dataclasses
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from checkmate import config, examples, metrics, parts
from checkmate.compare import differences, load_state
from checkmate.config import CheckmateError
from checkmate.controlplane.preflight import check_machine, require
from checkmate.lab import Lab, LabConfig, clean_stale, sigterm_interrupts
from checkmate.p4.v1model import bmv2
from checkmate.progress import RunView
from checkmate.services import Services

_REFRESH_SECONDS = 0.1
_RUN_SECONDS = 1800.0
_COMMIT_SECONDS = 30.0
_SHOWN_DIFFERENCES = 10
_KILL = re.compile(r"([0-9]{1,9})@([0-9]{1,9})")


@dataclass(frozen=True)
class DemoOptions:
    """What the command line gives; ``kill`` is "none", "random" or "RANK@STEP"."""

    ranks: int = 4
    steps: int = 40
    params: int = 3_000_000
    mtu: int = 1500
    channels: int = 2
    ranks_per_host: int = 1
    shadows: int = 1
    switch: str = "ebpf"
    kill: str = "random"
    seed: int = 0
    keep: bool = False
    as_json: bool = False


@dataclass(frozen=True)
class Kill:
    """Rank ``rank`` dies ``delay`` seconds after the first gradients of step ``step`` are on the wire."""

    rank: int
    step: int
    delay: float


@dataclass
class Result:
    """What a demo found: the keys of ``--json``.

    ``tagged_bytes``, ``expected_bytes``: gradient payload of all committed iterations. ``copies``: packets that the
    switch copied to the shadow. ``drops``: packets lost between switch and shadow. ``repeated_iterations``: iterations
    that a rank had completed and that ran again; 1 if the kill only interrupted one. ``restore_seconds``: until the
    slowest rank held the shadow's state, without the start of its process; ``downtime_seconds``: from the kill to the
    next new checkpoint. Both are None without a kill.
    """

    iterations: int
    committed_steps: int = 0
    repeated_iterations: int = 0
    tagged_bytes: int = 0
    expected_bytes: int = 0
    copies: int = 0
    drops: int = 0
    gaps: int = 0
    killed: str | None = None
    restored_step: int | None = None
    restore_seconds: float | None = None
    downtime_seconds: float | None = None
    params_equal: bool = False
    optimizer_equal: bool = False
    shadow_equal: bool = False
    differences: list[str] = field(default_factory=list)

    def failures(self) -> list[str]:
        """What is not as it must be."""
        checks = {
            "parameters differ": self.params_equal,
            "optimizer state differs": self.optimizer_equal,
            "the shadow's state differs": self.shadow_equal,
            "not every iteration was committed": self.committed_steps == self.iterations,
            "tagged bytes are not the expected ones": self.tagged_bytes == self.expected_bytes,
            "more than one iteration was repeated": self.repeated_iterations <= 1,
        }
        return [text for text, is_right in checks.items() if not is_right]


def run_demo(options: DemoOptions, console: Console) -> bool:
    """Run the demo; True when the restored run equals the run that never failed. Cleans up on every path."""
    kill = choose_kill(options)
    if options.switch == "bmv2":
        bmv2.find_binary()
    require(check_machine(mounts=False))
    for prefix in clean_stale():
        console.print(f"removed what the killed run {prefix} had left behind")
    with sigterm_interrupts():
        try:
            lab_config = LabConfig(
                options.ranks,
                options.mtu,
                options.switch,
                "demo",
                ranks_per_host=options.ranks_per_host,
                shadows=options.shadows,
            )
            with Lab(lab_config, options.keep, partial(console.print, soft_wrap=True)) as lab:
                result = _Demo(options, kill, lab, console).run()
        except KeyboardInterrupt:
            console.print("interrupted: everything is removed")
            raise SystemExit(130) from None
    console.print(_table(result))
    for line in result.differences:
        console.print(f"  differs: {line}", style="red", markup=False)
    if options.keep:
        console.print(f"logs and final states are in {lab.directory}")
    failures = result.failures()
    console.print(
        f"[bold red]FAILED[/]: {'; '.join(failures)}"
        if failures
        else "[bold green]OK[/]: the run that lost a rank equals, bit for bit, the run that never failed"
        if result.killed
        else "[bold green]OK[/]: the shadow's state equals, bit for bit, the trainer's"
    )
    if options.as_json:
        sys.stdout.write(json.dumps(dataclasses.asdict(result)) + "\n")
    return not failures


def choose_kill(options: DemoOptions) -> Kill | None:
    """Which rank dies when; raises CheckmateError when the options can't be met."""
    if options.mtu not in config.MTU_CHOICES:
        raise CheckmateError(f"--mtu {options.mtu}: allowed are {' and '.join(map(str, config.MTU_CHOICES))}")
    chance = random.Random(options.seed)
    if options.kill == "none":
        return None
    if options.kill == "random":
        return Kill(chance.randrange(options.ranks), chance.randint(2, options.steps), chance.uniform(0.0, 0.2))
    match = _KILL.fullmatch(options.kill)
    if match is None:
        raise CheckmateError(f"--kill {options.kill}: use none, random or RANK@STEP, for example 2@17")
    rank, step = map(int, match.groups())
    if rank >= options.ranks or not 1 <= step <= options.steps:
        raise CheckmateError(
            f"--kill {options.kill}: here the rank is 0 to {options.ranks - 1} and the step 1 to {options.steps}"
        )
    return Kill(rank, step, 0.0)


class _Demo:
    def __init__(self, options: DemoOptions, kill: Kill | None, lab: Lab, console: Console) -> None:
        self.options = options
        self.kill = kill
        self.lab = lab
        self.console = console
        self.services = Services(lab)
        self.result = Result(iterations=options.steps)

    def run(self) -> Result:
        self.console.print("starting switch, shadow and controller …")
        self.services.start()
        victim = f"; rank {self.kill.rank} will be killed in step {self.kill.step}" if self.kill else ""
        self.console.print(f"run 1: every iteration is a checkpoint{victim}")
        killer = _Killer(self.kill, self.services) if self.kill else None
        self._train("checkmate", killer)
        self._collect(killer)
        self.console.print("run 2: the same training without failure and without checkpoints")
        self._train("reference", None, attach=False)
        self._compare()
        return self.result

    def _train(self, name: str, killer: "_Killer | None", attach: bool = True) -> None:
        options = self.options
        losses = self._file(f"{name}.loss")
        args = ["--steps", options.steps, "--params", options.params, "--seed", options.seed]
        args += ["--out", self._file(f"{name}.pt"), "--metrics", losses]
        job = self.services.run(
            examples.TRAIN,
            [str(arg) for arg in args],
            log=f"{name}.log",
            channels=options.channels,
            attach=attach,
            env={metrics.VARIABLE: str(self._file("metrics"))} if attach else {},
        )
        deadline = time.monotonic() + _RUN_SECONDS
        with RunView(self.console, options.steps, losses) as view:
            while job.poll() is None:
                status = self.services.shadow_status() if attach else None
                if killer:
                    killer.look(status)
                view.update(status)
                if time.monotonic() > deadline:
                    raise CheckmateError(f"the {name} run did not end within {_RUN_SECONDS:.0f} s")
                time.sleep(_REFRESH_SECONDS if killer is None or killer.is_done else killer.patience)
        if job.returncode != 0:
            raise CheckmateError(f"the {name} run failed:\n{self.lab.log_tail(f'{name}.log', 30)}")

    def _collect(self, killer: "_Killer | None") -> None:
        result = self.result
        shadows = [self.services.shadow_status(number) for number in range(self.options.shadows)]
        controller = self.services.controller_status()
        answers = [status for status in shadows if status is not None]
        if len(answers) < len(shadows) or controller is None:
            raise CheckmateError("a shadow or the controller does not answer any more")
        result.committed_steps = min(status["committed"] or 0 for status in answers)
        result.gaps = sum(status["receiver"]["gaps"] for status in answers)
        result.drops = sum(status["receiver"]["driver_drops"] for status in answers)
        result.copies = sum(count["packets"] for count in controller["counters"]["copies_out"].values())
        with parts.exported(self.services.shadow_sockets, self.lab.directory) as state:
            torch.save(state, self._file("shadow.pt"))
        notes = metrics.read(self._file("metrics"))
        restores = [note for note in notes if note["kind"] == "restore"]
        result.tagged_bytes = tagged_bytes(notes, self.options.steps)
        if killer is None:
            return
        result.killed = killer.killed
        result.downtime_seconds = killer.downtime
        if restores:
            result.restored_step = restores[0]["step"]
            result.restore_seconds = max(note["seconds"] for note in restores)
            result.repeated_iterations = max(1, killer.completed - restores[0]["step"])

    def _compare(self) -> None:
        reference = load_state(self._file("reference.pt"))
        trained = load_state(self._file("checkmate.pt"))
        shadow = load_state(self._file("shadow.pt"))
        params = {tensor.data_ptr(): tensor for tensor in reference["model"].values()}
        self.result.expected_bytes = self.options.steps * sum(tensor.nbytes for tensor in params.values())
        model, optimizer, on_shadow = (
            list(differences(reference[part] if part else reference, other, part or "shadow"))
            for part, other in (("model", trained["model"]), ("optimizer", trained["optimizer"]), (None, shadow))
        )
        self.result.params_equal = not model
        self.result.optimizer_equal = not optimizer
        self.result.shadow_equal = not on_shadow
        self.result.differences = [*model, *optimizer, *on_shadow][:_SHOWN_DIFFERENCES]

    def _file(self, name: str) -> Path:
        return self.lab.directory / name


def tagged_bytes(notes: list[dict[str, Any]], steps: int) -> int:
    """Payload bytes tagged for iterations that count: of each incarnation up to the step that the next one restored."""
    restored = {note["incarnation"]: note["step"] for note in notes if note["kind"] == "restore"}
    by_step = {(n["incarnation"], n["step"], n["rank"]): n["tagged_bytes"] for n in notes if n["kind"] == "step"}
    incarnations = sorted({incarnation for incarnation, _, _ in by_step} | restored.keys())
    ends = [*(restored.get(incarnation, 0) for incarnation in incarnations[1:]), steps]
    total = 0
    for incarnation, end in zip(incarnations, ends, strict=True):
        if end > restored.get(incarnation, 0):
            total += sum(value for (i, step, _), value in by_step.items() if (i, step) == (incarnation, end))
    return total


class _Killer:
    """Kills one rank's processes while its all-reduce is on the wire."""

    patience = 0.005
    """Seconds between two looks until the kill."""

    def __init__(self, kill: Kill, services: Services) -> None:
        self._kill = kill
        self._services = services
        self._bytes_before: int | None = None
        self._killed_at = 0.0
        self.completed = 0
        self.killed: str | None = None
        self.downtime: float | None = None

    @property
    def is_done(self) -> bool:
        """Whether the rank is dead already."""
        return self.killed is not None

    def look(self, status: dict[str, Any] | None) -> None:
        """Kill when its time has come; afterwards wait for the first checkpoint of the new incarnation."""
        if status is None or status["committed"] is None:
            return
        if self.is_done:
            if self.downtime is None and status["incarnation"] > 1 and status["committed"] > self._committed_then:
                self.downtime = time.monotonic() - self._killed_at
        elif status["committed"] >= self._kill.step - 1:
            received = status["receiver"]["payload_bytes"]
            if self._bytes_before is None:
                self._bytes_before = received
            elif received > self._bytes_before:
                time.sleep(self._kill.delay)
                self._strike(status["committed"])

    def _strike(self, committed: int) -> None:
        lab = self._services.lab
        topology = lab.topology
        netns = topology.host(topology.groups[0].ranks[self._kill.rank]).netns
        pids = subprocess.run(["ip", "netns", "pids", str(netns)], capture_output=True, text=True, check=True).stdout
        for pid in map(int, pids.split()):
            with suppress(ProcessLookupError, FileNotFoundError):
                if f"RANK={self._kill.rank}" in Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0"):
                    os.kill(pid, signal.SIGKILL)
        self._killed_at = time.monotonic()
        self._committed_then = committed
        notes = metrics.read(lab.directory / "metrics")
        self.completed = max((note["step"] for note in notes if note["kind"] == "step"), default=0)
        self.killed = f"rank {self._kill.rank} in step {self.completed + 1}"


def _table(result: Result) -> Table:
    def seconds(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f} s"

    def equal(value: bool) -> str:
        return "[green]equal, bit for bit[/]" if value else "[bold red]DIFFERENT[/]"

    table = Table(title="Checkmate demo", show_header=False)
    rows = {
        "iterations": str(result.iterations),
        "checkpoints committed": str(result.committed_steps),
        "killed": result.killed or "nobody",
        "restored step": "-" if result.restored_step is None else str(result.restored_step),
        "repeated iterations": str(result.repeated_iterations),
        "restore from the shadow": seconds(result.restore_seconds),
        "kill to next checkpoint": seconds(result.downtime_seconds),
        "gradient bytes tagged": f"{result.tagged_bytes:,}",
        "gradient bytes expected": f"{result.expected_bytes:,}",
        "packets copied": f"{result.copies:,}",
        "packets dropped": f"{result.drops:,}",
        "gaps": str(result.gaps),
        "parameters": equal(result.params_equal),
        "optimizer state": equal(result.optimizer_equal),
        "the shadow's state": equal(result.shadow_equal),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table
