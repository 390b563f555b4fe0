"""A training job in one process that sends to a shadow what a real one would: the tests' reference."""

import copy
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from checkmate.protocol import Layout, Seed, StepRecord, receive
from checkmate.tensors import is_same, named_state, pack_group, pack_state, rounds_by_place

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def over_the_wire(message: Any) -> Any:
    """The message as its receiver sees it (msgpack makes tuples lists)."""

    class Once:
        data = message.encode()

        def recv(self, count: int) -> bytes:
            part, self.data = self.data[:count], self.data[count:]
            return part

    return receive(Once())  # type: ignore[arg-type]


def small_model(seed: int = 0) -> nn.Module:
    """A convolution in channels-last order, linear layers, a frozen parameter, an odd number of elements."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(45, 33), nn.Tanh(), nn.Linear(33, 7))
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    net[3].bias.requires_grad_(False)
    return net


def two_groups(net: nn.Module) -> list[dict[str, Any]]:
    """Weight decay for matrices only, as most language model trainers have it."""
    params = list(net.parameters())
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0, "lr": 0.02},
    ]


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    """AdamW with two groups."""
    return torch.optim.AdamW(two_groups(net), lr=0.01)


@dataclass
class Step:
    """What one step puts on the networks."""

    record: StepRecord
    layout: Layout
    buckets: dict[int, bytearray]


class Trainer:
    """Model, optimizer and LR schedule; ``train`` makes one step and returns what a shadow would get."""

    def __init__(
        self,
        make: MakeOptimizer = adamw,
        model: Callable[[], nn.Module] = small_model,
        buckets: int = 3,
        dtype: torch.dtype = torch.float32,
    ):
        self.net = model()
        self.optimizer = make(self.net)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda t: 1.0 / (1 + t))
        self.step = 0
        self._buckets = buckets
        self._dtype = next(self.net.parameters()).dtype

    def seed(self) -> tuple[Seed, list[Tensor]]:
        """The state now, the tensors copied."""
        description, manifest, tensors = pack_state(*named_state(self.net), self.optimizer)
        seed = over_the_wire(Seed(self.step, description, manifest))
        return seed, [tensor.clone() for tensor in tensors]

    def train(self, skip: bool = False) -> Step:
        """One step on data that depend on the step alone."""
        self.step += 1
        torch.manual_seed(self.step)
        self.optimizer.zero_grad()
        self.net(torch.randn(4, 3, 5, 5).to(self._dtype)).square().mean().backward()
        layout, buckets = self._place()
        groups = [pack_group(group) for group in self.optimizer.param_groups]
        record = StepRecord(self.step, layout.digest, groups, skip, threads=self._threads)
        if not skip:
            self.optimizer.step()
            self.scheduler.step()
        return Step(over_the_wire(record), over_the_wire(layout), buckets)

    @property
    def _threads(self) -> int:
        return torch.get_num_threads() if any(map(rounds_by_place, self.net.parameters())) else 0

    def boundary(self, rank: int = 0) -> dict[str, Any]:
        """What this rank would send at its next forward."""
        return {"rank": rank, "after": self.step}

    def snapshot(self) -> dict[str, Any]:
        """Copies of the state dicts."""
        return copy.deepcopy({"model": self.net.state_dict(), "optimizer": self.optimizer.state_dict()})

    def _place(self) -> tuple[Layout, dict[int, bytearray]]:
        """Gradients in reverse order into buckets, in memory order, as DDP does it."""
        ready = [(name, p) for name, p in reversed(list(self.net.named_parameters())) if p.grad is not None]
        share = -(-len(ready) // self._buckets)
        lines, data = [], {}
        for bucket in range(self._buckets):
            members = ready[bucket * share : (bucket + 1) * share]
            place, first, flat = [], 0, []
            for name, param in members:
                place.append([name, first, param.numel()])
                first += param.numel()
                stored = torch.empty_like(param).copy_(param.grad)
                flat.append(stored.as_strided((stored.numel(),), (1,)))
            raw = torch.cat(flat) if flat else torch.empty(0)
            data[bucket] = bytearray(raw.view(torch.uint8).numpy().tobytes())
            dtype = str(self._dtype).removeprefix("torch.")
            lines.append({"bucket": bucket, "bytes": len(data[bucket]), "dtype": dtype, "params": place})
        return Layout(hashlib.sha256(repr(lines).encode()).hexdigest(), lines), data


def differing(left: Any, right: Any, path: str = "") -> list[str]:
    """Paths at which two nested states differ in value, type or any bit."""
    if isinstance(left, Tensor):
        return [] if isinstance(right, Tensor) and is_same(left.detach(), right.detach()) else [path]
    if type(left) is not type(right):
        return [f"{path}: type"]
    if isinstance(left, list | tuple):
        left, right = dict(enumerate(left)), dict(enumerate(right))
    if not isinstance(left, dict):
        return [] if left == right else [path]
    if left.keys() != right.keys():
        return [f"{path}: keys"]
    return [text for key in left for text in differing(left[key], right[key], f"{path}/{key}")]
