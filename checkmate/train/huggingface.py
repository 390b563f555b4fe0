"""Hugging Face Transformers: ``trainer.add_callback(CheckmateCallback(trainer))``, and every step is a checkpoint.

A restarted ``trainer.train()`` repeats its epochs from the first. Those that are over yield nothing, for which the
Trainer would give up: the callback tells it to go on, with the counters of the step that was restored.
"""

from typing import Any

from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from checkmate.config import CheckmateError
from checkmate.train.attach import attach
from checkmate.train.checkpoint import Checkpoint

_COUNTERS = ("global_step", "best_metric", "best_global_step", "total_flos", "num_input_tokens_seen")


class CheckmateCallback(TrainerCallback):
    """Attaches when training begins, and restores what the shadow holds. ``checkpoint`` is what ``attach`` returned.

    Add it after all other callbacks. Raises CheckmateError for what cannot be followed. Until the end of the epoch in
    which it goes on, a restarted Trainer logs an ``epoch`` that is too low.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.checkpoint: Checkpoint | None = None
        self._trainer = trainer
        self._repeats = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Everything is set up, no batch is drawn yet."""
        ddp, optimizer = self._trainer.model_wrapped, self._trainer.optimizer
        if not isinstance(ddp, DistributedDataParallel):
            raise CheckmateError(f"the Trainer made a {type(ddp).__name__} of the model: only DDP can be followed")
        if state.global_step:
            raise CheckmateError("resume_from_checkpoint restores another state than the shadow's: leave it out")
        try:
            batches, group = len(kwargs["train_dataloader"]), args.gradient_accumulation_steps
        except TypeError:
            raise CheckmateError(
                "the length of the data is unknown: give the Trainer a data set with __len__"
            ) from None
        if batches % group:
            raise CheckmateError(
                f"an epoch has {batches} batches, gradient_accumulation_steps is {group}: it must divide them, because "
                "a restarted Trainer counts batches from where it goes on"
            )
        stateful = {"trainer": _Counters(state), "scheduler": self._trainer.lr_scheduler}
        self.checkpoint = attach(ddp, getattr(optimizer, "optimizer", optimizer), stateful=stateful)
        self._repeats = self.checkpoint.resume() is not None

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """This epoch was not over."""
        self._repeats = False

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """One that was over yielded nothing: that is neither a reason to stop nor one to log, evaluate or save."""
        if self._repeats:
            control.should_training_stop = state.global_step >= state.max_steps
            control.should_log = control.should_evaluate = control.should_save = False

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Hand over the last step."""
        if self.checkpoint is not None:
            self.checkpoint.close()


class _Counters:
    """What of the Trainer's state decides how training goes on."""

    def __init__(self, state: TrainerState) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self._state, name) for name in _COUNTERS if hasattr(self._state, name)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self._state, name, value)
