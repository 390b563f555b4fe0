"""Whether two processes make the same optimizer steps, to the last bit.

The bits depend on torch's version and on the vector instructions that it chose (ATen's CPU capability). So both make a
few steps of the optimizer on the same numbers, and compare what came out. ``Hello`` carries the trainer's.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from checkmate.crc32c import crc32c
from checkmate.tensors import memory

STEPS = 3
LR = 1e-3
MOST_CASES = 8
_ELEMENTS = 1007
"""Many vectors, and some elements that fill none."""

Case = list[Any]
"""[class, hyperparameters as ``pack_group`` packs them, dtype]."""


def here() -> str:
    """What decides the bits, for people."""
    flushed = ", denormals flushed" if not (torch.tensor(2.0**-126) / 2).item() else ""
    default = "" if torch.get_default_dtype() is torch.float32 else f", {torch.get_default_dtype()} by default"
    return f"torch {torch.__version__} with {torch.backends.cpu.get_cpu_capability()}{flushed}{default}"


def numbers(step: int, dtype: torch.dtype) -> Tensor:
    """Weights (step 0) or gradients of a step: of many sizes, also denormal; of whole numbers, the same anywhere."""
    index = torch.arange(1, _ELEMENTS + 1, dtype=torch.int64) + step * _ELEMENTS
    mixed = (index * 2654435761 >> 3) % (1 << 24) - (1 << 23)  # Knuth's multiplicative hash
    return torch.ldexp(mixed.double(), -(23 + index % 12 * 12)).to(dtype)


def digest(tensors: Iterable[Tensor], before: int) -> int:
    """CRC32C of the bytes, continued."""
    for tensor in tensors:
        data = memory(tensor)
        assert data is not None
        before = crc32c(data, before)
    return before
