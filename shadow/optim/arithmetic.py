"""Whether a replica here makes the trainer's steps, found out before it follows any."""

import functools
from typing import Any

import msgpack
import torch

from checkmate import arithmetic
from checkmate.config import CheckmateError
from checkmate.protocol import Layout, Seed, StepRecord
from checkmate.shadow.optim.replica import Replica
from checkmate.tensors import describe, dtype_of

_NAME = "weight"


def problem(theirs: dict[str, Any] | None) -> str | None:
    """Why the steps of a trainer with this ``Hello.arithmetic`` can't be made here; None: they can, or nobody knows."""
    if theirs is None:
        return None
    try:
        if _digest(msgpack.packb(theirs["cases"])) == theirs["digest"]:
            return None
        whose = str(theirs["of"])
    except (CheckmateError, KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        return f"malformed hello: arithmetic is {theirs!r:.200} ({error!r:.200})"
    return (
        f"its optimizer's steps have other bits here: the trainer computes them by {whose}, this shadow by "
        f"{arithmetic.here()}; install the same torch on both; where one processor lacks instructions, set "
        "ATEN_CPU_CAPABILITY (avx512, avx2, default) to what both have; leave torch's denormals and default dtype alone"
    )


@functools.lru_cache(maxsize=64)
def _digest(packed: bytes) -> int:
    value = 0
    for cls, fields, dtype in msgpack.unpackb(packed)[: arithmetic.MOST_CASES]:
        value = arithmetic.digest(_steps(cls, fields, dtype), value)
    return value


def _steps(cls: str, fields: dict[str, Any], dtype: str) -> list[torch.Tensor]:
    weights = arithmetic.numbers(0, dtype_of(dtype))
    place = {"bucket": 0, "bytes": weights.nbytes, "dtype": dtype, "params": [[_NAME, 0, weights.numel()]]}
    layout = Layout("probe", [place])
    description = {"class": cls, "groups": [{**fields, "params": [_NAME]}], "scalars": {}}
    replica = Replica(Seed(0, description, [describe(_NAME, "param", weights)]), [weights])
    for step in range(1, arithmetic.STEPS + 1):
        gradient = arithmetic.numbers(step, dtype_of(dtype))
        buckets = {0: memoryview(bytearray(gradient.view(torch.uint8).numpy().tobytes()))}
        replica.apply(StepRecord(step, layout.digest, [fields]), layout, buckets)
    return [tensor.detach() for tensor in replica.pack()[2]]
