"""Short conversations with a shadow: begin an incarnation, send a seed, fetch the state to restore.

Every wait is bounded: one read or write by ``IDLE_S``, a whole conversation by ``CALL_S`` and, where tensors flow, by
the time they take at ``SLOWEST_BYTES_PER_S``, and by ``SETTLE_S`` where shadows have to make steps first.
"""

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from checkmate.checked import Endpoint
from checkmate.config import CheckmateError
from checkmate.protocol import (
    SETTLE_S,
    Ack,
    Begin,
    Begun,
    Challenge,
    Hello,
    Message,
    ProtocolError,
    Refused,
    Restore,
    Seed,
    State,
    prove,
    receive,
)
from checkmate.tensors import manifest_bytes, receive_tensors, send_tensors
from checkmate.train.settings import Settings

M = TypeVar("M", bound=Message)

IDLE_S = 10.0
CALL_S = 30.0
SLOWEST_BYTES_PER_S = 4e6


class ShadowError(CheckmateError):
    """The shadow could not be reached, refused, or broke off; the text says which and why."""


class Unfollowable(CheckmateError):
    """The shadow can't follow this job; the text says which, why and what to do. ``holds``: see ``Refused``."""

    def __init__(self, text: str, holds: int | None = None) -> None:
        super().__init__(text)
        self.holds = holds


class DeadlineSocket(socket.socket):
    """A TCP socket whose reads and writes end by ``deadline`` (monotonic seconds), each within ``idle_s``."""

    deadline = float("inf")
    idle_s = IDLE_S

    def allow(self, seconds: float, idle_s: float = IDLE_S) -> None:
        """Everything from now on must be over within this time, each read and write within ``idle_s``."""
        self.deadline, self.idle_s = time.monotonic() + seconds, idle_s

    def recv(self, *args: Any) -> bytes:
        self._bound()
        return super().recv(*args)

    def recv_into(self, *args: Any) -> int:
        self._bound()
        return super().recv_into(*args)

    def sendall(self, *args: Any) -> None:
        self._bound()
        super().sendall(*args)

    def _bound(self) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self.settimeout(min(left, self.idle_s))


@dataclass(frozen=True)
class Client:
    """One rank's way to talk to one of its job's shadows. ``arithmetic``: see ``Hello``."""

    settings: Settings
    endpoint: Endpoint
    rank: int
    world: int
    arithmetic: dict[str, Any] | None = None

    @property
    def address(self) -> str:
        """For messages: ``host:port``."""
        return str(self.endpoint)

    def connect(self, purpose: str, incarnation: int, call_s: float | None = None) -> DeadlineSocket:
        """A connection past the handshake; raises OSError or ProtocolError."""
        sock = _open(self.endpoint, CALL_S if call_s is None else call_s)
        try:
            challenge = _expect(Challenge, receive(sock))
            proof = prove(self.settings.token, challenge.nonce, purpose)
            shadows = max(1, len(self.settings.job_shadows))
            who = self.settings.job, proof, purpose, self.rank, self.world, incarnation
            about = Hello(*who, shadows=shadows, arithmetic=self.arithmetic, group=self.settings.group)
            sock.sendall(about.encode())
        except BaseException:
            sock.close()
            raise
        return sock

    def records(self, incarnation: int) -> socket.socket:
        """A records connection past the handshake, without any deadline; raises OSError or ProtocolError."""
        return socket.socket(fileno=self.connect("records", incarnation).detach())

    def commits(self, incarnation: int) -> socket.socket:
        """The coordinator's connection past the handshake, without any deadline; raises OSError or ProtocolError."""
        return socket.socket(fileno=self.connect("commit", incarnation, IDLE_S).detach())

    def begin(self, proposed: int, call_s: float) -> Begun:
        """Open a new incarnation of at least ``proposed``."""
        with self._conversation("begin", 0, "begin an incarnation", call_s) as sock:
            sock.sendall(Begin(proposed).encode())
            return _expect(Begun, receive(sock))

    def send_seed(
        self, incarnation: int, seed: Seed, tensors: Sequence[Tensor], on_open: Callable[[socket.socket], None]
    ) -> int | None:
        """Send a full state; returns the step that the shadow acknowledges. ``on_open`` gets the socket to abort it."""
        with self._conversation("seed", incarnation, f"send the seed of step {seed.step}") as sock:
            on_open(sock)
            sock.allow(CALL_S + manifest_bytes(seed.manifest) / SLOWEST_BYTES_PER_S)
            sock.sendall(seed.encode())
            send_tensors(sock, tensors)
            sock.allow(CALL_S)
            return _expect(Ack, receive(sock)).committed

    def restore(self, incarnation: int, step: int | None = None, history: int = 0) -> tuple[State, list[Tensor]]:
        """The state of this step, from which the incarnation goes on; None: of the committed step, whatever it is."""
        with self._conversation("restore", incarnation, "restore") as sock:
            if len(self.settings.job_shadows) > 1:  # it may have to make steps that wait for the others first
                sock.allow(SETTLE_S, SETTLE_S)
            sock.sendall(Restore(step, history).encode())
            state = _expect(State, receive(sock))
            sock.allow(CALL_S + manifest_bytes(state.manifest) / SLOWEST_BYTES_PER_S)
            return state, receive_tensors(sock, state.manifest)

    @contextmanager
    def _conversation(
        self, purpose: str, incarnation: int, what: str, call_s: float | None = None
    ) -> Iterator[DeadlineSocket]:
        """A connection that turns every fault into a ShadowError."""
        try:
            with self.connect(purpose, incarnation, call_s) as sock:
                yield sock
        except Unfollowable as error:
            raise Unfollowable(f"shadow {self.address} can't follow this job: {error}", error.holds) from None
        except (OSError, CheckmateError) as error:
            raise ShadowError(f"rank {self.rank} could not {what} at shadow {self.address}: {error}") from error


def _open(endpoint: Endpoint, call_s: float) -> DeadlineSocket:
    family, kind, protocol, _, address = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)[0]
    sock = DeadlineSocket(family, kind, protocol)
    try:
        sock.allow(call_s)
        sock.settimeout(min(call_s, IDLE_S))
        sock.connect(address)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        sock.close()
        raise
    return sock


def _expect(kind: type[M], message: Message | None) -> M:
    if isinstance(message, kind):
        return message
    if isinstance(message, Refused) and message.for_good:
        raise Unfollowable(message.reason, message.holds)
    if isinstance(message, Refused):
        raise ProtocolError(f"refused: {message.reason}")
    found = "closed the connection" if message is None else f"sent {message.TYPE!r}"
    raise ProtocolError(f"the shadow {found} where {kind.TYPE!r} was due")
