"""examples/train.py with Checkmate attached by hand: the three lines marked below are all the difference.

Start it with ``torchrun`` after setting CHECKMATE_SHADOWS, CHECKMATE_TOKEN_FILE and CHECKMATE_JOB (``checkmate run``
sets them, and leaves a module that the script has attached alone).
"""

import os

import torch
import torch.distributed as dist
from model import GPT, Text
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler
from train import argument_parser, parameter_groups, report, save, warmup_cosine

import checkmate
from checkmate.nccl_plugin.ring import backend  # noqa: F401 - for CPU tensors; with NCCL the plugin is enough


def main() -> None:
    args = argument_parser(__doc__).parse_args()
    torch.set_num_threads(args.threads)
    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "checkmate")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")

    torch.manual_seed(args.seed)
    model = DistributedDataParallel(GPT(args.params, args.block).to(device), bucket_cap_mb=args.bucket_cap_mb)
    torch.manual_seed(args.seed + 1 + rank)  # dropout differs between ranks
    optimizer = AdamW(parameter_groups(model), lr=args.lr, betas=(0.9, 0.95), fused=True)
    scheduler = LambdaLR(optimizer, lambda step: warmup_cosine(step, args.steps))
    checkpoint = checkmate.attach(model, optimizer, stateful={"scheduler": scheduler})  # 1
    start = checkpoint.resume()  # 2
    if rank == 0:
        print("fresh start" if start is None else f"resumed after step {start}", flush=True)

    text = Text(args.text, args.block)
    sampler = DistributedSampler(text, seed=args.seed, drop_last=True)
    loader = DataLoader(text, args.batch, sampler=sampler, num_workers=args.workers, drop_last=True)

    epoch = 0
    while scheduler.last_epoch < args.steps:
        sampler.set_epoch(epoch)
        for tokens, targets in loader:  # continues where the restored step left it
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
    checkpoint.close()  # 3
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
