"""One rank of a test of HSDP over gloo: STORE SEED|NAME…. A mesh of one replica and two shards: each rank has a shadow.

For each seed a configuration is drawn and trained; after every step the shadow's state must be this rank's shards.
NAME: one of the functions at the end.
"""

import contextlib
import copy
import os
import random
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.optim import SGD, Adam, AdamW

from checkmate import attach, config
from checkmate.config import CheckmateError
from checkmate.protocol import Seed
from checkmate.tensors import named_state, pack_state
from checkmate.train import attach as attach_module
from checkmate.train import checkpoint, checks, hsdp
from checkmate.train.checkpoint import Checkpoint
from checkmate.train.interchange import Start, state_dict
from checkmate.train.masters import Masters
from support.train.direct import DirectClient, DirectLink, DirectShadow
from support.trainer import differing

RANK = int(os.environ["RANK"])
STEPS = 6
SHARDED = 1
"""Seed of a configuration."""


class Net(nn.Module):
    """Odd sizes: shards of 4 and 3 rows, of 1 and none; a layer that is frozen, one that may go unused."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.middle = nn.Sequential(nn.Linear(7, 6), nn.LayerNorm(6))
        self.branch = nn.Linear(6, 6)
        self.last = nn.Linear(6, 1)
        self.back, self.again = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        if tied:
            self.again.weight = self.back.weight

    def forward(self, x: Tensor, branches: int = 1) -> Tensor:
        x = self.again(self.back(self.middle(self.frozen(self.first(x)).tanh())))
        for _ in range(branches):
            x = x + self.branch(x)
        return self.last(x).float().square().mean()


class Training:
    """A drawn configuration, trained from the beginning."""

    def __init__(self, seed: int) -> None:
        r = self.draws = random.Random(seed)
        torch.manual_seed(seed)
        self.net = Net(tied=r.random() < 0.5)
        reduce = r.choice([None, None, torch.float32, torch.bfloat16])
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if reduce else None, reduce_dtype=reduce)
        columns = r.random() < 0.3
        options: dict[str, Any] = {
            "mesh": init_device_mesh("cpu", (1, 2), mesh_dim_names=("replica", "shard")),
            "mp_policy": policy,
            "reshard_after_forward": r.choice([None, True, False]),
            "shard_placement_fn": (lambda p: Shard(1) if p.dim() > 1 and p.shape[1] % 2 == 0 else None)
            if columns
            else None,
        }
        often = r.choice([0.0, 0.8, 1.0])
        for part in (self.net.first, self.net.branch, self.net.middle, [self.net.back, self.net.again]):
            if r.random() < often:
                fully_shard(part, **options)
        self.module: Any = fully_shard(self.net, **options)
        self.optimizer = self._optimizer()
        self.clip = r.choice(["none", "norm", "norm", "value", "part"])
        self.clip_foreach = r.choice([None, False, True])
        self.norm_type = r.choice([2.0, 1.0])  # torch finds no infinity norm of an empty shard
        self.passes = r.choice([1, 1, 2])
        self.sync = r.choice(["gradient", "all-reduce"])
        self.reshard = r.random() < 0.5
        twice = self.passes == 1 or self.sync == "all-reduce"  # otherwise FSDP2 reduces for each call
        self.branches = r.choice([[1], [2] if twice else [1], [0, 1]])
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if r.random() < 0.3 else None
        self.data = torch.Generator().manual_seed(100 * seed + RANK)

    def _optimizer(self) -> torch.optim.Optimizer:
        r = self.draws
        params = list(self.net.parameters())
        groups = [
            {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0, "lr": 0.02},
        ]
        kind: Any = r.choice([AdamW, Adam, SGD])
        options: dict[str, Any] = {"momentum": 0.9} if kind is SGD else {"amsgrad": r.random() < 0.3}
        options |= r.choice([{}, {"foreach": True}, {"fused": True}] if kind is not SGD else [{}, {"foreach": True}])
        optimizer: torch.optim.Optimizer = kind(groups, lr=0.01, **options)
        return optimizer

    def simplify(self) -> "Training":
        """One backward pass, and nothing that changes gradients."""
        self.passes, self.clip, self.scaler, self.branches = 1, "none", None, [1]
        return self

    def step(self) -> None:
        """Backward passes, what changes gradients, the step; without a forward of the next."""
        self.optimizer.zero_grad()
        self.backward()
        self.update()

    def backward(self) -> None:
        branches = self.draws.choice(self.branches)
        for index in range(self.passes):
            is_last = index == self.passes - 1
            self.module.set_reshard_after_backward(is_last or self.reshard)
            if self.sync == "gradient":
                self.module.set_requires_gradient_sync(is_last)
            else:
                self.module.set_requires_all_reduce(is_last)
            loss = self.module(torch.randn(4, 6, generator=self.data), branches)
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def update(self) -> None:
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        self._clip()
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def _clip(self) -> None:
        params = list(self.net.parameters())
        match self.clip:
            case "norm":
                nn.utils.clip_grad_norm_(params, 0.05, self.norm_type, foreach=self.clip_foreach)
            case "part":
                nn.utils.clip_grad_norm_(params[:4], 0.05, self.norm_type)
            case "value":
                nn.utils.clip_grad_value_(params, 0.01)


def follow(training: Training, shadow: DirectShadow) -> Checkpoint:
    """Attach to the shadow, which may hold a state."""
    module: Any = attach_module
    module.load_plugin = lambda: shadow
    module.Client = lambda *_, **__: DirectClient(shadow)
    return attach(training.module, training.optimizer)


def differences(training: Training, shadow: DirectShadow, step: int) -> list[str]:
    """Between this rank's shards and the shadow's state."""
    description, manifest, tensors = pack_state(*named_state(training.net), training.optimizer)
    assert shadow.replica is not None and shadow.committed == step, (shadow.committed, shadow.staging.damage)
    return shadow.replica.differences(Seed(step, description, manifest), tensors)


def drawn(seed: int) -> None:
    """Followed without a seed, to the bit."""
    shadow, training = DirectShadow(reread=True), Training(seed)
    followed = follow(training, shadow)
    assert followed.resume() is None
    for step in range(1, STEPS + 1):
        training.step()
        followed.before_forward()
        assert shadow.unfollowed == [], f"seed {seed} step {step}: {shadow.unfollowed}"
        assert differences(training, shadow, step) == [], f"seed {seed}: {vars(training)} after step {step}"
    followed.close()
    assert shadow.seeds == [0]


def train(training: Training, followed: Checkpoint, steps: int = 1) -> None:
    for _ in range(steps):
        training.step()
        followed.before_forward()


def twice(training: Training) -> None:
    """Each pass reduces."""
    training.backward()
    training.backward()


def zeros(training: Training) -> None:
    training.backward()
    training.optimizer.zero_grad(set_to_none=False)
    training.backward()


def each_call(training: Training) -> None:
    """After a pass without reduction, a module that is called twice is reduced twice."""
    training.passes, training.sync, training.branches = 2, "gradient", [2]
    training.backward()
    training.simplify()


def scaled(training: Training) -> None:
    training.backward()
    for param in training.net.parameters():
        if param.grad is not None:
            param.grad.mul_(0.5)


def scaled_together(training: Training) -> None:
    """By a function that DTensors count no changes of."""
    training.backward()
    torch._foreach_mul_([param.grad for param in training.net.parameters() if param.grad is not None], 0.5)


NOTICED = {
    twice: "is one of an earlier backward pass, or was added to it",
    zeros: "is one of an earlier backward pass, or was added to it",
    each_call: "a module that is called several times in a forward was reduced several times",
    scaled: "was changed after its all-reduce",
    scaled_together: "was changed after its all-reduce",
}


def noticed() -> None:
    """One step that can't be followed costs one seed."""
    for change, reason in NOTICED.items():
        shadow, training = DirectShadow(reread=True), Training(SHARDED).simplify()
        training.sync = "gradient"
        followed = follow(training, shadow)
        followed.resume()
        train(training, followed)
        training.optimizer.zero_grad()
        change(training)
        training.optimizer.step()
        assert reason in (shadow.records[-1].unfollowed or ""), (change, shadow.records[-1].unfollowed)
        followed.before_forward()
        assert followed._seeder.wait(30)
        train(training, followed)
        assert differences(training, shadow, followed._step) == [], change
        with torch.no_grad():
            for param in training.net.parameters():
                param.clamp_(-0.1, 0.1)
        training.step()
        assert "was changed by something else" in (shadow.records[-1].unfollowed or "")
        followed.close()


def apart() -> None:
    """Modules of different replicas."""
    net, options = Net(tied=False), {"mesh_dim_names": ("replica", "shard")}
    fully_shard(net.first, mesh=init_device_mesh("cpu", (2, 1), **options))
    fully_shard(net, mesh=init_device_mesh("cpu", (1, 2), **options))
    found = list(hsdp.problems(hsdp.Sharded(net), {}))
    assert any("meshes of different replicas: all modules must have the same" in text for text in found), found


def unfrozen() -> None:
    """A frozen layer stays as it is; from when it is trained on its steps are not followed."""
    shadow, training = DirectShadow(reread=True), Training(SHARDED).simplify()
    followed = follow(training, shadow)
    followed.resume()
    train(training, followed, 2)
    assert differences(training, shadow, 2) == []
    training.net.frozen.requires_grad_(True)
    train(training, followed)
    assert "frozen.weight, which was frozen when it was attached" in (shadow.records[-1].unfollowed or "")
    followed.close()


def broken_off() -> None:
    """A backward pass that ends in an error, and is done again."""

    def fail(_grad: Tensor) -> None:
        raise ZeroDivisionError

    shadow, training = DirectShadow(reread=True), Training(SHARDED).simplify()
    followed = follow(training, shadow)
    followed.resume()
    train(training, followed)
    data = torch.randn(4, 6).requires_grad_()
    data.register_hook(fail)  # type: ignore[no-untyped-call]
    with contextlib.suppress(ZeroDivisionError):
        training.module(data).backward()
    assert followed._hook._open
    training.module.reset_iter_state()
    train(training, followed)
    assert (shadow.unfollowed, followed.committed) == ([], 2)
    assert differences(training, shadow, 3) == []
    followed.close()


def closed() -> None:
    """What no shadow follows any more trains on as before, with torch's own reduce-scatter."""
    shadow, training, alone = DirectShadow(reread=True), Training(SHARDED).simplify(), Training(SHARDED).simplify()
    followed = follow(training, shadow)
    followed.resume()
    train(training, followed)
    followed.close()
    told = len(shadow.records)
    for _ in range(2):
        training.step()
    for _ in range(3):
        alone.step()
    assert not differing(whole(alone), whole(training)) and len(shadow.records) == told
    assert all(type(group._reduce_scatter_comm).__name__ == "DefaultReduceScatter" for _, group in followed._ddp.parts)  # type: ignore[union-attr]


def resumed() -> None:
    """From a shadow, and from a saved state, a run goes on as the one that went on by itself."""
    shadow, training = DirectShadow(reread=True), Training(SHARDED).simplify()
    followed = follow(training, shadow)
    followed.resume()
    train(training, followed, 3)
    saved, data = followed.state_dict(), training.data.get_state()
    assert not differing(saved, shadow.replica.state_dicts()), differing(saved, shadow.replica.state_dicts())  # type: ignore[union-attr]
    saved = copy.deepcopy(saved)
    followed.close()
    for _ in range(3):
        training.step()

    for restored in (True, False):
        shadow = shadow if restored else DirectShadow(reread=True)
        fresh = Training(SHARDED).simplify()
        followed = follow(fresh, shadow)
        assert followed.resume() == (3 if restored else None)
        if not restored:
            followed.load_state_dict(saved)
        fresh.data.set_state(data)
        train(fresh, followed, 3)
        assert differences(fresh, shadow, 6) == [] and shadow.unfollowed == []
        assert not differing(whole(training), whole(fresh))
        followed.close()

    with pytest.raises(CheckmateError, match=r"model: .* is of shape \[.*\], in the script's model \[.*\]"):
        Start({**saved, "model": Net(tied=False).state_dict()}, fresh.net, fresh.optimizer, Masters(fresh.net, {}))


def whole(training: Training) -> dict[str, Any]:
    """This rank's state."""
    return state_dict(training.net, training.optimizer, Masters(training.net, {}), 0)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=RANK, world_size=2)
    os.environ["CHECKMATE_GROUP_RANKS"] = str(RANK)
    config.MIN_RANKS = 1
    checks.CARRIERS.append("gloo")
    checkpoint.RecordsLink = DirectLink  # type: ignore[misc, assignment]
    for name in sys.argv[2:]:
        drawn(int(name)) if name.isdecimal() else globals()[name]()
        print("passed", name, flush=True)
    dist.destroy_process_group()


main()
