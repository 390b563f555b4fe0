"""A restored run continues bit for bit; a state that cannot be restored is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.train.fake_shadow import FakeShadow
from support.train.model import Net, build, train, use
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

import checkmate
from checkmate.config import CheckmateError
from checkmate.protocol import StepRecord
from checkmate.tensors import is_same
from checkmate.train import checkpoint as checkpoint_module

pytest_plugins = ["support.train.world"]


class Average:
    """Something of the user's: changed after every step."""

    def __init__(self) -> None:
        self.value = torch.zeros(3)

    def update(self, model: nn.Module) -> None:
        self.value += torch.rand(3) + next(model.parameters()).detach().mean()

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: LambdaLR(o, lambda step: 1.0 / (1 + step)),
    "one cycle": lambda o: OneCycleLR(o, 0.1, total_steps=40),
    "sequential": lambda o: SequentialLR(o, [StepLR(o, 2), LambdaLR(o, lambda s: 0.5**s)], [4]),
    "each epoch": lambda o: StepLR(o, 1, gamma=0.5),
    "plateau": lambda o: ReduceLROnPlateau(o, patience=0),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: AdamW(p, lr=0.01, fused=True),
    "adam": lambda p: Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1),
    "sgd": lambda p: SGD(p, lr=0.01, momentum=0.9, nesterov=True),
}


def script(scheduler_name: str, optimizer_name: str, stop: int | None = None) -> tuple[list[float], dict[str, Any]]:
    """A whole training script; ``stop``: killed in the iteration after this step."""
    torch.manual_seed(5)
    ddp = DistributedDataParallel(Net(), bucket_cap_mb=0.0001)
    optimizer = OPTIMIZERS[optimizer_name](ddp.parameters())
    average = Average()
    checkpoint = checkmate.attach(ddp, optimizer, stateful={"average": average})
    start = checkpoint.resume() or 0
    scheduler = SCHEDULERS[scheduler_name](optimizer)
    loader = DataLoader(TensorDataset(torch.arange(80.0).reshape(20, 4)), 6, shuffle=True)
    losses = []
    for _epoch in range(3):
        for (x,) in loader:
            loss = ddp(x + torch.rand(()))
            optimizer.zero_grad()
            loss.backward()
            if stop is not None and start + len(losses) == stop:
                checkpoint.close(finished=False)
                return losses, {}
            optimizer.step()
            average.update(ddp)
            if scheduler_name not in ("each epoch", "plateau"):
                scheduler.step()
            losses.append(loss.item())
        if scheduler_name == "each epoch":
            scheduler.step()
        if scheduler_name == "plateau":
            scheduler.step(1.0)
    checkpoint.close()
    final = {**ddp.module.state_dict(), "average": average.value, "random": torch.rand(3)}
    for index, state in enumerate(optimizer.state.values()):
        final |= {f"{index}.{key}": value for key, value in state.items() if value is not None}
    return losses, final | {"lr": torch.tensor([group["lr"] for group in optimizer.param_groups])}


def run_until(
    stop: int,
    names: tuple[str, str],
    killed: FakeShadow,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    restarted: Callable[[], None],
) -> list[float]:
    """Losses of a script that is killed after a step whose state this shadow then holds."""
    use(killed, tmp_path, monkeypatch)
    send = checkpoint_module.Checkpoint._send_boundary

    def send_boundary(self: Any, at_forward: bool) -> None:
        if self._step == stop:
            self._seeder.request("test")
        send(self, at_forward)
        if self._step == stop:
            assert self._seeder.wait(10)  # the kill that follows would break it off

    restarted()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module.Checkpoint, "_send_boundary", send_boundary)
        losses, _ = script(*names, stop)
    assert killed.wait(lambda: stop in killed.complete_steps())
    return losses


@pytest.mark.parametrize(
    ("scheduler", "optimizer", "stop"),
    [
        ("lambda", "adamw", 2),
        ("one cycle", "adam", 4),
        ("sequential", "adamw", 6),
        ("each epoch", "sgd", 4),
        ("each epoch", "adamw", 5),
        ("plateau", "adam", 9),
        ("plateau", "adam", 8),
    ],
)
def test_a_restored_run_continues_bit_for_bit(
    scheduler: str,
    optimizer: str,
    stop: int,
    shadow: FakeShadow,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    restarted: Callable[[], None],
) -> None:
    losses, final = script(scheduler, optimizer)
    killed = FakeShadow(1)
    first = run_until(stop, (scheduler, optimizer), killed, tmp_path, monkeypatch, restarted)
    restored = FakeShadow(1)
    restored.hold(killed, stop)
    use(restored, tmp_path, monkeypatch)
    restarted()
    second, resumed = script(scheduler, optimizer)
    assert first + second == losses
    different = [name for name in final if not is_same(final[name], resumed[name])]
    assert not different
    assert restored.of(StepRecord)[0].step == stop + 1
    for fake in (killed, restored):
        fake.close()


def test_a_rank_that_was_not_there_takes_up_anothers_state_but_its_own_random_numbers(
    shadow: FakeShadow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarted: Callable[[], None]
) -> None:
    losses, final = script("lambda", "sgd")
    stop, rates = 4, []
    for rank, world in ((0, 1), (1, 2)):  # who left the state
        killed = FakeShadow(1)
        run_until(stop, ("lambda", "sgd"), killed, tmp_path, monkeypatch, restarted)
        restored = FakeShadow(1)
        restored.hold(killed, stop)
        restored.states[0][0].boundary.update(rank=rank, world=world)
        use(restored, tmp_path, monkeypatch)
        restarted()
        rest, resumed = script("lambda", "sgd")
        assert len(rest) == len(losses) - stop
        assert (rest == losses[stop:]) == (rank == 0), "dropout must differ between ranks"
        rates.append(resumed["lr"])
        for fake in (killed, restored):
            fake.close()
    assert torch.equal(rates[0], rates[1]) and torch.equal(rates[0], final["lr"])


def test_state_that_does_not_fit_is_refused(
    shadow: FakeShadow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ddp, optimizer = build()
    checkpoint = checkmate.attach(ddp, optimizer)
    checkpoint.resume()
    train(ddp, optimizer)
    checkpoint.close()
    held = FakeShadow(1)
    held.hold(shadow, 0)
    use(held, tmp_path, monkeypatch)
    other = DistributedDataParallel(nn.Linear(4, 1))
    checkpoint = checkmate.attach(other, AdamW(other.parameters()))
    with pytest.raises(CheckmateError, match=r"step 0 could not be restored on rank\(s\) \[0\]: .*doesn't fit"):
        checkpoint.resume()
    held.close()


def test_a_broken_restore_is_refused(shadow: FakeShadow, monkeypatch: pytest.MonkeyPatch) -> None:
    ddp, optimizer = build()
    shadow.committed = 7  # but it has no state of it: the connection just ends
    checkpoint = checkmate.attach(ddp, optimizer)
    with pytest.raises(CheckmateError, match="step 7 could not be restored"):
        checkpoint.resume()
    train(ddp, optimizer)  # nothing of ours is left
    assert shadow.of(StepRecord) == []
