"""The ``Work`` that a collective returns, and the thread that completes its futures."""

import threading
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from checkmate.nccl_plugin.ring.engine import Operation, Ring, RingError


class RingWork(dist.Work):
    """Operations that end together.

    Holds every tensor involved (``keep``) until the operations have ended, whether or not the caller does.
    """

    def __init__(
        self,
        name: str,
        operations: Sequence[Operation],
        outputs: list[torch.Tensor],
        keep: object,
        completer: "Completer",
    ) -> None:
        super().__init__()
        self._name = name
        self._operations = operations
        self._outputs = outputs
        self._keep = keep
        self._completer = completer
        self._lock = threading.Lock()
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None
        self._error: BaseException | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until it has ended; a time-out of zero means none. Raises DistBackendError on failure or time-out."""
        seconds = timeout.total_seconds()
        try:
            ended = all(operation.wait(seconds if seconds > 0 else None) for operation in self._operations)
        except RingError as error:
            raise self._fail(error) from error
        if not ended:
            raise dist.DistBackendError(f"{self._name}: not done after {seconds:g} s")
        self._keep = None
        return True

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        try:
            return all(operation.poll() for operation in self._operations)
        except RingError as error:
            self._fail(error)
            return True

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """The error with which it ended, if any."""
        self.is_completed()
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The output tensors."""
        return self._outputs

    def synchronize(self) -> None:
        """Wait: on a CPU there is no stream to enqueue on."""
        self.wait()

    def get_future(self) -> "torch.futures.Future[list[torch.Tensor]]":
        """A future of the output tensors, completed by the group's completer thread."""
        with self._lock:
            if self._future is not None:
                return self._future
            self._future = torch.futures.Future()
        self._completer.watch(self)
        return self._future

    def watch(self, cookie: int) -> bool:
        """Ask for a completion of each operation that has not ended; False when all have."""
        asked = [operation.notify(cookie) for operation in self._operations]
        return any(asked)

    def complete(self) -> bool:
        """Complete the future if all operations have ended; called by the completer alone."""
        if not self.is_completed():
            return False
        future = self.get_future()
        if self._error is not None:
            future.set_exception(self._error)  # type: ignore[arg-type]
        else:
            self._keep = None
            future.set_result(self._outputs)
        return True

    def _fail(self, error: RingError) -> BaseException:
        with self._lock:
            if self._error is None:
                self._error = dist.DistBackendError(f"{self._name}: {error}")
            return self._error


class Completer:
    """Completes the futures of a ring's operations: one thread, started at the first future, asleep in C."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._watched: dict[int, RingWork] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._next = 0

    def watch(self, work: RingWork) -> None:
        """Complete ``work`` when its operations have ended, at once when they have."""
        with self._lock:
            cookie = self._next
            self._next += 1
            self._watched[cookie] = work
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="checkmate-completer", daemon=True)
                self._thread.start()
        if not work.watch(cookie):
            self._complete(cookie)

    def join(self) -> None:
        """Wait for the thread; the ring must have been closed."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _complete(self, cookie: int) -> None:
        with self._lock:
            work = self._watched.pop(cookie, None)
        if work is not None and not work.complete():
            with self._lock:
                self._watched[cookie] = work

    def _run(self) -> None:
        while True:
            try:
                cookie = self._ring.next_done()
            except EOFError:
                return
            if cookie is not None:
                self._complete(cookie)
