"""A loop of one's own with Hugging Face accelerate, no mention of Checkmate: a small network learns a function.

checkmate run --topology topology.yaml examples/train_accelerate.py --epochs 3
"""

import argparse
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

SIZE = 24
"""Samples of the data set: 6 batches of 2 for each of two ranks."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--accumulate", type=int, default=1, help="batches for each optimizer step")
    parser.add_argument("--out", type=Path, help="where rank 0 saves the final state")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(3)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.accumulate)

    x = torch.randn(SIZE, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True).sin())
    network = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
    adam = torch.optim.Adam(network.parameters(), lr=0.01)
    model, optimizer, loader, scheduler = accelerator.prepare(
        network, adam, DataLoader(data, batch_size=2, shuffle=True), CosineAnnealingLR(adam, 80)
    )
    for _epoch in range(args.epochs):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                step = int(adam.state_dict()["state"][0]["step"])
                where = f"rank {accelerator.process_index} step {step}"
                sys.stdout.write(f"{where} lr {scheduler.get_last_lr()[0]!r} loss {loss.item()!r}\n")

    if accelerator.is_main_process and args.out is not None:
        torch.save({"model": network.state_dict(), "optimizer": adam.state_dict()}, args.out)
    accelerator.end_training()


if __name__ == "__main__":
    main()
