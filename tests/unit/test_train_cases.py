"""What real scripts do beside forward, backward and step: followed to the bit, or noticed and healed by a seed."""

import contextlib
import copy
import io
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from support.train.direct import DirectClient, DirectShadow
from support.train.model import Net, build
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

import checkmate
from checkmate import plain
from checkmate.config import CheckmateError
from checkmate.protocol import Seed
from checkmate.tensors import MASTER, is_same, named_state, pack_state
from checkmate.train import attach as attach_module
from checkmate.train.checkpoint import Checkpoint
from checkmate.train.compression import Compression

pytest_plugins = ["support.train.world"]


class Script:
    """A script in steps: forward (which hands over the step before), backward, then what the test does."""

    def __init__(
        self, shadow: DirectShadow, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, **options: Any
    ) -> None:
        self.shadow, self.ddp, self.optimizer = shadow, ddp, optimizer
        self.checkpoint: Checkpoint = checkmate.attach(ddp, optimizer, **options)

    def start(self) -> "Script":
        assert self.checkpoint.resume() is None
        return self

    def backward(self, factor: float = 1.0) -> None:
        loss = self.ddp(torch.randn(6, 4)) * factor
        self.optimizer.zero_grad()
        loss.backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()

    def hand_over(self) -> list[str]:
        """As the next forward does; returns what differs between the committed state and the trainer's."""
        self.checkpoint.before_forward()
        assert self.checkpoint._seeder.wait(30)
        description, manifest, tensors = pack_state(*named_state(self.ddp.module), self.optimizer)
        step = self.shadow.committed
        assert self.shadow.replica is not None and step == self.checkpoint._step, self.shadow.staging.damage
        return self.shadow.replica.differences(Seed(step, description, manifest), tensors)


@pytest.fixture
def script(direct: DirectShadow) -> Iterator[Callable[..., Script]]:
    """Makes a script; ended at the end."""
    made: list[Script] = []

    def make(ddp: DistributedDataParallel | None = None, optimizer: torch.optim.Optimizer | None = None) -> Script:
        if ddp is None:
            ddp, optimizer = build()
        assert optimizer is not None
        made.append(Script(direct, ddp, optimizer).start())
        return made[-1]

    yield make
    for item in made:
        item.checkpoint.close()


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("kind", [AdamW, SGD])
def test_a_closure_that_computes_the_gradients_is_followed(
    script: Callable[..., Script], kind: type[torch.optim.Optimizer], by_name: bool
) -> None:
    ddp, _ = build()
    item = script(ddp, kind(ddp.parameters(), lr=0.01))  # type: ignore[call-arg]
    calls = []

    def closure() -> float:
        item.backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
        calls.append(len(calls))
        return 0.5 + len(calls)

    for step in range(1, 4):
        loss: Any = item.optimizer.step(closure=closure) if by_name else item.optimizer.step(closure)
        assert loss == 0.5 + step
        assert item.hand_over() == []
    assert (calls, item.shadow.seeds, item.shadow.unfollowed) == ([0, 1, 2], [0], [])


# Steps that a GradScaler skips


@pytest.mark.parametrize("fused", [False, True])
def test_t8_a_skipped_step_is_skipped_by_shadow_and_counts(script: Callable[..., Script], fused: bool) -> None:
    ddp, _ = build()
    optimizer = AdamW(ddp.parameters(), lr=0.01, fused=fused)
    item = script(ddp, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    scheduler = LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    applied, rates = 0, []
    for index in range(6):
        loss = ddp(torch.randn(6, 4))
        optimizer.zero_grad()
        (scaler.scale(loss) * (float("inf") if index in (0, 3) else 1.0)).backward()
        rates.append(optimizer.param_groups[0]["lr"])
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= before:  # as scripts find out that the step was made
            scheduler.step()
        applied += index not in (0, 3)
        assert item.hand_over() == []
        assert item.checkpoint.committed == index + 1
    assert [record.skipped for record in item.shadow.records] == [index in (0, 3) for index in range(6)]
    assert {float(state["step"]) for state in optimizer.state.values()} == {float(applied)} == {scheduler.last_epoch}
    assert rates == pytest.approx([0.01 / (1 + made) for made in (0, 0, 1, 2, 2, 3)])
    assert [record.groups[0]["lr"] for record in item.shadow.records] == rates
    assert item.shadow.seeds == [0]
    stored = item.shadow.boundaries[0]["forward"]["scalers"]
    assert stored[-1]["scale"] == scaler.get_scale()


def test_a_loss_scale_that_a_fused_sgd_spoils_is_noticed(script: Callable[..., Script]) -> None:
    """torch makes its momentum of uninitialised memory: nobody can follow that."""
    ddp, _ = build()
    item = script(ddp, SGD(ddp.parameters(), lr=0.01, momentum=0.9, fused=True))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(ddp(torch.randn(6, 4))).mul(float("inf")).backward()
    scaler.step(item.optimizer)
    assert "uninitialised memory" in (item.shadow.records[0].unfollowed or "")
    assert item.hand_over() == []
    assert item.shadow.seeds == [0, 1]


# Backward passes


def test_t9_accumulation_is_one_all_reduce_and_one_step(script: Callable[..., Script]) -> None:
    item = script()
    for step in range(1, 3):
        item.optimizer.zero_grad()
        with item.ddp.no_sync():
            for _ in range(3):
                item.ddp(torch.randn(6, 4)).backward()
        item.ddp(torch.randn(6, 4)).backward()
        item.optimizer.step()
        assert item.hand_over() == []
        assert len(item.shadow.records) == step


def test_gradients_reduced_twice_are_those_of_the_second_time(script: Callable[..., Script]) -> None:
    item = script()
    for step in range(1, 4):
        item.backward()
        item.ddp(torch.randn(6, 4)).backward()
        item.optimizer.step()
        assert item.hand_over() == []
        assert item.checkpoint.committed == step
        assert item.shadow.committed == 2 * step
    assert [record.skipped for record in item.shadow.records] == [True, False] * 3
    assert item.shadow.seeds == [0]


def test_a_backward_pass_that_breaks_off_is_left_out(script: Callable[..., Script]) -> None:
    item = script()
    item.step()
    loss = item.ddp(torch.randn(6, 4))
    handle = item.ddp.module.first.weight.register_hook(lambda _grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    handle.remove()
    assert item.hand_over() == []


def test_gradients_that_were_not_used_do_not_count(script: Callable[..., Script]) -> None:
    item = script()
    item.step()
    item.backward()  # a script that finds this loss too large, say
    item.step()
    assert item.hand_over() == []
    assert item.shadow.seeds == [0]
    assert item.checkpoint.committed == 2


# Changes that no gradient tells of


def clamp(item: Script) -> None:
    with torch.no_grad():
        for param in item.ddp.parameters():
            param.clamp_(-0.01, 0.01)


def clamp_data(item: Script) -> None:
    for param in item.ddp.parameters():
        param.data.clamp_(-0.01, 0.01)


def load(item: Script) -> None:
    stored = copy.deepcopy(item.optimizer.state_dict())
    for state in stored["state"].values():
        state["exp_avg"].mul_(2)
    item.optimizer.load_state_dict(stored)


def t5_moments_anew(item: Script) -> None:
    for state in item.optimizer.state.values():
        state["exp_avg"] = torch.full_like(state["exp_avg"], 0.5)


def reset(item: Script) -> None:
    item.optimizer.state.clear()


@pytest.mark.parametrize("late", [False, True], ids=["after the step", "before the step"])
@pytest.mark.parametrize("change", [clamp, clamp_data, load, t5_moments_anew, reset])
def test_what_a_script_changes_by_itself_is_in_the_committed_state(
    script: Callable[..., Script], change: Callable[[Script], None], late: bool
) -> None:
    item = script()
    item.step()
    assert item.hand_over() == []
    if late:
        item.backward()
        change(item)
        item.optimizer.step()
    else:
        item.step()
        change(item)
    assert item.hand_over() == []
    assert item.shadow.unfollowed != []
    assert item.shadow.seeds[0] == 0 and len(item.shadow.seeds) > 1
    before = len(item.shadow.seeds)
    for _ in range(3):
        item.step()
        assert item.hand_over() == []
    assert len(item.shadow.seeds) <= before + 1  # the shadow's own request may come after the seed


def test_what_is_changed_before_the_first_forward_is_in_the_initial_state(script: Callable[..., Script]) -> None:
    item = script()
    nn.init.zeros_(item.ddp.module.second.weight)  # type: ignore[union-attr, arg-type]
    item.step()
    assert (item.shadow.records[0].unfollowed, item.shadow.seeds) == (None, [0])
    assert item.hand_over() == []


class Teaching(nn.Module):
    """A student and a frozen teacher that follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(4, 4), nn.Linear(4, 4)
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.student(x) - self.teacher(x)).square().mean()

    def follow(self, through_data: bool) -> None:
        for mine, theirs in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            (mine.data if through_data else mine).mul_(0.9).add_(theirs.data, alpha=0.1)


@pytest.mark.parametrize("through_data", [False, True])
def test_a_frozen_teacher_that_follows_is_never_committed_stale(
    script: Callable[..., Script], through_data: bool
) -> None:
    ddp = DistributedDataParallel(Teaching())
    item = script(ddp, AdamW(ddp.parameters(), lr=0.01))
    for _ in range(3):
        item.step()
        ddp.module.follow(through_data)
        assert item.hand_over() == []


def test_what_a_hook_of_the_users_changes_after_the_step_is_noticed(direct: DirectShadow) -> None:
    ddp, optimizer = build()
    optimizer.register_step_post_hook(lambda *_: clamp_(ddp.module.first.weight))
    with contextlib.closing(Script(direct, ddp, optimizer).checkpoint) as checkpoint:
        assert checkpoint.resume() is None
        ddp(torch.randn(6, 4)).backward()
        optimizer.step()
        checkpoint.before_forward()
    assert "first.weight was changed" in str(direct.unfollowed)


def clamp_(param: Any) -> None:
    param.detach().clamp_(-0.01, 0.01)


def test_an_evaluation_of_averaged_weights_is_not_what_training_goes_on_from(
    direct: DirectShadow, restarted: Callable[[], None]
) -> None:
    def evaluate(ddp: DistributedDataParallel) -> None:
        weight: Any = ddp.module.first.weight
        own = weight.detach().clone()
        with torch.no_grad():
            weight.mul_(0.5)
            ddp(torch.randn(6, 4))
            weight.copy_(own)

    item = Script(direct, *build()).start()
    item.step()
    evaluate(item.ddp)
    assert direct.committed == 0
    assert item.hand_over() == []
    drawn = torch.randn(3)
    item.checkpoint.close()
    restarted()
    item = Script(direct, *build())
    assert item.checkpoint.resume() == 1
    evaluate(item.ddp)  # a script that evaluates without a DataLoader does so again
    item.checkpoint.before_forward()
    assert torch.equal(torch.randn(3), drawn)
    item.checkpoint.close()


@pytest.mark.parametrize("anew", [False, True])
def test_a_second_optimizer_ends_following_and_says_so(
    script: Callable[..., Script], caplog: pytest.LogCaptureFixture, anew: bool
) -> None:
    item = script()
    item.step()
    assert item.hand_over() == []
    other = AdamW(item.ddp.parameters(), lr=0.1)
    if anew:
        item.optimizer = other
        item.step()
    else:
        item.step()
        other.step()
    assert f"at step {2 - anew}: another optimizer (AdamW) than the one that was attached" in caplog.text
    assert item.checkpoint._closed and item.shadow.committed == 1


def test_a_compiled_step_is_noticed(script: Callable[..., Script]) -> None:
    item = script()
    item.backward()
    torch.compile(item.optimizer.step, backend="eager")()
    assert "compiled" in (item.shadow.records[0].unfollowed or "")
    assert item.hand_over() == []


def test_a_followed_module_can_be_saved_and_copied_whole(script: Callable[..., Script]) -> None:
    item = script()
    item.step()
    file = io.BytesIO()
    torch.save(item.ddp, file)
    file.seek(0)
    for other in (torch.load(file, weights_only=False), copy.deepcopy(item.ddp)):
        other(torch.randn(6, 4))
        assert item.shadow.committed == 0  # that was no forward of the followed one
    assert item.hand_over() == []


# Odd parameters and options


class Odd(nn.Module):
    """A scalar and empty parameters between others."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.none = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.empty(0, 3))
        self.layer, self.rest = nn.Linear(4, 4), nn.Parameter(torch.empty(2, 0))

    def forward(self, x: Tensor) -> Tensor:
        return (self.scale * self.layer(x)).square().mean() + self.none.sum() + self.rest.sum()


@pytest.mark.parametrize("as_view", [False, True])
def test_scalars_and_empty_parameters_are_followed(script: Callable[..., Script], as_view: bool) -> None:
    ddp = DistributedDataParallel(Odd(), gradient_as_bucket_view=as_view)
    item = script(ddp, AdamW(ddp.parameters(), lr=0.1))
    for _ in range(3):
        item.step()
        assert item.hand_over() == []
    assert (item.shadow.seeds, item.shadow.unfollowed) == ([0], [])


def test_a_learning_rate_of_numpys_single_precision_is_followed(script: Callable[..., Script]) -> None:
    ddp, _ = build()
    item = script(ddp, AdamW(ddp.parameters(), lr=np.float32(0.01)))  # type: ignore[arg-type]
    for _ in range(3):
        item.step()
        assert item.hand_over() == []
    assert (item.shadow.seeds, item.shadow.unfollowed) == ([0], [])


@pytest.mark.parametrize("repeated", [1, 6], ids=["one of them", "as many as there are"])
def test_parameters_that_are_clipped_twice_are_so_on_the_shadow(script: Callable[..., Script], repeated: int) -> None:
    item = script()
    for _ in range(3):
        item.backward()
        first, *others = item.ddp.parameters()
        nn.utils.clip_grad_norm_([first] * repeated + ([first, *others] if repeated == 1 else []), 0.001)
        item.optimizer.step()
        assert item.hand_over() == []
    assert (item.shadow.seeds, item.shadow.unfollowed) == ([0], [])


# Parameter groups


def test_t11_a_group_added_in_mid_run_is_carried_on(script: Callable[..., Script]) -> None:
    ddp = DistributedDataParallel(Net())
    params = list(ddp.parameters())
    item = script(ddp, AdamW(params[2:], lr=0.01))
    for _ in range(2):
        item.step()
        assert item.hand_over() == []
    assert item.shadow.seeds == [0]
    item.step()
    item.optimizer.add_param_group({"params": params[:2], "lr": 0.1})
    assert item.hand_over() == []
    assert item.shadow.unfollowed != []
    for _ in range(2):
        item.step()
        assert item.hand_over() == []
    assert item.shadow.replica is not None
    assert len(item.shadow.replica.state_dicts()["optimizer"]["param_groups"]) == 2


def test_t11_a_group_added_in_mid_run_comes_back(direct: DirectShadow, restarted: Callable[[], None]) -> None:
    def begin() -> tuple[Script, list[Tensor]]:
        net = Net()
        net.drop.p = 0.0  # the first forward after a restore draws again what it drew
        ddp = DistributedDataParallel(net)
        params = list(ddp.parameters())
        return Script(direct, ddp, AdamW(params[2:], lr=0.01)), params

    item, params = begin()
    item.start().step()
    assert item.hand_over() == []
    item.optimizer.add_param_group({"params": params[:2], "lr": 0.1})
    item.step()
    assert item.hand_over() == []
    item.checkpoint.close(finished=False)
    restarted()
    again, _ = begin()
    assert again.checkpoint.resume() == 2
    assert [group["lr"] for group in again.optimizer.param_groups] == [0.01, 0.1]
    seeds = len(direct.seeds)
    for _ in range(2):
        torch.manual_seed(5)
        item.step()
        torch.manual_seed(5)
        again.step()
        assert again.hand_over() == []
    for ours, theirs in zip(item.ddp.parameters(), again.ddp.parameters(), strict=True):
        assert is_same(ours.detach(), theirs.detach())
    assert len(direct.seeds) == seeds
    again.checkpoint.close()


@pytest.mark.parametrize("foreach", [None, False, True])
def test_t10_one_norm_over_all_stages_clips_on_every_shadow(
    direct: DirectShadow, monkeypatch: pytest.MonkeyPatch, foreach: bool | None
) -> None:
    """The last stage's own norm is below the limit: clipped by itself it would not be clipped at all."""
    other = DirectShadow()
    first = Script(direct, *build()).start()
    monkeypatch.setattr(attach_module, "load_plugin", lambda: other)
    monkeypatch.setattr(attach_module, "Client", lambda *_, **__: DirectClient(other))
    last = Script(other, *build()).start()
    stages = (first, last)
    with contextlib.closing(first.checkpoint), contextlib.closing(last.checkpoint):
        for step in range(1, 4):
            first.backward(50.0)
            last.backward(0.02)
            norms = [nn.utils.get_total_norm(_grads(stage), foreach=foreach) for stage in stages]
            assert norms[0] > 1 > norms[1]
            total = torch.linalg.vector_norm(torch.stack(norms))  # as an all-reduce over the stages makes it
            for stage in stages:
                nn.utils.clip_grads_with_norm_(stage.ddp.parameters(), 1.0, total, foreach=foreach)
                stage.optimizer.step()
            together = nn.utils.get_total_norm([grad for stage in stages for grad in _grads(stage)])
            assert together.item() == pytest.approx(1.0, rel=1e-4)
            for stage in stages:
                assert stage.hand_over() == []
                (change,) = stage.shadow.records[-1].changes
                assert change["max_norm"] == 1.0 and torch.equal(plain.decode(change["total_norm"]), total)
                assert stage.shadow.committed == step and stage.shadow.unfollowed == [] and stage.shadow.seeds == [0]


def _grads(stage: Script) -> list[Tensor]:
    return [param.grad for param in stage.ddp.parameters() if param.grad is not None]


def test_a_gradient_that_the_script_drops_is_passed_over(script: Callable[..., Script]) -> None:
    item = script()
    item.step()
    assert item.hand_over() == []
    item.backward()
    item.ddp.module.first.weight.grad = None
    item.optimizer.step()
    assert item.hand_over() == []
    assert item.shadow.records[-1].absent == ["first.weight"] and item.shadow.seeds == [0]


def test_a_frozen_parameter_with_a_gradient_of_its_own_is_noticed(script: Callable[..., Script]) -> None:
    ddp, _ = build()
    ddp.module.first.weight.requires_grad_(False)
    ddp = DistributedDataParallel(ddp.module)
    item = script(ddp, AdamW(ddp.parameters(), lr=0.01))
    item.step()
    assert item.hand_over() == []
    item.backward()
    ddp.module.first.weight.grad = torch.ones_like(ddp.module.first.weight)
    item.optimizer.step()
    assert "first.weight, which was frozen" in (item.shadow.records[-1].unfollowed or "")
    assert item.hand_over() == []


# Saves and restores


def test_t4_a_seed_is_the_value_when_it_was_taken(script: Callable[..., Script]) -> None:
    item = script()
    item.step()
    before = [param.detach().clone() for param in item.ddp.module.parameters()]
    item.checkpoint._seeder.take(1, item.shadow.incarnation, 1)
    with torch.no_grad():
        for param in item.ddp.parameters():
            param.zero_()
    assert item.checkpoint._seeder.wait(30)
    held = [tensor for line, tensor in zip(*item.shadow._working.pack()[1:], strict=True) if line[1] == "param"]  # type: ignore[union-attr]
    assert all(torch.equal(a, b) for a, b in zip(held, before, strict=True))


@pytest.mark.parametrize("early", [False, True], ids=["made after resume", "made before resume"])
def test_t6_a_restart_in_mid_schedule_has_the_rate_of_that_step(
    direct: DirectShadow, restarted: Callable[[], None], early: bool
) -> None:
    rates: list[float] = []

    def warmed_up(optimizer: torch.optim.Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5) / (1 + step))

    def run(stop: int) -> None:
        restarted()
        ddp, optimizer = build()
        checkpoint = checkmate.attach(ddp, optimizer)
        scheduler = warmed_up(optimizer) if early else None
        start = checkpoint.resume() or 0
        scheduler = scheduler or warmed_up(optimizer)
        assert not early or scheduler.last_epoch == start  # by which a script may count its steps
        for _ in range(start, stop):
            ddp(torch.randn(6, 4)).backward()
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        checkpoint.close()

    run(7)
    without, rates[:] = list(rates), []
    direct.__init__()  # type: ignore[misc]
    for stop in (3, 7):
        run(stop)
    assert rates == without and len(rates) == 7


def test_a_restart_after_twice_reduced_gradients_continues_the_count(
    direct: DirectShadow, restarted: Callable[[], None]
) -> None:
    for stop in (2, 4):
        restarted()
        ddp, optimizer = build()
        item = Script(direct, ddp, optimizer)
        start = item.checkpoint.resume()
        assert start == (None if stop == 2 else 2)
        for _ in range(start or 0, stop):
            item.backward()
            ddp(torch.randn(6, 4)).backward()
            optimizer.step()
        item.checkpoint.close()
        assert item.checkpoint.committed == stop and direct.committed == 2 * stop


# Compressed buckets


@pytest.mark.parametrize("kind", [Compression.BF16, Compression.FP16])
def test_a_compressed_bucket_is_decompressed_as_the_trainer_does(
    script: Callable[..., Script], kind: Compression, monkeypatch: pytest.MonkeyPatch
) -> None:
    ddp, optimizer = build()
    monkeypatch.setattr(type(ddp), "_check_comm_hook", lambda *_: None)  # torch wants NCCL for one of them
    ddp.register_comm_hook(None, getattr(default_hooks, str(kind.value)))
    item = script(ddp, optimizer)
    for _ in range(4):
        item.step()
        assert item.hand_over() == []
    dtypes = {line["dtype"] for line in item.shadow._layout.buckets}  # type: ignore[union-attr]
    assert dtypes == {"bfloat16" if kind is Compression.BF16 else "float16"}
    assert item.shadow.seeds == [0]


def test_a_hook_of_another_group_is_not_stood_in_for() -> None:
    class Fake:
        _comm_hooks: ClassVar[list[Any]] = [(print, None)]

    assert Compression.of(Fake()) is None  # type: ignore[arg-type]


# Master weights


def mastered(direct: DirectShadow) -> tuple[Script, dict[str, Tensor]]:
    ddp = DistributedDataParallel(Net().bfloat16())
    masters = {name: param.detach().float() for name, param in ddp.module.named_parameters()}
    item = Script(direct, ddp, AdamW(masters.values(), lr=0.01), masters=masters)
    return item.start(), masters


def convert(item: Script, masters: dict[str, Tensor]) -> None:
    item.optimizer.zero_grad()
    item.ddp(torch.randn(6, 4).bfloat16()).backward()
    for name, master in masters.items():
        master.grad = item.ddp.module.get_parameter(name).grad.float()  # type: ignore[union-attr]
        item.ddp.module.get_parameter(name).grad = None


def copy_back(item: Script, masters: dict[str, Tensor]) -> None:
    for name, master in masters.items():
        item.ddp.module.get_parameter(name).detach().copy_(master)


def differences(item: Script, masters: dict[str, Tensor]) -> list[str]:
    item.checkpoint.before_forward()
    assert item.checkpoint._seeder.wait(30)
    params, buffers = named_state(item.ddp.module)
    params += [(MASTER + name, master) for name, master in masters.items()]
    description, manifest, tensors = pack_state(params, buffers, item.optimizer)
    assert item.shadow.replica is not None and item.shadow.committed == item.checkpoint._step
    return item.shadow.replica.differences(Seed(item.checkpoint._step, description, manifest), tensors)


def test_master_weights_are_followed_and_exported(direct: DirectShadow) -> None:
    item, masters = mastered(direct)
    for _ in range(3):
        convert(item, masters)
        nn.utils.clip_grad_norm_(masters.values(), 0.01)
        item.optimizer.step()
        copy_back(item, masters)
        assert differences(item, masters) == []
    assert direct.seeds == [0] and direct.replica is not None
    exported = direct.replica.state_dicts()
    assert exported["model"].keys() == item.ddp.module.state_dict().keys()
    assert all(torch.equal(exported["masters"][name], master) for name, master in masters.items())
    item.checkpoint.close()


def test_master_weights_that_are_not_copied_back_are_noticed(direct: DirectShadow) -> None:
    item, masters = mastered(direct)
    convert(item, masters)
    item.optimizer.step()
    assert differences(item, masters) == []
    assert "is not its master copy" in str(direct.unfollowed)
    item.checkpoint.close()


def test_master_gradients_of_another_value_are_noticed(direct: DirectShadow) -> None:
    item, masters = mastered(direct)
    item.optimizer.zero_grad()
    item.ddp(torch.randn(6, 4).bfloat16()).backward()
    for name, master in masters.items():
        master.grad = item.ddp.module.get_parameter(name).grad.float() * 0.5  # type: ignore[union-attr]
    item.optimizer.step()
    copy_back(item, masters)
    assert "is not that of its parameter" in (direct.records[0].unfollowed or "")
    assert differences(item, masters) == []
    item.checkpoint.close()


def test_copies_that_fit_no_parameter_are_refused(direct: DirectShadow) -> None:
    ddp, optimizer = build()
    with pytest.raises(CheckmateError, match="the module has no parameter 'ghost'"):
        checkmate.attach(ddp, optimizer, masters={"ghost": torch.zeros(1)})
    with pytest.raises(CheckmateError, match=r"masters\['first.bias'\] is torch.float32 \[1\]: it must be"):
        checkmate.attach(ddp, optimizer, masters={"first.bias": torch.zeros(1)})
