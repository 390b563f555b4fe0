"""One rank of test_train_hook: trains the same model with plain DDP and with our hook, compares every gradient."""

import itertools
import os
import sys

import torch
import torch.distributed as dist
from fake_shadow import FakePlugin
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from checkmate.tensors import is_same
from checkmate.train.hook import GradientHook
from checkmate.train.reductions import Owner

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def gradients(hooked: bool, as_view: bool, batched: bool, to_none: bool) -> list[Tensor]:
    """All gradients of three iterations, the second with accumulation."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 5), nn.Linear(5, 5).bfloat16())
    model[2].register_forward_hook(lambda _m, _a, out: out.bfloat16())
    ddp = DistributedDataParallel(
        model, gradient_as_bucket_view=as_view, batched_grad_copy=batched, bucket_cap_mb=0.0003
    )
    if hooked:
        GradientHook(ddp, Owner(FakePlugin(), lambda: 1, lambda work: work()))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    torch.manual_seed(100 + RANK)
    seen = []
    for iteration in range(3):
        optimizer.zero_grad(set_to_none=to_none)
        if iteration == 1:
            with ddp.no_sync():
                ddp(torch.randn(4, 7)).float().square().mean().backward()
        ddp(torch.randn(4, 7)).float().square().mean().backward()
        seen += [p.grad.clone() for p in ddp.parameters() if p.grad is not None]
        optimizer.step()
    assert len(seen) == 3 * 6
    return seen


def main() -> None:
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=RANK, world_size=WORLD)
    for options in itertools.product([False, True], repeat=3):
        plain, ours = gradients(False, *options), gradients(True, *options)
        assert all(is_same(a, b) for a, b in zip(plain, ours, strict=True)), f"as_view, batched, to_none = {options}"
    dist.destroy_process_group()


main()
