"""What frameworks wrap around models and optimizers is seen through; whose loops need a callback is told so."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.train.fake_shadow import FakeShadow
from support.train.model import build
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR

import checkmate
from checkmate.config import CheckmateError
from checkmate.train import bootstrap, registry

pytest_plugins = ["support.train.world"]


class Wrapper(torch.optim.Optimizer):
    """As accelerate's: an optimizer by its class, without anything of its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def test_a_wrapped_optimizer_is_one_optimizer_with_its_schedulers(shadow: FakeShadow) -> None:
    registry.install()
    ddp, optimizer = build()
    wrapper = Wrapper(optimizer)
    scheduler = StepLR(wrapper, 2)
    assert wrapper not in registry.optimizers() and wrapper not in registry.all_optimizers()
    assert optimizer in registry.optimizers()
    assert registry.schedulers(optimizer) == [scheduler]
    checkmate.attach(ddp, optimizer).close()


def test_loaders_that_one_rank_reads_for_all_are_refused(shadow: FakeShadow, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dispatcher:
        """Stands for accelerate's."""

    monkeypatch.setitem(sys.modules, "accelerate.data_loader", SimpleNamespace(DataLoaderDispatcher=Dispatcher))
    ddp, optimizer = build()
    checkmate.attach(ddp, optimizer).close()
    loader = Dispatcher()
    with pytest.raises(CheckmateError, match="dispatch_batches=False"):
        checkmate.attach(*build())
    del loader


def test_lightning_is_asked_for_the_callback(group: None) -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="needs checkmate[lightning]")
    module = lightning.LightningModule()
    module.weight = nn.Parameter(torch.zeros(1))
    for of in (module, DistributedDataParallel(module)):
        assert "give its Trainer checkmate.train.lightning.CheckmateCallback()" in (bootstrap._own_loop(of) or "")


def test_transformers_is_asked_for_the_callback_where_there_is_a_trainer(tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers", reason="needs checkmate[accelerate]")
    trainer = transformers.Trainer(nn.Linear(1, 1), transformers.TrainingArguments(output_dir=tmp_path, use_cpu=True))
    assert "checkmate.train.huggingface.CheckmateCallback(trainer)" in (bootstrap._own_loop(trainer.model) or "")
    del trainer


def test_others_need_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "transformers.trainer", raising=False)
    assert bootstrap._own_loop(nn.Linear(1, 1)) is None
