"""What happens to gradients between their all-reduce and the optimizer step.

The shadow gets them as the all-reduce left them. torch's own functions that change them, whatever name a script calls
them by, are noted as ``StepRecord.changes``; every other change shows in the gradients' version counters.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import Replicate
from torch.nn.utils import clip_grad

from checkmate import plain
from checkmate.tensors import local
from checkmate.train.watch import Spots, place_and_version

Change = dict[str, Any]

Step = Callable[[], Any]

_trails: "weakref.WeakSet[GradientTrail]" = weakref.WeakSet()
_around_step: "weakref.WeakKeyDictionary[torch.optim.Optimizer, Callable[[Step], Any]]" = weakref.WeakKeyDictionary()


class GradientTrail:
    """Follows the gradients of ``params`` (by ``id``: name and parameter) from ``seal`` to the optimizer step."""

    def __init__(self, params: Mapping[int, tuple[str, Tensor]], of_masters: bool = False) -> None:
        install()
        self._params = params
        self._of_masters = of_masters
        self._expected: dict[int, tuple[int, int]] = {}
        self._changes: list[Change] = []
        self._spots = Spots(0)
        _trails.add(self)

    def seal(self) -> None:
        """The reducing backward pass is over: gradients are now what the shadow gets."""
        self._changes = []
        self._expected = self._now(self._params)
        self._spots.take([(name, param.grad) for name, param in self._params.values() if param.grad is not None])

    def end(self) -> None:
        """The iteration is over."""
        self._expected, self._changes = {}, []
        self._spots.drop()

    def look(self) -> None:
        """Gradients are about to be changed or used."""

    def absent(self) -> list[str]:
        """Names of the parameters without a gradient."""
        return [name for name, param in self._params.values() if param.grad is None]

    def unexplained(self) -> str | None:
        """Name of a parameter whose gradient was changed by something unknown, None: there is none."""
        for key, value in self._now(self._params).items():
            if self._expected.get(key) != value:
                return self._params[key][0]
        return self._spots.changed()

    def changes(self) -> list[Change]:
        """All known changes in order, as plain values."""
        return [
            {key: plain.encode(value) if isinstance(value, Tensor) else value for key, value in change.items()}
            for change in self._changes
        ]

    @contextlib.contextmanager
    def noting(self, params: Sequence[Tensor], change: Change) -> Iterator[None]:
        """Around a change of these parameters' gradients, and of nothing else."""
        keys = {id(param) for param in params if param.grad is not None} & self._params.keys()
        if not keys:
            yield
            return
        self.look()
        known = self._as_expected()
        explained = self._spots.changed() is None
        yield
        self._expected |= self._now(known)  # of all: views of one bucket share a version counter
        if explained:
            self._spots.refresh()
        everything = sorted(name for name, param in self._params.values() if param.grad is not None)
        names = sorted(self._params[id(p)][0] for p in params if id(p) in keys)  # one that is listed twice, twice
        self._changes.append({**change, "params": None if names == everything else names, "masters": self._of_masters})

    def _as_expected(self) -> list[int]:
        now = self._now(self._params)
        return [key for key, value in now.items() if self._expected.get(key) == value]

    def _now(self, keys: Iterable[int]) -> dict[int, tuple[int, int]]:
        grads = ((key, self._params[key][1].grad) for key in keys)
        return {key: place_and_version(grad) for key, grad in grads if grad is not None}


def around_scaled_step(optimizer: torch.optim.Optimizer, around: Callable[[Step], Any] | None) -> None:
    """A GradScaler calls ``around`` with what steps this optimizer, or doesn't when it found inf; None: no longer."""
    _around_step.pop(optimizer, None)
    if around is not None:
        _around_step[optimizer] = around


@functools.cache
def install() -> None:
    """Note what torch's functions do to gradients from now on.

    Where torch is built otherwise nothing is noted, and such changes are found as unknown ones are.
    """
    _replace_inner(clip_grad._clip_grads_with_norm_, _clip_norm)
    _replace_inner(clip_grad.clip_grad_value_, _clip_value)
    for name, around in (("_unscale_grads_", _unscale), ("_maybe_opt_step", _maybe_step)):
        original = getattr(GradScaler, name, None)
        if original is not None:
            setattr(GradScaler, name, _wrapped(original, around))


def _replace_inner(decorated: Any, around: Callable[..., Any]) -> None:
    """Wrap what a decorator wrapped, in place: scripts may have imported the decorated function by its own name."""
    cells = [cell for cell in decorated.__closure__ or () if callable(cell.cell_contents)]
    if len(cells) == 1:
        cells[0].cell_contents = _wrapped(cells[0].cell_contents, around)


def _wrapped(original: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    return call


@contextlib.contextmanager
def _noting(params: Sequence[Tensor], change: Change) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for trail in list(_trails):
            stack.enter_context(trail.noting(params, change))
        yield


def _listed(parameters: Any) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def _everywhere(norm: Tensor) -> Tensor:
    """A DTensor of which ranks may hold parts as one that all hold, which torch would make of it in any case."""
    if local(norm) is norm:
        return norm
    sharded: Any = norm
    whole: Tensor = sharded.redistribute(placements=[Replicate()] * sharded.device_mesh.ndim)
    return whole


def _clip_norm(
    original: Callable[..., None], parameters: Any, max_norm: float, total_norm: Tensor, foreach: bool | None = None
) -> None:
    params = _listed(parameters)
    total_norm = _everywhere(total_norm)
    change = {"op": "clip_norm", "max_norm": float(max_norm), "total_norm": local(total_norm).detach().clone()}
    with _noting(params, change | {"foreach": foreach}):
        original(params, max_norm, total_norm, foreach)


def _clip_value(original: Callable[..., None], parameters: Any, clip_value: float, foreach: bool | None = None) -> None:
    params = _listed(parameters)
    with _noting(params, {"op": "clip_value", "clip_value": float(clip_value), "foreach": foreach}):
        original(params, clip_value, foreach)


def _unscale(
    original: Callable[..., Any],
    scaler: GradScaler,
    optimizer: torch.optim.Optimizer,
    inv_scale: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    with _noting(params, {"op": "unscale", "inv_scale": inv_scale.detach().clone(), "foreach": None}):
        return original(scaler, optimizer, inv_scale, *args, **kwargs)


def _maybe_step(
    original: Callable[..., Any], scaler: GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
) -> Any:
    step = functools.partial(original, scaler, optimizer, *args, **kwargs)
    around = _around_step.get(optimizer)
    return step() if around is None else around(step)
