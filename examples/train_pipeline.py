"""Pipeline x data parallel: a small GPT in stages, each stage on several ranks with DistributedDataParallel.

    torchrun --nproc-per-node 4 examples/train_pipeline.py --stages 2 --steps 100

Plain PyTorch, no mention of Checkmate. Rank r is replica r mod D of stage r div D, where each stage has D replicas.
"""

import torch
import torch.distributed as dist
from model import GPT, VOCABULARY, Text
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler
from train import argument_parser, parameter_groups, report, save, warmup_cosine


class Stage(nn.Module):
    """One of ``count`` parts of a GPT: tokens [batch, time] or activations in, activations or logits out."""

    def __init__(self, gpt: GPT, index: int, count: int) -> None:
        super().__init__()
        share = len(gpt.layers) // count
        self.is_first, self.is_last = index == 0, index == count - 1
        if self.is_first:
            self.tokens, self.positions, self.drop = gpt.tokens, gpt.positions, gpt.drop
        self.layers = gpt.layers[index * share : None if self.is_last else (index + 1) * share]
        if self.is_last:
            self.norm, self.head = gpt.norm, gpt.head

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            x = self.drop(self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device)))
        x = self.layers(x)
        return self.head(self.norm(x)) if self.is_last else x


def clip(model: nn.Module, max_norm: float, stages: dist.ProcessGroup) -> None:
    """One norm over all stages decides for each, as if the model were in one piece."""
    square = nn.utils.get_total_norm([param.grad for param in model.parameters() if param.grad is not None]) ** 2
    dist.all_reduce(square, group=stages)
    nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, square.sqrt())


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--stages", type=int, default=2, help="parts of the model")
    parser.add_argument("--microbatches", type=int, default=2, help="parts of a batch")
    parser.add_argument("--clip", type=float, default=1.0, help="norm to which gradients are clipped")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo")
    rank, replicas = dist.get_rank(), dist.get_world_size() // args.stages
    mesh = init_device_mesh("cpu", (args.stages, replicas), mesh_dim_names=("stage", "replica"))
    index, replica = mesh.get_local_rank("stage"), mesh.get_local_rank("replica")

    torch.manual_seed(args.seed)
    gpt = GPT(args.params, args.block)
    width = gpt.tokens.embedding_dim
    part = Stage(gpt, index, args.stages)
    model = DistributedDataParallel(part, process_group=mesh.get_group("replica"), bucket_cap_mb=args.bucket_cap_mb)
    torch.manual_seed(args.seed + 1 + rank)  # dropout differs between ranks
    optimizer = AdamW(parameter_groups(model), lr=args.lr, betas=(0.9, 0.95), fused=True)
    scheduler = LambdaLR(optimizer, lambda step: warmup_cosine(step, args.steps))

    micro = args.batch // args.microbatches
    tokens = torch.zeros(micro, args.block, dtype=torch.int64)
    activations = torch.zeros(micro, args.block, width, requires_grad=True)
    stage = PipelineStage(
        model,
        index,
        args.stages,
        torch.device("cpu"),
        input_args=tokens if part.is_first else activations,
        output_args=torch.zeros(micro, args.block, VOCABULARY, requires_grad=True) if part.is_last else activations,
        group=mesh.get_group("stage"),
    )

    def loss_of_part(logits: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) / args.microbatches

    # The loss is scaled rather than the gradients, which then are what the all-reduce made.
    schedule = Schedule1F1B(stage, args.microbatches, loss_of_part, scale_grads=False)

    text = Text(args.text, args.block)
    sampler = DistributedSampler(text, replicas, replica, seed=args.seed, drop_last=True)
    loader = DataLoader(text, args.batch, sampler=sampler, num_workers=args.workers, drop_last=True)

    epoch = 0
    while scheduler.last_epoch < args.steps:
        sampler.set_epoch(epoch)
        for tokens, targets in loader:
            if scheduler.last_epoch == args.steps:
                break
            optimizer.zero_grad()
            losses: list[Tensor] = []
            schedule.step(*([tokens] if part.is_first else []), target=targets if part.is_last else None, losses=losses)
            clip(model, args.clip, mesh.get_group("stage"))
            optimizer.step()
            scheduler.step()
            if part.is_last:
                report(args.metrics, replica, scheduler.last_epoch, sum(loss.item() for loss in losses))
        epoch += 1

    if replica == 0 and args.out is not None:
        state = {"model": part.state_dict(), "optimizer": optimizer.state_dict()}
        save(state, args.out.with_name(f"{args.out.name}.{index}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
