"""Tensor x data parallel: each layer of a small GPT is split over some ranks, and that is replicated with DDP.

    torchrun --nproc-per-node 4 examples/train_tensor.py --parts 2 --params 200000 --steps 100

Plain PyTorch, no mention of Checkmate. Rank r holds part r mod T of replica r div T, where a layer has T parts.
"""

import torch
import torch.distributed as dist
from model import GPT, Text
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler
from train import argument_parser, parameter_groups, report, save, warmup_cosine


class _SumBackward(torch.autograd.Function):
    """The same input for all parts, whose gradients add up."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group  # type: ignore[attr-defined]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].clone()
        dist.all_reduce(grad, group=ctx.group)  # type: ignore[attr-defined]
        return grad, None


class _SumForward(torch.autograd.Function):
    """The parts' outputs add up; each gets the gradient of the sum."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class Column(nn.Linear):
    """Some of the outputs of a linear layer: the rows ``keep`` of its weight."""

    def __init__(self, whole: nn.Linear, keep: Tensor, group: dist.ProcessGroup) -> None:
        super().__init__(whole.in_features, len(keep))
        self.weight, self.bias = nn.Parameter(whole.weight[keep].detach()), nn.Parameter(whole.bias[keep].detach())
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(_SumBackward.apply(x, self._group))


class Row(nn.Linear):
    """What some of the inputs of a linear layer, the columns ``keep`` of its weight, add to all outputs."""

    def __init__(self, whole: nn.Linear, keep: Tensor, group: dist.ProcessGroup) -> None:
        super().__init__(len(keep), whole.out_features)
        self.weight, self.bias = nn.Parameter(whole.weight[:, keep].detach()), nn.Parameter(whole.bias.detach().clone())
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        return _SumForward.apply(nn.functional.linear(x, self.weight), self._group) + self.bias


def split(gpt: GPT, part: int, parts: int, group: dist.ProcessGroup) -> GPT:
    """Replace each layer's matrices by one of ``parts`` parts: some heads, some hidden units."""
    for layer in gpt.layers:
        heads, width = layer.heads, layer.project.in_features
        mine = torch.arange(width).view(heads, -1).chunk(parts)[part].flatten()
        hidden = torch.arange(layer.mlp[0].out_features).chunk(parts)[part]
        layer.heads = heads // parts
        layer.qkv = Column(layer.qkv, torch.cat([mine + offset for offset in (0, width, 2 * width)]), group)
        layer.project = Row(layer.project, mine, group)
        layer.mlp[0], layer.mlp[2] = Column(layer.mlp[0], hidden, group), Row(layer.mlp[2], hidden, group)
    return gpt


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--parts", type=int, default=2, help="parts of each layer: a divisor of its number of heads")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo")
    replicas = dist.get_world_size() // args.parts
    mesh = init_device_mesh("cpu", (replicas, args.parts), mesh_dim_names=("replica", "part"))
    replica, part = mesh.get_local_rank("replica"), mesh.get_local_rank("part")

    torch.manual_seed(args.seed)
    gpt = split(GPT(args.params, args.block), part, args.parts, mesh.get_group("part"))
    model = DistributedDataParallel(gpt, process_group=mesh.get_group("replica"), bucket_cap_mb=args.bucket_cap_mb)
    torch.manual_seed(args.seed + 1 + replica)  # dropout differs between replicas, not between parts
    optimizer = AdamW(parameter_groups(model), lr=args.lr, betas=(0.9, 0.95), fused=True)
    scheduler = LambdaLR(optimizer, lambda step: warmup_cosine(step, args.steps))

    text = Text(args.text, args.block)
    sampler = DistributedSampler(text, replicas, replica, seed=args.seed, drop_last=True)
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
            optimizer.step()
            scheduler.step()
            report(args.metrics, dist.get_rank(), scheduler.last_epoch, loss.item())
        epoch += 1

    if replica == 0 and args.out is not None:
        state = {"model": gpt.state_dict(), "optimizer": optimizer.state_dict()}
        save(state, args.out.with_name(f"{args.out.name}.{part}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
