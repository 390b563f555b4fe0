"""The cut of a model into shards, and what of every message and state belongs to which."""

import itertools

import pytest
import torch
from support.trainer import Trainer, adamw, differing, small_model
from torch import nn

from checkmate.config import CheckmateError
from checkmate.protocol import Boundary, Digests, Layout, StepRecord
from checkmate.shadow import messages
from checkmate.shadow.optim.replica import Replica
from checkmate.tensors import MASTER, named_state, pack_state, unpack_state
from checkmate.train.shards import Shard, cut, join


class Tied(nn.Module):
    """A second name, a buffer, a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.norm = nn.BatchNorm1d(8)
        self.hidden = nn.Linear(8, 30)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight
        self.hidden.bias.requires_grad_(False)


def names(shard: Shard, module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters() if shard.owns(name)]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_every_parameter_is_in_one_shard_and_every_shard_has_one(count: int) -> None:
    module = small_model()
    shards = cut(module, count)
    held = [names(shard, module) for shard in shards]
    assert all(held)
    assert list(itertools.chain(*held[::-1])) == [name for name, _ in module.named_parameters()]
    assert held == [names(shard, module) for shard in cut(small_model(3), count)], "another process cuts alike"


def test_shards_are_of_equal_size_as_far_as_parameters_allow() -> None:
    module = nn.Sequential(*(nn.Linear(40, 40) for _ in range(12)))
    sizes = dict(module.named_parameters())
    held = [sum(sizes[name].nbytes for name in names(shard, module)) for shard in cut(module, 4)]
    assert max(held) - min(held) <= 40 * 40 * 4


def test_too_many_shadows_are_refused() -> None:
    with pytest.raises(CheckmateError, match="3 shadows for 2 parameter"):
        cut(nn.Linear(2, 2), 3)


def test_messages_are_split() -> None:
    module = small_model()
    first, second = cut(module, 2)
    ours, theirs = names(first, module), names(second, module)
    places = [{"bucket": 0, "bytes": 8, "dtype": "float32", "params": [[ours[-1], 0, 1], [theirs[-1], 1, 1]]}]
    places.append({"bucket": 1, "bytes": 4, "dtype": "float32", "params": [[theirs[0], 0, 1]]})
    whole = Layout("whole", places)
    layout = first.part(whole)
    assert isinstance(layout, Layout)
    assert [bucket["params"] for bucket in layout.buckets] == [[[ours[-1], 0, 1]]] and layout.elsewhere == [1]
    changes = [{"op": "clip_value", "params": None}, {"op": "clip_value", "params": [ours[0], theirs[0]]}]
    record = first.part(StepRecord(1, "whole", [], absent=[theirs[0], ours[0]], changes=changes))
    assert isinstance(record, StepRecord) and record.layout == layout.digest
    assert record.absent == [ours[0]] and [change["params"] for change in record.changes] == [None, [ours[0]]]
    assert second.part(whole) != layout
    digests = Digests(1, [[MASTER + theirs[0], "param", 0, 4, 7]])
    assert first.part(digests) is None and second.part(digests) == digests
    boundary = Boundary(1, {})
    assert first.part(boundary) is boundary
    (only,) = cut(module, 1)
    assert only.part(whole) is whole


def test_shards_of_a_state_make_the_whole_again() -> None:
    module = Tied()
    optimizer = torch.optim.AdamW([{"params": [p]} for p in module.parameters()], lr=0.1)
    for param in module.parameters():
        param.grad = torch.ones_like(param) if param.requires_grad else None
    optimizer.step()
    whole = pack_state(*named_state(module), optimizer)
    parts = [shard.pick(whole) for shard in cut(module, 2)]
    assert all(len(part[1]) < len(whole[1]) for part in parts)
    assert [line[0] for line in parts[1][1] if line[1] == "buffer"] == [], "buffers are the first shard's"
    fresh = Tied()
    unpack_state(*named_state(fresh), torch.optim.AdamW([{"params": [p]} for p in fresh.parameters()]), *join(parts))
    assert differing(dict(module.state_dict()), dict(fresh.state_dict())) == []
    with pytest.raises(CheckmateError, match="not the shards of one"):
        join([parts[0], parts[0]])


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("fused", [True, False])
def test_replicas_of_shards_equal_the_trainer(count: int, fused: bool) -> None:
    def make(net: nn.Module) -> torch.optim.Optimizer:
        optimizer = adamw(net)
        for group in optimizer.param_groups:
            group["fused"] = fused
        return optimizer

    trainer = Trainer(make)
    shards = cut(trainer.net, count)
    seed, tensors = trainer.seed()
    replicas = []
    for shard in shards:
        part, chosen = shard.seed(seed, tensors)
        messages.check(part)
        replicas.append(Replica(part, chosen))
    for _ in range(4):
        step = trainer.train()
        for shard, replica in zip(shards, replicas, strict=True):
            layout, record = shard.part(step.layout), shard.part(step.record)
            assert isinstance(layout, Layout) and isinstance(record, StepRecord)
            replica.apply(record, layout, {bucket: memoryview(data) for bucket, data in step.buckets.items()})
    _, manifest, held = join([replica.pack() for replica in replicas])
    _, lines, expected = pack_state(*named_state(trainer.net), trainer.optimizer)
    found = {(line[0], line[1]): tensor.detach() for line, tensor in zip(manifest, held, strict=True)}
    wanted = {(line[0], line[1]): tensor.detach() for line, tensor in zip(lines, expected, strict=True)}
    assert differing(wanted, found) == []
