"""Which parameters each shadow of a group holds, and what of every message and state is theirs.

A shard is a run of parameters in the reverse order of the module's, in which DDP first fills its buckets, so that few
buckets are needed by two shadows. The cut follows from the module alone: every rank makes the same, in every
incarnation. Buffers belong to the first shard, a second name and a master copy to the shard of their parameter.
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack
from torch import Tensor, nn

from checkmate.config import CheckmateError
from checkmate.protocol import Digests, Layout, Message, Seed, StepRecord
from checkmate.tensors import MASTER, Manifest

Packed = tuple[dict[str, Any], Manifest, list[Tensor]]
"""Optimizer description, manifest and tensors, as ``checkmate.tensors.pack_state`` makes them."""


def cut(module: nn.Module, count: int) -> list["Shard"]:
    """As many shards, as equal in bytes as whole parameters allow; CheckmateError when there are too few of those."""
    sizes = [(name, param.nbytes) for name, param in module.named_parameters()][::-1]
    if count > 1 and len(sizes) < count:
        raise CheckmateError(f"{count} shadows for {len(sizes)} parameter(s): each must hold one at least")
    owners: dict[str, int] = {}
    index, before, total = 0, 0, sum(size for _, size in sizes)
    for position, (name, size) in enumerate(sizes):
        wanted = (2 * before + size) * count // (2 * total) if total else 0  # where its middle falls
        must = count - (len(sizes) - position)  # the shards to come need one each
        index = max(index, must, min(wanted, index + 1)) if position else 0
        owners[name] = index
        before += size
    return [Shard(owners, index, count) for index in range(count)]


class Shard:
    """One shadow's part of everything. ``owners``: number of the shard of each parameter."""

    def __init__(self, owners: Mapping[str, int], index: int, count: int) -> None:
        self._owners = owners
        self._index = index
        self._count = count
        self._layouts: dict[str, Layout] = {}

    def owns(self, name: str) -> bool:
        """A parameter, master copy or buffer of this name is in this shard."""
        return self._owners.get(name.removeprefix(MASTER), 0) == self._index

    def part(self, message: Message) -> Message | None:
        """What this shadow must be told; None: nothing."""
        if self._count == 1:
            return message
        match message:
            case Layout():
                return self._layout(message)
            case StepRecord():
                return self._record(message)
            case Digests():
                blocks = [block for block in message.blocks if self.owns(block[0])]
                return dataclasses.replace(message, blocks=blocks) if blocks else None
        return message

    def pick(self, state: Packed) -> Packed:
        """This shard's part of a whole state."""
        if self._count == 1:
            return state
        description, manifest, tensors = state
        groups = [
            {**group, "params": self._names(group["params"]), "order": group["params"]}
            for group in description["groups"]
        ]
        scalars = {name: values for name, values in description["scalars"].items() if self.owns(name)}
        chosen = [(line, tensor) for line, tensor in zip(manifest, tensors, strict=True) if self._owns_line(line)]
        return (
            {**description, "groups": groups, "scalars": scalars},
            [line for line, _ in chosen],
            [tensor for _, tensor in chosen],
        )

    def seed(self, seed: Seed, tensors: Sequence[Tensor]) -> tuple[Seed, list[Tensor]]:
        """This shard's part of a seed."""
        optimizer, manifest, chosen = self.pick((seed.optimizer, seed.manifest, list(tensors)))
        return dataclasses.replace(seed, optimizer=optimizer, manifest=manifest), chosen

    def _layout(self, layout: Layout) -> Layout:
        if layout.digest not in self._layouts:
            buckets = [
                {**bucket, "params": [place for place in bucket["params"] if self.owns(place[0])]}
                for bucket in layout.buckets
            ]
            ours = [bucket for bucket in buckets if bucket["params"]]
            elsewhere = [bucket["bucket"] for bucket in buckets if not bucket["params"]]
            digest = hashlib.sha256(msgpack.packb([ours, elsewhere])).hexdigest()[:32]
            self._layouts[layout.digest] = Layout(digest, ours, elsewhere)
        return self._layouts[layout.digest]

    def _record(self, record: StepRecord) -> StepRecord:
        changes = [
            change if change["params"] is None else {**change, "params": self._names(change["params"])}
            for change in record.changes
        ]
        known = self._layouts.get(record.layout)
        return dataclasses.replace(
            record,
            layout=known.digest if known else record.layout,
            absent=self._names(record.absent),
            changes=changes,
        )

    def _names(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if self.owns(name)]

    def _owns_line(self, line: Sequence[Any]) -> bool:
        prefix, _, first = line[1].partition(".")
        return self.owns(first if prefix == "alias" else line[0])


def join(parts: Sequence[Packed]) -> Packed:
    """The whole of which ``parts`` are all shards' parts; CheckmateError when they are not of one cut."""
    if len(parts) == 1:
        return parts[0]
    descriptions = [description for description, _, _ in parts]
    groups = [_join_groups(list(same)) for same in zip(*(d["groups"] for d in descriptions), strict=True)]
    scalars = {name: values for description in descriptions for name, values in description["scalars"].items()}
    manifest = [line for _, lines, _ in parts for line in lines]
    tensors = [tensor for _, _, held in parts for tensor in held]
    return {**descriptions[0], "groups": groups, "scalars": scalars}, manifest, tensors


def _join_groups(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    whole = {key: value for key, value in parts[0].items() if key != "order"}
    order = parts[0].get("order")
    names = [name for part in parts for name in part["params"]]
    if order is None or sorted(names) != sorted(order):
        raise CheckmateError(
            "the shadows' states are not the shards of one: they were made for another number of shadows; restart all "
            "shadows to begin anew"
        )
    return {**whole, "params": list(order)}
