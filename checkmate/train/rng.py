"""Random number states of this process: torch on the CPU and every CUDA device in use, Python's, numpy's."""

import random
import struct
from typing import Any

import numpy as np
import torch

from checkmate import plain

_PYTHON_STATE = struct.Struct("<625I")
"""The words of Python's Mersenne twister."""


def capture() -> dict[str, Any]:
    """All states as plain values, about 10 KB."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "python": [version, _PYTHON_STATE.pack(*words), gauss],
        "numpy": plain.encode(np.random.get_state(legacy=False)),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = [device.numpy().tobytes() for device in torch.cuda.get_rng_state_all()]
    return state


def apply(state: dict[str, Any]) -> None:
    """Make all generators continue from a captured state."""
    torch.set_rng_state(_as_tensor(state["torch"]))
    version, words, gauss = state["python"]
    random.setstate((version, _PYTHON_STATE.unpack(words), gauss))
    np.random.set_state(plain.decode(state["numpy"]))
    if "cuda" in state:
        torch.cuda.set_rng_state_all([_as_tensor(device) for device in state["cuda"]])


def capture_generator(generator: torch.Generator) -> bytes:
    """State of one torch generator."""
    return generator.get_state().numpy().tobytes()


def apply_generator(generator: torch.Generator, state: bytes) -> None:
    """Make one torch generator continue from a captured state."""
    generator.set_state(_as_tensor(state))


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
