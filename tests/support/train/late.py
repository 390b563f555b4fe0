"""One rank of a test in which the shadow comes late: trains for some steps after it joined."""

import os
import sys
import time

import torch
import torch.distributed as dist
from fake_shadow import FakePlugin
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import checkmate
from checkmate.train import attach, checkpoint, checks

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
plugin = FakePlugin()
attach.load_plugin = lambda: plugin
checks.CARRIERS.append("gloo")
checkpoint.BEGIN_S = 0.2

store, minutes = sys.argv[1], float(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=RANK, world_size=WORLD)
ddp = DistributedDataParallel(nn.Linear(2, 2))
optimizer = SGD(ddp.parameters(), lr=0.1)
followed = checkmate.attach(ddp, optimizer)
assert followed.resume() is None
print("training", flush=True)
end = time.monotonic() + 60 * minutes
joined = 0
enough = torch.zeros(())
while not enough and time.monotonic() < end:
    optimizer.zero_grad()
    ddp(torch.randn(3, 2)).sum().backward()
    optimizer.step()
    time.sleep(0.05)
    joined += plugin.incarnation == 1 and followed.committed is not None
    enough = torch.tensor(float(joined > 60))
    dist.all_reduce(enough, dist.ReduceOp.MIN)
dist.destroy_process_group()
