"""What a shadow cannot follow is refused when it is attached, by name and with the reason."""

import sys
from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FlatParameter, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from checkmate import config
from checkmate.tensors import rounds_by_place
from checkmate.train import boundary, hsdp, registry
from checkmate.train.compression import Compression, hook_name
from checkmate.train.hsdp import ROADMAP, Replicated, Sharded

FOLLOWED = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)
CARRIERS = ["checkmate", "nccl"]
"""Back ends whose all-reduce goes through the plugin."""
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_DEVICES = ("cpu", "cuda")
_FSDP1 = f"FullyShardedDataParallel (FSDP1) is not followed, whatever its sharding_strategy; {ROADMAP}"


def refusal(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    stateful: Mapping[str, object],
    masters: Mapping[str, Tensor],
) -> str | None:
    """Why this model and optimizer cannot be followed, None when they can."""
    model = hsdp.replicated(module) if isinstance(module, nn.Module) else None
    if model is None:
        if isinstance(module, FullyShardedDataParallel):
            return _FSDP1
        reason = sharded(module.parameters()) if isinstance(module, nn.Module) else None
        return reason or f"{type(module).__name__} is not a DistributedDataParallel: wrap the model in one"
    checks = (
        hsdp.problems(model, masters) if isinstance(model, Sharded) else _ddp(model),
        _group(model),
        _module(model.module),
        _optimizer(model.module, optimizer, masters),
        _stateful(optimizer, stateful),
        _loaders(),
    )
    for reasons in checks:
        for reason in reasons:
            return reason
    return None


def sharded(params: Iterable[Tensor]) -> str | None:
    """Why parameters that ranks hold parts of, but not by fully_shard, cannot be followed; None when there are none."""
    for param in params:
        if isinstance(param, FlatParameter):
            return _FSDP1
        if isinstance(param, DTensor):
            return f"the parameters are DTensors that fully_shard did not make; {ROADMAP}"
    return None


def _group(ddp: Replicated) -> Iterator[str]:
    world = dist.get_world_size(ddp.process_group)
    if world < config.MIN_RANKS:
        yield f"{world} rank(s): no gradient crosses the network; at least {config.MIN_RANKS} are needed"
    backend = _backend_name(ddp)
    if backend not in CARRIERS:
        yield (
            f"the process group's back end for {ddp.device_type} is {backend}, whose gradients do not go through the "
            f"plugin: use one of {', '.join(CARRIERS)}"
        )


def _backend_name(ddp: Replicated) -> str:
    """Name of the back end that reduces this module's gradients."""
    configured = dist.get_backend_config(ddp.process_group)
    by_device = dict(part.split(":", 1) for part in configured.split(",") if ":" in part)
    return by_device.get(ddp.device_type, dist.get_backend(ddp.process_group))


def _ddp(ddp: DistributedDataParallel) -> Iterator[str]:
    if ddp.mixed_precision is not None:
        yield "DDP's mixed_precision reduces through a communication hook of its own: use autocast instead"
    if Compression.of(ddp) is None:
        followed = ", ".join(str(kind.value) for kind in Compression if kind.value)
        yield (
            f"the module's communication hook {hook_name(ddp)}: what it reduces is not the gradient; only torch's own "
            f"{followed} of DDP's own process group are followed"
        )
    if ddp._delay_all_reduce_params:
        yield "delay_all_reduce_named_params: those gradients never pass the communication hook"
    if ddp._use_python_reducer:
        yield "the Python reducer of torch.compile has no communication hooks"
    places: dict[int, str] = {}
    for name, param in ddp.module.named_parameters():
        if param.numel() and (other := places.setdefault(param.data_ptr(), name)) != name:
            yield (
                f"parameters {other} and {name} are two that share memory, of which a shadow can't keep one copy: "
                "tie them by one Parameter under both names"
            )
        if hasattr(param, "_in_backward_optimizers"):
            yield f"parameter {name} has an optimizer that steps inside backward: let the optimizer step after it"
        if param.requires_grad and name in ddp.parameters_to_ignore:
            yield f"DDP was told to ignore parameter {name}: its gradient is never all-reduced"


def _module(module: nn.Module) -> Iterator[str]:
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            yield f"{name} has sparse gradients: use sparse=False"
    for name, param in module.named_parameters():
        if param.dtype not in _DTYPES:
            yield f"parameter {name} is {param.dtype}: only floating-point types of 16 to 64 bits are followed"
        if param.device.type not in _DEVICES:
            yield f"parameter {name} is on {param.device}: only {' and '.join(_DEVICES)} are followed"


def _optimizer(module: nn.Module, optimizer: torch.optim.Optimizer, masters: Mapping[str, Tensor]) -> Iterator[str]:
    cls = type(optimizer)
    if cls.__name__ == "ZeroRedundancyOptimizer":
        yield f"ZeroRedundancyOptimizer holds the state of some parameters on each rank; {ROADMAP}"
    if cls not in FOLLOWED:
        names = ", ".join(kind.__name__ for kind in FOLLOWED)
        yield (
            f"optimizer {cls.__module__}.{cls.__qualname__}: only torch's own {names} are followed, whose update of an "
            "element depends on nothing but that element"
        )
    names_of_all = {id(param): name for name, param in module.named_parameters()}
    names_of_copies = {id(copy): name for name, copy in masters.items()}
    for index, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            yield f"parameter group {index} is differentiable, which no shadow can be"
        if cls is torch.optim.SGD and group["fused"] and group["momentum"]:
            for param in group["params"]:
                if rounds_by_place(param):
                    yield (
                        f"parameter group {index} is for torch's fused SGD with momentum and holds {param.dtype}: that "
                        "kernel rounds the momentum of a tensor's last elements differently each time; use foreach=True"
                    )
        for param in group["params"]:
            if id(param) not in names_of_all | names_of_copies:
                shape = list(param.shape)
                yield (
                    f"parameter group {index} holds a parameter of shape {shape} that is not in the module; "
                    "where it is a copy of one that is, name it: attach(…, masters={name: copy})"
                )
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    missing = {key: name for key, name in names_of_all.items() if key not in held and name not in masters}
    for other in registry.all_optimizers() if missing else ():
        theirs = [missing[id(p)] for group in other.param_groups for p in group["params"] if id(p) in missing]
        if other is not optimizer and theirs:
            yield (
                f"parameter {theirs[0]} and {len(theirs) - 1} more are not in this optimizer but in another "
                f"{type(other).__name__}: one optimizer must hold all that are trained (several are not supported)"
            )


def _stateful(optimizer: torch.optim.Optimizer, stateful: Mapping[str, object]) -> Iterator[str]:
    for name in boundary.without_state(stateful):
        yield f"stateful[{name!r}] has no state_dict() and load_state_dict()"
    known = [*registry.schedulers(optimizer), *(item for item in stateful.values() if isinstance(item, LRScheduler))]
    if hasattr(optimizer.step, "_wrapped_by_lr_sched") and not known:
        yield (
            "a learning-rate scheduler was made before attach: name it, attach(…, stateful={'scheduler': scheduler}), "
            "or make it afterwards"
        )


def _loaders() -> Iterator[str]:
    accelerate = sys.modules.get("accelerate.data_loader")
    if accelerate is not None and registry.alive(accelerate.DataLoaderDispatcher):
        yield (
            "accelerate reads the data on one rank for all, where no rank can go on by itself: use "
            "DataLoaderConfiguration(dispatch_batches=False)"
        )
