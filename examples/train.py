"""Train a small GPT on the licence texts that every Debian machine has, with DistributedDataParallel.

    torchrun --nproc-per-node 2 examples/train.py --steps 100

Nothing here knows of Checkmate; ``checkmate run … examples/train.py`` makes every step a checkpoint.
"""

import argparse
import json
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
from model import GPT, Text
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler


def argument_parser(description: str | None = __doc__) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=2, help="windows per rank and step")
    parser.add_argument("--block", type=int, default=64, help="tokens per window")
    parser.add_argument("--params", type=int, default=3_000_000, help="approximate number of parameters")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate after warm-up")
    parser.add_argument("--bucket-cap-mb", type=float, default=2, help="size of DDP's gradient buckets in MiB")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="torch threads per rank")
    parser.add_argument("--workers", type=int, default=0, help="data loading processes per rank")
    parser.add_argument("--text", type=Path, default=Path("/usr/share/common-licenses"), help="folder of text files")
    parser.add_argument("--out", type=Path, help="where rank 0 saves the final state")
    parser.add_argument("--metrics", type=Path, help="file to which each rank appends its loss of every step")
    return parser


def main() -> None:
    args = argument_parser().parse_args()
    torch.set_num_threads(args.threads)
    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")

    torch.manual_seed(args.seed)
    model = DistributedDataParallel(GPT(args.params, args.block).to(device), bucket_cap_mb=args.bucket_cap_mb)
    torch.manual_seed(args.seed + 1 + rank)  # dropout differs between ranks
    optimizer = AdamW(parameter_groups(model), lr=args.lr, betas=(0.9, 0.95), fused=True)
    scheduler = LambdaLR(optimizer, lambda step: warmup_cosine(step, args.steps))

    text = Text(args.text, args.block)
    sampler = DistributedSampler(text, seed=args.seed, drop_last=True)
    loader = DataLoader(text, args.batch, sampler=sampler, num_workers=args.workers, drop_last=True)

    epoch = 0
    while scheduler.last_epoch < args.steps:
        sampler.set_epoch(epoch)
        for tokens, targets in loader:
            if scheduler.last_epoch == args.steps:
                break
            loss = model(tokens.to(device), targets.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            report(args.metrics, rank, scheduler.last_epoch, loss.item())
        epoch += 1

    if rank == 0 and args.out is not None:
        save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, args.out)
    dist.destroy_process_group()


def parameter_groups(model: nn.Module) -> list[dict[str, object]]:
    """Matrices decay, biases and norms do not."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]


def warmup_cosine(step: int, steps: int) -> float:
    """Factor of the learning rate: linear warm-up over a tenth of the steps, then a cosine down to a tenth."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))


def report(metrics: Path | None, rank: int, step: int, loss: float) -> None:
    if rank == 0:
        print(f"step {step} loss {loss:.4f}", flush=True)
    if metrics is not None:
        with metrics.open("a") as file:
            file.write(json.dumps({"rank": rank, "step": step, "loss": loss}) + "\n")


def save(state: dict[str, object], path: Path) -> None:
    """Under its name the file is always complete."""
    partial = path.with_name(path.name + ".partial")
    torch.save(state, partial)
    partial.replace(path)


if __name__ == "__main__":
    main()
