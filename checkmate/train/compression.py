"""torch's own DDP communication hooks that this package's hook can stand in for, bit for bit."""

from enum import Enum
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel


class Compression(Enum):
    """What a communication hook of the user's does to a bucket before its all-reduce; NONE: there is no such hook."""

    NONE = None
    PLAIN = default_hooks.allreduce_hook.__name__
    BF16 = default_hooks.bf16_compress_hook.__name__
    FP16 = default_hooks.fp16_compress_hook.__name__

    @classmethod
    def of(cls, ddp: DistributedDataParallel) -> Self | None:
        """Of the module's present hook; None when that can't be stood in for, or is not torch's."""
        hooks: list[Any] = ddp._comm_hooks
        if not hooks:
            return cls.NONE if "comm_hook" not in logged(ddp) else None  # a built-in hook is listed nowhere else
        ((hook, state),) = hooks
        name = getattr(hook, "__name__", None)
        if hook is not getattr(default_hooks, str(name), None) or state not in (
            None,
            dist.group.WORLD,
            ddp.process_group,
        ):
            return None
        return next((kind for kind in cls if kind.value == name), None)

    def compress(self, buffer: Tensor) -> Tensor:
        """What is all-reduced in place of the bucket: itself, or a copy of 16 bits."""
        match self:
            case Compression.BF16:
                return buffer.to(torch.bfloat16)
            case Compression.FP16:
                return buffer.to(torch.float16)
            case _:
                return buffer


def hook_name(ddp: DistributedDataParallel) -> str:
    """Of the module's present hook, for messages."""
    hooks: list[Any] = ddp._comm_hooks
    hook = hooks[0][0] if hooks else logged(ddp).get("comm_hook")
    return str(getattr(hook, "__qualname__", hook))


def logged(ddp: Any) -> dict[str, Any]:
    """What DDP's own logger knows of the module."""
    data: dict[str, Any] = ddp._get_ddp_logging_data()
    return data
