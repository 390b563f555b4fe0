"""Many readers or one writer, where a reader that is too slow for the writer is told to stop."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Gate:
    """Guards the committed state: restores read it, the optimizer steps it.

    ``grace_s``: how long a writer lets readers finish before it calls their ``cancel``. ``limit_s``: longest wait of
    either side; TimeoutError after it.
    """

    def __init__(self, grace_s: float, limit_s: float = 30.0) -> None:
        self._grace_s = grace_s
        self._limit_s = limit_s
        self._changed = threading.Condition()
        self._readers: dict[object, Callable[[], None]] = {}
        self._writing = False

    @contextmanager
    def reading(self, cancel: Callable[[], None]) -> Iterator[None]:
        """No writer meanwhile. ``cancel`` must make the reader end soon; it may be called from another thread."""
        key = object()
        with self._changed:
            if not self._changed.wait_for(lambda: not self._writing, self._limit_s):
                raise TimeoutError(f"the state was being stepped for {self._limit_s:g} s")
            self._readers[key] = cancel
        try:
            yield
        finally:
            with self._changed:
                del self._readers[key]
                self._changed.notify_all()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """No reader meanwhile."""
        with self._changed:
            self._writing = True  # holds off new readers
            try:
                self._clear_readers()
            except BaseException:
                self._stop_writing()
                raise
        try:
            yield
        finally:
            with self._changed:
                self._stop_writing()

    def _stop_writing(self) -> None:
        self._writing = False
        self._changed.notify_all()

    def _clear_readers(self) -> None:
        end = time.monotonic() + self._limit_s
        if self._changed.wait_for(lambda: not self._readers, self._grace_s):
            return
        for cancel in self._readers.values():
            cancel()
        if not self._changed.wait_for(lambda: not self._readers, max(0.0, end - time.monotonic())):
            raise TimeoutError(f"{len(self._readers)} readers did not end within {self._limit_s:g} s")
