"""``checkmate demo`` as a person starts it: what it finds, what it prints, and that nothing is left of it, ever."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.training import RUN_S, SCRIPT, needs_root, parameter_bytes, rack, soon

from checkmate import lab
from checkmate.compare import load_state

pytestmark = [*needs_root, pytest.mark.slow, pytest.mark.timeout(900)]

SMALL = ("--ranks", "2", "--params", "100000")
KEYS = {
    "iterations",
    "committed_steps",
    "repeated_iterations",
    "tagged_bytes",
    "expected_bytes",
    "copies",
    "drops",
    "gaps",
    "restore_seconds",
    "params_equal",
    "optimizer_equal",
}
"""What users may rely on; there may be more."""
GONE_S = 30.0


@dataclass
class Demo:
    """A demo in a process group of its own, as a shell starts it; its temporary files are in ``folder``."""

    folder: Path
    process: "subprocess.Popen[str]"

    @property
    def prefix(self) -> str:
        """Of all that it makes."""
        return f"ckm{self.process.pid}"

    def output(self) -> str:
        """What it printed so far."""
        return (self.folder / "output").read_text(errors="replace")

    def reaches(self, step: int) -> None:
        """Wait until its first run has finished this step on some rank."""
        metrics = lab.ROOT / self.prefix / "metrics"

        def is_there() -> bool:
            assert self.process.poll() is None, self.output()
            return metrics.exists() and f'"step": {step},' in metrics.read_text()

        soon(is_there, f"step {step} of the demo", RUN_S)

    def wait(self) -> int:
        """Its exit status."""
        return self.process.wait(RUN_S)


class Demos:
    """Starts demos; kills what is left of them at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._demos: list[Demo] = []

    def start(self, *options: str) -> Demo:
        folder = self._folder / str(len(self._demos))
        temporary = folder / "tmp"
        temporary.mkdir(parents=True)
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "checkmate", "demo", *SMALL, *options],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, "TMPDIR": str(temporary)},
                start_new_session=True,
            )
        demo = Demo(folder, process)
        self._demos.append(demo)
        return demo

    def close(self) -> None:
        for demo in self._demos:
            demo.process.kill()
            demo.process.wait(10)
        lab.clean_stale()


@pytest.fixture
def demos(tmp_path: Path) -> Iterator[Demos]:
    made = Demos(tmp_path)
    yield made
    made.close()


def leftovers(prefix: str) -> list[str]:
    """Namespaces, directories, mounts and processes that carry a lab's name."""
    found = [str(path) for path in Path("/run/netns").glob(f"{prefix}-*")]
    found += [str(lab.ROOT / prefix)] * (lab.ROOT / prefix).exists()
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    found += [line for line in mounts if f"/{prefix}/" in line or f"/{prefix}-" in line]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if f"/{prefix}/" in command or f"/{prefix}-" in command:
            found.append(f"process {process.name}: {command}")
    return found


def files_in(folder: Path) -> list[Path]:
    """Temporary files that a demo left."""
    return list((folder / "tmp").rglob("*"))


def test_a_demo_finds_all_equal_says_so_and_leaves_nothing(demos: Demos) -> None:
    demo = demos.start("--steps", "8", "--kill", "1@3", "--mtu", "9000", "--channels", "1", "--keep", "--json")
    assert demo.wait() == 0, demo.output()
    result = json.loads(demo.output().splitlines()[-1])
    assert result.keys() >= KEYS
    assert result["iterations"] == result["committed_steps"] == 8
    assert result["repeated_iterations"] == 1 and result["killed"].startswith("rank 1 ")
    assert result["tagged_bytes"] == result["expected_bytes"] > 0
    assert result["params_equal"] and result["optimizer_equal"] and result["shadow_equal"]
    assert (result["drops"], result["gaps"], result["differences"]) == (0, 0, [])
    assert result["copies"] > 0 and result["restore_seconds"] > 0
    kept = lab.ROOT / demo.prefix
    try:
        state = load_state(kept / "reference.pt")
        assert result["expected_bytes"] == 8 * parameter_bytes(state)
        assert leftovers(demo.prefix) == [str(kept)], "only what --keep names stays"
    finally:
        subprocess.run(["rm", "-r", str(kept)], check=True)
    assert not files_in(demo.folder)


def test_a_demo_with_several_ranks_on_each_host_finds_all_equal(demos: Demos) -> None:
    """The killed rank's neighbours on its host are restored like all others."""
    demo = demos.start("--ranks", "4", "--ranks-per-host", "2", "--steps", "6", "--kill", "3@3", "--json")
    assert demo.wait() == 0, demo.output()
    result = json.loads(demo.output().splitlines()[-1])
    assert result["committed_steps"] == 6 and result["killed"].startswith("rank 3 ")
    assert result["tagged_bytes"] == result["expected_bytes"] > 0
    assert result["params_equal"] and result["optimizer_equal"] and result["shadow_equal"]
    assert not leftovers(demo.prefix)


def test_after_sigkill_the_next_start_cleans_up_and_ctrl_c_leaves_nothing(demos: Demos) -> None:
    killed = demos.start("--steps", "1000", "--kill", "none")
    killed.reaches(2)
    killed.process.kill()
    killed.wait()
    soon(lambda: not [line for line in leftovers(killed.prefix) if line.startswith("process")], "its processes", GONE_S)
    assert leftovers(killed.prefix), "a killed process can't clean up: else this test shows nothing"

    stopped = demos.start("--steps", "1000", "--kill", "none")
    stopped.reaches(2)
    assert not leftovers(killed.prefix)
    assert f"removed what the killed run {killed.prefix} had left behind" in stopped.output().replace("\n", " ")
    os.killpg(stopped.process.pid, signal.SIGINT)
    time.sleep(0.2)
    os.killpg(stopped.process.pid, signal.SIGINT)  # an impatient person
    assert stopped.wait() == 130, stopped.output()
    assert not leftovers(stopped.prefix), stopped.output()
    assert not files_in(stopped.folder)


def test_a_demo_that_is_stopped_at_once_leaves_nothing(demos: Demos) -> None:
    """While its namespaces and services are being made."""
    demo = demos.start("--steps", "4")
    soon(lambda: list(Path("/run/netns").glob(f"{demo.prefix}-*")), "its namespaces", RUN_S)
    demo.process.terminate()
    assert demo.wait() == 130, demo.output()
    assert not leftovers(demo.prefix), demo.output()
    assert not files_in(demo.folder)


def test_a_script_that_fails_is_told_of_and_leaves_nothing(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text(SCRIPT.read_text().replace('death.at("reduced")', 'raise RuntimeError("a bug of the user")'))
    with rack(2) as built:
        prefix = built.lab.prefix
        job = built.services.run(broken, ["--steps=3"], log="broken.log", max_restarts=1)
        assert job.wait(RUN_S) == 2
        log = (built.lab.directory / "broken.log").read_text()
    assert "a bug of the user" in log
    assert "the script failed on 2 rank(s) and no restart is left" in log
    assert not leftovers(prefix)
