"""What a followed run tells its shadow, step by step, and what is refused when it is attached."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.train.direct import DirectClient, DirectShadow
from support.train.fake_shadow import FakePlugin, FakeShadow, order
from support.train.model import build, train
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

import checkmate
from checkmate import config
from checkmate.config import CheckmateError
from checkmate.protocol import Hello, Layout, StepRecord
from checkmate.tensors import is_same
from checkmate.train import checks, registry
from checkmate.train.client import Unfollowable
from checkmate.train.fleet import Unrestorable

pytest_plugins = ["support.train.world"]


def test_messages_of_each_step_come_in_order(shadow: FakeShadow, plugin: FakePlugin) -> None:
    ddp, optimizer = build()
    checkpoint = checkmate.attach(ddp, optimizer)
    assert checkpoint.resume() is None
    assert shadow.seeds == []  # the script may still load a state
    train(ddp, optimizer, 3)
    assert [seed.step for seed, _ in shadow.seeds] == [0]
    assert order(shadow, 0) != [] and "B3" not in order(shadow, 0)
    checkpoint.close()
    # buckets are rebuilt after the first iteration: a second layout
    assert order(shadow, 0) == ["L", "S1", "B1", "L", "S2", "B2", "S3", "B3"]
    assert checkpoint.committed == 3 and checkpoint.dropped == 0
    assert all(record.unfollowed is None and not record.skipped for record in shadow.of(StepRecord))
    assert shadow.of(Hello)[0].incarnation == 1


def test_buckets_are_tagged_with_their_iteration(shadow: FakeShadow, plugin: FakePlugin) -> None:
    ddp, optimizer = build()
    with_checkpoint = checkmate.attach(ddp, optimizer)
    with_checkpoint.resume()
    train(ddp, optimizer, 3)
    assert not plugin.registered
    with_checkpoint.close()
    layouts = shadow.of(Layout)
    for step, layout in ((1, layouts[0]), (2, layouts[-1]), (3, layouts[-1])):
        tagged = [(bucket, nbytes) for iteration, bucket, nbytes in plugin.tagged if iteration == step]
        assert tagged == [(b["bucket"], b["bytes"]) for b in layout.buckets]
    assert len(layouts[-1].buckets) > 1
    assert plugin.incarnation == 0


def test_the_layout_says_where_each_gradient_is(shadow: FakeShadow) -> None:
    ddp, optimizer = build()
    seen: dict[int, Tensor] = {}
    checkpoint = checkmate.attach(ddp, optimizer)
    checkpoint.resume()
    hook = checkpoint._hook._reduce
    checkpoint._hook._reduce = lambda bucket: seen.update({bucket.index(): bucket.buffer()}) or hook(bucket)  # type: ignore
    train(ddp, optimizer, 2)
    params = dict(ddp.module.named_parameters())
    layout = shadow.wait(lambda: len(shadow.of(StepRecord)) == 2) and shadow.of(Layout)[-1]
    assert shadow.of(StepRecord)[-1].layout == layout.digest
    found = []
    for bucket in layout.buckets:
        assert bucket["dtype"] == "float32" and bucket["bytes"] == seen[bucket["bucket"]].nbytes
        for name, start, count in bucket["params"]:
            found.append(name)
            assert torch.equal(seen[bucket["bucket"]][start : start + count], params[name].grad.flatten())  # type: ignore
    assert sorted(found) == sorted(params)
    checkpoint.close()


def test_records_carry_the_hyperparameters_of_the_step(shadow: FakeShadow) -> None:
    ddp, _ = build()
    params = list(ddp.parameters())
    optimizer = AdamW([{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.0}], lr=1.0)
    checkpoint = checkmate.attach(ddp, optimizer)
    checkpoint.resume()
    scheduler = LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    for _ in range(3):
        train(ddp, optimizer)
        scheduler.step()
    checkpoint.close()
    groups = [record.groups for record in shadow.of(StepRecord)]
    assert [g[0]["lr"] for g in groups] == [1.0, 0.5, 1 / 3]
    assert [g["weight_decay"] for g in groups[0]] == [0.01, 0.0]
    assert groups[0][0]["betas"] == [0.9, 0.999] and "params" not in groups[0][0]


def unfollowed(shadow: FakeShadow) -> list[str | None]:
    return [record.unfollowed for record in shadow.of(StepRecord)]


def test_only_the_reducing_backward_counts(shadow: FakeShadow, plugin: FakePlugin) -> None:
    ddp, optimizer = build()
    checkpoint = checkmate.attach(ddp, optimizer)
    checkpoint.resume()
    for _ in range(2):
        optimizer.zero_grad()
        with ddp.no_sync():
            for _ in range(3):
                ddp(torch.randn(6, 4)).backward()
        ddp(torch.randn(6, 4)).backward()
        optimizer.step()
    checkpoint.close()
    assert unfollowed(shadow) == [None, None]
    assert sorted({iteration for iteration, _, _ in plugin.tagged}) == [1, 2]


def scale(ddp: DistributedDataParallel) -> None:
    torch._foreach_mul_([p.grad for p in ddp.parameters()], 0.5)


def clamp_data(ddp: DistributedDataParallel) -> None:
    for param in ddp.parameters():
        param.grad.data.clamp_(-1e-6, 1e-6)  # type: ignore[union-attr]


def scale_and_clip(ddp: DistributedDataParallel) -> None:
    scale(ddp)
    nn.utils.clip_grad_norm_(ddp.parameters(), 1e-3)


def scale_data_and_clip(ddp: DistributedDataParallel) -> None:
    clamp_data(ddp)
    nn.utils.clip_grad_value_(ddp.parameters(), 1e-3)


def replace_one(ddp: DistributedDataParallel) -> None:
    param = next(ddp.parameters())
    param.grad = param.grad.clone()  # type: ignore[union-attr]


def accumulate(ddp: DistributedDataParallel) -> None:
    with ddp.no_sync():
        ddp(torch.randn(6, 4)).backward()


@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (scale, "changed after its all-reduce"),
        (clamp_data, "changed after its all-reduce"),
        (scale_and_clip, "changed after its all-reduce"),
        (scale_data_and_clip, "changed after its all-reduce"),
        (replace_one, "gradient of first.weight was changed"),
        (accumulate, "changed after its all-reduce"),
    ],
)
def test_changed_gradients_are_noticed(
    shadow: FakeShadow,
    plugin: FakePlugin,
    change: Callable[[DistributedDataParallel], None],
    reason: str,
    as_view: bool,
) -> None:
    ddp, optimizer = build(gradient_as_bucket_view=as_view)
    checkpoint = checkmate.attach(ddp, optimizer)
    checkpoint.resume()
    train(ddp, optimizer)
    optimizer.zero_grad()
    ddp(torch.randn(6, 4)).backward()
    change(ddp)
    optimizer.step()
    train(ddp, optimizer)
    checkpoint.close()
    first, second, third = unfollowed(shadow)
    assert first is None and third is None
    assert second is not None and reason in second
    tagged = [(iteration, bucket) for iteration, bucket, _ in plugin.tagged]
    assert len(tagged) == len(set(tagged))  # never two gradients under one name


def test_a_hook_of_the_users_that_changes_gradients_is_noticed(shadow: FakeShadow) -> None:
    ddp, optimizer = build()
    checkpoint = checkmate.attach(ddp, optimizer)
    checkpoint.resume()
    optimizer.register_step_pre_hook(lambda *_: scale(ddp))
    train(ddp, optimizer)
    checkpoint.close()
    assert "changed after its all-reduce" in (unfollowed(shadow)[0] or "")


def test_steps_without_gradients_of_their_own_are_not_followed(shadow: FakeShadow) -> None:
    ddp, optimizer = build()
    checkpoint = checkmate.attach(ddp, optimizer)
    checkpoint.resume()
    train(ddp, optimizer)
    optimizer.step()
    ddp(torch.randn(6, 4))
    optimizer.step(lambda: 0.0)
    checkpoint.close()
    reasons = unfollowed(shadow)
    assert reasons[0] is None
    assert "no all-reduce" in (reasons[1] or "") and "no all-reduce" in (reasons[2] or "")
    assert [record.step for record in shadow.of(StepRecord)] == [1, 2, 3]


def test_a_seed_is_the_state_between_two_steps(shadow: FakeShadow) -> None:
    ddp, optimizer = build()
    checkpoint = checkmate.attach(ddp, optimizer)
    checkpoint.resume()
    shadow.seed_always = True
    after: dict[int, list[Tensor]] = {0: [p.detach().clone() for p in ddp.module.parameters()]}
    for step in range(1, 7):
        train(ddp, optimizer)
        after[step] = [p.detach().clone() for p in ddp.module.parameters()]
        time.sleep(0.05)
    checkpoint.close()
    assert len(shadow.seeds) >= 4
    for seed, tensors in shadow.seeds:
        params = [t for (_, kind, *_), t in zip(seed.manifest, tensors, strict=True) if kind == "param"]
        assert all(is_same(a, b) for a, b in zip(params, after[seed.step], strict=True))
        assert seed.optimizer["class"] == "AdamW"
        if seed.step:
            steps = [t for (_, kind, *_), t in zip(seed.manifest, tensors, strict=True) if kind == "state.step"]
            assert {t.item() for t in steps} == {seed.step}


def test_the_optimizer_state_is_not_touched_by_following(shadow: FakeShadow) -> None:
    ddp, optimizer = build()
    checkpoint = checkmate.attach(ddp, optimizer)
    checkpoint.resume()
    assert optimizer.state_dict()["state"] == {}
    train(ddp, optimizer)
    assert {state["step"].item() for state in optimizer.state.values()} == {1}
    checkpoint.close()


# Refusals


def test_a_shadow_that_can_never_follow_refuses_attach(direct: DirectShadow, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_for_good(*_: object) -> None:
        raise Unfollowable("shadow 1.2.3.4:7701 can't follow this job: other bits")

    monkeypatch.setattr(DirectClient, "begin", refuse_for_good)
    refuse("^shadow 1.2.3.4:7701 can't follow this job: other bits$", *build())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("checkmate")]


def test_a_refused_job_does_not_begin_anew_over_what_is_held(
    direct: DirectShadow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even a script that knows nothing of Checkmate: it would train from the start, and without checkpoints."""

    def refuse_for_good(*_: object) -> None:
        raise Unfollowable("shadow 1.2.3.4:7701 can't follow this job: other bits", 7000)

    monkeypatch.setattr(DirectClient, "begin", refuse_for_good)
    with pytest.raises(Unrestorable, match=r"other bits; but step 7000 of this job is held, .* set right what is refu"):
        checkmate.attach(*build())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("checkmate")]


def refuse(match: str, ddp: Any, optimizer: Any, stateful: dict[str, Any] | None = None) -> None:
    with pytest.raises(CheckmateError, match=match):
        checkmate.attach(ddp, optimizer, stateful=stateful)


def test_what_cannot_be_followed_is_refused_by_name(shadow: FakeShadow) -> None:
    ddp, optimizer = build()
    params = list(ddp.parameters())

    class Own(AdamW):
        pass

    refuse("Net is not a DistributedDataParallel", ddp.module, optimizer)
    refuse(r"optimizer torch.optim.adagrad.Adagrad: only torch's own AdamW", ddp, torch.optim.Adagrad(params))
    refuse(r"optimizer .*Own: only", ddp, Own(params))
    refuse(r"optimizer .*Muon: only", ddp, torch.optim.Muon([param for param in params if param.ndim == 2]))
    refuse(r"parameter first.weight and 1 more are not in this optimizer but in another AdamW", ddp, AdamW(params[2:]))
    stranger = nn.Parameter(torch.zeros(3))
    refuse(r"group 0 holds a parameter of shape \[3\] that is not in the module", ddp, AdamW([*params, stranger]))
    refuse(r"stateful\['x'\] has no state_dict", ddp, optimizer, {"x": object()})
    refuse("average.value is a builtins.object", ddp, optimizer, {"average": Unstorable()})
    LambdaLR(optimizer, lambda step: 1.0)  # before the registry knew of it
    registry._schedulers.clear()
    refuse("a learning-rate scheduler was made before attach", ddp, optimizer)

    narrow = DistributedDataParallel(nn.Linear(3, 3).bfloat16())
    refuse(
        "group 0 is for torch's fused SGD with momentum and holds torch.bfloat16",
        narrow,
        SGD(narrow.parameters(), momentum=0.9, fused=True),
    )
    apart = build()[0].module
    apart.second.bias = nn.Parameter(apart.first.bias.data[:1])
    refuse("parameters first.bias and second.bias are two that share memory", *wrapped(apart))
    early = build()[0].module
    _apply_optimizer_in_backward(SGD, early.first.parameters(), {"lr": 0.1})
    refuse("first.weight has an optimizer that steps inside backward", *wrapped(early))
    sparse = DistributedDataParallel(nn.Embedding(4, 4, sparse=True))
    refuse("has sparse gradients", sparse, SGD(sparse.parameters()))
    hooked, optimizer = build()
    hooked.register_comm_hook(PowerSGDState(None), powerSGD_hook)
    refuse(
        "communication hook powerSGD_hook: what it reduces is not the gradient; only torch's own allreduce_hook",
        hooked,
        optimizer,
    )
    builtin, optimizer = build()
    builtin._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)  # type: ignore[attr-defined]
    refuse("communication hook BuiltinCommHookType.FP16_COMPRESS", builtin, optimizer)
    assert shadow.incarnation == 0


def wrapped(net: Any) -> tuple[DistributedDataParallel, AdamW]:
    return DistributedDataParallel(net), AdamW(net.parameters())


def test_a_module_is_attached_once(shadow: FakeShadow) -> None:
    ddp, optimizer = build()
    checkpoint = checkmate.attach(ddp, optimizer)
    refuse("attach was called for this module before", ddp, optimizer)
    checkpoint.close()
    refuse("use the Checkpoint that the first call returned, or wrap the model in a new Dist", ddp, optimizer)


class Unstorable:
    def state_dict(self) -> dict[str, Any]:
        return {"value": object()}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_the_environment_is_checked(shadow: FakeShadow, monkeypatch: pytest.MonkeyPatch) -> None:
    ddp, optimizer = build()
    with monkeypatch.context() as patch:
        patch.delenv("CHECKMATE_SHADOWS")
        refuse("CHECKMATE_SHADOWS is not set: it must be", ddp, optimizer)
        patch.setenv("CHECKMATE_SHADOWS", "1.2.3.4")
        refuse("CHECKMATE_SHADOWS=1.2.3.4 is not ip:port", ddp, optimizer)
        patch.setenv("CHECKMATE_SHADOWS", "1.2.3.4:5,1.2.3.4:5")
        refuse("names a shadow twice", ddp, optimizer)
        patch.setenv("CHECKMATE_SHADOWS", ",".join(f"1.2.3.4:{port}" for port in range(1, 9)))
        refuse("8 shadows for 6 parameter", ddp, optimizer)
    monkeypatch.setenv("CHECKMATE_TOKEN_FILE", "/nonexistent")
    refuse("token_file /nonexistent", ddp, optimizer)


def test_back_ends_that_bypass_the_plugin_are_refused(shadow: FakeShadow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "CARRIERS", ["checkmate", "nccl"])
    refuse("back end for cpu is gloo", *build())
    monkeypatch.setattr(config, "MIN_RANKS", 2)
    refuse(r"1 rank\(s\): no gradient crosses the network", *build())


# The end


def test_the_last_step_is_handed_over_before_the_process_group_goes(shadow: FakeShadow) -> None:
    ddp, optimizer = build()
    checkpoint = checkmate.attach(ddp, optimizer)
    checkpoint.resume()
    train(ddp, optimizer, 2)
    original = checkpoint._undo and dist.destroy_process_group
    dist.destroy_process_group()
    assert order(shadow, 0)[-1] == "B2" and checkpoint.committed == 2
    assert dist.destroy_process_group is not original


def test_a_script_that_breaks_off_does_not_hand_over_its_last_step(shadow: FakeShadow) -> None:
    ddp, optimizer = build()
    checkpoint = checkmate.attach(ddp, optimizer)
    checkpoint.resume()
    with pytest.raises(ZeroDivisionError):
        try:
            train(ddp, optimizer, 2)
            raise ZeroDivisionError  # before scheduler.step(), say
        finally:
            dist.destroy_process_group()
    assert order(shadow, 0)[-1] == "S2" and checkpoint.committed == 1


def test_resume_is_called_once_and_first(shadow: FakeShadow, caplog: pytest.LogCaptureFixture) -> None:
    ddp, optimizer = build()
    checkpoint = checkmate.attach(ddp, optimizer)
    train(ddp, optimizer)
    assert "resume() was not called" in caplog.text
    assert [seed.step for seed, _ in shadow.seeds] == [0]
    with pytest.raises(CheckmateError, match="once, before the first forward"):
        checkpoint.resume()
    checkpoint.close()
    checkpoint.close()


def test_importing_checkmate_does_not_import_torch() -> None:
    code = (
        "import sys, checkmate; assert 'torch' not in sys.modules; assert checkmate.attach and 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)
