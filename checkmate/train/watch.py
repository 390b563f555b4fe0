"""Notices that something else than the optimizer's step changed parameters or optimizer state.

Clamped weights, a frozen teacher that follows the student, loaded or reset optimizer state: no gradient tells a shadow
of these. Version counters do. Changes through ``.data`` pass them by; spot checks of values find those on the CPU, all
tensors in the first steps, some of them in each later one.
"""

import random
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from checkmate.tensors import local

if TYPE_CHECKING:
    from checkmate.train.masters import Masters

FULL_STEPS = 3
"""Steps after which every parameter and gradient is spot-checked."""
SPOTS = 8
"""Tensors that are spot-checked after each later step."""
_WIDTH = 64
"""Elements of a spot."""


def place_and_version(tensor: Tensor) -> tuple[int, int]:
    """What differs after the tensor was replaced or changed in place.

    A DTensor counts changes beside its shard, and those by torch's foreach functions not at all.
    """
    held = local(tensor)
    return held.data_ptr(), held._version + (0 if held is tensor else tensor._version)


class Spots:
    """Some values of some tensors, to be compared later; on the CPU only: elsewhere looking means waiting."""

    def __init__(self, seed: int) -> None:
        self._draws = random.Random(seed)  # of our own: training's generators stay untouched
        self._taken = 0
        self._spots: list[tuple[str, Tensor, Tensor]] = []

    def take(self, tensors: list[tuple[str, Tensor]]) -> None:
        """Remember values of these tensors."""
        self._taken += 1
        if self._taken > FULL_STEPS and len(tensors) > SPOTS:
            tensors = self._draws.sample(tensors, SPOTS)
        spots = [(name, self._spot(local(tensor))) for name, tensor in tensors if tensor.device.type == "cpu"]
        self._spots = [(name, spot, spot.clone()) for name, spot in spots]

    def refresh(self) -> None:
        """The values as they are now are right."""
        self._spots = [(name, spot, spot.clone()) for name, spot, _ in self._spots]

    def drop(self) -> None:
        """Compare nothing, and keep no tensor alive."""
        self._spots = []

    def changed(self) -> str | None:
        """Name of a tensor with a changed value, None: none was found."""
        return next((name for name, spot, value in self._spots if not _is_equal(spot, value)), None)

    def _spot(self, tensor: Tensor) -> Tensor:
        offset = tensor.storage_offset()
        room = min(tensor.numel(), tensor.untyped_storage().nbytes() // tensor.element_size() - int(offset))
        width = min(_WIDTH, room)
        return tensor.detach().as_strided((width,), (1,), offset + self._draws.randint(0, room - width))


class _Look(NamedTuple):
    """Of parameters and of optimizer state: what differs after any change but one through ``.data``."""

    params: list[tuple[int, int]]
    state: list[int]
    state_versions: list[tuple[int, int]]


class Watch:
    """Parameters of a module and the state of its optimizer, from ``seal`` on."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, masters: "Masters") -> None:
        copied = masters.sources
        params = [(name, param) for name, param in module.named_parameters() if id(param) not in copied]
        self._params: list[tuple[str, Tensor]] = [*params, *masters.named]
        self._masters = masters
        self._optimizer = optimizer
        self._spots = Spots(0)
        self._seen = _Look([], [], [])
        self._groups: list[list[int]] = []

    def seal(self) -> None:
        """All is as the shadow has it."""
        self._seen, self._groups = self._look(), self._members()
        self._spots.take(self._params)

    def changed(self) -> str | None:
        """What was changed since ``seal``, as text; None: nothing."""
        now = self._look()
        if now != self._seen:
            return f"{self._first_difference(now)} was changed by something else than the optimizer's step"
        if self._members() != self._groups:
            return "the optimizer's parameter groups hold other parameters than before"
        if (spot := self._spots.changed()) is not None:
            return f"parameter {spot} was changed (through .data, say) by something else than the optimizer's step"
        if (stray := self._masters.differing_value()) is not None:
            return f"parameter {stray} is not its master copy, converted"
        return None

    def _look(self) -> "_Look":
        params = [param for _, param in self._params]
        values = [value for state in self._optimizer.state.values() for value in state.values()]
        return _Look(
            list(map(place_and_version, params)),
            list(map(id, values)),
            [place_and_version(value) for value in values if isinstance(value, Tensor)],
        )

    def _first_difference(self, now: "_Look") -> str:
        pairs = zip(self._params, now.params, self._seen.params, strict=True)
        return next((f"parameter {name}" for (name, _), new, old in pairs if new != old), "optimizer state")

    def _members(self) -> list[list[int]]:
        return [list(map(id, group["params"])) for group in self._optimizer.param_groups]


def _is_equal(spot: Tensor, value: Tensor) -> bool:
    """NaNs are equal to themselves."""
    return torch.equal(spot.view(torch.uint8), value.view(torch.uint8))
