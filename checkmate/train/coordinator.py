"""Lets the shadows of a job commit a step once all of them have what it takes.

One for a job, in a thread of its rank 0. It knows nothing that the shadows don't tell it anew when it connects: it may
die with its process at any moment, and the next one goes on. What it releases was promised by all shadows; it forgets
what a shadow promised when the connection ends, so that a shadow that is gone holds up all.
"""

import contextlib
import logging
import math
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from checkmate.config import CheckmateError
from checkmate.protocol import Message, ProtocolError, Ready, Refused, Release, take
from checkmate.train.agreement import newest_position

log = logging.getLogger("checkmate")

MESSAGE_BYTES = 1 << 16
"""Largest message that a shadow sends on this connection."""
BACK_OFF_S = (0.1, 1.0)
"""First and longest pause between two attempts to connect."""
LAG = 2
"""Steps that a shadow is behind when it is said to be waited for."""
LEAD_S = 0.5
"""From an order of seeds to the step that they are to be of: all groups must have heard by then. Doubled each time."""
ORDER_S = (5.0, 60.0)
"""First and longest pause between two orders, while seeds don't help."""

Pace = Callable[[], tuple[int, float]]
"""The step that training is at, and the seconds that one takes."""


class Connector(Protocol):
    """What the coordinator needs of ``checkmate.train.client.Client``."""

    @property
    def address(self) -> str:
        """For messages."""

    def commits(self, incarnation: int) -> socket.socket:
        """A connection past the handshake; raises OSError or CheckmateError."""


@dataclass
class Heard:
    """What a shadow said last: ``spans`` None, nothing since it was connected. ``told``: the newest answer."""

    spans: list[list[int]] | None = None
    number: int = 0
    needs_seed: bool = False
    told: Release | None = None


def agreed(heard: dict[str, Heard], released: int | None) -> int | None:
    """The newest step that all can be at, or are: what was ``released`` stays so, whoever has not heard of it yet."""
    known = [[(0, *span) for span in one.spans] for one in heard.values() if one.spans]
    position = newest_position(known) if len(known) == len(heard) else None
    return max((step for step in (position and position[1], released) if step is not None), default=None)


def decide(heard: dict[str, Heard], step: int | None, seed_at: int | None = None) -> dict[str, Release]:
    """The answers that are due, by address: pure. ``step``: is released; ``seed_at``: all are to be seeded there."""
    newest = max((one.spans[-1][1] for one in heard.values() if one.spans), default=0)
    waits_for = [address for address, one in heard.items() if not one.spans or one.spans[-1][1] <= newest - LAG]
    due = {}
    for address, one in heard.items():
        answer = Release(step, one.number, waits_for, seed_at)
        if one.spans is not None and answer != one.told:
            due[address] = answer
    return due


class Orders:
    """When all shadows are to be seeded, and of which step: groups are at the same one only if all know it before.

    A seed that comes too late for the gradients after it helps for one step; then more time is left between two.
    """

    def __init__(self, pace: Pace) -> None:
        self.at: int | None = None
        self.wanted = False
        """One is due whatever shadows say."""
        self._newest = -1
        self._pace = pace
        self._lead, self._pause = LEAD_S, ORDER_S[0]
        self._not_before = 0.0

    def update(self, heard: dict[str, Heard], released: int | None, now: float) -> None:
        """Order when one is due: one shadow needs a seed, and all are there to take one."""
        step, seconds = self._pace()
        if released is not None and released > self._newest:
            self._lead, self._pause = LEAD_S, ORDER_S[0]
        if step > self._newest:
            self.at = None
        if now < self._not_before or not self.are_due(heard):
            return
        self.wanted = False
        self.at = self._newest = step + 1 + math.ceil(self._lead / max(seconds, 1e-3))
        self._not_before = now + self._lead + self._pause
        self._lead, self._pause = min(2 * self._lead, ORDER_S[0]), min(2 * self._pause, ORDER_S[1])

    def are_due(self, heard: dict[str, Heard]) -> bool:
        """Some shadow needs a seed, and all can be asked."""
        needed = self.wanted or any(one.needs_seed for one in heard.values())
        return needed and all(one.spans is not None for one in heard.values())

    def wait_s(self, heard: dict[str, Heard], now: float) -> float | None:
        """Until the next order; None: none is due."""
        return max(0.0, self._not_before - now) if self.are_due(heard) else None


@dataclass
class _Shadow:
    connector: Connector
    heard: Heard = field(default_factory=Heard)
    sock: socket.socket | None = None
    inbox: bytearray = field(default_factory=bytearray)
    pause: float = BACK_OFF_S[0]
    not_before: float = 0.0


class Coordinator:
    """Runs from the start until ``close``."""

    def __init__(self, connectors: Sequence[Connector], incarnation: int, pace: Pace) -> None:
        self.released: int | None = None
        self._incarnation = incarnation
        self._orders = Orders(pace)
        self._shadows = {connector.address: _Shadow(connector) for connector in connectors}
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="checkmate-commits", daemon=True)
        self._thread.start()

    def order(self) -> None:
        """Let all shadows be seeded, once all can be asked: they joined late, and would wait for a seed unasked."""
        self._orders.wanted = True
        self._wake()

    def close(self, timeout: float) -> None:
        """End the connections and the thread."""
        self._stop.set()
        self._wake()
        self._thread.join(timeout)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_out.send(b"\0")

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                try:
                    self._turn()
                except Exception:  # this thread must go on: without it nothing would be committed any more
                    log.exception("commits begin anew after an error of Checkmate's own")
                    self._begin_anew()
        finally:
            for shadow in self._shadows.values():
                self._drop(shadow)
            self._selector.close()
            self._wake_in.close()
            self._wake_out.close()

    def _turn(self) -> None:
        for shadow in self._shadows.values():
            if shadow.sock is None and time.monotonic() >= shadow.not_before and not self._stop.is_set():
                self._connect(shadow)
        self._answer()
        for key, _ in self._selector.select(self._until_next_due()):
            if isinstance(key.data, _Shadow):
                self._read(key.data)
            else:
                self._wake_in.recv(1)

    def _begin_anew(self) -> None:
        """Forget what was heard; shadows tell it again when they are connected."""
        for shadow in self._shadows.values():
            self._drop(shadow)
        self._stop.wait(BACK_OFF_S[0])

    @property
    def _heard(self) -> dict[str, Heard]:
        return {address: shadow.heard for address, shadow in self._shadows.items()}

    def _until_next_due(self) -> float | None:
        now = time.monotonic()
        waits = [max(0.0, shadow.not_before - now) for shadow in self._shadows.values() if shadow.sock is None]
        order = self._orders.wait_s(self._heard, now)
        return min(waits if order is None else [*waits, order], default=None)

    def _connect(self, shadow: _Shadow) -> None:
        """May take as long as the client lets it: without this shadow nothing can be committed anyway."""
        try:
            sock = shadow.connector.commits(self._incarnation)
        except (OSError, CheckmateError) as error:
            log.debug("commit connection to %s: %s", shadow.connector.address, error)
            self._postpone(shadow)
            return
        sock.setblocking(False)
        shadow.sock = sock
        self._selector.register(sock, selectors.EVENT_READ, shadow)

    def _postpone(self, shadow: _Shadow) -> None:
        shadow.not_before = time.monotonic() + shadow.pause
        shadow.pause = min(2 * shadow.pause, BACK_OFF_S[1])

    def _drop(self, shadow: _Shadow) -> None:
        if shadow.sock is not None:
            self._selector.unregister(shadow.sock)
            shadow.sock.close()
            shadow.sock = None
            shadow.inbox.clear()
            shadow.heard = Heard()
            self._postpone(shadow)

    def _read(self, shadow: _Shadow) -> None:
        assert shadow.sock is not None
        try:
            data = shadow.sock.recv(1 << 16)
            if not data:
                raise ConnectionError("the shadow closed the connection")
            shadow.inbox += data
            while (message := take(shadow.inbox, MESSAGE_BYTES)) is not None:
                self._hear(shadow, message)
        except BlockingIOError:
            return
        except (OSError, CheckmateError) as error:
            log.debug("commit connection to %s: %s", shadow.connector.address, error)
            self._drop(shadow)

    def _hear(self, shadow: _Shadow, message: Message) -> None:
        if isinstance(message, Refused):
            raise ProtocolError(f"refused: {message.reason}")
        if not isinstance(message, Ready):
            raise ProtocolError(f"unexpected {message.TYPE!r} on a commit connection")
        if not _makes_sense(message):
            raise ProtocolError(f"malformed ready message: {message!r:.200}")
        shadow.pause = BACK_OFF_S[0]
        if message.number >= shadow.heard.number:  # two threads of the shadow may have sent them
            shadow.heard.number, shadow.heard.spans = message.number, message.spans
            shadow.heard.needs_seed = message.needs_seed

    def _answer(self) -> None:
        heard = self._heard
        self.released = agreed(heard, self.released)
        self._orders.update(heard, self.released, time.monotonic())
        for address, answer in decide(heard, self.released, self._orders.at).items():
            shadow = self._shadows[address]
            if shadow.sock is None:
                continue
            data = answer.encode()
            try:
                if shadow.sock.send(data) < len(data):
                    raise BlockingIOError("the shadow doesn't read")
            except OSError as error:
                log.debug("commit connection to %s: %s", address, error)
                self._drop(shadow)
            else:
                shadow.heard.told = answer


def _makes_sense(message: Ready) -> bool:
    spans = message.spans if isinstance(message.spans, list) else [None]
    return (
        type(message.number) is int
        and type(message.needs_seed) is bool
        and all(isinstance(span, list) and [type(step) for step in span] == [int, int] for span in spans)
    )
