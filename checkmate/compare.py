"""Bit-for-bit comparison of saved training states."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from checkmate.config import CheckmateError


def load_state(path: Path) -> dict[str, Any]:
    """Load {"model": state_dict, "optimizer": state_dict}; raises CheckmateError when it is not such a file."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        return {"model": state["model"], "optimizer": state["optimizer"]}
    except (OSError, KeyError, TypeError, RuntimeError) as error:
        raise CheckmateError(f"{path} is not a saved training state: {error}") from None


def differences(expected: Any, actual: Any, path: str = "") -> Iterator[str]:
    """Where two nested states differ, as texts that begin with the path; nothing when every bit is equal.

    Tensors are compared by dtype, shape and bytes (NaN equals the same NaN, 0.0 differs from -0.0), all else by repr.
    """
    if isinstance(expected, torch.Tensor) and isinstance(actual, torch.Tensor):
        yield from _tensor_differences(expected, actual, path)
    elif isinstance(expected, dict) and isinstance(actual, dict):
        for key in sorted(expected.keys() | actual.keys(), key=str):
            if key not in expected or key not in actual:
                yield f"{path}.{key}: only in the {'second' if key not in expected else 'first'}"
            else:
                yield from differences(expected[key], actual[key], f"{path}.{key}")
    elif isinstance(expected, list | tuple) and isinstance(actual, list | tuple):
        if len(expected) != len(actual):
            yield f"{path}: {len(expected)} entries against {len(actual)}"
        for index, (left, right) in enumerate(zip(expected, actual, strict=False)):
            yield from differences(left, right, f"{path}[{index}]")
    elif repr(expected) != repr(actual):
        yield f"{path}: {expected!r} against {actual!r}"


def _tensor_differences(expected: torch.Tensor, actual: torch.Tensor, path: str) -> Iterator[str]:
    if expected.dtype != actual.dtype or expected.shape != actual.shape:
        yield f"{path}: {expected.dtype} {list(expected.shape)} against {actual.dtype} {list(actual.shape)}"
        return
    left, right = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (expected, actual))
    if not torch.equal(left, right):
        unequal = int((left.view(-1, expected.element_size()) != right.view(-1, expected.element_size())).any(1).sum())
        yield f"{path}: {unequal} of {expected.numel()} elements differ"
