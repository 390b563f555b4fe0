"""HSDP: the parameters of a small GPT are sharded over some ranks with FSDP2, and that is replicated.

    torchrun --nproc-per-node 4 examples/train_hsdp.py --shards 2 --steps 100

Plain PyTorch, no mention of Checkmate. Rank r holds shard r mod S of replica r div S, where there are S shards.
"""

from typing import Any

import torch
import torch.distributed as dist
from model import GPT, Text
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler
from train import argument_parser, parameter_groups, report, save, warmup_cosine


def local(state: Any) -> Any:
    """A nested state with this rank's shards of its tensors."""
    if isinstance(state, dict):
        return {key: local(value) for key, value in state.items()}
    return state.to_local() if isinstance(state, DTensor) else state


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--shards", type=int, default=2, help="ranks that share the parameters of one replica")
    parser.add_argument("--clip", type=float, default=1.0, help="norm to which gradients are clipped")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh(
        "cpu", (dist.get_world_size() // args.shards, args.shards), mesh_dim_names=("replica", "shard")
    )

    torch.manual_seed(args.seed)
    model = GPT(args.params, args.block)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
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
            loss = model(tokens, targets)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            scheduler.step()
            report(args.metrics, rank, scheduler.last_epoch, loss.item())
        epoch += 1

    if mesh.get_local_rank("replica") == 0 and args.out is not None:
        state = {"model": local(model.state_dict()), "optimizer": local(optimizer.state_dict())}
        save(state, args.out.with_name(f"{args.out.name}.{mesh.get_local_rank('shard')}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
