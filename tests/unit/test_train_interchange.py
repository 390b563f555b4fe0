"""Files of plain PyTorch begin followed runs, and what a followed run saves is a file of plain PyTorch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.train.direct import DirectShadow
from support.train.fake_shadow import FakeShadow
from support.train.model import Net, build, train
from support.trainer import differing
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

import checkmate
from checkmate.config import CheckmateError

pytest_plugins = ["support.train.world"]


def saved(path: Path, steps: int, **also: Any) -> Path:
    """What a plain script saves after some steps, of the wrapped module as many do."""
    ddp, optimizer = build()
    torch.manual_seed(1)
    train(ddp, optimizer, steps)
    torch.save({"model": ddp.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 1, **also}, path)
    return path


def read(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def in_order(optimizer_state: dict[str, Any]) -> dict[str, Any]:
    """The shadow's groups come in alphabetical order of their fields."""
    groups = [dict(sorted(group.items())) for group in optimizer_state["param_groups"]]
    return {"state": optimizer_state["state"], "param_groups": groups}


@pytest.mark.parametrize("resume_first", [True, False])
def test_a_plain_file_begins_a_followed_run(direct: DirectShadow, tmp_path: Path, resume_first: bool) -> None:
    path = saved(tmp_path / "plain.pt", 3, step=3)
    generator = torch.get_rng_state()

    plain, plain_optimizer = build()
    plain.load_state_dict(read(path)["model"])
    plain_optimizer.load_state_dict(read(path)["optimizer"])
    torch.set_rng_state(generator)
    train(plain, plain_optimizer, 3)

    ddp, optimizer = build()
    checkpoint = checkmate.attach(ddp, optimizer)
    if resume_first:
        assert checkpoint.resume() is None
    checkpoint.load_state_dict(read(path))
    if not resume_first:
        assert checkpoint.resume() is None
    torch.set_rng_state(generator)
    train(ddp, optimizer, 3)
    state = checkpoint.state_dict()
    checkpoint.close()

    assert (state["step"], direct.committed, direct.seeds, direct.unfollowed) == (6, 6, [3], [])
    assert differing(plain.module.state_dict(), state["model"]) == []
    assert differing(plain_optimizer.state_dict(), state["optimizer"]) == []
    assert direct.replica is not None
    held = direct.replica.state_dicts()
    assert differing(dict(state["model"]), dict(held["model"]) | dict(_buffers(state))) == []
    assert differing(in_order(state["optimizer"]), in_order(held["optimizer"])) == []


def _buffers(state: dict[str, Any]) -> dict[str, Any]:
    """The shadow has these from the boundary."""
    return {name: value for name, value in state["model"].items() if "running" in name or "num_batches" in name}


def test_a_restart_goes_on_from_the_shadow_and_not_from_the_file(
    direct: DirectShadow, tmp_path: Path, restarted: Callable[[], None]
) -> None:
    path = saved(tmp_path / "plain.pt", 3, step=3)
    ddp, optimizer = build()
    checkpoint = checkmate.attach(ddp, optimizer)
    checkpoint.load_state_dict(read(path))
    checkpoint.resume()
    train(ddp, optimizer, 2)
    expected = checkpoint.state_dict()
    checkpoint.close()

    restarted()
    ddp, optimizer = build()
    checkpoint = checkmate.attach(ddp, optimizer)
    checkpoint.load_state_dict(read(path))
    assert checkpoint.resume() == 5
    assert differing(expected, checkpoint.state_dict()) == []
    with pytest.raises(CheckmateError, match=r"after step 5: call it before the first forward"):
        checkpoint.load_state_dict(read(path))
    checkpoint.close()


def test_plain_pytorch_loads_what_a_followed_run_saves(shadow: FakeShadow, tmp_path: Path) -> None:
    ddp, optimizer = build()
    checkpoint = checkmate.attach(ddp, optimizer)
    checkpoint.resume()
    train(ddp, optimizer, 2)
    torch.save(checkpoint.state_dict(), tmp_path / "saved.pt")
    with pytest.raises(CheckmateError, match="before the first forward"):
        checkpoint.load_state_dict(read(tmp_path / "saved.pt"))
    checkpoint.close()
    net = Net()
    plain = AdamW(net.parameters())
    state = read(tmp_path / "saved.pt")
    net.load_state_dict(state["model"])
    plain.load_state_dict(state["optimizer"])
    assert state["step"] == 2
    assert differing(ddp.module.state_dict(), net.state_dict()) == []
    assert differing(optimizer.state_dict(), plain.state_dict()) == []


def test_master_copies_travel_with_the_file(
    direct: DirectShadow, tmp_path: Path, restarted: Callable[[], None]
) -> None:
    def start() -> tuple[Any, dict[str, Any]]:
        restarted()
        torch.manual_seed(0)
        ddp = DistributedDataParallel(Net().to(torch.bfloat16))
        masters = {name: param.detach().float() for name, param in ddp.module.named_parameters()}
        return checkmate.attach(ddp, AdamW(masters.values()), masters=masters), masters

    checkpoint, masters = start()
    for copy in masters.values():
        copy.add_(1e-5)  # bits that a parameter does not have
    path = tmp_path / "saved.pt"
    torch.save(checkpoint.state_dict(), path)
    expected = {name: copy.clone() for name, copy in masters.items()}
    checkpoint.close()

    checkpoint, masters = start()
    checkpoint.load_state_dict(read(path))
    assert differing(expected, masters) == []
    with pytest.raises(CheckmateError, match="no map 'masters'"):
        checkpoint.load_state_dict({key: value for key, value in read(path).items() if key != "masters"})
    checkpoint.close()


def _without(state: dict[str, Any], part: str, key: str) -> dict[str, Any]:
    del state[part][key]
    return state


def _with(state: dict[str, Any], part: str, **values: Any) -> dict[str, Any]:
    return {**state, part: {**state[part], **values}} if part else {**state, **values}


def _of_sgd(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "optimizer": SGD(Net().parameters(), lr=0.1).state_dict()}


def _smaller_moment(state: dict[str, Any]) -> dict[str, Any]:
    state["optimizer"]["state"][0]["exp_avg"] = torch.zeros(3)
    return state


WRONG: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "weights alone": (lambda state: state["model"], r"this one has .*there is no map 'model'"),
    "no map": (lambda state: [state], r"this one is a list"),
    "no optimizer": (lambda state: {"model": state["model"]}, r"this one has \['model'\]: there is no map 'optimizer'"),
    "missing": (lambda state: _without(state, "model", "module.first.bias"), r"model: first\.bias is missing"),
    "unknown": (lambda state: _with(state, "model", **{"module.x": torch.ones(1)}), r"model: x is not in the script's"),
    "shape": (
        lambda state: _with(state, "model", **{"module.first.bias": torch.ones(2)}),
        r"first\.bias is of shape \[2\], in the script's model \[8\]",
    ),
    "another optimizer": (_of_sgd, r"group 0 has no 'amsgrad': it is of another optimizer than AdamW"),
    "more groups": (
        lambda state: _with(state, "optimizer", param_groups=2 * state["optimizer"]["param_groups"]),
        r"2 parameter group\(s\), in the script 1",
    ),
    "moments": (_smaller_moment, r"exp_avg of shape \[3\] for a parameter of shape \[8, 4\]"),
    "not an optimizer's": (
        lambda state: _with(state, "", optimizer={"a": 1}),
        r"not the state_dict\(\) of an optimizer",
    ),
    "step": (lambda state: _with(state, "", step=-1), r"'step' is -1: it must be a whole number"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_named_and_nothing_is_changed(shadow: FakeShadow, tmp_path: Path, name: str) -> None:
    path = saved(tmp_path / "plain.pt", 1, step=1)
    ddp, optimizer = build()
    checkpoint = checkmate.attach(ddp, optimizer)
    change, text = WRONG[name]
    before = {key: value.clone() for key, value in ddp.module.state_dict().items()}
    with pytest.raises(CheckmateError, match=text):
        checkpoint.load_state_dict(change(read(path)))
    assert differing(before, dict(ddp.module.state_dict())) == []
    assert optimizer.state_dict()["state"] == {}
    checkpoint.load_state_dict(read(path))  # the right one, afterwards
    assert optimizer.state_dict()["state"][0]["step"] == 1
    checkpoint.close()
