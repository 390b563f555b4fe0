"""Joining shadows that were not there when training started.

Rank 0 opens an incarnation in the background and publishes its number in the process group's store; every rank takes
it from there; when all have, rank 0 asks for a seed. Training never waits for any of this.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any

from checkmate.train.client import ShadowError
from checkmate.train.fleet import Beginning, Unrestorable

log = logging.getLogger("checkmate")

POLL_S = 0.5
BACK_OFF_S = (1.0, 30.0)
_KEY = "checkmate/incarnation"
_ADOPTED = "checkmate/adopted"


class Admission:
    """A background search for the shadows, from the start to ``close``.

    ``store``: a torch.distributed Store of this object's own. ``begin``: opens an incarnation, on rank 0 only.
    ``adopt(incarnation, held)`` and ``request_seed(reason)`` are called from the background thread; ``held`` is the
    newest step that a shadow holds, on rank 0 only.
    """

    def __init__(
        self,
        store: Any,
        world: int,
        begin: Callable[[], Beginning] | None,
        adopt: Callable[[int, int | None], None],
        request_seed: Callable[[str], None],
    ) -> None:
        self._store = store
        self._world = world
        self._begin = begin
        self._adopt = adopt
        self._request_seed = request_seed
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="checkmate-admission", daemon=True)
        self._thread.start()

    def close(self, timeout: float) -> None:
        """Stop looking."""
        self._stop.set()
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            if self._begin is None:
                self._follow()
            else:
                self._lead(self._begin)
        except Exception as error:  # the store goes away with the process group
            log.debug("admission ended: %s", error)

    def _lead(self, begin: Callable[[], Beginning]) -> None:
        pause = BACK_OFF_S[0]
        while not self._stop.wait(pause):
            try:
                begun = begin()
            except (ShadowError, Unrestorable) as error:
                log.debug("%s", error)
                pause = min(2 * pause, BACK_OFF_S[1])
                continue
            if self._stop.is_set():  # closed meanwhile: nobody would end what is opened now
                return
            self._adopt(begun.incarnation, begun.newest)
            self._store.set(_KEY, str(begun.incarnation))
            if self._wait_for(lambda: self._store.add(_ADOPTED, 0) >= self._world - 1):
                self._request_seed("the shadow joined late")
            return

    def _follow(self) -> None:
        if self._wait_for(lambda: self._store.check([_KEY])):
            self._adopt(int(self._store.get(_KEY)), None)
            self._store.add(_ADOPTED, 1)

    def _wait_for(self, condition: Callable[[], bool]) -> bool:
        while not condition():
            if self._stop.wait(POLL_S):
                return False
        return not self._stop.is_set()
