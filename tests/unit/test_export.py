"""``checkmate export`` of a shadow that follows a run: every format, read back by plain PyTorch."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.shadow import JOB, TOKEN, FakeReceiver, Job
from support.trainer import Trainer, adamw, differing, small_model
from torch import nn
from typer.testing import CliRunner

from checkmate.cli import app
from checkmate.config import CheckmateError
from checkmate.persist.interchange import read_safetensors
from checkmate.shadow.daemon import Shadow, ShadowConfig
from checkmate.shadow.rx.receiver import RxConfig


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """A shadow that has committed step 2 of a run."""
    receiver = FakeReceiver()
    config = ShadowConfig(JOB, TOKEN, ("127.0.0.1", 0), tmp_path / "status", RxConfig([("a", None), ("b", None)], 1500))
    with Shadow(config, make_receiver=lambda _: receiver) as shadow:
        job = Job(shadow, receiver, Trainer(), world=1)
        job.begin()
        job.seed()
        job.step()
        job.step()
        yield job
        job.kill()


def export(tmp_path: Path, out: str, *options: str) -> dict[str, Any]:
    """What the command prints; nothing but its file may stay."""
    before = {path.name for path in tmp_path.iterdir()}
    result = CliRunner().invoke(app, ["export", str(tmp_path / "status"), str(tmp_path / out), *options])
    if result.exception is not None:
        assert {path.name for path in tmp_path.iterdir()} == before
        raise result.exception
    assert {path.name for path in tmp_path.iterdir()} == before | {out}
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A plain model and optimizer with other values, as a new script makes them."""
    model = small_model(9)
    return model, adamw(model)


def same(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """They hold what the trainer holds, to the bit; hyperparameters are of the boundary, which this job leaves out."""
    assert differing(job.trainer.net.state_dict(), model.state_dict()) == []
    assert differing(job.trainer.optimizer.state_dict()["state"], optimizer.state_dict()["state"]) == []
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


@pytest.mark.parametrize("form", ["torch", "safetensors"])
def test_plain_pytorch_loads_what_is_exported(job: Job, tmp_path: Path, form: str) -> None:
    out = tmp_path / "state"
    assert export(tmp_path, "state", "--format", form) == {"step": 2, "path": str(out)}
    state = torch.load(out, weights_only=True) if form == "torch" else read_safetensors(out)
    model, optimizer = fresh()
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    same(job, model, optimizer)
    export(tmp_path, "state", "--format", form)  # a file is replaced


def test_the_default_is_torch_and_others_read_our_safetensors(job: Job, tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch", reason="needs safetensors")
    export(tmp_path, "state")
    export(tmp_path, "state.safetensors", "--format", "safetensors")
    model = torch.load(tmp_path / "state", weights_only=True)["model"]
    named = library.load_file(tmp_path / "state.safetensors")
    assert differing(model, {name: named[f"model.{name}"] for name in model}) == []


def test_distributed_checkpoint_loads_what_is_exported(job: Job, tmp_path: Path) -> None:
    export(tmp_path, "folder", "--format", "dcp")
    model, optimizer = fresh()
    for param in model.parameters():
        param.grad = torch.zeros_like(param) if param.requires_grad else None
    optimizer.step()  # dcp.load fills what is there
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 0}
    dcp.load(state, checkpoint_id=tmp_path / "folder", no_dist=True)
    assert state["step"] == 2
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    same(job, model, optimizer)
    with pytest.raises(CheckmateError, match="folder exists"):
        export(tmp_path, "folder", "--format", "dcp")


@pytest.mark.parametrize("form", ["torch", "safetensors", "dcp"])
def test_a_folder_that_is_missing_and_a_shadow_that_is(tmp_path: Path, form: str) -> None:
    with pytest.raises(CheckmateError, match=r"the folder .* does not exist"):
        export(tmp_path, "no/where", "--format", form)
    with pytest.raises(CheckmateError, match="no status from"):
        export(tmp_path, "state", "--format", form)
