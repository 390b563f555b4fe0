"""A shadow in the trainer's own process: the real hook, records, staging and optimizer, without any network.

Each all-reduced bucket is copied where it is registered for tagging: in a world of one rank that is what would cross
the network. Messages go through their encoding.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from checkmate.protocol import Begun, Boundary, Layout, Message, Seed, State, StepRecord
from checkmate.shadow import messages
from checkmate.shadow.optim.replica import Replica
from checkmate.shadow.staging import Gradient, Ready, Staging
from checkmate.tensors import Manifest
from checkmate.train.agreement import Position
from support.train.fake_shadow import FakePlugin
from support.trainer import over_the_wire


class DirectShadow(FakePlugin):
    """Plugin, network and shadow of one rank. ``unfollowed``: what the trainer said or the shadow found, in order.

    ``reread``: there are several ranks, of which this is one; buckets are then those that are not compressed.
    """

    def __init__(self, reread: bool = False) -> None:
        super().__init__()
        self.reread = reread
        self.staging = Staging(3, 1e9, lambda gradient: None)
        self.replica: Replica | None = None
        self.history = 0
        self.boundaries: dict[int, dict[str, Any]] = {}
        self.records: list[StepRecord] = []
        self.seeds: list[int] = []
        self.unfollowed: list[str] = []
        self.link: DirectLink | None = None
        self._working: Replica | None = None
        self._announced: list[tuple[int, int, bytearray]] = []
        self._places: list[tuple[int, bytearray]] = []
        self._layout: Layout | None = None

    @property
    def committed(self) -> int | None:
        """Newest committed step."""
        return self.replica.step if self.replica else None

    def restart(self, world: int = 1) -> None:
        """A new incarnation."""
        self.incarnation += 1
        self._working = self.replica
        self.staging.begin(world, self.committed, self.boundaries if self.replica else {})

    def register_bucket(self, ptr: int, nbytes: int, bucket: int) -> None:
        super().register_bucket(ptr, nbytes, bucket)
        self._announced.append((self.iteration, bucket, bytearray(ctypes.string_at(ptr, nbytes))))
        self._places.append((ptr, self._announced[-1][2]))

    def unregister_buckets(self) -> None:
        """The backward pass is over: where ranks were several, buckets hold the sums now."""
        super().unregister_buckets()
        if self.reread:
            for ptr, data in self._places:
                data[:] = ctypes.string_at(ptr, len(data))
        self._places.clear()

    def take(self, message: Message) -> None:
        """A message of the records connection."""
        received = over_the_wire(message)
        messages.check(received)
        match received:
            case Layout():
                self._layout = received
                self.staging.add_layout(received)
            case StepRecord():
                self.records.append(received)
                self._take_gradients()
                self.staging.add_record(0, received)
            case Boundary():
                self.staging.add_boundary(0, received.step, received.state, received.unfollowed)
        self._advance()

    def adopt(self, seed: Seed, tensors: Sequence[Tensor]) -> None:
        """A seed arrived."""
        self.seeds.append(seed.step)
        seed = over_the_wire(seed)
        verdict = self.staging.judge_seed(seed.step, self.committed)
        if verdict == "verify" and self._working is not None and not self._working.differences(seed, tensors):
            return
        if verdict != "ignore":
            self._working = Replica(seed, [tensor.clone() for tensor in tensors])
            self.staging.adopt(seed.step)
            self._advance()

    def _take_gradients(self) -> None:
        announced, self._announced = self._announced, []
        assert self._layout is not None
        for iteration, bucket, data in announced:
            dtype = next(line["dtype"] for line in self._layout.buckets if line["bucket"] == bucket)
            self.staging.add_gradient(Gradient(iteration, bucket, dtype, len(data), data))

    def _advance(self) -> None:
        while (ready := self.staging.ready()) is not None and self._working is not None:
            self._apply(self._working, ready)
        if self.staging.commit_seed():
            self.replica, self.boundaries = self._working, self.staging.boundaries
        if self.staging.damage is not None:
            self.unfollowed.append(self.staging.damage)
            if self.link is not None:
                self.link.ask(self.staging.damage)

    def _apply(self, working: Replica, ready: Ready) -> None:
        working.check(ready.record, ready.layout)
        buckets = {bucket: memoryview(gradient.handle) for bucket, gradient in ready.gradients.items()}
        working.apply(ready.record, ready.layout, buckets)
        self.replica, self.boundaries = working, ready.boundaries
        self.staging.taken(ready.record.step)


class DirectClient:
    """In place of ``checkmate.train.client.Client``."""

    address = "direct"

    def __init__(self, shadow: DirectShadow) -> None:
        self.shadow = shadow

    def begin(self, proposed: int, call_s: float) -> Begun:
        self.shadow.restart()
        committed = self.shadow.committed
        return Begun(
            self.shadow.incarnation,
            committed,
            [] if committed is None else [[self.shadow.history, committed, committed]],
        )

    def send_seed(
        self, incarnation: int, seed: Seed, tensors: Sequence[Tensor], on_open: Callable[[Any], None]
    ) -> int | None:
        self.shadow.adopt(seed, tensors)
        self.shadow.history = seed.history
        return self.shadow.committed

    def restore(self, incarnation: int, step: int | None = None, history: int = 0) -> tuple[State, list[Tensor]]:
        assert self.shadow.replica is not None
        description, manifest, tensors = self.shadow.replica.pack()
        state = State(self.shadow.committed, description, _listed(manifest), self.shadow.boundaries.get(0, {}))
        return over_the_wire(state), [tensor.clone() for tensor in tensors]


class DirectLink:
    """In place of ``checkmate.train.link.RecordsLink``."""

    dropped = 0
    refused = None

    def __init__(self, client: DirectClient, greeting: Any, on_seed_request: Callable[..., None], _: Any) -> None:
        self._shadow = client.shadow
        self.ask = on_seed_request
        self.connected = False

    @property
    def committed(self) -> Position | None:
        return None if self._shadow.committed is None else (self._shadow.history, self._shadow.committed)

    def open(self, incarnation: int) -> None:
        self.connected = True
        self._shadow.link = self

    def wait(self, condition: Callable[[], bool], timeout: float) -> bool:
        return condition()

    def send(self, message: Message) -> bool:
        self._shadow.take(message)
        return True

    def close(self, timeout: float) -> None:
        self._shadow.link = None


def _listed(manifest: Manifest) -> Manifest:
    return [list(line) for line in manifest]
