"""A plain DDP script that kills itself: ``--die RANK@STEP:MOMENT …``, one for each start of the job, in order.

What it does between its deaths is what any script does: several buckets, dropout that differs between ranks, two
parameter groups, a learning rate that changes every step, epochs that are shorter than the run.

``--report`` gets one JSON line for each step of each rank, with a digest of parameters, optimizer state, learning rate
and loss, and one line for each death; times are of the machine's monotonic clock. ``--states`` is a folder for rank 0's
state after each step.
"""

import argparse
import hashlib
import importlib
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WIDTH = 128
LAYERS = 6
CLASSES = 10
BUCKET_MB = 0.15
BATCH = 4
BATCHES = 6
"""Of each rank in an epoch."""
ON_THE_WIRE_S = 1.0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--die", nargs="*", default=[], metavar="RANK@STEP:MOMENT")
    parser.add_argument("--default-adamw", action="store_true", help="not the fused one")
    parser.add_argument("--scaled", action="store_true", help="accumulate, scale the loss, skip a step, clip")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of each step")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--states", type=Path)
    return parser.parse_args()


class Net(nn.Module):
    """Layers of equal size, so that there are several buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.drop(torch.tanh(layer(x)))
        scores: Tensor = self.head(self.norm(x))
        return scores


class Death:
    """When this process kills itself, if it does."""

    def __init__(self, deaths: list[str], rank: int, report: Path | None) -> None:
        start = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self.step = 0
        self._report = report
        self._rank, self._start = rank, start
        self._when: tuple[int, str] | None = None
        if start < len(deaths):
            victim, when = deaths[start].split("@")
            step, moment = when.split(":")
            self._when = (int(step), moment) if int(victim) == rank else None

    def at(self, *moments: str) -> None:
        """The process is at these moments of the present step."""
        if self._when is not None and self._when[0] == self.step and self._when[1] in moments:
            self._die()

    def _die(self) -> NoReturn:
        assert self._when is not None
        note(self._report, rank=self._rank, start=self._start, step=self.step, died=self._when[1])
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")

    def arm(self, model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        """Watch the moments that are inside torch's own code."""
        net: Any = model.module
        net.layers[LAYERS // 2].register_forward_pre_hook(lambda *_: self.at("forward"))
        net.head.register_full_backward_hook(lambda *_: self.at("backward"))
        optimizer.register_step_pre_hook(lambda *_: self.at("step-pre"))
        optimizer.register_step_post_hook(lambda *_: self.at("step-post"))
        self._watch_groups(optimizer)
        self._watch_buckets(sum(param.numel() for param in model.parameters()))
        if self._when is not None and self._when[1] == "restore":
            self._watch_restore()

    def _watch_groups(self, optimizer: Any) -> None:
        """In the optimizer step, when the first group is updated and the second is not."""
        init_group, groups = optimizer._init_group, 0

        def watched(*args: Any, **kwargs: Any) -> Any:
            nonlocal groups
            groups += 1
            if groups % 2 == 0:
                self.at("half-stepped")
            return init_group(*args, **kwargs)

        optimizer._init_group = watched

    def _watch_buckets(self, elements: int) -> None:
        """At the launch of a bucket's all-reduce, and when part of the last one is on the wire."""
        all_reduce: Any = dist.all_reduce
        launched = 0

        def watched(tensor: Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
            nonlocal launched
            frames = _frames()
            work = all_reduce(tensor, *args, async_op=async_op, **kwargs)
            if async_op:
                is_first, launched = launched == 0, (launched + tensor.numel()) % elements
                is_last = launched == 0
                self.at(*["bucket-first"] * is_first, *["bucket-last"] * is_last)
                if is_last and self._when == (self.step, "bucket-inside"):
                    _wait(lambda: _frames() > frames, ON_THE_WIRE_S)
                    self.at("bucket-inside")
            return work

        dist.all_reduce = watched

    def _watch_restore(self) -> None:
        """While the state comes in from the shadow, half of the tensors being there."""
        client: Any = importlib.import_module("checkmate.train.client")  # only in a run with Checkmate
        receive_tensors = client.receive_tensors

        def watched(sock: Any, manifest: Any) -> NoReturn:
            receive_tensors(sock, manifest[: len(manifest) // 2])
            self._die()

        client.receive_tensors = watched


def _frames() -> int:
    """Frames that the plugin has sent so far; 0 without it."""
    if not os.environ.get("CHECKMATE_SHADOWS"):
        return 0
    counters: Any = importlib.import_module("checkmate.nccl_plugin.binding").Plugin().counters()
    return int(counters.plain_frames + counters.tagged_frames)


def _wait(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the all-reduce does not begin"


@dataclass
class Training:
    """What a step changes."""

    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    scheduler: LambdaLR
    scaler: torch.amp.GradScaler

    def backward(self, x: Tensor, y: Tensor) -> Tensor:
        """All of a step's gradients; with a scaler in two passes, and infinite ones in every third step."""
        self.optimizer.zero_grad()
        if not self.scaler.is_enabled():
            return self._pass(x, y, 1.0)
        with self.model.no_sync():
            self._pass(x, y, 1.0)
        return self._pass(x, y, float("inf") if self.scheduler.last_epoch % 3 == 1 else 1.0)

    def _pass(self, x: Tensor, y: Tensor, factor: float) -> Tensor:
        loss = nn.functional.cross_entropy(self.model(x), y)
        (self.scaler.scale(loss) * factor).backward()
        return loss

    def step(self) -> None:
        """Update the parameters."""
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def state(self) -> dict[str, Any]:
        """As examples/train.py saves it."""
        return {"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict()}

    def digest(self, loss: Tensor) -> str:
        """Of every bit that the next step depends on."""
        state = self.optimizer.state_dict()
        tensors = [*self.model.module.state_dict().values(), loss.detach()]
        tensors += [
            state["state"][index][key] for index in sorted(state["state"]) for key in sorted(state["state"][index])
        ]
        digest = hashlib.sha256(repr([group["lr"] for group in state["param_groups"]]).encode())
        for tensor in tensors:
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        return digest.hexdigest()


def note(path: Path | None, **values: Any) -> None:
    """Append one line; lines of several ranks never mix (O_APPEND)."""
    if path is not None:
        with path.open("ab", buffering=0) as file:
            file.write(json.dumps(values).encode() + b"\n")


def save(state: dict[str, Any], path: Path) -> None:
    """Under its name the file is always complete."""
    partial = path.with_name(path.name + ".partial")
    torch.save(state, partial)
    partial.replace(path)


def make_training(default_adamw: bool, scaled: bool) -> Training:
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), bucket_cap_mb=BUCKET_MB)
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = AdamW(groups, lr=1e-2, fused=None if default_adamw else True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2, enabled=scaled)
    return Training(model, optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step)), scaler)


def make_loader(world: int) -> tuple[DataLoader[Any], DistributedSampler[Any]]:
    generator = torch.Generator().manual_seed(1)
    samples = BATCH * BATCHES * world
    data = TensorDataset(
        torch.randn(samples, WIDTH, generator=generator), torch.randint(CLASSES, (samples,), generator=generator)
    )
    sampler: DistributedSampler[Any] = DistributedSampler(data, seed=2)
    return DataLoader(data, BATCH, sampler=sampler), sampler


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    death = Death(args.die, rank, args.report)
    training = make_training(args.default_adamw, args.scaled)
    torch.manual_seed(100 + rank)
    death.arm(training.model, training.optimizer)
    loader, sampler = make_loader(dist.get_world_size())
    start = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))

    scheduler = training.scheduler
    epoch = 0
    while scheduler.last_epoch < args.steps:
        sampler.set_epoch(epoch)
        for x, y in loader:
            if scheduler.last_epoch == args.steps:
                break
            death.step = scheduler.last_epoch + 1
            time.sleep(args.pause)
            loss = training.backward(x, y)
            death.at("reduced")
            training.step()
            death.at("stepped")
            scheduler.step()
            death.at("scheduled")
            where = {"rank": rank, "start": start, "step": scheduler.last_epoch}
            note(args.report, **where, time=time.monotonic(), digest=training.digest(loss))
            if rank == 0 and args.states is not None:
                save(training.state(), args.states / f"{scheduler.last_epoch}.pt")
        epoch += 1
    death.at("over")

    if rank == 0 and args.out is not None:
        save(training.state(), args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
