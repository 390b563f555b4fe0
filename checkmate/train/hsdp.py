"""HSDP: FSDP2's ``fully_shard`` over a mesh of two dimensions, replicas and shards.

Each rank holds a shard of every parameter. Gradients are reduce-scattered over the ranks that share the parameters, and
each shard is then all-reduced over the ranks that hold the same one, its replicas. That all-reduce is what is tagged:
the replicas of a shard are a data-parallel group with shadows of its own, which hold exactly this shard.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from checkmate.tensors import local
from checkmate.train.reductions import Owner, Reductions, after_finalize, line

ROADMAP = (
    "use DistributedDataParallel, or fully_shard with a mesh of replicas and shards (HSDP); what comes next is in "
    "README.md, Roadmap"
)
FSDP = (
    "the parameters are sharded without replicas (FSDP): gradients are reduce-scattered, and reduced ones never cross "
    f"the network; {ROADMAP}"
)
_UNDIVIDED = (torch.float32, torch.bfloat16)
"""Data types of gradients that FSDP2 does not divide after their all-reduce."""


class Sharded:
    """A module that ``fully_shard`` made, with what a DistributedDataParallel shows of itself."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.parts = list(_parts(module))
        group = self.parts[0][1]
        self.process_group: dist.ProcessGroup | None = getattr(group.mesh_info, "replicate_process_group", None)
        self.device: torch.device = group.device
        self.device_type = self.device.type

    def register_forward_pre_hook(self, hook: Callable[..., Any], *, prepend: bool) -> RemovableHandle:
        """Of the module."""
        return self.module.register_forward_pre_hook(hook, prepend=prepend)


Replicated = DistributedDataParallel | Sharded
"""What can be followed."""


def replicated(module: nn.Module) -> Replicated | None:
    """The module as it can be followed, None: it is not of a kind that can."""
    if isinstance(module, DistributedDataParallel):
        return module
    return Sharded(module) if next(_parts(module), None) is not None else None


def problems(model: Sharded, masters: Mapping[str, Tensor]) -> Iterator[str]:
    """Why it can't be followed."""
    for _, group in model.parts:
        yield from _of_mesh(group.mesh_info)
        yield from _of_group(group)
    if len({tuple(_ranks(group.mesh_info, "replicate")) for _, group in model.parts}) > 1:
        yield "fully_shard was called with meshes of different replicas: all modules must have the same"
    if len({part for part, _ in model.parts}) < len(model.parts):
        yield "shard_placement_fn gives parameters of one module meshes of their own: all must have the same"
    sharded = {id(param) for _, group in model.parts for param in _params(group)}
    for name, param in model.module.named_parameters():
        if param.requires_grad and id(param) not in sharded:
            yield (
                f"parameter {name} is trained but not sharded, so that its gradient is never reduced: call fully_shard "
                "on the outermost module, too, and ignore only frozen parameters"
            )
    if masters:
        yield "masters: FSDP2 keeps parameters of more bits by itself: use its MixedPrecisionPolicy"


def _of_mesh(mesh_info: Any) -> Iterator[str]:
    shards, replicas = _ranks(mesh_info, "shard"), _ranks(mesh_info, "replicate")
    if not replicas:
        yield FSDP
    if not shards:
        yield "the parameters are replicated by replicate(), not sharded: use DistributedDataParallel"
    if len(shards) == 1:
        yield "the mesh's second dimension has one rank, so that nothing is sharded: use DistributedDataParallel"


def _of_group(group: Any) -> Iterator[str]:
    if isinstance(group.offload_policy, CPUOffloadPolicy):
        yield "CPUOffloadPolicy: gradients leave the device that reduced them; use OffloadPolicy()"
    if group._all_reduce_hook is not None:
        yield "set_all_reduce_hook: what a hook does to gradients after their all-reduce is not known"
    for one in group.fsdp_params:
        if one.is_dtensor:
            yield "parameters were DTensors before fully_shard (tensor parallel): their shards are of two kinds at once"
        policy = group.mp_policy
        yield from _division(group, policy.reduce_dtype or policy.param_dtype or one.sharded_param.dtype)


def _division(group: Any, dtype: torch.dtype) -> Iterator[str]:
    if dtype not in _UNDIVIDED or group.force_sum_reduction_for_comms:
        how = "with set_force_sum_reduction_for_comms" if dtype in _UNDIVIDED else f"as {dtype}"
        yield (
            f"gradients reduced {how} are divided after their all-reduce, which their copies don't show: use "
            "MixedPrecisionPolicy(reduce_dtype=torch.float32) or torch.bfloat16, without forced sums"
        )


def _parts(module: nn.Module) -> Iterator[tuple[FSDPModule, Any]]:
    """Parameters that FSDP2 gathers and reduces together (its FSDPParamGroup), with a module of theirs."""
    seen = set[int]()
    for part in module.modules():
        for group in part._get_fsdp_state()._fsdp_param_groups if isinstance(part, FSDPModule) else ():
            if id(group) not in seen:  # modules that were sharded by one call have one
                seen.add(id(group))
                yield cast("FSDPModule", part), group


def _params(group: Any) -> list[Tensor]:
    return [one.sharded_param for one in group.fsdp_params]


def _ranks(mesh_info: Any, dimension: str) -> list[int]:
    group = getattr(mesh_info, f"{dimension}_process_group", None)
    return [] if group is None else dist.get_process_group_ranks(group)


class ShardReductions(Reductions):
    """The all-reduces of a module's gradient shards over their replicas: a bucket for each group of parameters.

    Where a gradient lies in its bucket is seen afterwards: FSDP2 makes gradients views of the reduced buffer, or of one
    of the parameters' data type with the same places.
    """

    def __init__(self, model: Sharded, owner: Owner) -> None:
        super().__init__(model.module, owner)
        self._parts = model.parts[::-1]  # in about the order of backward, as DDP numbers its buckets
        self._underway = False
        self._announced: dict[int, dict[str, Any]] = {}
        self._older: set[int] = set()
        self._doubt: str | None = None
        for index, (part, group) in enumerate(self._parts):
            part.set_custom_reduce_scatter(_Tap(group._reduce_scatter_comm, functools.partial(self._reduce, index)))
            part.set_all_reduce_hook(lambda _output: self._guard(self._plugin.unregister_buckets))

    def before_forward(self) -> None:
        """A backward pass that is still under way was broken off by an error."""
        self._underway = False

    def close(self) -> None:
        super().close()
        for part, group in self._parts:
            if isinstance(group._reduce_scatter_comm, _Tap):
                part.set_custom_reduce_scatter(group._reduce_scatter_comm.inner)
            group._all_reduce_hook = None

    def _reduce(self, index: int, output: Tensor) -> None:
        """Gradient shards are about to come into ``output``, to be all-reduced there or kept until they are."""
        if self._parts[index][1].all_reduce_grads and not self._closed:
            self._guard(lambda: self._announce(index, output))

    def _announce(self, index: int, output: Tensor) -> None:
        if not self._underway:
            self._begin()
            self._underway = True
            self._announced, self._older, self._doubt = {}, set(), None
            after_finalize(lambda: self._guard(self._seal))
        group = self._parts[index][1]
        self._doubt = self._doubt or next(_division(group, output.dtype), None)
        if index in self._announced:
            self._doubt = self._doubt or (
                "a module that is called several times in a forward was reduced several times, which FSDP2 does after "
                "set_requires_gradient_sync(False): use set_requires_all_reduce(False)"
            )
            return
        self._announced[index] = line(index, output, [])
        self._older |= {id(param) for param in _params(group) if param.grad is not None}
        self._plugin.register_bucket(output.data_ptr(), output.nbytes, index)

    def _seal(self) -> None:
        self._underway = False
        for index, (_, group) in enumerate(self._parts):
            for param in _params(group):
                name, _ = self._params.get(id(param), (None, None))
                if name is None or param.grad is None:
                    continue
                if index not in self._announced or id(param) in self._older:
                    self._doubt = self._doubt or _added(name)
                else:
                    grad = local(param.grad)
                    self._announced[index]["params"].append([name, int(grad.storage_offset()), grad.numel()])
        if self._announced != self._buckets:
            self._buckets, self._layout = self._announced, None
        self._end(self._doubt)


def _added(name: str) -> str:
    return (
        f"the gradient of {name} is one of an earlier backward pass, or was added to it: call zero_grad() with "
        "set_to_none=True before, and accumulate under set_requires_gradient_sync(False)"
    )


class _Tap(ReduceScatter):
    """A reduce-scatter of FSDP2 that says where its output will be."""

    def __init__(self, inner: ReduceScatter, seen: Callable[[Tensor], None]) -> None:
        self.inner = inner
        self._seen = seen

    def allocate(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.inner.allocate(*args, **kwargs)

    def __call__(self, output_tensor: Tensor, *args: Any, **kwargs: Any) -> dist.Work | None:
        self._seen(output_tensor)
        return self.inner(output_tensor, *args, **kwargs)
