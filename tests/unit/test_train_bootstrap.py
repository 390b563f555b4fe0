"""An unmodified script under ``python -m checkmate.train.bootstrap``, two ranks on gloo and a fake shadow."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.train.fake_shadow import FakeShadow, order
from support.train.processes import SUPPORT, finish, start

from checkmate.plain import encode
from checkmate.protocol import StepRecord
from checkmate.train import bootstrap

SCRIPT = "plain_script.py"


def results(out: Path, world: int) -> list[dict[str, Any]]:
    return [torch.load(f"{out}.{rank}") for rank in range(world)]


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_killed_rank_costs_nothing(workers: str, tmp_path: Path) -> None:
    killed, restored = FakeShadow(2), FakeShadow(2)
    killed.seed_always = True
    environment = {"WORKERS": workers}
    finish(start(2, SCRIPT, [str(tmp_path / "whole")], tmp_path, environment))

    args = [SCRIPT, str(tmp_path / "killed"), "6", "1"]
    processes = start(2, "run_bootstrap.py", args, tmp_path, environment | killed.environment(tmp_path))
    for process in processes:
        process.wait(60)
    assert processes[1].returncode == -9 and processes[0].returncode != 0
    assert killed.wait(lambda: len(killed.complete_steps()) > 1)
    step = killed.complete_steps()[-1]
    assert 1 < step <= 6

    restored.hold(killed, step)
    args = [SCRIPT, str(tmp_path / "restored")]
    outputs = finish(
        start(2, "run_bootstrap.py", args, tmp_path, environment | restored.environment(tmp_path)), timeout=90
    )
    assert f"rank 1 restored step {step}" in outputs[1]
    for rank, (whole, again) in enumerate(
        zip(results(tmp_path / "whole", 2), results(tmp_path / "restored", 2), strict=True)
    ):
        assert again.pop("losses") == whole.pop("losses")[step:]
        assert encode(again) == encode(whole)  # every bit
        assert order(restored, rank)[:2] == ["L", f"S{step + 1}"]
    assert len(restored.of(StepRecord, 0)) == 10 - step
    for process in processes:
        process.communicate()
    for fake in (killed, restored):
        fake.close()


def run(tmp_path: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    process = start(1, "run_bootstrap.py", [SCRIPT, str(tmp_path / "out")], tmp_path, environment)[0]
    process.wait(60)
    return process


def test_state_that_cannot_be_restored_stops_the_script(tmp_path: Path) -> None:
    shadow = FakeShadow(1)
    shadow.committed = 3  # but its state never comes
    process = run(tmp_path, shadow.environment(tmp_path))
    output = process.communicate()[0]
    shadow.close()
    assert process.returncode != 0
    assert "the state of step 3 could not be restored" in output
    assert "Traceback" not in output
    assert not (tmp_path / "out.0").exists()


def test_what_cannot_be_attached_trains_on_with_a_warning(tmp_path: Path) -> None:
    shadow = FakeShadow(1)
    environment = shadow.environment(tmp_path) | {"CHECKMATE_JOB": ""}
    process = run(tmp_path, environment)
    output = process.communicate()[0]
    shadow.close()
    assert process.returncode == 0, output
    assert output.count("checkmate: not attached: CHECKMATE_JOB is not set") == 1
    assert len(results(tmp_path / "out", 1)[0]["losses"]) == 20


LOOK = """
import sys, torch, torch.distributed
from torch.utils.data import DataLoader
print([__name__, sys.argv, sys.path[0], DataLoader.__iter__.__module__, torch.distributed.init_process_group.__module__,
       torch.nn.parallel.DistributedDataParallel.__init__.__code__.co_filename.endswith("distributed.py")])
sys.exit(3)
"""


def test_without_a_shadow_everything_is_left_alone(tmp_path: Path) -> None:
    script = tmp_path / "look.py"
    script.write_text(LOOK)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CHECKMATE_")}
    command = [sys.executable, "-P", "-m", "checkmate.train.bootstrap", str(script), "--x", "1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3, done.stderr
    seen = ["__main__", [str(script), "--x", "1"], str(tmp_path), "torch.utils.data.dataloader"]
    assert done.stdout.strip() == str([*seen, "torch.distributed.distributed_c10d", True])


@pytest.mark.parametrize(
    ("asked", "used"),
    [
        (None, "checkmate"),
        ("gloo", "checkmate"),
        ("nccl", "nccl"),
        ("cpu:gloo,cuda:nccl", "cpu:checkmate,cuda:nccl"),
        ("cpu:gloo", "cpu:checkmate"),
        ("mpi", "mpi"),
    ],
)
def test_only_gloo_is_replaced(asked: str | None, used: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bootstrap.plugin_backend(asked) == used


def test_support_is_complete() -> None:
    assert (SUPPORT / SCRIPT).is_file() and "checkmate" not in (SUPPORT / SCRIPT).read_text().split('"""')[2]


def test_a_module_that_the_script_attached_is_left_alone(tmp_path: Path) -> None:
    shadow = FakeShadow(1)
    script = ["explicit_script.py", str(tmp_path / "out")]
    (output,) = finish(start(1, "run_bootstrap.py", script, tmp_path, shadow.environment(tmp_path)))
    steps = [record.step for record in shadow.of(StepRecord, 0)]
    shadow.close()
    assert steps == [1, 2, 3]
    assert "not attached" not in output
