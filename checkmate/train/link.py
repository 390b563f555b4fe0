"""The records connection: how step records reach the shadow without ever holding up training.

``send`` is called by the training thread. It writes straight into the kernel's buffer, so that what was sent reaches
the shadow even if the process is killed right after; what does not fit waits in a bounded backlog that the link's
own thread drains; when that is full, or while there is no connection, messages are dropped and counted: the shadow
notices the hole and asks for a seed. The same thread connects, reads and reconnects.
"""

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from checkmate.config import CheckmateError
from checkmate.protocol import Ack, Message, ProtocolError, Refused, SeedRequest, take
from checkmate.train.agreement import Position

log = logging.getLogger("checkmate")

BACKLOG_BYTES = 8 << 20
SEND_BUFFER_BYTES = 1 << 20
MESSAGE_BYTES = 1 << 20
"""Largest message that a shadow sends on this connection."""
BACK_OFF_S = (0.1, 1.0)
"""First and longest pause between two attempts to connect."""
REFUSED_S = 30.0
"""Pause after the shadow refused."""
_LINGER_S = 1.0


class Connector(Protocol):
    """What the link needs of ``checkmate.train.client.Client``."""

    def records(self, incarnation: int) -> socket.socket:
        """A connection past the handshake; raises OSError or CheckmateError."""


class RecordsLink:
    """Records of one rank to one shadow; ``committed``: history and newest step that it acknowledged.

    ``on_seed_request`` is called with the reason and the step that it is to be of. ``changed``: notified of every
    change; links may share one.
    """

    def __init__(
        self,
        connector: Connector,
        greeting: Callable[[], Sequence[Message]],
        on_seed_request: Callable[[str, int | None], None],
        changed: threading.Condition | None = None,
    ) -> None:
        self.committed: Position | None = None
        self.dropped = 0
        self.refused: str | None = None
        self._connector = connector
        self._greeting = greeting
        self._on_seed_request = on_seed_request
        self._incarnation = 0
        self._lock = changed or threading.Condition()
        self._sock: socket.socket | None = None
        self._backlog = bytearray()
        self._stop = threading.Event()
        self._wake_in, self._wake_out = socket.socketpair()
        for end in (self._wake_in, self._wake_out):
            end.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="checkmate-records", daemon=True)

    @property
    def connected(self) -> bool:
        """True while messages reach the kernel or the backlog rather than being dropped."""
        return self._sock is not None

    def open(self, incarnation: int) -> None:
        """Connect in the background as this incarnation; once."""
        self._incarnation = incarnation
        self._thread.start()

    def wait(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Wait until the condition holds; it is looked at whenever the connection or ``committed`` changes."""
        with self._lock:
            return self._lock.wait_for(condition, timeout)

    def send(self, message: Message) -> bool:
        """Never blocks; False when the message was dropped."""
        data = message.encode()
        with self._lock:
            if self._sock is None or len(self._backlog) + len(data) > BACKLOG_BYTES:
                self.dropped += 1
                return False
            was_idle = not self._backlog
            self._backlog += data
            if was_idle:
                self._write(self._sock)
            if was_idle and self._backlog:
                self._wake()
        return True

    def close(self, timeout: float) -> None:
        """Let what was sent get out, then end the connection and the thread, within about ``timeout`` seconds."""
        self.wait(lambda: not self._backlog or self._sock is None, timeout)
        self._stop.set()
        self._wake()
        if self._thread.ident is not None:
            self._thread.join(timeout + _LINGER_S)
        if not self._thread.is_alive():  # a thread that hangs in connect() still uses them
            self._wake_in.close()
            self._wake_out.close()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: the thread wakes anyway
            self._wake_out.send(b"\0")

    def _write(self, sock: socket.socket) -> None:
        """Move what fits from the backlog into the kernel; a broken connection is left for the thread to find."""
        try:
            while self._backlog:
                del self._backlog[: sock.send(self._backlog)]
        except BlockingIOError:
            return
        except OSError:
            self._drop_connection()
            self._wake()

    def _drop_connection(self) -> None:
        self._sock = None
        if self._backlog:
            self.dropped += 1
            self._backlog.clear()
        self._lock.notify_all()

    def _run(self) -> None:
        pause = BACK_OFF_S[0]
        while not self._stop.is_set():
            started = time.monotonic()
            try:
                with self._connector.records(self._incarnation) as sock:
                    self._serve(sock)
            except (OSError, CheckmateError) as error:
                log.debug("records connection: %s", error)
            with self._lock:
                self._drop_connection()
            pause = BACK_OFF_S[0] if time.monotonic() - started > BACK_OFF_S[1] else min(2 * pause, BACK_OFF_S[1])
            self._stop.wait(pause if self.refused is None else REFUSED_S)

    def _serve(self, sock: socket.socket) -> None:
        """Read, and write what did not fit, until the connection ends."""
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        sock.setblocking(False)
        with self._lock:
            self._backlog += b"".join(message.encode() for message in self._greeting())
            self._sock = sock
            self._write(sock)
            self._lock.notify_all()
        inbox = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_in, selectors.EVENT_READ)
            selector.register(sock, selectors.EVENT_READ)
            while self._sock is sock and not self._stop.is_set():
                selector.modify(sock, selectors.EVENT_READ | (selectors.EVENT_WRITE if self._backlog else 0))
                for key, events in selector.select():
                    if key.fileobj is self._wake_in:
                        self._wake_in.recv(4096)
                        continue
                    if events & selectors.EVENT_WRITE:
                        self._flush(sock)
                    if events & selectors.EVENT_READ and not self._read(sock, inbox):
                        return
        if self._stop.is_set():
            _linger(sock)

    def _flush(self, sock: socket.socket) -> None:
        with self._lock:
            if self._sock is sock:
                self._write(sock)
                self._lock.notify_all()

    def _read(self, sock: socket.socket, inbox: bytearray) -> bool:
        """Handle what arrived; False at the end of the connection."""
        try:
            data = sock.recv(1 << 16)
        except BlockingIOError:
            return True
        inbox += data
        while (message := take(inbox, MESSAGE_BYTES)) is not None:
            self._handle(message)
        return bool(data)

    def _handle(self, message: Message) -> None:
        match message:
            case Ack():
                with self._lock:
                    self.committed = None if message.committed is None else (message.history, message.committed)
                    self._lock.notify_all()
            case SeedRequest():
                self._on_seed_request(message.reason, message.at)
                with self._lock:
                    self._lock.notify_all()
            case Refused():
                if self.refused is None:
                    log.warning("the shadow refused this rank's records: %s", message.reason)
                self.refused = message.reason
            case _:
                raise ProtocolError(f"unexpected {message.TYPE!r} on the records connection")


def _linger(sock: socket.socket) -> None:
    """Close in order: unread input at close() would make the kernel reset the connection and discard what we sent."""
    try:
        sock.shutdown(socket.SHUT_WR)
        sock.setblocking(True)
        end = time.monotonic() + _LINGER_S
        while (left := end - time.monotonic()) > 0:
            sock.settimeout(left)
            if not sock.recv(1 << 16):
                return
    except OSError:
        return
