"""Joining shadows that were not there when training started.

The first rank of each group opens an incarnation in the background and publishes its number in the process group's
store, until all groups have the same. Every rank takes it from there; when all have, a seed is due. Training never
waits for any of this.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol

from checkmate.train.client import ShadowError, Unfollowable
from checkmate.train.fleet import Beginning, Unrestorable

log = logging.getLogger("checkmate")

POLL_S = 0.5
BACK_OFF_S = (1.0, 30.0)
_KEY = "incarnation"
_ADOPTED = "adopted"


class Job(Protocol):
    """``checkmate.train.peers.Peers``, as far as it is used here."""

    number: int
    job: int
    leaders: list[int]


class Admission:
    """A background search for the shadows, from the start to ``close``.

    ``store``: a torch.distributed Store of this object's own. ``begin``: opens an incarnation of at least that number,
    on each group's first rank only. ``adopt(incarnation, held)`` and, on those, ``request_seed(reason)`` are called
    from the background thread; ``held`` is the newest step that a shadow holds, on each group's first rank only.
    """

    def __init__(
        self,
        store: Any,
        job: Job,
        begin: Callable[[int], Beginning] | None,
        adopt: Callable[[int, int | None], None],
        request_seed: Callable[[str], None],
    ) -> None:
        self._store = store
        self._job = job
        self._keys = [f"{_KEY}/{leader}" for leader in job.leaders]
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
        except Unfollowable as error:
            log.warning("%s; training goes on without checkpoints", error)
        except Exception as error:  # the store goes away with the process group
            log.debug("admission ended: %s", error)

    def _lead(self, begin: Callable[[int], Beginning]) -> None:
        begun: Beginning | None = None
        pause = BACK_OFF_S[0]
        while not self._stop.wait(pause if begun is None else POLL_S):
            newest = max(self._published(), default=0)
            if begun is not None and begun.incarnation >= newest:
                if self._agreed() is not None:
                    break
                continue
            try:
                begun = begin(newest)
            except (ShadowError, Unrestorable) as error:
                if isinstance(error.__cause__, Unfollowable):  # what it holds was given up when training began
                    raise error.__cause__ from None
                log.debug("%s", error)
                begun, pause = None, min(2 * pause, BACK_OFF_S[1])
                continue
            self._store.set(f"{_KEY}/{self._job.number}", str(begun.incarnation))
        if begun is None or not self._take(begun.newest):
            return
        if self._wait_for(lambda: self._store.add(_ADOPTED, 0) >= self._job.job):
            self._request_seed("the shadow joined late")

    def _follow(self) -> None:
        if self._wait_for(lambda: self._agreed() is not None):
            self._take(None)

    def _take(self, held: int | None) -> bool:
        """False: closed meanwhile."""
        if self._stop.is_set() or (incarnation := self._agreed()) is None:
            return False
        self._adopt(incarnation, held)
        self._store.add(_ADOPTED, 1)
        return True

    def _published(self) -> list[int]:
        return [int(self._store.get(key)) for key in self._keys if self._store.check([key])]

    def _agreed(self) -> int | None:
        """The incarnation that all groups have opened: none begins another one then, because none has a newer."""
        published = self._published()
        return published[0] if len(published) == len(self._keys) and len(set(published)) == 1 else None

    def _wait_for(self, condition: Callable[[], bool]) -> bool:
        while not condition():
            if self._stop.wait(POLL_S):
                return False
        return not self._stop.is_set()
