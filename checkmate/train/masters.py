"""Master weights: the optimizer holds copies of parameters, of more bits, that the script itself keeps in step.

After backward the script gives each copy its parameter's gradient, converted; after the step it copies each copy into
its parameter. The shadow does the same. That the script did is spot-checked, on the CPU in every step.
"""

import random
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from checkmate.config import CheckmateError
from checkmate.tensors import MASTER
from checkmate.train.gradients import GradientTrail
from checkmate.train.watch import FULL_STEPS, SPOTS

_ROWS = 4
"""Rows of a tensor that are compared."""


class Masters:
    """The copies of a module's parameters, by the parameter's name.

    Raises CheckmateError, naming it, for a copy that fits no parameter.
    """

    def __init__(self, module: nn.Module, copies: Mapping[str, Tensor]) -> None:
        params = dict(module.named_parameters())
        for name, copy in copies.items():
            if name not in params:
                raise CheckmateError(f"masters: the module has no parameter {name!r}")
            if copy.shape != params[name].shape or not copy.is_floating_point():
                raise CheckmateError(
                    f"masters[{name!r}] is {copy.dtype} {list(copy.shape)}: it must be a floating-point copy of a "
                    f"parameter of shape {list(params[name].shape)}"
                )
        self._pairs: dict[str, tuple[Tensor, Tensor]] = {name: (params[name], copy) for name, copy in copies.items()}
        self._ids = {id(copy) for copy in copies.values()}
        self.named = [(MASTER + name, copy) for name, copy in copies.items()]
        self.trail = _MasterTrail({id(copy): (MASTER + name, copy) for name, copy in copies.items()}, self)
        self._draws = random.Random(0)
        self._looks = 0

    def __contains__(self, param: object) -> bool:
        return id(param) in self._ids

    @property
    def sources(self) -> set[int]:
        """``id`` of each parameter that has a copy."""
        return {id(param) for param, _ in self._pairs.values()}

    def differing_gradient(self) -> str | None:
        """Name of a copy whose gradient is not its parameter's, None: none was found."""
        return next(
            (name for name, param, copy in self._sample() if not _fits(self._draws, copy.grad, param.grad)), None
        )

    def differing_value(self) -> str | None:
        """Name of a parameter that is not its copy, None: none was found."""
        return next((name for name, param, copy in self._sample() if not _fits(self._draws, param, copy)), None)

    def _sample(self) -> list[tuple[str, Tensor, Tensor]]:
        self._looks += 1
        pairs = [(name, *pair) for name, pair in self._pairs.items() if pair[0].device.type == "cpu"]
        everything = self._looks <= 2 * FULL_STEPS or len(pairs) <= SPOTS
        return pairs if everything else self._draws.sample(pairs, SPOTS)


class _MasterTrail(GradientTrail):
    """The copies' gradients: sealed when they are first looked at, for a script makes them when it likes."""

    def __init__(self, params: Mapping[int, tuple[str, Tensor]], masters: Masters) -> None:
        super().__init__(params, of_masters=True)
        self._masters = masters
        self._is_sealed = False
        self._wrong: str | None = None

    def look(self) -> None:
        if not self._is_sealed:
            self._wrong = self._masters.differing_gradient()
            self.seal()
            self._is_sealed = True

    def unexplained(self) -> str | None:
        self.look()
        return self._wrong or super().unexplained()

    def end(self) -> None:
        super().end()
        self._is_sealed = False


def _fits(draws: random.Random, converted: Tensor | None, source: Tensor | None) -> bool:
    """Some rows of a tensor are those of another, converted; True when one is not there to be compared."""
    if converted is None or source is None:
        return True
    if converted.dim():
        first = draws.randint(0, max(0, converted.shape[0] - _ROWS))
        converted, source = converted[first : first + _ROWS], source[first : first + _ROWS]
    expected = source.detach().to(converted.dtype)
    return torch.allclose(converted.detach(), expected, rtol=0, atol=0, equal_nan=True)  # NaNs of any bits
