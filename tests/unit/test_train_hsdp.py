"""HSDP: the shadows of a shard's replicas hold that shard, bit for bit; what can't be followed is refused."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.train.fake_shadow import FakeShadow
from support.train.processes import finish, start
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import checkmate
from checkmate.config import CheckmateError
from checkmate.train import bootstrap, hsdp, registry

pytest_plugins = ["support.train.world"]

DRAWS = range(16)
SCENARIOS = ["noticed", "apart", "unfrozen", "broken_off", "closed", "resumed"]


def run(names: list[str], folder: Path) -> None:
    unreachable = FakeShadow(1)  # for the settings alone
    unreachable.close()
    environment = {**unreachable.environment(folder), "PYTHONPATH": str(Path(__file__).parents[1])}
    outputs = finish(start(2, "hsdp_ranks.py", names, folder, environment), 240)
    assert [output.count("passed ") for output in outputs] == [len(names)] * 2


def test_the_shadows_hold_the_local_shards(tmp_path: Path) -> None:
    run([*map(str, DRAWS), *SCENARIOS], tmp_path)


# What is refused, in a world of one rank


def mesh(*shape: int, names: tuple[str, ...] = ("replicate", "shard")) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=names[-len(shape) :])


def refuse(text: str, module: nn.Module) -> None:
    with pytest.raises(CheckmateError, match=text):
        checkmate.attach(module, AdamW(module.parameters()))


def test_what_has_no_replicas_is_refused(shadow: FakeShadow, caplog: pytest.LogCaptureFixture) -> None:
    text = r"sharded without replicas \(FSDP\): gradients are reduce-scattered.* README.md, Roadmap"
    refuse(text, fully_shard(nn.Linear(4, 2), mesh=mesh(1)))
    refuse("mesh's second dimension has one rank", fully_shard(nn.Linear(4, 2), mesh=mesh(1, 1)))
    auto = bootstrap.AutoAttach()
    registry.install()
    net = fully_shard(nn.Linear(4, 2), mesh=mesh(1))
    auto._note(net)
    made = AdamW(net.parameters())
    auto._try_attach()
    auto._try_attach()
    assert len([line for line in caplog.messages if "not attached: the parameters are sharded" in line]) == 1, made


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_other_kinds_of_shards_are_refused(shadow: FakeShadow) -> None:
    one = FullyShardedDataParallel(
        nn.Linear(4, 2), sharding_strategy=ShardingStrategy.NO_SHARD, device_id=torch.device("cpu")
    )
    refuse(r"FullyShardedDataParallel \(FSDP1\) is not followed, .* README.md, Roadmap", one)
    from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415 - warns

    zero = DistributedDataParallel(nn.Linear(4, 2))
    with pytest.raises(CheckmateError, match=r"ZeroRedundancyOptimizer holds the state of some .* README.md, Roadmap"):
        checkmate.attach(zero, ZeroRedundancyOptimizer(zero.parameters(), AdamW))  # type: ignore[no-untyped-call]
    net = nn.Linear(4, 2)
    net.weight = nn.Parameter(distribute_tensor(net.weight.detach(), mesh(1), [Shard(0)]))
    refuse("the parameters are DTensors that fully_shard did not make; .* README.md, Roadmap", net)


def deep() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def offloaded() -> nn.Module:
    return fully_shard(deep(), mesh=mesh(1, 1), offload_policy=CPUOffloadPolicy(pin_memory=False))


def hooked() -> nn.Module:
    net = fully_shard(deep(), mesh=mesh(1, 1))
    net.set_all_reduce_hook(lambda output: None)
    return net


def summed() -> nn.Module:
    net = fully_shard(deep(), mesh=mesh(1, 1))
    net.set_force_sum_reduction_for_comms(True)
    return net


def own_mesh() -> nn.Module:
    other = ShardPlacementResult(Shard(0), FSDPMeshInfo(mesh(1), shard_mesh_dim=0))
    return fully_shard(deep(), mesh=mesh(1, 1), shard_placement_fn=lambda param: other if param.dim() > 1 else None)


def in_part() -> nn.Module:
    net = deep()
    fully_shard(net[0], mesh=mesh(1, 1))
    return net


def tensor_parallel() -> nn.Module:
    whole, net = mesh(1, 1, 1, names=("replicate", "shard", "part")), deep()
    for layer in net:
        for name, param in list(layer.named_parameters()):
            setattr(layer, name, nn.Parameter(distribute_tensor(param.detach(), whole["part"], [Shard(0)])))
    return fully_shard(net, mesh=whole["replicate", "shard"])


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "offload": (offloaded, "CPUOffloadPolicy"),
    "hook": (hooked, "set_all_reduce_hook: what a hook does"),
    "sums": (summed, "gradients reduced with set_force_sum_reduction_for_comms are divided after their all-reduce"),
    "mesh": (own_mesh, "shard_placement_fn gives parameters of one module meshes of their own"),
    "replicate": (lambda: replicate(deep(), mesh=mesh(1)), r"replicated by replicate\(\), not sharded"),
    "part": (in_part, r"parameter 1.weight is trained but not sharded, .* call fully_shard on the outermost module"),
    "fp64": (
        lambda: fully_shard(deep().double(), mesh=mesh(1, 1)),
        r"gradients reduced as torch.float64 are divided .* use MixedPrecisionPolicy\(reduce_dtype=torch.float32\)",
    ),
    "fp16": (
        lambda: fully_shard(deep(), mesh=mesh(1, 1), mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16)),
        "gradients reduced as torch.float16 are divided after",
    ),
    "tensor parallel": (tensor_parallel, "parameters were DTensors before fully_shard"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_options_that_cannot_be_followed_are_refused(group: None, case: str) -> None:
    make, text = REFUSED[case]
    model = hsdp.replicated(make())
    assert isinstance(model, hsdp.Sharded)
    problems = list(hsdp.problems(model, {}))
    assert any(re.search(text, problem) for problem in problems), problems


def test_options_that_change_nothing_are_not(group: None) -> None:
    options = {"mesh": mesh(1, 1), "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    net = deep()
    fully_shard(net[0], reshard_after_forward=False, **options)
    model = hsdp.replicated(fully_shard(net, **options))
    assert isinstance(model, hsdp.Sharded)
    assert all("has one rank" in problem for problem in hsdp.problems(model, {}))
    assert list(hsdp.problems(model, {"0.weight": torch.zeros(1)}))[-1].startswith("masters: FSDP2 keeps")
