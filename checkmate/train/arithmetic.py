"""What this rank's optimizer makes of known numbers: a shadow that makes anything else of them can't follow it."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from checkmate import arithmetic
from checkmate.tensors import dtype_name, optimizer_class_name, pack_group


def measure(optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """``Hello.arithmetic`` of this optimizer; None where it steps parameters that are not on a CPU.

    Steps other parameters than the optimizer's, with its options.
    """
    if any(param.device.type != "cpu" for group in optimizer.param_groups for param in group["params"]):
        return None
    cases: list[arithmetic.Case] = []
    value = 0
    for group in optimizer.param_groups:
        options = {name: group[name] for name in optimizer.defaults if name in group} | {"lr": _lr(group["lr"])}
        for dtype in dict.fromkeys(param.dtype for param in group["params"]):
            case = [optimizer_class_name(optimizer), pack_group(options), dtype_name(dtype)]
            if case not in cases and len(cases) < arithmetic.MOST_CASES:
                cases.append(case)
                value = arithmetic.digest(_steps(type(optimizer), options, dtype), value)
    return {"of": arithmetic.here(), "cases": cases, "digest": value}


def _lr(lr: float | Tensor) -> float | Tensor:
    """Not a schedule's, which may be 0 now."""
    return torch.full_like(lr, arithmetic.LR) if isinstance(lr, Tensor) else arithmetic.LR


def _steps(cls: type[Any], options: dict[str, Any], dtype: torch.dtype) -> list[Tensor]:
    param = nn.Parameter(arithmetic.numbers(0, dtype))
    named = inspect.signature(cls).parameters
    defaults = {name: value for name, value in options.items() if name in named}
    optimizer: torch.optim.Optimizer = cls([{**options, "params": [param]}], **defaults)
    step_alone = cls.step.__wrapped__  # without the script's hooks into all optimizers' steps
    for step in range(1, arithmetic.STEPS + 1):
        param.grad = arithmetic.numbers(step, dtype)
        step_alone(optimizer)
    return [param.detach(), *(value for value in optimizer.state[param].values() if isinstance(value, Tensor))]
