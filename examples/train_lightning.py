"""A small network learns with PyTorch Lightning; the callback is all that mentions Checkmate.

    checkmate run --topology topology.yaml examples/train_lightning.py --epochs 3

Without Checkmate it runs under ``torchrun``, too, with ``--plain``.
"""

import argparse
import os
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
from torch.utils.data import DataLoader, Dataset, TensorDataset

SIZE = 24
"""Samples of the data set: 6 batches of 2 for each of two ranks."""


class Network(pl.LightningModule):
    """Layers, dropout and batch norm: random numbers and buffers, too."""

    def __init__(self, every_step: bool) -> None:
        super().__init__()
        self.every_step = every_step
        self.layers = nn.Sequential(
            nn.Linear(8, 32),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(32, 32),
            nn.ReLU(),
            nn.Linear(32, 1),
        )

    def training_step(self, batch: tuple[Tensor, Tensor], _index: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.layers(x), y)
        where = f"rank {self.global_rank} step {self.global_step + 1} epoch {self.current_epoch}"
        sys.stdout.write(f"{where} lr {self.optimizers().param_groups[0]['lr']!r} loss {loss.item()!r}\n")
        return loss

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        if self.every_step:
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": CosineAnnealingLR(optimizer, 40), "interval": "step"},
            }
        return {"optimizer": optimizer, "lr_scheduler": StepLR(optimizer, 1, gamma=0.5)}


def data() -> Dataset[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SIZE, 8, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--accumulate", type=int, default=1, help="batches for each optimizer step")
    parser.add_argument("--schedule-every-step", action="store_true", help="rather than once an epoch")
    parser.add_argument("--out", type=Path, help="where rank 0 saves the final state")
    parser.add_argument("--plain", action="store_true", help="leave Checkmate out")
    args = parser.parse_args()
    torch.set_num_threads(1)
    pl.seed_everything(1)

    callbacks: list[pl.Callback] = []
    if not args.plain:
        from checkmate.train.lightning import CheckmateCallback  # noqa: PLC0415

        callbacks.append(CheckmateCallback())
    trainer = pl.Trainer(
        strategy="ddp",
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        max_epochs=args.epochs,
        accumulate_grad_batches=args.accumulate,
        gradient_clip_val=0.5,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    network = Network(args.schedule_every_step)
    trainer.fit(network, DataLoader(data(), batch_size=2, shuffle=True))
    if trainer.is_global_zero and args.out is not None:
        torch.save({"model": network.state_dict(), "optimizer": trainer.optimizers[0].state_dict()}, args.out)


if __name__ == "__main__":
    main()
