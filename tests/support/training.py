"""Whole training jobs in a lab, and what is left of them: reports of the ranks, notes of Checkmate, final states."""

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from checkmate import metrics
from checkmate.compare import differences, load_state
from checkmate.config import CheckmateError
from checkmate.demo import tagged_bytes
from checkmate.lab import Lab, LabConfig, stop
from checkmate.native import library
from checkmate.services import Services
from checkmate.status import export

SCRIPT = Path(__file__).parents[1] / "e2e/scripts/train_and_die.py"
RUN_S = 400.0
"""For a whole job, on a machine that is busy with other things."""
SOON_S = 60.0

needs_root = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: makes network namespaces, loads BPF programs"),
]


def soon(condition: Callable[[], Any], what: str, seconds: float = SOON_S) -> None:
    """Fail when it does not become true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.05)


@dataclass
class Run:
    """A job of the training script that is under way or over."""

    rack: "Rack"
    name: str
    steps: int
    process: "subprocess.Popen[bytes]"
    started: float = field(default_factory=time.monotonic)

    def file(self, suffix: str) -> Path:
        """A file of this job."""
        return self.rack.lab.directory / f"{self.name}.{suffix}"

    def wait(self, seconds: float = RUN_S) -> "Run":
        """Until it is over, without an error."""
        assert self.join(seconds) == 0, self.output()
        return self

    def join(self, seconds: float = RUN_S) -> int:
        """Exit status."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            stop(self.process)
            raise AssertionError(f"{self.name} is not over after {seconds:.0f} s:\n{self.output()}") from None

    def output(self) -> str:
        """The end of what the job and the services said, for messages."""
        names = [f"{self.name}.log", "shadow.log", "controller.log", "switch.log"]
        return "\n".join(f"== {name}\n{self.rack.lab.log_tail(name, 40)}" for name in names)

    def said(self) -> str:
        """All that the job's ranks and launcher wrote."""
        return self.file("log").read_text(errors="replace")

    def report(self) -> list[dict[str, Any]]:
        """Lines of the script's ranks so far."""
        path = self.file("report")
        return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []

    def step(self) -> int:
        """Newest step that rank 0 has finished."""
        return max((line["step"] for line in self.report() if line["rank"] == 0 and "digest" in line), default=0)

    def reaches(self, step: int) -> None:
        """Wait until rank 0 has finished this step; fail when the job ends before."""

        def is_there() -> bool:
            assert self.process.poll() in (None, 0), self.output()
            return self.step() >= step or self.process.poll() == 0

        soon(is_there, f"step {step} of {self.name}")
        assert self.step() >= step

    def digests(self, start: int) -> dict[tuple[int, int], str]:
        """By (rank, step), of the job's start number ``start``."""
        return {(n["rank"], n["step"]): n["digest"] for n in self.report() if n["start"] == start and "digest" in n}

    def notes(self, kind: str) -> list[dict[str, Any]]:
        """What Checkmate noted, see ``checkmate.metrics``."""
        return [note for note in metrics.read(self.file("metrics")) if note["kind"] == kind]

    def state(self, step: int | None = None) -> dict[str, Any]:
        """Rank 0's final state, or that after a step."""
        return load_state(self.file("pt") if step is None else self.file("states") / f"{step}.pt")

    def tagged_bytes(self) -> int:
        """Gradient payload that was tagged for the iterations that count."""
        return tagged_bytes(metrics.read(self.file("metrics")), self.steps)


class Rack:
    """A lab with switch, controller and shadow, in which jobs run one after another."""

    def __init__(self, lab: Lab, services: Services) -> None:
        self.lab = lab
        self.services = services

    def start(
        self,
        name: str,
        steps: int,
        *,
        die: Sequence[str] = (),
        attach: bool = True,
        options: Sequence[str] = (),
        channels: int = 2,
        max_restarts: int | None = None,
        topology_file: Path | None = None,
    ) -> Run:
        """Start the training script; ``die`` as its option, ``topology_file`` as of ``Services.run``."""
        base = self.lab.directory / name
        arguments = [f"--steps={steps}", f"--out={base}.pt", f"--report={base}.report", *options]
        if not attach:
            Path(f"{base}.states").mkdir()
            arguments.append(f"--states={base}.states")
        process = self.services.run(
            SCRIPT,
            [*arguments, "--die", *die],
            log=f"{name}.log",
            channels=channels,
            attach=attach,
            max_restarts=len(die) if max_restarts is None else max_restarts,
            env={metrics.VARIABLE: f"{base}.metrics"} if attach else {},
            topology_file=topology_file,
        )
        return Run(self, name, steps, process)

    def status(self) -> dict[str, Any]:
        """The shadow's; it must answer."""
        status = self.services.shadow_status()
        assert status is not None, self.lab.log_tail("shadow.log")
        return status

    def shadow_is(self, **wanted: Any) -> Callable[[], bool]:
        """A condition on the shadow's status."""

        def holds() -> bool:
            status = self.services.shadow_status()
            return status is not None and all(status[key] == value for key, value in wanted.items())

        return holds

    def exported(self, index: int = 0) -> dict[str, Any]:
        """The state that a shadow would serve now, and its step."""
        path = self.lab.directory / "exported.pt"
        step = export(self.services.shadow_sockets[index], path)
        return {**load_state(path), "step": step}

    def renew_shadow(self) -> None:
        """A shadow without any state, in its groups."""
        stop(self.services.process("shadow"))
        self.services.start_shadow()
        self.services.wait_for("the new shadow to be in its groups", self.shadow_is(registered=True))


def assert_equal(expected: Any, actual: Any) -> None:
    """Two states must be equal, bit for bit."""
    assert not (found := list(differences(expected, actual))), found[:10]


def parameter_bytes(state: dict[str, Any]) -> int:
    """Of the model: the payload of one iteration."""
    return sum(tensor.nbytes for tensor in {t.data_ptr(): t for t in state["model"].values()}.values())


@contextlib.contextmanager
def rack(ranks: int, mtu: int = 1500, shadow_options: Sequence[str] = (), **shape: Any) -> Iterator[Rack]:
    """A lab with running services; skips the test where something is not built. ``shape``: more of ``LabConfig``."""
    try:
        for name in ("switch.bpf.o", "counter.bpf.o", "libcheckmate_net.so", "libcheckmate_shadow.so"):
            library(name)
    except CheckmateError as error:
        pytest.skip(str(error))
    with Lab(LabConfig(ranks, mtu, job="test", **shape)) as lab:
        yield Rack(lab, Services(lab, shadow_options).start())
