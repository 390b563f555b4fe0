"""A small model, its training, and how a process is pointed to a fake shadow."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from support.train.fake_shadow import FakeShadow


def use(shadow: FakeShadow, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in shadow.environment(folder).items():
        monkeypatch.setenv(name, value)


class Net(nn.Module):
    """Two layers, dropout, batch norm: parameters, random numbers and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.second = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.second(self.drop(self.norm(self.first(x)).relu())).square().mean()
        return loss


def build(**kwargs: Any) -> tuple[DistributedDataParallel, AdamW]:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Net(), bucket_cap_mb=0.0001, **kwargs)
    return ddp, AdamW(ddp.parameters(), lr=0.01)


def train(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        loss = ddp(torch.randn(6, 4))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
