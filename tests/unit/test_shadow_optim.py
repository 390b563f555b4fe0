"""The shadow's replica of an optimizer is the trainer's, bit for bit, or refuses with a name."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.trainer import Trainer, adamw, differing, over_the_wire, small_model, two_groups
from torch import nn

from checkmate.protocol import Layout, Seed, StepRecord
from checkmate.shadow.optim.replica import Refusal, Replica
from checkmate.tensors import named_state, unpack_state


def adam(**options: Any) -> Any:
    return lambda net: torch.optim.Adam(two_groups(net), **options)


OPTIMIZERS: dict[str, Any] = {
    "adamw": adamw,
    "adamw fused": lambda net: torch.optim.AdamW(two_groups(net), lr=0.01, fused=True),
    "adamw foreach": lambda net: torch.optim.AdamW(two_groups(net), lr=0.01, foreach=True),
    "adamw for-loop": lambda net: torch.optim.AdamW(two_groups(net), lr=0.01, foreach=False),
    "adamw maximize amsgrad": lambda net: torch.optim.AdamW(two_groups(net), maximize=True, amsgrad=True),
    "adam": adam(betas=(0.8, 0.97)),
    "adam fused": adam(fused=True, amsgrad=True),
    "adam tensor lr": lambda net: torch.optim.Adam(net.parameters(), lr=torch.tensor(0.01)),
    "sgd": lambda net: torch.optim.SGD(two_groups(net)),
    "sgd nesterov": lambda net: torch.optim.SGD(two_groups(net), momentum=0.9, nesterov=True),
    "sgd fused": lambda net: torch.optim.SGD(two_groups(net), momentum=0.9, dampening=0.1, fused=True),
    "sgd foreach": lambda net: torch.optim.SGD(net.parameters(), momentum=0.9, weight_decay=0.1, foreach=True),
}


def follow(trainer: Trainer, replica: Replica, skip: bool = False) -> None:
    step = trainer.train(skip)
    replica.apply(step.record, step.layout, {b: memoryview(data) for b, data in step.buckets.items()})


def gaps(trainer: Trainer, replica: Replica) -> list[str]:
    """Differences after a step; the schedule sets the trainer's lr for the step to come already."""
    ours, theirs = replica.state_dicts(), trainer.snapshot()
    assert ours.pop("step") == trainer.step
    for state in (ours, theirs):
        for group in state["optimizer"]["param_groups"]:
            del group["lr"]
    return differing({"model": dict(theirs["model"]), "optimizer": theirs["optimizer"]}, ours)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_follows_to_the_bit(name: str) -> None:
    trainer = Trainer(OPTIMIZERS[name])
    replica = Replica(*trainer.seed())
    for index in range(8):
        follow(trainer, replica, skip=index == 4)
        assert gaps(trainer, replica) == []
        assert replica.differences(*trainer.seed()) == []


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def large(dtype: torch.dtype) -> Callable[[], nn.Module]:
    """So many weights that torch cuts their step among threads."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(75, 1403), nn.Tanh(), nn.Linear(1403, 3)).to(dtype)

    return make


@pytest.mark.parametrize("name", ["adamw fused", "adamw for-loop", "sgd nesterov"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_follows_a_trainer_of_other_threads(name: str, dtype: torch.dtype, set_threads: Callable[[int], None]) -> None:
    trainer = Trainer(OPTIMIZERS[name], large(dtype))
    replica = Replica(*trainer.seed())
    for _ in range(4):
        set_threads(3)
        step = trainer.train()
        set_threads(1)
        replica.apply(step.record, step.layout, {b: memoryview(data) for b, data in step.buckets.items()})
    assert replica.differences(*trainer.seed()) == []
    assert torch.get_num_threads() == 1


def test_threads_show_in_the_bits_of_16_bit_parameters(set_threads: Callable[[int], None]) -> None:
    trainers = [Trainer(OPTIMIZERS["sgd nesterov"], large(torch.bfloat16)) for _ in range(2)]
    for threads, trainer in zip((1, 3), trainers, strict=True):
        set_threads(threads)
        for _ in range(4):
            trainer.train()
    assert Replica(*trainers[0].seed()).differences(*trainers[1].seed())


@pytest.mark.parametrize("name", ["adamw", "adamw fused", "sgd nesterov"])
def test_seed_in_mid_training(name: str) -> None:
    trainer = Trainer(OPTIMIZERS[name])
    for _ in range(3):
        trainer.train()
    replica = Replica(*trainer.seed())
    for _ in range(3):
        follow(trainer, replica)
    assert gaps(trainer, replica) == []


def test_restore_into_a_trainer_goes_on_identically() -> None:
    trainer = Trainer(OPTIMIZERS["adamw fused"])
    replica = Replica(*trainer.seed())
    for _ in range(3):
        follow(trainer, replica)
    description, manifest, tensors = replica.pack()
    sent = over_the_wire(Seed(3, description, manifest))
    other = Trainer(OPTIMIZERS["adamw fused"], model=lambda: small_model(9))
    unpack_state(*named_state(other.net), other.optimizer, sent.optimizer, sent.manifest, tensors)
    other.step = 3
    other.scheduler.load_state_dict(trainer.scheduler.state_dict())
    for mine, theirs in zip(other.optimizer.param_groups, trainer.optimizer.param_groups, strict=True):
        mine["lr"] = theirs["lr"]
    trainer.train()
    other.train()
    assert differing(trainer.snapshot(), other.snapshot()) == []


def test_t1_step_counts_real_steps_only() -> None:
    """A seed with zeroed state, as some trainers materialise it, is stepped like one without."""
    trainer, plain = Trainer(), Trainer()
    for param in trainer.net.parameters():
        if param.requires_grad:
            trainer.optimizer.state[param] = {
                "step": torch.tensor(0.0), "exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param),
            }  # fmt: skip
    replica = Replica(*trainer.seed())
    step = plain.train()
    replica.apply(step.record, step.layout, {b: memoryview(data) for b, data in step.buckets.items()})
    assert replica.step == 1
    assert gaps(plain, replica) == []
    assert {float(s["step"]) for s in replica.state_dicts()["optimizer"]["state"].values()} == {1.0}


def test_skipped_step_changes_nothing_but_the_step() -> None:
    trainer = Trainer()
    replica = Replica(*trainer.seed())
    follow(trainer, replica)
    before = [t.clone() for t in replica.pack()[2]]
    step = trainer.train(skip=True)
    replica.apply(step.record, step.layout, {})
    assert replica.step == 2
    assert differing(before, [t.detach() for t in replica.pack()[2]]) == []


def test_gradients_are_used_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer()
    replica = Replica(*trainer.seed())
    step = trainer.train()
    homes = [torch.frombuffer(data, dtype=torch.uint8).data_ptr() for data in step.buckets.values()]
    ends = [home + len(data) for home, data in zip(homes, step.buckets.values(), strict=True)]
    seen: list[bool] = []

    def spy(optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    at = param.grad.data_ptr()
                    seen.append(any(home <= at < end for home, end in zip(homes, ends, strict=True)))

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    replica.apply(step.record, step.layout, {b: memoryview(data) for b, data in step.buckets.items()})
    assert len(seen) == 5 and all(seen)


def test_lists_and_shared_tensors_survive() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.b.weight = self.a.weight

    net = Tied()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    trainer = Trainer.__new__(Trainer)
    trainer.net, trainer.optimizer, trainer.step = net, optimizer, 0
    seed, tensors = trainer.seed()
    replica = Replica(seed, tensors)
    model = replica.state_dicts()["model"]
    assert model.keys() == net.state_dict().keys()
    assert model["a.weight"].data_ptr() == model["b.weight"].data_ptr()
    assert replica.pack()[1] == seed.manifest


@pytest.mark.parametrize(
    ("make", "pattern"),
    [
        (lambda net: torch.optim.Adagrad(net.parameters()), "optimizer Adagrad can't be followed"),
        (lambda net: type("AdamW", (torch.optim.AdamW,), {})(net.parameters()), r"test_shadow_optim\.AdamW can't be"),
        (lambda net: torch.optim.Adam(net.parameters(), differentiable=True), "differentiable"),
    ],
)
def test_other_optimizers_are_refused_by_name(make: Any, pattern: str) -> None:
    with pytest.raises(Refusal, match=pattern):
        Replica(*Trainer(make).seed())


def test_capturable_is_stepped_without_and_served_with() -> None:
    trainer = Trainer(lambda net: torch.optim.Adam(net.parameters(), lr=0.01))
    trainer.optimizer.param_groups[0]["capturable"] = True
    replica = Replica(*trainer.seed())
    trainer.optimizer.param_groups[0]["capturable"] = False
    step = trainer.train()
    step.record.groups[0]["capturable"] = True
    replica.apply(step.record, step.layout, {b: memoryview(data) for b, data in step.buckets.items()})
    assert replica.pack()[0]["groups"][0]["capturable"] is True
    assert replica.state_dicts()["optimizer"]["param_groups"][0]["capturable"] is True


def _rename(bucket: dict[str, Any]) -> None:
    bucket["params"][0][0] = "ghost"


def _shrink(bucket: dict[str, Any]) -> None:
    bucket["params"][0][2] -= 1


def _retype(bucket: dict[str, Any]) -> None:
    bucket["dtype"] = "int32"


def _nonsense(bucket: dict[str, Any]) -> None:
    bucket["dtype"] = "float33"


def _overlap(bucket: dict[str, Any]) -> None:
    bucket["params"][1][1] -= 1


def _beyond(bucket: dict[str, Any]) -> None:
    bucket["bytes"] -= 4


def _double(bucket: dict[str, Any]) -> None:
    bucket["params"].append(list(bucket["params"][0]))


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        (_rename, "'ghost' in bucket 0 is not a parameter of the seed"),
        (_shrink, "'5.bias' in bucket 0 has 6 elements, in the seed 7"),
        (_retype, "'5.bias' in bucket 0 has int32 gradients, but is torch.float32"),
        (_nonsense, "float33"),
        (_overlap, "'5.weight' in bucket 0 at elements 6 to 237 overlaps"),
        (_beyond, "'5.weight' in bucket 0 at elements 7 to 238 overlaps another or the bucket's end"),
        (_double, "'5.bias' is in it twice"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_and_nothing_changes(change: Any, pattern: str) -> None:
    trainer = Trainer()
    replica = Replica(*trainer.seed())
    before = [t.clone() for t in replica.pack()[2]]
    step = trainer.train()
    change(step.layout.buckets[0])
    with pytest.raises(Refusal, match=pattern):
        replica.apply(step.record, step.layout, {b: memoryview(data) for b, data in step.buckets.items()})
    assert replica.step == 0
    assert differing(before, [t.detach() for t in replica.pack()[2]]) == []


def test_another_number_of_groups_is_refused() -> None:
    trainer = Trainer()
    replica = Replica(*trainer.seed())
    with pytest.raises(Refusal, match="3 parameter groups, the seed 2"):
        replica.check(StepRecord(1, "x", [{}, {}, {}]), Layout("x", []))


def test_differences_are_named() -> None:
    trainer = Trainer()
    replica = Replica(*trainer.seed())
    follow(trainer, replica)
    seed, tensors = trainer.seed()
    index = next(i for i, line in enumerate(seed.manifest) if line[:2] == ["3.weight", "state.exp_avg"])
    tensors[index].view(torch.int32)[0, 0] ^= 1
    assert replica.differences(seed, tensors) == ["state.exp_avg 3.weight"]
