"""A plain script of two stages with two replicas each: STORE OUT [WORLD|REFUSED].

Stage 1 has no data of its own: it begins by receiving. WORLD: gradients are reduced over all ranks; REFUSED: stage 1
has an optimizer that cannot be followed.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader


def main() -> None:
    store, out, *how = sys.argv[1:]
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    torch.manual_seed(1)
    stage = rank // 2
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = None if "WORLD" in how else groups[stage]
    model = DistributedDataParallel(nn.Linear(4, 4), process_group=group)
    kind = torch.optim.Adagrad if stage == 1 and "REFUSED" in how else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.1)
    for item in DataLoader(torch.randn(3, 4)) if stage == 0 else range(3):
        batch = item if stage == 0 else torch.zeros(1, 4)
        dist.send(batch, rank + 2) if stage == 0 else dist.recv(batch, rank - 2)
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save(model.module.state_dict(), f"{out}.{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
