"""Random training configurations, and the training that follows from one."""

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR

STEPS = 20
_WIDTH = 6

Optimizer = torch.optim.Optimizer


@dataclass(frozen=True)
class Config:
    """One training configuration; ``seed`` decides data, initial values and what happens when."""

    seed: int
    # the model
    dtype: str
    masters: bool
    conv: bool
    norm: bool
    tied: bool
    frozen: bool
    branch: str  # none, always, sometimes, frozen half-way
    # the optimizer
    kind: str
    groups: int
    options: dict[str, Any]
    implementation: str  # default, for-loop, foreach, fused
    schedule: str
    tensor_lr: bool
    # every step
    clip: str  # none, norm, value, both, a part
    clip_foreach: bool | None
    norm_type: float
    scaler: bool
    unscale: bool
    passes: int
    reduce_all: bool
    to_none: bool
    zero_early: bool
    autocast: bool
    # DDP
    as_view: bool
    batched: bool
    unused: bool
    static: bool
    hook: str

    def __str__(self) -> str:
        return ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in fields(self))


def draw(seed: int) -> Config:
    """A configuration that torch itself accepts."""
    r = random.Random(seed)

    def maybe(chance: float = 0.5) -> bool:
        return r.random() < chance

    dtype = r.choice(["float32"] * 5 + ["bfloat16", "float16", "float64"])
    small = dtype in ("bfloat16", "float16")
    branch = r.choice(["none", "none", "always", "sometimes", "frozen half-way"])
    unused = branch in ("sometimes", "frozen half-way") or maybe(0.2)
    static = not unused and maybe(0.2)
    kind = r.choice(["AdamW", "Adam", "SGD"])
    implementation = r.choice(["default", "for-loop", "foreach", "fused"])
    if kind == "SGD":
        momentum = r.choice([0.0, 0.9])
        nesterov = momentum > 0 and maybe(0.4)
        options: dict[str, Any] = {
            "momentum": momentum,
            "nesterov": nesterov,
            "dampening": 0.0 if nesterov else r.choice([0.0, 0.1]),
        }
    else:
        options = {"amsgrad": maybe(0.3), "betas": r.choice([(0.9, 0.999), (0.8, 0.9)]), "eps": r.choice([1e-8, 1e-6])}
    options |= {"weight_decay": r.choice([0.0, 0.01, 0.1]), "maximize": maybe(0.2)}
    if kind == "SGD" and implementation == "fused" and branch != "always":
        options["momentum"], options["nesterov"] = 0.0, False  # torch mixes up momentum of unused parameters
    masters = dtype != "float64" and maybe(0.8 if small else 0.1)
    if kind == "SGD" and options["momentum"] and small and not masters and implementation == "fused":
        implementation = "foreach"  # the fused kernel gives other bits each time, and is refused
    scaler = (masters or not small) and maybe(0.3) and not (implementation == "fused" and options.get("momentum"))
    passes = 1 if static else r.choice([1, 1, 2, 3])
    return Config(
        seed=seed,
        dtype=dtype,
        masters=masters,
        conv=not small and maybe(0.3),
        norm=not small and maybe(0.4),
        tied=maybe(0.25),
        frozen=maybe(0.3),
        branch=branch,
        kind=kind,
        groups=r.choice([1, 2, 3]),
        options=options,
        implementation=implementation,
        schedule=r.choice(["none", "lambda", "one cycle", "cosine", "by hand"]),
        tensor_lr=maybe(0.1),
        clip=r.choice(["none", "none", "norm", "norm", "value", "both", "a part"]),
        clip_foreach=r.choice([None, False, True]),
        norm_type=r.choice([2.0, 2.0, 1.0, float("inf")]),
        scaler=scaler,
        unscale=maybe(),
        passes=passes,
        reduce_all=passes > 1 and maybe(0.3),
        to_none=maybe(0.7),
        zero_early=maybe(),
        autocast=not small and dtype == "float32" and maybe(0.25),
        as_view=maybe(),
        batched=maybe(0.2),
        unused=unused,
        static=static,
        hook=r.choice(["none"] * 4 + ["allreduce_hook", "fp16_compress_hook", "bf16_compress_hook"]),
    )


class Net(nn.Module):
    """Layers as the configuration wants them; ``use_branch`` decides whether a forward uses the branch."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3) if config.conv else None
        first = 45 if config.conv else _WIDTH
        self.first = nn.Linear(first, 9)
        self.norm = nn.BatchNorm1d(9) if config.norm else None
        self.second = nn.Linear(9, 9)
        self.third = nn.Linear(9, 9, bias=not config.tied)
        self.branch = nn.Linear(9, 9) if config.branch != "none" else None
        if config.conv:
            self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if config.tied:
            self.third.weight = self.second.weight
        if config.frozen:
            self.second.bias.requires_grad_(False)
        self.use_branch = True
        self.to(getattr(torch, config.dtype))

    def forward(self, x: Tensor) -> Tensor:
        if self.conv is not None:
            x = self.conv(x).flatten(1)
        x = self.first(x)
        if self.norm is not None:
            x = self.norm(x)
        x = self.second(torch.tanh(x))
        if self.branch is not None and self.use_branch:
            x = x + self.branch(x)
        loss: Tensor = self.third(torch.relu(x)).float().square().mean()
        return loss


class Training:
    """Everything that a script makes from a configuration, and its loop; ranks draw data and branches of their own."""

    def __init__(self, config: Config, rank: int = 0) -> None:
        self.config, self.rank = config, rank
        torch.manual_seed(config.seed)
        self.net = Net(config)
        self.ddp = DistributedDataParallel(
            self.net,
            bucket_cap_mb=0.0003,
            gradient_as_bucket_view=config.as_view,
            batched_grad_copy=config.batched,
            find_unused_parameters=config.unused,
            static_graph=config.static,
        )
        if config.hook != "none":
            self.ddp._check_comm_hook = lambda hook: None  # torch wants NCCL for one of them
            self.ddp.register_comm_hook(None, getattr(default_hooks, config.hook))
        self.masters: dict[str, Tensor] = {}
        if config.masters:
            precise = torch.float32 if config.dtype != "float32" else torch.float64
            self.masters = {name: p.detach().to(precise, copy=True) for name, p in self.net.named_parameters()}
        self.optimizer = self._optimizer()
        self.scaler = torch.amp.GradScaler("cpu", enabled=config.scaler, init_scale=2.0**10, growth_interval=3)
        self.scheduler: Any = None
        self.step = 0
        torch.manual_seed(config.seed + rank)

    def make_scheduler(self) -> None:
        """After attaching, as a script may do it."""
        make: dict[str, Callable[[Optimizer], Any]] = {
            "lambda": lambda o: LambdaLR(o, lambda step: 1.0 / (1 + step)),
            "one cycle": lambda o: OneCycleLR(o, 0.05, total_steps=2 * STEPS, cycle_momentum=_has_momentum(o)),
            "cosine": lambda o: CosineAnnealingLR(o, STEPS),
        }
        if self.config.schedule in make:
            self.scheduler = make[self.config.schedule](self.optimizer)

    def iterate(self) -> None:
        """One iteration of the loop, from zero_grad to the scheduler's step."""
        config, r = self.config, random.Random(f"{self.config.seed} {self.step}")
        self.step += 1
        if config.branch == "frozen half-way" and self.net.branch is not None:
            frozen = 8 <= self.step < 14
            self.net.branch.requires_grad_(not frozen)
            if frozen:
                self.net.branch.zero_grad()
        if self.masters:  # the optimizer's zero_grad is for these alone
            self.net.zero_grad(set_to_none=config.to_none)
        if config.zero_early:
            self.optimizer.zero_grad(set_to_none=config.to_none)
        mine = random.Random(f"{config.seed} {self.step} {self.rank}")
        inf = config.scaler and r.random() < 0.2
        for index in range(config.passes):
            is_last = index == config.passes - 1
            self.net.use_branch = config.branch != "sometimes" or mine.random() < 0.4
            with contextlib.nullcontext() if is_last or config.reduce_all else self.ddp.no_sync():
                loss = self._loss(mine)
                if not config.zero_early and index == 0:
                    self.optimizer.zero_grad(set_to_none=config.to_none)
                loss = self.scaler.scale(loss) * (float("inf") if inf and is_last else 1.0)
                loss.backward()
        for name, master in self.masters.items():
            grad = self.net.get_parameter(name).grad
            master.grad = None if grad is None else grad.to(master.dtype)
        if config.unscale and config.scaler:
            self.scaler.unscale_(self.optimizer)
        self._clip()
        self.scaler.step(self.optimizer)
        for name, master in self.masters.items():
            self.net.get_parameter(name).detach().copy_(master)
        self.scaler.update()
        self._schedule()

    def _loss(self, r: random.Random) -> Tensor:
        shape = (4, 3, 5, 5) if self.config.conv else (4, _WIDTH)
        x = torch.randn(shape, dtype=getattr(torch, self.config.dtype)) * r.choice([1, 3])
        with torch.autocast("cpu", torch.bfloat16, enabled=self.config.autocast):
            loss: Tensor = self.ddp(x)
        return loss

    def _clip(self) -> None:
        clip, foreach = self.config.clip, self.config.clip_foreach
        params = list(self.masters.values()) or list(self.net.parameters())
        if clip == "a part":
            nn.utils.clip_grad_norm_(params[::2], 0.01, self.config.norm_type, foreach=foreach)
        if clip in ("value", "both"):
            nn.utils.clip_grad_value_(params, 0.003, foreach=foreach)
        if clip in ("norm", "both"):
            nn.utils.clip_grad_norm_((param for param in params), 0.02, self.config.norm_type, foreach=foreach)

    def _schedule(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step()
        elif self.config.schedule == "by hand":
            group = self.optimizer.param_groups[-1]
            group["weight_decay"] = 0.001 * self.step
            if "betas" in group:
                group["betas"] = (0.9 - 0.01 * self.step, group["betas"][1])

    def _optimizer(self) -> Optimizer:
        config = self.config
        cls: Any = {"AdamW": AdamW, "Adam": Adam, "SGD": SGD}[config.kind]
        params = list(self.masters.values()) or list(self.net.parameters())
        groups = [{"params": params[index :: config.groups]} for index in range(config.groups)]
        for index, group in enumerate(groups[1:], 1):
            group |= {"lr": 0.01 / index, "weight_decay": 0.02 * index}
        chosen = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
        implementation = chosen.get(config.implementation, {})
        lr: Any = 0.02
        if config.tensor_lr and config.implementation in ("for-loop", "fused") and config.schedule == "none":
            lr = torch.tensor(0.02)
        optimizer: Optimizer = cls(groups, lr=lr, **config.options, **implementation)
        return optimizer


def _has_momentum(optimizer: Optimizer) -> bool:
    return "betas" in optimizer.defaults or optimizer.defaults.get("momentum", 0) > 0
