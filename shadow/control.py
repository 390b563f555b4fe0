"""The control server of a shadow: trainers prove that they hold the job token, then send records and seeds and restore.

One thread for each connection, a bounded number of them, in which strangers can't take the places of those that have
proved themselves. Every read and write has a time-out, so that a slow or silent peer costs its own connection and
nobody else's. Nothing is ever sent in a way that could make a trainer or the engine wait: acknowledgements that don't
fit into the kernel's buffer are dropped.
"""

import contextlib
import hmac
import logging
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from checkmate.config import CheckmateError
from checkmate.protocol import (
    VERSION,
    Ack,
    Begin,
    Begun,
    Boundary,
    Challenge,
    Digests,
    Hello,
    Layout,
    Message,
    ProtocolError,
    Ready,
    Refused,
    Release,
    Restore,
    Seed,
    SeedRequest,
    State,
    StepRecord,
    prove,
    receive,
)
from checkmate.shadow import messages
from checkmate.shadow.optim import arithmetic
from checkmate.strangers import Strangers
from checkmate.tensors import manifest_bytes, receive_tensors, send_tensors

log = logging.getLogger("checkmate.shadow")

_HELLO_BYTES = 4096
_RELEASE_BYTES = 1 << 16
_NONCE_BYTES = 32
_BACKLOG = 64
_POLL_MS = 1000
_LINGER_S = 1.0


class Service(Protocol):
    """What the server needs of ``Engine``."""

    def admit(self, hello: Hello) -> str | None:
        """Reason to refuse, None to go on."""

    def begin(self, world: int, shadows: int, proposed: int) -> Begun:
        """Open an incarnation."""

    def release(self, incarnation: int, message: Release) -> None:
        """A step may be committed."""

    def settle(self, incarnation: int, history: int, step: int) -> None:
        """Be at the step that is restored."""

    def deliver(self, incarnation: int, rank: int, message: Message) -> None:
        """Take a record."""

    def announce_seed(self, incarnation: int, step: int | None) -> None:
        """A seed begins to arrive, or breaks off."""

    def seed(self, incarnation: int, seed: Seed, tensors: Sequence[Tensor]) -> int | None:
        """Take a seed."""

    def restoring(self, rank: int, cancel: Callable[[], None]) -> AbstractContextManager[tuple[State, list[Tensor]]]:
        """The state for a rank."""

    def rank0_connected(self) -> None:
        """Rank 0 listens."""


def _physical_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Limits:
    """``handshake_s``: for all of it. ``stall_s``: for one read or write. ``seed_bytes``: largest state accepted.

    ``connections``: past the handshake. ``strangers``: before it.
    """

    handshake_s: float = 5.0
    stall_s: float = 10.0
    connections: int = 256
    strangers: int = 64
    seed_bytes: int = field(default_factory=_physical_memory)


class _Denied(Exception):
    """The peer is refused; the text is for it and for the log."""


class _Unfollowable(_Denied):
    """For as long as it is what it is."""


class _Connection:
    """A peer's socket with time-outs, and a way to write to it that never waits."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.sock = sock
        self.peer = peer
        self.hello: Hello | None = None
        self._unsent = b""
        self._lock = threading.Lock()

    def send_nowait(self, message: Message) -> bool:
        """False when it did not fit or the connection is gone; a part that was sent is completed by the next call."""
        with self._lock:
            try:
                if self._unsent:
                    self._unsent = self._unsent[self.sock.send(self._unsent, socket.MSG_DONTWAIT) :]
                if self._unsent:
                    return False
                data = message.encode()
                self._unsent = data[self.sock.send(data, socket.MSG_DONTWAIT) :]
            except OSError:
                return False
            return True

    def abort(self) -> None:
        """Make every read and write of this connection end."""
        with contextlib.suppress(OSError):  # it may be closed already
            self.sock.shutdown(socket.SHUT_RDWR)


class _Hurried:
    """A socket that gives each read what is left of one time-out."""

    def __init__(self, sock: socket.socket, seconds: float) -> None:
        self._sock = sock
        self._end = time.monotonic() + seconds

    def recv(self, count: int) -> bytes:
        """As ``socket.recv``."""
        self._sock.settimeout(max(self._end - time.monotonic(), 0.001))
        return self._sock.recv(count)


class ControlServer:
    """Listens from ``start`` to ``close``. Raises CheckmateError when the address can't be used.

    ``group``: name of the data-parallel group whose state is kept here; empty: of any. ``alone``: ranks that name none
    are of it, because the shadow has no other group.
    """

    def __init__(
        self,
        address: tuple[str, int],
        token: bytes,
        job: str,
        service: Service,
        limits: Limits | None = None,
        group: str = "",
        alone: bool = True,
    ) -> None:
        self._token = token
        self._job = job
        self._group = group
        self._alone = alone
        self._service = service
        self._limits = limits or Limits()
        self._lock = threading.Lock()
        self._connections: dict[_Connection, threading.Thread] = {}
        self._strangers = Strangers(self._limits.strangers, _Connection.abort, log)
        self._ack: Ack | None = None
        self._ready: Ready | None = None
        self._incarnation = 0
        self._stopping = threading.Event()
        self.counters = {"accepted": 0, "refused": 0, "restores": 0, "broken": 0}
        try:
            family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server(address, family=family, backlog=_BACKLOG)
        except OSError as error:
            raise CheckmateError(
                f"control address {address[0]}:{address[1]}: {os.strerror(error.errno or 0)}; it must be an address of "
                "this machine, and the port free"
            ) from None
        self._thread = threading.Thread(target=self._accept, name="shadow-control")

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens: IP address and port."""
        host, port = self._listener.getsockname()[:2]
        return host, port

    def start(self) -> None:
        """Accept connections from now on."""
        self._thread.start()

    def close(self) -> None:
        """End all connections and threads."""
        self._stopping.set()
        with self._lock:
            threads = list(self._connections.values())
            for connection in self._connections:
                connection.abort()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accept loop
        for thread in (self._thread, *threads):
            if thread.ident is not None:
                thread.join()
        self._listener.close()

    # Engine's listener: on its thread, never waits ---------------------------------------------------------------

    def committed(self, step: int | None, history: int) -> None:
        """Tell all ranks."""
        self._ack = Ack(step, history)
        for connection in self._of("records"):
            connection.send_nowait(self._ack)

    def ready(self, number: int, spans: list[list[int]], needs_seed: bool) -> None:
        """Tell the coordinator; one that can't be told asks again by connecting anew."""
        self._ready = Ready(number, spans, needs_seed)
        for connection in self._of("commit"):
            if not connection.send_nowait(self._ready):
                connection.abort()

    def ask_for_seed(self, reason: str, at: int | None) -> bool:
        """Ask rank 0; False when it isn't connected."""
        request = SeedRequest(reason, at)
        asked = [c.send_nowait(request) for c in self._of("records") if c.hello and c.hello.rank == 0]
        return any(asked)

    def incarnation(self, incarnation: int) -> None:
        """End connections of older incarnations; what they would still send is stale."""
        with self._lock:
            self._incarnation, self._ready = incarnation, None
            for connection in self._connections:
                hello = connection.hello
                if hello is not None and hello.purpose != "begin" and hello.incarnation < incarnation:
                    connection.send_nowait(Refused(f"incarnation {incarnation} was opened"))
                    connection.abort()

    def following(self, following: bool) -> None:
        """Of no concern to trainers."""

    def _of(self, purpose: str) -> list[_Connection]:
        with self._lock:
            return [c for c in self._connections if c.hello is not None and c.hello.purpose == purpose]

    # Threads ------------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        while not self._stopping.is_set():
            if not poll.poll(_POLL_MS):
                continue
            try:
                sock, address = self._listener.accept()
            except OSError as error:
                if not self._stopping.is_set():
                    log.warning("control server: %s", error)
                    self._stopping.wait(0.1)  # out of descriptors, perhaps
                continue
            self._enter(_Connection(sock, f"{address[0]}:{address[1]}"), address[0])

    def _enter(self, connection: _Connection, host: str) -> None:
        thread = threading.Thread(target=self._serve, args=(connection,), name=f"shadow-{connection.peer}")
        with self._lock:
            if self._stopping.is_set():
                connection.sock.close()
                return
            evicted = self._strangers.enter(connection, host)
            leaving = self._connections.get(evicted) if evicted else None
            self._connections[connection] = thread
            self.counters["accepted"] += 1
        thread.start()
        if leaving is not None:
            leaving.join(self._limits.handshake_s)  # threads stay as few as connections; it ends at once

    def _serve(self, connection: _Connection) -> None:
        try:
            _prepare(connection.sock)
            self._converse(connection)
        except (_Denied, CheckmateError) as error:
            self.counters["refused"] += 1
            who = f"rank {connection.hello.rank} at " if connection.hello else ""
            log.warning("%s%s: refused: %s", who, connection.peer, error)
            for_good = isinstance(error, _Unfollowable)
            _refuse(connection, Refused(str(error), for_good, self._ack.committed if for_good and self._ack else None))
        except OSError as error:
            if not self._stopping.is_set():
                self.counters["broken"] += 1
                log.info("%s: %s", connection.peer, error)
        except Exception:
            log.exception("%s: closed because of an error of the shadow's own", connection.peer)
        finally:
            with self._lock:
                self._strangers.leave(connection)
                self._connections.pop(connection, None)
            connection.sock.close()

    def _converse(self, connection: _Connection) -> None:
        hello = self._handshake(connection)
        self._acquaint(connection)
        self._check_group(hello)
        if (problem := arithmetic.problem(hello.arithmetic)) is not None:
            raise _Unfollowable(problem)
        connection.sock.settimeout(self._limits.stall_s)
        match hello.purpose:
            case "records":
                self._admit(connection, hello)
                self._take_records(connection, hello)
            case "begin":
                connection.hello = hello
                self._begin(connection, hello)
            case "commit":
                self._admit(connection, hello)
                self._take_releases(connection, hello)
            case "seed":
                self._admit(connection, hello)
                self._take_seed(connection, hello)
            case "restore":
                self._admit(connection, hello)
                self._restore(connection, hello)
            case unknown:
                raise _Denied(f"unknown purpose {unknown!r}")

    def _handshake(self, connection: _Connection) -> Hello:
        sock = connection.sock
        sock.settimeout(self._limits.handshake_s)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        sock.sendall(Challenge(nonce).encode())
        hello = receive(_Hurried(sock, self._limits.handshake_s), _HELLO_BYTES)  # type: ignore[arg-type]
        if hello is None:
            raise ConnectionError("closed before the handshake")
        if not isinstance(hello, Hello):
            raise _Denied(f"expected hello, got {hello.TYPE}")
        if hello.version != VERSION:
            raise _Denied(f"protocol version {hello.version!r}: this shadow speaks {VERSION}; install the same release")
        if not (isinstance(hello.purpose, str) and isinstance(hello.proof, bytes) and isinstance(hello.group, str)):
            raise _Denied("malformed hello")
        if not hmac.compare_digest(prove(self._token, nonce, hello.purpose), hello.proof):
            raise _Denied("wrong job token; give the trainers the token file of the job")
        if hello.job != self._job:
            raise _Denied(f"job {hello.job!r}: this shadow serves {self._job!r}")
        numbers = (hello.rank, hello.world, hello.incarnation, hello.shadows)
        if not all(type(n) is int for n in numbers) or not 0 <= hello.rank < hello.world or min(numbers[2:]) < 0:
            raise _Denied(
                f"rank {hello.rank!r} of {hello.world!r}, incarnation {hello.incarnation!r}, of {hello.shadows!r} "
                "shadows, makes no sense"
            )
        return hello

    def _acquaint(self, connection: _Connection) -> None:
        """It has proved who it is: no stranger can end it any more."""
        with self._lock:
            if not self._strangers.leave(connection):
                raise ConnectionAbortedError("it had to make room")
            known = len(self._connections) - len(self._strangers)
        if known > self._limits.connections:
            raise _Denied(f"this shadow has {self._limits.connections} connections, as many as it takes")

    def _check_group(self, hello: Hello) -> None:
        """The job's coordinator is of one group and talks to the shadows of all."""
        if hello.purpose == "commit" or not self._group or (self._alone and not hello.group):
            return
        if hello.group != self._group:
            raise _Unfollowable(
                f"group {hello.group!r} (CHECKMATE_GROUP): this address of the shadow is for {self._group!r}; give "
                "both the same topology"
            )

    def _admit(self, connection: _Connection, hello: Hello) -> None:
        reason = self._service.admit(hello)
        if reason is not None:
            raise _Denied(reason)
        with self._lock:
            if hello.incarnation < self._incarnation:
                raise _Denied(f"incarnation {self._incarnation} was opened")
            for other in self._connections:
                same = other.hello and (other.hello.purpose, other.hello.rank) == (hello.purpose, hello.rank)
                if same and hello.purpose in ("records", "commit"):
                    other.abort()  # a rank's newest connection counts
            connection.hello = hello

    # Purposes -----------------------------------------------------------------------------------------------------

    def _take_records(self, connection: _Connection, hello: Hello) -> None:
        if self._ack is not None:
            connection.send_nowait(self._ack)
        if hello.rank == 0:
            self._service.rank0_connected()
        poll = select.poll()
        poll.register(connection.sock, select.POLLIN)
        while not self._stopping.is_set():
            if not poll.poll(_POLL_MS):
                continue  # a trainer may be silent for long
            message = receive(connection.sock)
            if message is None:
                return
            if not isinstance(message, Layout | StepRecord | Digests | Boundary):
                raise ProtocolError(f"unexpected {message.TYPE} on a records connection")
            messages.check(message)
            self._service.deliver(hello.incarnation, hello.rank, message)

    def _take_releases(self, connection: _Connection, hello: Hello) -> None:
        if (ready := self._ready) is not None and not connection.send_nowait(ready):
            return
        poll = select.poll()
        poll.register(connection.sock, select.POLLIN)
        while not self._stopping.is_set():
            if not poll.poll(_POLL_MS):
                continue
            message = receive(connection.sock, _RELEASE_BYTES)
            if message is None:
                return
            if hello.rank != 0 or not isinstance(message, Release):
                raise _Denied("only rank 0 can release steps, with release messages")
            messages.check(message)
            self._service.release(hello.incarnation, message)

    def _begin(self, connection: _Connection, hello: Hello) -> None:
        message = receive(connection.sock, _HELLO_BYTES)
        if hello.rank != 0 or not isinstance(message, Begin) or type(message.proposed) is not int:
            raise _Denied("only rank 0 can begin an incarnation, with a begin message")
        connection.sock.sendall(self._service.begin(hello.world, hello.shadows, message.proposed).encode())

    def _take_seed(self, connection: _Connection, hello: Hello) -> None:
        seed = receive(connection.sock)
        if hello.rank != 0 or not isinstance(seed, Seed):
            raise _Denied("only rank 0 can send a seed, with a seed message")
        messages.check(seed)
        size = manifest_bytes(seed.manifest)
        if size > self._limits.seed_bytes:
            raise _Denied(
                f"a state of {size} bytes does not fit into this shadow, which takes {self._limits.seed_bytes}"
            )
        self._service.announce_seed(hello.incarnation, seed.step)
        try:
            tensors = receive_tensors(connection.sock, seed.manifest)
            committed = self._service.seed(hello.incarnation, seed, tensors)
        except BaseException:
            self._service.announce_seed(hello.incarnation, None)
            raise
        connection.sock.sendall(Ack(committed).encode())

    def _restore(self, connection: _Connection, hello: Hello) -> None:
        message = receive(connection.sock, _HELLO_BYTES)
        if not isinstance(message, Restore):
            raise _Denied("expected a restore message")
        messages.check(message)
        if message.step is not None:
            self._service.settle(hello.incarnation, message.history, message.step)
        with self._service.restoring(hello.rank, connection.abort) as (state, tensors):
            connection.sock.sendall(state.encode())
            send_tensors(connection.sock, tensors)
        self.counters["restores"] += 1


def _prepare(sock: socket.socket) -> None:
    """Small messages at once; a peer whose machine is gone is noticed."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _refuse(connection: _Connection, refused: Refused) -> None:
    """Say why and close in order: unread input would make the kernel discard what we said."""
    if not connection.send_nowait(refused):
        return
    try:
        connection.sock.shutdown(socket.SHUT_WR)
        hurried = _Hurried(connection.sock, _LINGER_S)
        while hurried.recv(1 << 16):
            pass
    except OSError:
        return
