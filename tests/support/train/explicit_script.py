"""The three-line form in a script that `checkmate run` started: STORE OUT."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import checkmate

store, _ = sys.argv[1:]
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
ddp = DistributedDataParallel(nn.Linear(4, 1))
optimizer = AdamW(ddp.parameters())
checkpoint = checkmate.attach(ddp, optimizer)
checkpoint.resume()
for _ in range(3):
    optimizer.zero_grad()
    ddp(torch.ones(2, 4)).sum().backward()
    optimizer.step()
checkpoint.close()
dist.destroy_process_group()
