"""Joining a shadow that was not there when training started, or that came back without what it knew.

Rank 0 opens the incarnation in the background and publishes its number in the process group's store; every rank takes
it from there; when all have, rank 0 asks for a seed. Training never waits for any of this.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any

from checkmate.protocol import Begun
from checkmate.train.client import ShadowError

log = logging.getLogger("checkmate")

POLL_S = 0.5
BACK_OFF_S = (1.0, 30.0)
_KEY = "checkmate/incarnation"


class Admission:
    """Background search for an incarnation newer than the one that this rank has.

    ``store``: a torch.distributed Store of this object's own. ``begin``: opens an incarnation of at least the given
    number, on rank 0 only. ``adopt(incarnation, held)`` and ``request_seed(reason)`` are called from the background
    thread; ``held`` is the step that the shadow holds, on rank 0 only.
    """

    def __init__(
        self,
        store: Any,
        world: int,
        begin: Callable[[int], Begun] | None,
        adopt: Callable[[int, int | None], None],
        request_seed: Callable[[str], None],
    ) -> None:
        self._store = store
        self._world = world
        self._begin = begin
        self._adopt = adopt
        self._request_seed = request_seed
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def searching(self) -> bool:
        """True while the background thread looks for an incarnation."""
        return self._thread is not None and self._thread.is_alive()

    def search(self, newer_than: int) -> None:
        """Start to look for an incarnation above ``newer_than``, unless that is under way."""
        if not self.searching and not self._stop.is_set():
            self._thread = threading.Thread(
                target=self._run, args=(newer_than,), name="checkmate-admission", daemon=True
            )
            self._thread.start()

    def close(self, timeout: float) -> None:
        """Stop looking."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self, newer_than: int) -> None:
        try:
            if self._begin is None:
                self._follow(newer_than)
            else:
                self._lead(newer_than, self._begin)
        except Exception as error:  # the store goes away with the process group
            log.debug("admission ended: %s", error)

    def _lead(self, newer_than: int, begin: Callable[[int], Begun]) -> None:
        pause = BACK_OFF_S[0]
        while not self._stop.is_set():
            try:
                begun = begin(newer_than + 1)
            except ShadowError as error:
                log.debug("%s", error)
                self._stop.wait(pause)
                pause = min(2 * pause, BACK_OFF_S[1])
                continue
            self._adopt(begun.incarnation, begun.committed)
            self._store.set(_KEY, str(begun.incarnation))
            self._acknowledge(begun.incarnation)
            self._wait_for_all(begun.incarnation)
            return

    def _follow(self, newer_than: int) -> None:
        self._wait_for(lambda: self._store.check([_KEY]) and int(self._store.get(_KEY)) > newer_than)
        if not self._stop.is_set():
            incarnation = int(self._store.get(_KEY))
            self._adopt(incarnation, None)
            self._acknowledge(incarnation)

    def _wait_for_all(self, incarnation: int) -> None:
        self._wait_for(lambda: self._store.add(_acknowledged(incarnation), 0) >= self._world)
        if not self._stop.is_set():
            self._request_seed("the shadow joined late")

    def _acknowledge(self, incarnation: int) -> None:
        self._store.add(_acknowledged(incarnation), 1)

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        while not self._stop.is_set() and not condition():
            self._stop.wait(POLL_S)


def _acknowledged(incarnation: int) -> str:
    return f"{_KEY}/{incarnation}/adopted"
