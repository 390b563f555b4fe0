"""A shadow for tests: speaks the control protocol over real sockets, remembers all messages, steps nothing."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkmate.protocol import (
    Ack,
    Begin,
    Begun,
    Boundary,
    Challenge,
    Hello,
    Layout,
    Message,
    Refused,
    Restore,
    Seed,
    SeedRequest,
    State,
    StepRecord,
    prove,
    receive,
)
from checkmate.tensors import receive_tensors, send_tensors

TOKEN = b"0123456789abcdef-token"
JOB = "job"


class FakeShadow:
    """``seed_always``: asks for a seed after every step. ``last``: lacks this step, asks for a seed and commits that.
    ``withheld_s``: before it commits. ``refusal``: it can never follow, and why.

    ``states``: what it restores, by rank (see ``state_of``).
    """

    def __init__(self, world: int, port: int = 0) -> None:
        self.world = world
        self.seed_always = False
        self.last: int | None = None
        self.withheld_s = 0.0
        self.silent_seeds = False
        self.refusal: str | None = None
        self.incarnation = 0
        self.committed: int | None = None
        self.history = 0
        self.states: dict[int, tuple[State, list[Any]]] = {}
        self.messages: list[tuple[int, Message]] = []
        self.seeds: list[tuple[Seed, list[Any]]] = []
        self._lock = threading.Condition()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def environment(self, folder: Path) -> dict[str, str]:
        """What the launcher would set."""
        token = folder / "token"
        token.write_bytes(TOKEN)
        token.chmod(0o600)
        return {
            "CHECKMATE_SHADOWS": f"127.0.0.1:{self.port}",
            "CHECKMATE_TOKEN_FILE": str(token),
            "CHECKMATE_JOB": JOB,
        }

    def close(self) -> None:
        """Refuse and break everything from now on."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.break_connections()

    def break_connections(self) -> None:
        """As a network fault would."""
        with self._lock:
            for sock in self._open:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def wait(self, condition: Callable[[], bool], timeout: float = 10) -> bool:
        """Wait for something about the messages."""
        with self._lock:
            return self._lock.wait_for(condition, timeout)

    def of(self, kind: type, rank: int | None = None) -> list[Any]:
        """Messages of a kind in order of arrival."""
        with self._lock:
            return [m for r, m in self.messages if isinstance(m, kind) and rank in (None, r)]

    def boundary(self, rank: int, step: int) -> dict[str, Any] | None:
        """State of a rank after a step."""
        found = [m.state for m in self.of(Boundary, rank) if m.step == step]
        return found[0] if found else None

    def complete_steps(self) -> list[int]:
        """Steps with a seed and the boundaries of all ranks."""
        return [
            seed.step
            for seed, _ in self.seeds
            if all(self.boundary(rank, seed.step) is not None for rank in range(self.world))
        ]

    def hold(self, other: "FakeShadow", step: int) -> None:
        """Take over what another one knew after a step."""
        seed, tensors = next((s, t) for s, t in other.seeds if s.step == step)
        self.committed, self.incarnation = step, other.incarnation
        for rank in range(self.world):
            boundary = other.boundary(rank, step) or {}
            self.states[rank] = (State(step, seed.optimizer, seed.manifest, boundary), tensors)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                with self._lock:
                    self._open.add(sock)
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError), sock:
            nonce = b"nonce"
            sock.sendall(Challenge(nonce).encode())
            hello = receive(sock)
            if not isinstance(hello, Hello):
                return
            if hello.proof != prove(TOKEN, nonce, hello.purpose) or hello.job != JOB:
                sock.sendall(Refused("wrong job token").encode())
                return
            if self.refusal is not None:
                sock.sendall(Refused(self.refusal, for_good=True).encode())
                return
            {"begin": self._begin, "records": self._records, "seed": self._seed, "restore": self._restore}[
                hello.purpose
            ](sock, hello)

    def _begin(self, sock: socket.socket, hello: Hello) -> None:
        message = receive(sock)
        assert isinstance(message, Begin) and hello.rank == 0
        self.incarnation = max(self.incarnation + 1, message.proposed)
        held = self.committed
        sock.sendall(Begun(self.incarnation, held, [] if held is None else [[0, held, held]]).encode())

    def _records(self, sock: socket.socket, hello: Hello) -> None:
        self._note(hello.rank, hello)
        if self.committed is not None:
            sock.sendall(Ack(self.committed, self.history).encode())
        while (message := receive(sock)) is not None:
            self._note(hello.rank, message)
            if isinstance(message, Boundary):
                if self.last == message.step:
                    sock.sendall(SeedRequest("test").encode())
                    self.wait(lambda: self.seeds[-1:] != [] and self.seeds[-1][0].step == self.last)
                if self.seed_always and hello.rank == 0:
                    sock.sendall(SeedRequest("test").encode())
                time.sleep(self.withheld_s)
                self.committed = message.step
                sock.sendall(Ack(message.step, self.history).encode())

    def _note(self, rank: int, message: Message) -> None:
        with self._lock:
            self.messages.append((rank, message))
            self._lock.notify_all()

    def _seed(self, sock: socket.socket, hello: Hello) -> None:
        seed = receive(sock)
        if seed is None:  # given up
            return
        assert isinstance(seed, Seed)
        if self.silent_seeds:
            time.sleep(60)
        tensors = receive_tensors(sock, seed.manifest)
        self.history = seed.history
        with self._lock:
            self.seeds.append((seed, tensors))
            self._lock.notify_all()
        sock.sendall(Ack(seed.step).encode())

    def _restore(self, sock: socket.socket, hello: Hello) -> None:
        assert isinstance(receive(sock), Restore)
        if hello.rank not in self.states:
            return
        state, tensors = self.states[hello.rank]
        sock.sendall(state.encode())
        send_tensors(sock, tensors)


def order(shadow: FakeShadow, rank: int) -> list[str]:
    """Messages of a rank as short text: L a layout, S3 a step record, B3 a boundary."""
    short = {Layout: "L", StepRecord: "S", Boundary: "B"}
    return [
        short[type(m)] + str(getattr(m, "step", "")) for r, m in list(shadow.messages) if r == rank and type(m) in short
    ]


class FakeCounters:
    tagged_bytes = 0


class FakePlugin:
    """Remembers what would be tagged: (iteration, bucket, bytes) of each registered all-reduce."""

    def __init__(self) -> None:
        self.iteration = 0
        self.incarnation = 0
        self.tagged: list[tuple[int, int, int]] = []
        self.registered: set[int] = set()

    def register_bucket(self, ptr: int, nbytes: int, bucket: int) -> None:
        self.registered.add(bucket)
        if self.incarnation:
            self.tagged.append((self.iteration, bucket, nbytes))

    def register_probe(self, ptr: int, nbytes: int) -> None:
        raise AssertionError("each rank has a host of its own")

    def unregister_buckets(self) -> None:
        self.registered.clear()

    def set_iteration(self, iteration: int) -> None:
        self.iteration = iteration

    def counters(self) -> FakeCounters:
        return FakeCounters()

    def set_incarnation(self, incarnation: int) -> None:
        self.incarnation = incarnation
