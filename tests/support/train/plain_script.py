"""A plain DDP script without any mention of Checkmate: STORE OUT [LAST_STEP RANK]: that rank is killed after a step."""

import os
import random
import signal
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Noisy(Dataset[Tensor]):
    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> Tensor:
        if torch.utils.data.get_worker_info() is None:
            return torch.full((4,), float(index)) * (torch.rand(()) + random.random() + np.random.rand())
        return torch.full((4,), float(index))


def main() -> None:
    store, out, *kill = sys.argv[1:]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.GELU(), nn.Linear(8, 1))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0001, forward_sync_buffers=False)
    optimizer = AdamW(ddp.parameters(), lr=0.01)
    scheduler = LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(10 + rank)
    data = Noisy()
    sampler = DistributedSampler(data, world, rank)
    loader = DataLoader(data, 3, sampler=sampler, num_workers=int(os.environ.get("WORKERS", "0")))
    losses: list[float] = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in loader:
            loss = ddp(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if kill and [scheduler.last_epoch, rank] == [int(number) for number in kill]:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
    state = {"losses": losses, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state | {"scheduler": scheduler.state_dict(), "random": torch.rand(3)}, f"{out}.{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
