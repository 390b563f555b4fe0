"""Proof that the shadow's state is the trainer's: digests of a step's blocks against the bytes that the step made here.

What is compared is the state of exactly that step, before it is served. Digests of a step that wasn't made here, but
came as a seed, prove nothing: a script may have changed the state since.
"""

import time
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from checkmate import blocks
from checkmate.config import CheckmateError
from checkmate.protocol import Digests, Layout
from checkmate.shadow.optim.replica import Replica
from checkmate.tensors import MASTER

Block = tuple[str, str, int]
"""Name, kind and first byte."""

_PENDING = 64
"""Steps whose digests wait for the step."""
_OLDEST = 8
"""Blocks listed in ``status``."""
_NAMED = 8
"""Blocks named when they differ."""


class Mismatch(CheckmateError):
    """Blocks differ from the trainer's; the text names step, tensors and buckets."""


@dataclass(frozen=True)
class Proof:
    """When a block was last proved equal: step and monotonic time; None: never."""

    block: Block
    when: tuple[int, float] | None


@dataclass(frozen=True)
class Verification:
    """For ``status``. ``blocks``: of the state that is held, from its first comparison on, which a seed begins anew;
    ``proved``: those that were equal at least once; ``oldest``: those that weren't for the longest time. ``compared``,
    ``mismatches``: blocks since the shadow's start; ``last_mismatch``: as text.
    """

    blocks: int = 0
    proved: int = 0
    compared: int = 0
    mismatches: int = 0
    last_mismatch: str | None = None
    oldest: tuple[Proof, ...] = ()


class Verifier:
    """Digests on their way, and what they proved of a replica. Not thread-safe."""

    def __init__(self) -> None:
        self._summary = Verification()
        self._pending: OrderedDict[int, list[list[Any]]] = OrderedDict()
        self._proofs: OrderedDict[Block, tuple[int, float] | None] = OrderedDict()
        self._proved = 0
        self._of: weakref.ref[Replica] | None = None
        self._doubted: set[Block] = set()
        self._compared = self._mismatches = 0
        self._last_mismatch: str | None = None

    @property
    def is_content(self) -> bool:
        """All blocks that ever differed in this incarnation have been proved equal since."""
        return not self._doubted

    def summary(self, replica: Replica | None) -> Verification:
        """All so far, and what it says of this replica."""
        if self._summary.blocks and not self._is_of(replica):
            self._summary = replace(self._summary, blocks=0, proved=0, oldest=())
        return self._summary

    def proofs(self, replica: Replica | None) -> list[Proof]:
        """Of every block of this replica, those first that weren't proved equal for the longest time."""
        return [Proof(block, when) for block, when in self._proofs.items()] if self._is_of(replica) else []

    def begin(self) -> None:
        """A new incarnation: what is on its way is stale."""
        self._pending.clear()
        self._doubted.clear()

    def expect(self, message: Digests) -> None:
        """Digests that will be compared when the step is made."""
        self._pending[message.step] = message.blocks
        while len(self._pending) > _PENDING:
            self._pending.popitem(last=False)

    def compare(self, replica: Replica, layout: Layout) -> None:
        """The replica just made its step, with buckets as ``layout`` has them; raises Mismatch."""
        digests = self._pending.pop(replica.step, None)
        for step in [step for step in self._pending if step < replica.step]:
            del self._pending[step]
        if digests is None:
            return
        if not self._is_of(replica):
            self._of, self._proofs, self._proved = weakref.ref(replica), OrderedDict(), 0
        differences = []
        for name, kind, first, nbytes, crc in digests:
            if (difference := self._difference(replica, (name, kind, first), (nbytes, crc))) is not None:
                differences.append(f"{difference} ({_place(layout, name)})")
        self._compared += len(digests)
        self._mismatches += len(differences)
        if differences:
            self._last_mismatch = f"step {replica.step}: {_listed(differences)} differ from the trainer's"
        self._summarize()
        if differences:
            raise Mismatch(str(self._last_mismatch))

    def _is_of(self, replica: Replica | None) -> bool:
        return self._of is not None and self._of() is replica

    def _difference(self, replica: Replica, block: Block, theirs: blocks.Digest) -> str | None:
        """Text that names the block, None when it is equal."""
        name, kind, first = block
        tensor = replica.tensor(name, kind)
        if tensor is None or (ours := blocks.digest(tensor, first)) is None:
            self._doubted.add(block)
            return f"{kind} {name}, of which there is no byte {first} here,"
        if ours != theirs:
            self._doubted.add(block)
            return f"{kind} {name}, bytes {first} to {first + ours[0] - 1}"
        self._prove(replica, block)
        return None

    def _prove(self, replica: Replica, block: Block) -> None:
        if block not in self._proofs:
            self._list(replica)
        self._doubted.discard(block)
        self._proved += self._proofs.get(block) is None
        self._proofs[block] = replica.step, time.monotonic()
        self._proofs.move_to_end(block)

    def _list(self, replica: Replica) -> None:
        """All blocks that there are by now; steps create optimizer state."""
        _, manifest, tensors = replica.pack()
        names = {line[0] for line in manifest}
        for (name, kind, *_), tensor in zip(manifest, tensors, strict=True):
            if kind == "buffer" or kind.startswith("alias.") or MASTER + name in names:
                continue
            for first in blocks.firsts(tensor.nbytes):
                if (name, kind, first) not in self._proofs:
                    self._proofs[name, kind, first] = None
                    self._proofs.move_to_end((name, kind, first), last=False)

    def _summarize(self) -> None:
        oldest = tuple(Proof(block, proof) for block, proof in islice(self._proofs.items(), _OLDEST))
        self._summary = Verification(
            len(self._proofs), self._proved, self._compared, self._mismatches, self._last_mismatch, oldest
        )


def _place(layout: Layout, name: str) -> str:
    name = name.removeprefix(MASTER)
    buckets = [bucket["bucket"] for bucket in layout.buckets if any(name == place[0] for place in bucket["params"])]
    return f"bucket {buckets[0]}" if buckets else "in no bucket"


def _listed(differences: Sequence[str]) -> str:
    more = len(differences) - _NAMED
    return "; ".join(differences[:_NAMED]) + (f" and {more} more" if more > 0 else "")
