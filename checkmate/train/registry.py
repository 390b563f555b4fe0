"""Optimizers, learning-rate schedulers and gradient scalers of this process, in order of creation: a script does not
hand them to us."""

import functools
import gc
import weakref
from typing import Any, TypeVar

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler

T = TypeVar("T")

_optimizers: list[weakref.ReferenceType[torch.optim.Optimizer]] = []
_schedulers: list[weakref.ReferenceType[LRScheduler]] = []
_scalers: list[weakref.ReferenceType[GradScaler]] = []


@functools.cache
def install() -> None:
    """Note every optimizer, scheduler and scaler that is made from now on."""
    _scalers.extend(map(weakref.ref, alive(GradScaler)))
    _follow(torch.optim.Optimizer, _optimizers)
    _follow(LRScheduler, _schedulers)
    _follow(GradScaler, _scalers)


def optimizers() -> list[torch.optim.Optimizer]:
    """Those alive."""
    there = [optimizer for reference in _optimizers if (optimizer := reference()) is not None]
    return [optimizer for optimizer in there if _owns_groups(optimizer)]


def all_optimizers() -> list[torch.optim.Optimizer]:
    """Those alive, made before ``install``, too; slow."""
    return [optimizer for optimizer in alive(torch.optim.Optimizer) if _owns_groups(optimizer)]


def schedulers(optimizer: torch.optim.Optimizer) -> list[LRScheduler]:
    """Those alive that drive this optimizer, or one that wraps it."""
    there = [scheduler for reference in _schedulers if (scheduler := reference()) is not None]
    groups = optimizer.param_groups
    return [one for one in there if getattr(getattr(one, "optimizer", None), "param_groups", None) is groups]


def scalers() -> list[GradScaler]:
    """Those alive and enabled, made before ``install``, too."""
    there = [scaler for reference in _scalers if (scaler := reference()) is not None]
    return [scaler for scaler in there if getattr(scaler, "_enabled", False)]


def alive(cls: type[T]) -> list[T]:
    """All objects of a class and its subclasses; slow."""
    return [item for item in gc.get_objects() if issubclass(type(item), cls)]


def _owns_groups(optimizer: torch.optim.Optimizer) -> bool:
    """False for what frameworks wrap around an optimizer: it looks like one, and shows the groups of the one inside."""
    return "param_groups" in vars(optimizer)


def _follow(cls: type[Any], made: list[weakref.ReferenceType[Any]]) -> None:
    """Through ``__new__``: some schedulers never call the base class's ``__init__``."""

    def create(kind: type[Any], *_args: Any, **_kwargs: Any) -> Any:
        item = object.__new__(kind)
        made.append(weakref.ref(item))
        return item

    cls.__new__ = staticmethod(create)  # type: ignore[assignment]
