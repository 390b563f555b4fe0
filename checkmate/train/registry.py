"""Optimizers and learning-rate schedulers of this process, in order of creation: a script does not hand them to us."""

import functools
import weakref
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

_optimizers: list[weakref.ReferenceType[torch.optim.Optimizer]] = []
_schedulers: list[weakref.ReferenceType[LRScheduler]] = []


@functools.cache
def install() -> None:
    """Note every optimizer and scheduler that is made from now on."""
    _follow(torch.optim.Optimizer, _optimizers)
    _follow(LRScheduler, _schedulers)


def optimizers() -> list[torch.optim.Optimizer]:
    """Those alive."""
    return [optimizer for reference in _optimizers if (optimizer := reference()) is not None]


def schedulers(optimizer: torch.optim.Optimizer) -> list[LRScheduler]:
    """Those alive that drive this optimizer."""
    alive = [scheduler for reference in _schedulers if (scheduler := reference()) is not None]
    return [scheduler for scheduler in alive if getattr(scheduler, "optimizer", None) is optimizer]


def _follow(cls: type[Any], made: list[weakref.ReferenceType[Any]]) -> None:
    """Through ``__new__``: some schedulers never call the base class's ``__init__``."""

    def create(kind: type[Any], *_args: Any, **_kwargs: Any) -> Any:
        item = object.__new__(kind)
        made.append(weakref.ref(item))
        return item

    cls.__new__ = staticmethod(create)  # type: ignore[assignment]
