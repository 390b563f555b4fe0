"""Checkmate: every data-parallel training iteration is a checkpoint, at no cost to the trainer."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from checkmate.train.attach import attach as attach
    from checkmate.train.checkpoint import Checkpoint as Checkpoint

__all__ = ["Checkpoint", "attach"]


def __getattr__(name: str) -> Any:
    """Load the trainer's side, and with it torch, only when it is used."""
    if name == "attach":
        from checkmate.train.attach import attach  # noqa: PLC0415

        return attach
    if name == "Checkpoint":
        from checkmate.train.checkpoint import Checkpoint  # noqa: PLC0415

        return Checkpoint
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
