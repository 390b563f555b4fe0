"""A tiny GPT-2, made here, learns with Hugging Face's Trainer; the callback is all that mentions Checkmate.

    checkmate run --topology topology.yaml examples/train_transformers.py --epochs 3

Without Checkmate it runs under ``torchrun``, too, with ``--plain``.
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

SIZE = 24
"""Samples of the data set: 6 batches of 2 for each of two ranks."""


class Tokens(Dataset[dict[str, Tensor]]):
    """Random sequences, one token of each dropped at random whenever it is drawn."""

    def __init__(self) -> None:
        self.tokens = torch.randint(0, 64, (SIZE, 16), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.tokens[index].clone()
        tokens[torch.randint(0, 16, ())] = 0
        return {"input_ids": tokens, "labels": tokens}


class Report(TrainerCallback):
    """One line of every step."""

    def on_step_end(self, args: TrainingArguments, state: object, control: object, **kwargs: object) -> None:
        rate = kwargs["lr_scheduler"].get_last_lr()[0]
        sys.stdout.write(f"rank {args.process_index} step {state.global_step} lr {rate!r}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--accumulate", type=int, default=1, help="batches for each optimizer step")
    parser.add_argument("--out", type=Path, help="where rank 0 saves the final state")
    parser.add_argument("--plain", action="store_true", help="leave Checkmate out")
    args = parser.parse_args()
    torch.set_num_threads(1)

    arguments = TrainingArguments(
        output_dir="/nonexistent",
        use_cpu=True,
        num_train_epochs=args.epochs,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=args.accumulate,
        learning_rate=1e-2,
        warmup_steps=4,
        weight_decay=0.1,
        seed=3,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    torch.manual_seed(3)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
    trainer = Trainer(model, arguments, train_dataset=Tokens(), callbacks=[Report()])
    if not args.plain:
        from checkmate.train.huggingface import CheckmateCallback  # noqa: PLC0415

        trainer.add_callback(CheckmateCallback(trainer))
    trainer.train()
    if trainer.is_world_process_zero() and args.out is not None:
        torch.save({"model": model.state_dict(), "optimizer": trainer.optimizer.state_dict()}, args.out)


if __name__ == "__main__":
    main()
