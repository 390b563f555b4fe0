"""PyTorch Lightning: ``Trainer(strategy="ddp", callbacks=[CheckmateCallback()])``, and every step is a checkpoint.

Lightning keeps counters of its own, of epochs, batches and steps, which decide when schedulers step and when training
ends. They travel with the state, and a restart goes on inside the epoch that was under way, as from Lightning's own
checkpoints, but at the very batch.
"""

from typing import Any

import lightning.pytorch as pl
from torch.nn.parallel import DistributedDataParallel

from checkmate.config import CheckmateError
from checkmate.train.attach import attach
from checkmate.train.boundary import Stateful
from checkmate.train.checkpoint import Checkpoint


class CheckmateCallback(pl.Callback):
    """Attaches when fitting starts, and restores what the shadow holds. ``checkpoint`` is what ``attach`` returned.

    Raises CheckmateError for what cannot be followed. Leaves out Lightning's sanity check: a restart has none.
    """

    def __init__(self) -> None:
        self.checkpoint: Checkpoint | None = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Everything is set up, no batch is drawn yet."""
        ddp = trainer.strategy.model
        if not isinstance(ddp, DistributedDataParallel):
            raise CheckmateError(f'{type(trainer.strategy).__name__} cannot be followed: use Trainer(strategy="ddp")')
        if len(trainer.optimizers) != 1:
            raise CheckmateError(f"{len(trainer.optimizers)} optimizers: one must hold all parameters that are trained")
        if trainer.ckpt_path is not None:
            raise CheckmateError("fit(ckpt_path=…) restores another state than the shadow's: leave it out")
        trainer.num_sanity_val_steps = 0
        self.checkpoint = attach(ddp, trainer.optimizers[0], stateful=self._stateful(trainer))
        self.checkpoint.resume(from_the_top=False)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Fitting ended."""
        self._close(finished=True)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """The last step may not be over."""
        self._close(finished=False)

    def _close(self, finished: bool) -> None:
        if self.checkpoint is not None:
            self.checkpoint.close(finished)

    def _stateful(self, trainer: pl.Trainer) -> dict[str, Stateful]:
        found: dict[str, Any] = {"loops": trainer.fit_loop}
        for index, config in enumerate(trainer.lr_scheduler_configs):
            found[f"scheduler {index}"] = config.scheduler
        for callback in trainer.callbacks:
            if callback is not self and callback.state_dict():
                found[f"callback {callback.state_key}"] = callback
        return found
