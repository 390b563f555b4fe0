"""Checkpoints on disk: PCcheck's engine (``engine``) and what is built on it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from checkmate.persist.checkpointer import Checkpointer as Checkpointer
    from checkmate.persist.coordinator import Coordinator as Coordinator
    from checkmate.persist.interval import AutoSaver as AutoSaver

__all__ = ["AutoSaver", "Checkpointer", "Coordinator"]


def __getattr__(name: str) -> Any:
    """Load what needs torch only when it is used."""
    if name == "AutoSaver":
        from checkmate.persist.interval import AutoSaver  # noqa: PLC0415

        return AutoSaver
    if name == "Checkpointer":
        from checkmate.persist.checkpointer import Checkpointer  # noqa: PLC0415

        return Checkpointer
    if name == "Coordinator":
        from checkmate.persist.coordinator import Coordinator  # noqa: PLC0415

        return Coordinator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
