"""A run's state as plain PyTorch saves it, and a run that begins from such a state.

Of a module that is sharded it is this rank's shards, as plain tensors: what the shadows of its group hold.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from checkmate.config import CheckmateError
from checkmate.tensors import MASTER, as_local_of, local
from checkmate.train.masters import Masters

_DDP = "module."
"""What DistributedDataParallel puts before every name of its module."""
_SHOWN = 4


def state_dict(module: nn.Module, optimizer: torch.optim.Optimizer, masters: Masters, step: int) -> dict[str, Any]:
    """``{"model", "optimizer", "step"}``, live; with ``"masters"``, by parameter, where the optimizer holds those."""
    state = {"model": _local(module.state_dict()), "optimizer": _local(optimizer.state_dict()), "step": step}
    copies = {name.removeprefix(MASTER): master.detach() for name, master in masters.named}
    return state | ({"masters": copies} if copies else {})


class Start:
    """A state to begin from, found to fit: CheckmateError names what does not. Nothing is changed before ``apply``."""

    def __init__(self, state: Any, module: nn.Module, optimizer: torch.optim.Optimizer, masters: Masters) -> None:
        self._module, self._optimizer = module, optimizer
        self._copies = {name.removeprefix(MASTER): master for name, master in masters.named}
        self._model = _local(_bare(_part(state, "model"), module))
        self._optimizer_state = _local(_part(state, "optimizer"))
        self._masters = _part(state, "masters") if self._copies else {}
        self.step: int = state.get("step", 0)
        problems = [*self._misfits(), *_other_optimizer(optimizer, self._optimizer_state)]
        if type(self.step) is not int or self.step < 0:
            problems.append(f"'step' is {self.step!r}: it must be a whole number, 0 or more")
        if problems:
            more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
            raise CheckmateError("the state does not fit: " + "; ".join(problems[:_SHOWN]) + more)

    def apply(self) -> None:
        """Load it, as plain PyTorch does."""
        ours = self._module.state_dict()
        if _local(ours) is ours:
            self._module.load_state_dict(self._model)
            self._optimizer.load_state_dict(dict(self._optimizer_state))
        else:
            self._module.load_state_dict({name: _like(ours[name], value) for name, value in self._model.items()})
            self._optimizer.load_state_dict(self._sharded_optimizer())
        with torch.no_grad():
            for name, copy in self._copies.items():
                copy.copy_(self._masters[name])

    def _sharded_optimizer(self) -> dict[str, Any]:
        """The optimizer's state in which what belongs to a sharded parameter is sharded, too."""
        groups = zip(self._optimizer_state["param_groups"], self._optimizer.param_groups, strict=True)
        params = {
            key: param for theirs, ours in groups for key, param in zip(theirs["params"], ours["params"], strict=True)
        }
        states = {
            key: {name: value if name == "step" else _like(params[key], value) for name, value in values.items()}
            for key, values in self._optimizer_state["state"].items()
        }
        return {**self._optimizer_state, "state": states}

    def _misfits(self) -> Iterator[str]:
        yield from _misfits("model", _local(self._module.state_dict()), self._model)
        yield from _misfits("masters", self._copies, self._masters)


def _part(state: Any, name: str) -> Mapping[str, Any]:
    part = state.get(name) if isinstance(state, Mapping) else None
    if isinstance(part, Mapping):
        return part
    found = f"has {sorted(map(str, state))}" if isinstance(state, Mapping) else f"is a {type(state).__name__}"
    raise CheckmateError(
        f"a state to begin from is a map with 'model' and 'optimizer' (and 'masters' where attach was given some), as "
        f"checkpoint.state_dict() and `checkmate export` give it; this one {found}: there is no map {name!r} in it"
    )


def _bare(model: Mapping[str, Any], module: nn.Module) -> Mapping[str, Any]:
    """Without the prefix that a file has of which the model was saved inside DistributedDataParallel."""
    names = module.state_dict().keys()
    if model and all(name.startswith(_DDP) for name in model) and not any(name.startswith(_DDP) for name in names):
        return {name.removeprefix(_DDP): value for name, value in model.items()}
    return model


def _misfits(part: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"{part}: {name} is missing" for name in sorted(ours.keys() - theirs.keys()))
    yield from (f"{part}: {name} is not in the script's model" for name in sorted(theirs.keys() - ours.keys()))
    for name in ours.keys() & theirs.keys():
        have, want = theirs[name], ours[name]
        if isinstance(want, Tensor) and (not isinstance(have, Tensor) or have.shape != want.shape):
            shape = list(have.shape) if isinstance(have, Tensor) else type(have).__name__
            yield f"{part}: {name} is of shape {shape}, in the script's model {list(want.shape)}"


def _other_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> Iterator[str]:
    """What torch would load although it is another optimizer's."""
    groups, values = state.get("param_groups"), state.get("state")
    if not isinstance(groups, list) or not isinstance(values, Mapping):
        yield "optimizer: not the state_dict() of an optimizer"
        return
    if len(groups) != len(optimizer.param_groups):
        yield f"optimizer: {len(groups)} parameter group(s), in the script {len(optimizer.param_groups)}"
        return
    for index, (theirs, ours) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        where = f"optimizer: parameter group {index}"
        if missing := sorted(ours.keys() - theirs.keys() - {"initial_lr", "param_names"}):
            yield f"{where} has no {missing[0]!r}: it is of another optimizer than {type(optimizer).__name__}"
        elif len(theirs["params"]) != len(ours["params"]):
            yield f"{where} holds {len(theirs['params'])} parameters, in the script {len(ours['params'])}"
        else:
            for key, param in zip(theirs["params"], ours["params"], strict=True):
                yield from (f"{where}: {problem}" for problem in _misshapen(values.get(key, {}), param))


def _misshapen(values: Mapping[str, Any], param: Tensor) -> Iterator[str]:
    for name, value in values.items():
        if name != "step" and isinstance(value, Tensor) and value.shape != local(param).shape:
            yield f"{name} of shape {list(value.shape)} for a parameter of shape {list(local(param).shape)}"


def _local(state: Any) -> Any:
    """A nested state with this rank's shards of its DTensors; itself, with torch's metadata, where it has none."""
    if isinstance(state, Tensor):
        return local(state)
    if not isinstance(state, Mapping):
        return state
    held = {key: _local(value) for key, value in state.items()}
    return state if all(held[key] is value for key, value in state.items()) else held


def _like(whole: Any, value: Any) -> Any:
    return as_local_of(whole, value) if isinstance(whole, Tensor) and isinstance(value, Tensor) else value
