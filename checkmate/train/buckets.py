"""DDP's buckets across a restart.

DDP cuts its gradients into buckets twice: by the order of the parameters at first, and by the order in which gradients
became ready in the first reducing backward pass from then on. Which bucket and place a gradient has decides in which
order the ranks' values are summed, and so its last bits. A restarted process must therefore begin with the second
cut, or its first iteration would differ from the one that the lost process would have run.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from checkmate.config import CheckmateError


class ReadyOrder:
    """Order in which gradients became ready in the first reducing backward pass of a job, over restarts."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        parameters: list[Any] = _parameters(ddp)
        self._indices = {id(param): index for index, param in enumerate(parameters)}
        self._seen: list[int] = []
        self._hooks = [param.register_post_accumulate_grad_hook(self._note) for param in parameters]
        self.indices: list[int] | None = None
        """Indices into the parameters in DDP's order; None before the first reducing backward pass."""

    def _note(self, param: Tensor) -> None:
        self._seen.append(self._indices[id(param)])

    def seal(self) -> None:
        """A reducing backward pass ended: the first one decides, the others change nothing."""
        if not self._hooks:
            return
        newest = self._seen[-len(self._indices) :]  # what came before was accumulated under no_sync()
        if len(set(newest)) == len(self._indices):
            self.indices = newest
        self._remove_hooks()

    def restore(self, indices: Sequence[int] | None) -> bool:
        """Cut the buckets as DDP did after a first pass in this order. Collective; before the first forward.

        True when the module has a new reducer, to which a communication hook must be registered again. Raises
        CheckmateError when the order is not one of this module's parameters.
        """
        if indices is None or self._ddp.find_unused_parameters or self._ddp.static_graph:
            return False  # DDP keeps its first buckets, or finds the others by itself
        if sorted(indices) != list(range(len(self._indices))):
            raise CheckmateError(
                f"the restored order of {len(indices)} gradients is not one of this model's {len(self._indices)} "
                "parameters: run the script that made it"
            )
        self._remove_hooks()
        self.indices = list(indices)
        _rebuild(self._ddp, self.indices)
        return True

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._seen = [], []


def _parameters(ddp: Any) -> list[Tensor]:
    parameters: list[Tensor] = ddp._build_params_for_reducer()[0]
    return parameters


def drop_hook(ddp: DistributedDataParallel) -> None:
    """A new reducer without communication hook, which torch can't take back; before the first forward."""
    _new_reducer(ddp, range(len(_parameters(ddp))))


def _rebuild(ddp: DistributedDataParallel, order: Sequence[int]) -> None:
    """A new reducer that believes that its first pass is over: DDP's own code makes the cut."""
    _new_reducer(ddp, order)
    ddp.reducer._push_all_rebuilt_params()
    with torch.enable_grad():
        ddp._has_rebuilt_buckets = ddp.reducer._rebuild_buckets()


def _new_reducer(ddp: DistributedDataParallel, order: Sequence[int]) -> None:
    internals: Any = ddp
    parameters, expect_sparse = internals._build_params_for_reducer()
    parameters = [parameters[index] for index in order]
    expect_sparse = [expect_sparse[index] for index in order]
    names = internals._build_debug_param_to_name_mapping(parameters)
    ddp.reducer._remove_autograd_hooks()
    internals._ddp_init_helper(parameters, expect_sparse, names, ddp.static_graph)
    if ddp.static_graph:
        ddp.reducer._set_static_graph()
        internals.logger._set_static_graph()
    ddp._comm_hooks.clear()


def broadcast_order(ddp: DistributedDataParallel, indices: Sequence[int] | None) -> list[int] | None:
    """Rank 0's order on every rank: DDP cuts by rank 0's. Collective."""
    count = len(_parameters(ddp))
    order = torch.full((count,), -1, dtype=torch.int64, device=ddp.device)
    if indices is not None and len(indices) == count:
        order.copy_(torch.tensor(indices))
    dist.broadcast(order, dist.get_global_rank(ddp.process_group, 0), group=ddp.process_group)
    shared: list[int] = order.tolist()
    return None if -1 in shared else shared
