"""What one rank's state after a step holds beside parameters and optimizer state, and how a restart takes it up again.

Three moments matter. *Just after the step*: data positions. *When the next batch is drawn* (without a DataLoader just
after the step): random numbers, for a restarted script continues there. *At the first forward after the step*: random
numbers, hyperparameters, schedulers, buffers and the user's own objects, which the script has changed since in ways
that a restart does not repeat (``scheduler.step()``, ``ema.update()``). Objects of the user's that can be iterated are
data positions and belong to the first moment.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from checkmate import plain
from checkmate.config import CheckmateError
from checkmate.tensors import pack_group, set_group
from checkmate.train import registry, rng
from checkmate.train.data import TRACKER

VERSION = 3


@runtime_checkable
class Stateful(Protocol):
    """An object of the user's that is restored with the model."""

    def state_dict(self) -> Any:
        """Plain values, tensors and arrays."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take up what ``state_dict`` gave."""


class RankState:
    """Captures and restores everything of this rank that gradients do not carry."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        stateful: Mapping[str, Stateful],
        rank: int,
        world: int,
    ) -> None:
        self._rank, self._world = rank, world
        self._module = module
        self._optimizer = optimizer
        self._positions = {name: item for name, item in stateful.items() if hasattr(item, "__iter__")}
        self._others = {name: item for name, item in stateful.items() if name not in self._positions}
        self._buffer_holders = [holder for holder in module.modules() if holder._buffers]
        self._buffers_at_start = self._buffer_versions()
        self._buffers_change = False
        self._after: dict[str, Any] | None = None
        self._awaited: dict[str, Any] | None = None

    def check(self) -> None:
        """Raise CheckmateError when something that is there now could not be stored."""
        _states("", self._positions)
        self._at_forward()

    def after_step(self) -> None:
        """Note what the next batch is drawn from."""
        random_states = None if TRACKER.is_iterating else rng.capture()
        after = {"rng": random_states, "data": TRACKER.positions(), "stateful": _states("", self._positions)}

        def fetch() -> None:
            TRACKER.before_fetch = None
            after["rng"] = rng.capture()

        self._after = after
        TRACKER.before_fetch = fetch

    @property
    def awaits_forward(self) -> bool:
        """Whether the next forward ends a step, or the repetition of what a restarted script did after one."""
        return self._after is not None or self._awaited is not None

    def take(self, at_forward: bool) -> dict[str, Any] | None:
        """State after the newest step, once; None when there is none or it was taken.

        ``at_forward`` False: the script is over, and no forward decides what its random numbers would have been.
        """
        after, self._after, TRACKER.before_fetch = self._after, None, None
        if after is None:
            return None
        random_states = rng.capture() if at_forward or after["rng"] is None else None
        after["rng"] = after["rng"] or random_states
        now = {"rng": random_states if at_forward else None, "data": TRACKER.progress(), **self._at_forward()}
        return {"version": VERSION, "rank": self._rank, "world": self._world, "after": after, "forward": now}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up the state that ``take`` returned; ``first_forward`` completes it. There is none before step 1.

        A rank that did not exist then is given another's: it keeps its own random numbers.
        """
        if "after" not in state:
            return
        if state.get("version") != VERSION:
            raise CheckmateError(f"the stored rank state has version {state.get('version')}, this one reads {VERSION}")
        after, now = state["after"], state["forward"]
        if state["rank"] != self._rank:
            own = rng.capture()
            after, now = {**after, "rng": own}, {**now, "rng": own}
        _load(self._positions, after["stateful"])
        _load(self._others, now["stateful"])
        self._set_groups(now["groups"])
        for scheduler, stored in zip(self._schedulers(), now["schedulers"], strict=False):
            scheduler.load_state_dict(plain.decode(stored))
        for scaler, stored in zip(self._scalers(), now["scalers"], strict=False):
            scaler.load_state_dict(plain.decode(stored))
        if now["buffers"] is not None:
            self._buffers_change = True
            _load_buffers(self._module, now["buffers"])
        TRACKER.replay(after["data"], now["data"], after["rng"], state["world"] != self._world)
        rng.apply(after["rng"])
        self._awaited = now

    def first_forward(self) -> None:
        """At the first forward after ``restore``: random numbers as they were at that forward, and schedules that the
        repeated part of the script has moved (an epoch that yields nothing still ends in ``scheduler.step()``)."""
        now, self._awaited = self._awaited, None
        if now is None:
            return
        TRACKER.arrive()
        schedulers = self._schedulers()
        if len(schedulers) != len(now["schedulers"]):
            raise CheckmateError(
                f"the restored state holds {len(now['schedulers'])} learning-rate scheduler(s), the script made "
                f"{len(schedulers)}: run the script that made it"
            )
        if len(self._scalers()) < len(now["scalers"]):
            raise CheckmateError("the restored state holds a GradScaler's scale, the script made none: run as before")
        if [plain.encode(scheduler.state_dict()) for scheduler in schedulers] != now["schedulers"]:
            for scheduler, stored in zip(schedulers, now["schedulers"], strict=True):
                scheduler.load_state_dict(plain.decode(stored))
            self._set_groups(now["groups"])
        if now["rng"] is not None:
            rng.apply(now["rng"])

    def _schedulers(self) -> list[LRScheduler]:
        """Those of the optimizer that ``stateful`` does not name, in order of creation."""
        named = [id(item) for item in self._others.values()]
        return [scheduler for scheduler in registry.schedulers(self._optimizer) if id(scheduler) not in named]

    def _scalers(self) -> list[GradScaler]:
        """Those that ``stateful`` does not name, in order of creation."""
        named = [id(item) for item in self._others.values()]
        return [scaler for scaler in registry.scalers() if id(scaler) not in named]

    def _at_forward(self) -> dict[str, Any]:
        return {
            "groups": [pack_group(group) for group in self._optimizer.param_groups],
            "schedulers": [
                plain.encode(scheduler.state_dict(), f"the state of {type(scheduler).__name__}")
                for scheduler in self._schedulers()
            ],
            "scalers": [plain.encode(scaler.state_dict(), "the state of GradScaler") for scaler in self._scalers()],
            "stateful": _states("stateful ", self._others),
            "buffers": self._changed_buffers(),
        }

    def _changed_buffers(self) -> dict[str, Any] | None:
        """All buffers once any has changed since the start: constant ones stay what the script makes them."""
        self._buffers_change = self._buffers_change or self._buffer_versions() != self._buffers_at_start
        if not self._buffers_change:
            return None
        return {name: plain.encode(buffer, f"buffer {name}") for name, buffer in self._module.named_buffers()}

    def _buffer_versions(self) -> list[tuple[int, int]]:
        buffers = [buffer for holder in self._buffer_holders for buffer in holder._buffers.values()]
        return [(id(buffer), buffer._version) for buffer in buffers if buffer is not None]

    def _set_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        for group, fields in zip(self._optimizer.param_groups, groups, strict=True):
            set_group(group, fields)


def _load_buffers(module: nn.Module, stored: Mapping[str, Any]) -> None:
    buffers = dict(module.named_buffers())
    if buffers.keys() != stored.keys():
        raise CheckmateError(f"buffers differ from the stored ones: {sorted(buffers.keys() ^ stored.keys())}")
    for name, buffer in buffers.items():
        buffer.detach().copy_(plain.decode(stored[name]))


def _states(prefix: str, items: Mapping[str, Stateful]) -> dict[str, Any]:
    return {name: plain.encode(item.state_dict(), f"{prefix}{name}") for name, item in items.items()}


def _load(items: Mapping[str, Stateful], stored: Mapping[str, Any]) -> None:
    if items.keys() != stored.keys():
        raise CheckmateError(
            f"stateful: the restored state holds {sorted(stored) or 'none'}, attach was given {sorted(items) or 'none'}"
        )
    for name, item in items.items():
        item.load_state_dict(plain.decode(stored[name]))


def without_state(items: Mapping[str, object]) -> list[str]:
    """Names of those that lack state_dict() or load_state_dict()."""
    return [name for name, item in items.items() if not isinstance(item, Stateful)]
