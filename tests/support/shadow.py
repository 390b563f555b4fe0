"""A shadow with a receiver that is fed by hand, and a job that talks to it over real sockets."""

import itertools
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from typing import Any

from checkmate.checked import Endpoint
from checkmate.protocol import Ack, Boundary, Message, SeedRequest, receive
from checkmate.shadow.daemon import Shadow
from checkmate.shadow.rx.receiver import Damage, Event, OpComplete
from checkmate.train.client import Client
from checkmate.train.settings import Settings
from support.trainer import Step, Trainer, over_the_wire

TOKEN = b"a token of the job's"
JOB = "test"
FLOAT32 = 7


class FakeReceiver:
    """Events and buffers by hand; every misuse of a buffer is an assertion."""

    def __init__(self, *_: Any) -> None:
        self.events: queue.Queue[Event] = queue.Queue()
        self.buffers: dict[int, bytearray] = {}
        self.incarnation = 0
        self.discarded: list[int] = []
        self.released = 0
        self._numbers = itertools.count()
        self.packets = 0

    def complete(self, incarnation: int, iteration: int, bucket: int, data: bytes, datatype: int = FLOAT32) -> None:
        """A bucket arrived; as the real one, frames of another incarnation are dropped."""
        if incarnation != self.incarnation:
            return
        index = next(self._numbers)
        self.buffers[index] = bytearray(data)
        self.packets += 1
        count = len(data) // 4
        self.events.put(
            OpComplete(
                incarnation, iteration, bucket, datatype, count, len(data), 1, iteration, index, time.monotonic()
            )
        )

    def damage(self, iteration: int | None, bucket: int | None = None, reason: str = "gap") -> None:
        """Bytes were lost."""
        self.events.put(Damage(self.incarnation, iteration, bucket, reason, "bytes 0 to 99 of 1000"))

    def poll(self, timeout_s: float) -> list[Event]:
        """As Receiver.poll."""
        try:
            return [self.events.get(timeout=min(timeout_s, 0.1))]
        except queue.Empty:
            return []

    def buffer(self, op: OpComplete) -> memoryview:
        """As Receiver.buffer."""
        return memoryview(self.buffers[op.buffer_index])

    def release(self, op: OpComplete) -> None:
        """As Receiver.release; what is used after it is visibly wrong."""
        data = self.buffers.pop(op.buffer_index)
        data[:] = b"\xff" * len(data)
        self.released += 1

    def set_incarnation(self, incarnation: int) -> None:
        """As Receiver.set_incarnation."""
        self.incarnation = incarnation

    def expect(self, iteration: int) -> None:
        """As Receiver.expect."""
        self.horizon = iteration

    def discard(self, iteration: int) -> None:
        """As Receiver.discard."""
        self.discarded.append(iteration)

    def incomplete(self, incarnation: int, iteration: int) -> str:
        """As Receiver.incomplete."""
        return f"bytes 8 to 15 of iteration {iteration}"

    def counters(self) -> dict[str, int]:
        """As Receiver.counters."""
        return {"packets": self.packets}

    def close(self) -> None:
        """As Receiver.close."""


class Rank:
    """A rank's records connection and what the shadow said on it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.sock.settimeout(None)
        self.heard: list[Message] = []
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        try:
            while (message := receive(self.sock)) is not None:
                self.heard.append(message)
        except OSError:
            return

    def send(self, *messages: Message) -> None:
        """Send at once."""
        self.sock.sendall(b"".join(message.encode() for message in messages))

    def acks(self) -> list[int | None]:
        """Acknowledged steps so far."""
        return [message.committed for message in self.heard if isinstance(message, Ack)]

    def requests(self) -> list[str]:
        """Reasons of the requests for a seed so far."""
        return [message.reason for message in self.heard if isinstance(message, SeedRequest)]

    def close(self) -> None:
        """As a killed process's."""
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
        self._thread.join(5)


def wait(condition: Callable[[], Any], what: str, timeout_s: float = 10.0) -> None:
    """Fail when it doesn't become true."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"waited {timeout_s} s for: {what}"
        time.sleep(0.005)


class Job:
    """Ranks of one job; all have the same trainer, as data-parallel ranks have the same state."""

    def __init__(
        self, shadow: Shadow, receiver: FakeReceiver, trainer: Trainer, world: int = 2, group: str = ""
    ) -> None:
        self.shadow, self.receiver, self.trainer, self.world, self.group = shadow, receiver, trainer, world, group
        self.incarnation = 0
        self.ranks: list[Rank] = []
        self._stack = ExitStack()

    def client(self, rank: int = 0, token: bytes = TOKEN, job: str = JOB, world: int | None = None) -> Client:
        """The trainer's own client."""
        endpoint = Endpoint(*self.shadow.control)
        return Client(Settings((endpoint,), token, job, group=self.group), endpoint, rank, world or self.world)

    def begin(self) -> int | None:
        """Open an incarnation and connect all ranks; returns the committed step."""
        begun = self.client().begin(0, 10.0)
        self.incarnation = begun.incarnation
        self.connect()
        return begun.committed

    def connect(self) -> None:
        """Records connections of all ranks."""
        self.ranks = [Rank(self.client(rank).connect("records", self.incarnation)) for rank in range(self.world)]

    def seed(self) -> int | None:
        """Send the trainer's state."""
        seed, tensors = self.trainer.seed()
        return self.client().send_seed(self.incarnation, seed, tensors, lambda _: None)

    def gradients(self, step: Step, buckets: Iterable[int] | None = None) -> None:
        """Buckets of a step arrive."""
        for bucket in step.buckets if buckets is None else buckets:
            self.receiver.complete(self.incarnation, step.record.step, bucket, step.buckets[bucket])

    def records(self, step: Step, ranks: Iterable[int] | None = None) -> None:
        """The layout and step record of ranks."""
        for rank in range(self.world) if ranks is None else ranks:
            self.ranks[rank].send(step.layout, step.record)

    def boundaries(self, step: int, ranks: Iterable[int] | None = None) -> None:
        """Boundaries of ranks."""
        for rank in range(self.world) if ranks is None else ranks:
            self.ranks[rank].send(over_the_wire(Boundary(step, self.boundary(rank, step))))

    def boundary(self, rank: int, step: int) -> dict[str, Any]:
        """What a rank sends; the shadow gives it back as it was."""
        return {"rank": rank, "step": step, "words": b"\0\1"}

    def step(self) -> Step:
        """A whole step, and wait until the shadow committed it."""
        step = self.trainer.train()
        self.gradients(step)
        self.records(step)
        self.boundaries(step.record.step)
        self.committed(step.record.step)
        return step

    def committed(self, step: int) -> None:
        """Wait until the shadow committed exactly this step."""
        wait(lambda: self.status()["committed"] == step, f"commit of {step}, status is {self.status()}")

    def status(self) -> dict[str, Any]:
        """The shadow's status."""
        return self.shadow.status()

    def kill(self) -> None:
        """All ranks die."""
        for rank in self.ranks:
            rank.close()
        self.ranks = []
