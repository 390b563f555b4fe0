"""Checkpoints of a training process: saved in the background, durable before they count, loaded exact to the bit."""

import contextlib
import errno
import logging
import os
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self, get_args

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from checkmate.config import CheckmateError
from checkmate.persist.coordinator import AgreementError, Coordinator, StoreError
from checkmate.persist.device import PinnedPool
from checkmate.persist.engine import Checkpoint, Code, Engine, Options, PersistError, State, Ticket
from checkmate.persist.file import CheckpointFile, read_manifest, read_state, require_whole
from checkmate.persist.snapshot import Snapshot
from checkmate.persist.state import MapLocation, MemoryKey, StateError, memory_key, pack

log = logging.getLogger(__name__)


OnError = Literal["warn", "raise"]


class CheckpointWarning(UserWarning):
    """A save in the background failed; training goes on."""


class Loaded(NamedTuple):
    """What ``load`` found."""

    step: int
    state: Any


@dataclass(frozen=True)
class Saved:
    """A durable checkpoint. ``write_s``: from the call of ``save`` until it was durable (with a coordinator: on all
    ranks). ``newest``: False when a newer one had been committed before it."""

    step: int
    nbytes: int
    write_s: float
    newest: bool


@dataclass(frozen=True)
class Finding:
    """A checkpoint in the file, and what is wrong with it (None: nothing)."""

    checkpoint: Checkpoint
    problem: str | None


class Checkpointer:
    """Saves and loads nested states in one file of N+1 slots, with N saves in flight.

    Without ``attach``, ``save`` returns when the state is copied to staging memory. With ``attach(optimizer)`` it does
    not wait for that optimizer's parameters and state; instead the optimizer's step waits for the copy of what it is
    about to change. Who changes them otherwise calls ``wait_copied`` first.

    Without ``in_flight`` (N), it and what ``options`` leaves open are tuned by a short probe when the file is made, and
    kept beside it; with it there is no probe, but what ``checkmate persist tune`` has kept is used. ``capacity``: bytes
    of the largest state to expect; a larger one makes the file anew, with its newest checkpoint. ``memory``: bytes of
    staging buffers; by default twice the capacity, at most a quarter of the machine's.
    ``coordinator``: a commit is one of all ranks, each with a file of its own: ``path`` with ``.RANK-of-WORLD``.
    ``on_error``: what the next ``save`` does about one that failed. ``timeout_s`` bounds every wait.
    Any thread may call, one save begins after the other; a forked child can not use its parent's.

    Raises PersistError for a path that cannot be used, and leaves what is there as it was.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        in_flight: int | None = None,
        options: Options | None = None,
        capacity: int = 0,
        memory: int | None = None,
        coordinator: Coordinator | None = None,
        on_error: OnError = "warn",
        timeout_s: float = 600.0,
    ) -> None:
        if on_error not in get_args(OnError):
            raise PersistError(errno.EINVAL, f"on_error is {on_error!r}: it must be one of {get_args(OnError)}")
        place = Path(path)
        if coordinator:
            place = place.with_name(f"{place.name}.{coordinator.rank}-of-{coordinator.world}")
        self._file = CheckpointFile(place, in_flight, options or Options(), capacity, memory, timeout_s)
        self._coordinator = coordinator
        self._on_error = on_error
        self._timeout_s = timeout_s
        self._optimizers: list[tuple[Optimizer, RemovableHandle]] = []
        self._executor: ThreadPoolExecutor | None = None
        self._pinned: PinnedPool | None = None
        self._pid = os.getpid()
        self._turn = threading.RLock()
        """Of the thread that saves, loads or closes; again for a signal handler that does."""
        self._lock = threading.Lock()
        self._running: dict[Future[Saved], Snapshot] = {}
        self._untold: list[Exception] = []
        self._resumed: Checkpoint | None = None
        self._undecided: dict[int, int] = {}
        """Saves whose outcome the store did not tell, and their counters: each keeps a slot."""
        self._closing = self._closed = False
        """Nothing is saved any more; the file is closed."""
        self.failures = 0
        """Saves that failed."""
        self.waited_s = 0.0
        """Time that the trainer has spent in ``save`` and waiting before optimizer steps."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None:
            self.close()
            return
        with contextlib.suppress(Exception):  # what is under way matters more
            self.close()

    @property
    def path(self) -> Path:
        """The file of this rank."""
        return self._file.path

    @property
    def in_flight(self) -> int:
        """N."""
        return self._file.in_flight

    def attach(self, optimizer: Optimizer) -> None:
        """From now on only this optimizer's step changes its parameters and state, and it waits for their copy."""
        self._optimizers.append((optimizer, optimizer.register_step_pre_hook(self._gate)))

    def save(self, state: Any, step: int) -> Future[Saved]:
        """Store a nested state of tensors, numbers, text, bytes, lists, tuples and maps as it is now.

        Waits for a free slot while N saves are in flight, and for the copy of what no attached optimizer owns. Errors
        of storage and of other ranks are in the future (PersistError, TimeoutError, AgreementError), and with the next
        call; they never stop training. Raises StateError for a state that cannot be stored, and PersistError for a bad
        ``step`` and when no file can be made.
        """
        step = require_whole("step", step, 0)
        start = time.monotonic()
        with self._my_turn():
            self._tell()
            number = self._coordinator.next_save() if self._coordinator else 0
            try:
                return self._save(state, step, number, start)
            except BaseException as error:
                if self._coordinator:
                    self._coordinator.fail(number, str(error))
                raise
            finally:
                self.waited_s += time.monotonic() - start

    def wait_copied(self) -> None:
        """Wait until all that was saved may be changed by anybody."""
        for snapshot in self._snapshots():
            snapshot.settle_all()

    def load(self, step: int | None = None, map_location: MapLocation = None) -> Loaded | None:
        """The newest state that verifies (with a coordinator: the newest that all ranks hold), or that of ``step``.

        Damaged ones are passed over with a warning. None when there is no checkpoint. Tensors come to the device that
        they were on, or where ``map_location`` says. Raises PersistError: no such step, it is damaged, or all that
        there were are; StateError.
        """
        with self._my_turn():
            engine = self._file.engine
            if engine and engine.about().warnings:
                log.warning("%s: %s", self.path, engine.about().warning)
            held = [c for c in engine.list() if c.published or self._coordinator] if engine else []
            found = [c for c in held if step in (None, c.step)]
            if self._coordinator:
                loaded = self._load_agreed(self._coordinator, engine, found, map_location)
            else:
                loaded = self._load_newest(engine, found, step, map_location)
            if loaded is None and step is not None:
                steps = sorted({c.step for c in held})
                raise PersistError(
                    Code.NOT_FOUND, f"{self.path} holds no checkpoint of step {step}; it holds {steps or 'none'}"
                )
            if loaded is None:
                self._require_nothing_lost(engine, held)
                return None
            checkpoint, state = loaded
            self._resumed = checkpoint if step is None else None
            return Loaded(checkpoint.step, state)

    def list(self) -> Sequence[Checkpoint]:
        """Complete checkpoints, newest first."""
        return self._file.engine.list() if self._file.engine else []

    def verify(self) -> Sequence[Finding]:
        """Read all checkpoints and compare all checksums."""
        engine = self._file.engine
        return [examine(engine, checkpoint) for checkpoint in engine.list()] if engine else []

    def close(self) -> None:
        """Wait for the saves in flight and close the file. Raises the error of one that failed and was not told yet.

        TimeoutError: saves are still in flight, and optimizers still wait for them; call it again.
        """
        if self._closed or os.getpid() != self._pid:
            return
        with self._my_turn():
            self._closing = True
            self._drain()
            if self._executor:
                self._executor.shutdown()  # all are done, but the last may not have told its error yet
            for _, handle in self._optimizers:  # until here, memory that is being copied must not change
                handle.remove()
            self._unpin()
            self._file.close(self._timeout_s)
            self._closed = True
        if self._untold:
            raise self._untold.pop()

    @contextlib.contextmanager
    def _my_turn(self) -> Iterator[None]:
        if os.getpid() != self._pid:  # the lock may be one that a thread of the parent holds for ever
            raise PersistError(Code.CLOSED, f"{self.path} was opened by the parent of this process: open it here")
        if not self._turn.acquire(timeout=self._timeout_s):
            raise TimeoutError(f"{self.path}: another thread was saving or loading for {self._timeout_s:g} s")
        try:
            yield
        finally:
            self._turn.release()

    # Saving

    def _save(self, state: Any, step: int, number: int, start: float) -> Future[Saved]:
        if self._closing:
            raise PersistError(Code.CLOSED, f"{self.path} is closed: save before close()")
        packed = pack(state, self._gated())
        run = self._coordinator.run if self._coordinator else ""
        metadata = packed.metadata(run=run, save=number)
        try:
            engine = self._engine_for(packed.data_bytes, len(metadata))
            ticket = engine.begin(step, packed.data_bytes, len(metadata), timeout_s=self._timeout_s)
        except (PersistError, OSError, StoreError) as error:
            if self._file.engine is None:
                raise
            return self._failed(error, number)
        try:
            pinned = self._pin(engine) if any(span.storage.is_cuda for span in packed.spans.values()) else None
            snapshot = Snapshot(packed, ticket, engine.about().options.chunk_bytes, pinned, self._timeout_s)
            snapshot.start()
            executor = self._executor = self._executor or ThreadPoolExecutor(self.in_flight + 1, "checkmate-persist")
            job = _Job(
                engine,
                ticket,
                snapshot,
                metadata,
                step,
                packed.data_bytes,
                start,
                self._coordinator,
                number,
                self._undecided,
            )
            future = executor.submit(job.run, self._timeout_s)
        except BaseException as error:  # an interrupt, too: its slot would be taken for ever
            ticket.abort()
            if isinstance(error, PersistError):
                return self._failed(error, number)
            raise
        with self._lock:
            self._running[future] = snapshot
        future.add_done_callback(self._ended)
        snapshot.settle()
        return future

    def _engine_for(self, data_bytes: int, meta_bytes: int) -> Engine:
        if self._file.needs_rest(data_bytes, meta_bytes):
            self._drain()
            self._unpin()
        if self._file.engine:  # before the file is made anew with its newest
            self._settle(self._file.engine)
        return self._file.fit(data_bytes, meta_bytes)

    def _settle(self, engine: Engine) -> None:
        """What was durable without being committed must not keep its slot for ever. Raises StoreError, PersistError."""
        if self._resumed:
            _forget_newer(engine, self._resumed)
            for number, counter in list(self._undecided.items()):
                if counter >= self._resumed.counter:
                    del self._undecided[number]
            self._resumed = None
        for number, counter in list(self._undecided.items()):
            assert self._coordinator
            if self._coordinator.settle(number):
                engine.publish(counter)
            else:
                engine.discard(counter)
            del self._undecided[number]

    def _gated(self) -> set[MemoryKey]:
        return {key for optimizer, _ in self._optimizers for key in _memory_of(optimizer, only_stepped=False)}

    def _gate(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Before a step of an attached optimizer."""
        snapshots = self._snapshots()
        if snapshots:
            start = time.monotonic()
            memory = list(_memory_of(optimizer, only_stepped=True))
            for snapshot in snapshots:
                snapshot.release(memory)
            self.waited_s += time.monotonic() - start

    def _snapshots(self) -> Sequence[Snapshot]:
        if os.getpid() != self._pid:  # a child has a copy of all memory, and may do what it likes
            return ()
        with self._lock:
            return tuple(self._running.values())

    def _pin(self, engine: Engine) -> PinnedPool:
        self._pinned = self._pinned or PinnedPool(engine.about().pool)
        return self._pinned

    def _unpin(self) -> None:
        if self._pinned:
            self._pinned.close()
            self._pinned = None

    def _failed(self, error: Exception, number: int) -> Future[Saved]:
        if self._coordinator:
            self._coordinator.fail(number, str(error))
        future: Future[Saved] = Future()
        future.set_exception(error)
        self._ended(future)
        return future

    def _ended(self, future: Future[Saved]) -> None:
        error = future.exception()
        with self._lock:
            self._running.pop(future, None)
            if isinstance(error, Exception):
                self.failures += 1
                self._untold.append(error)
        if error:
            log.warning("%s: a checkpoint failed, training goes on: %s", self.path, error)

    def _tell(self) -> None:
        with self._lock:
            untold, self._untold = self._untold, []
        for error in untold:
            if self._on_error == "raise":
                raise error
            warnings.warn(CheckpointWarning(f"{self.path}: a checkpoint failed: {error}"), stacklevel=3)

    def _drain(self) -> None:
        with self._lock:
            running = tuple(self._running)
        if wait_for(running, self._timeout_s).not_done:
            raise TimeoutError(f"{self.path}: saves were not done within {self._timeout_s:g} s")

    # Loading

    def _load_newest(
        self, engine: Engine | None, found: Sequence[Checkpoint], step: int | None, map_location: MapLocation
    ) -> tuple[Checkpoint, Any] | None:
        for checkpoint in found:
            assert engine
            try:
                return checkpoint, read_state(engine, checkpoint, map_location)
            except PersistError as error:
                if step is not None:
                    raise
                log.warning("%s: the checkpoint of step %d is passed over: %s", self.path, checkpoint.step, error)
        return None

    def _require_nothing_lost(self, engine: Engine | None, held: Sequence[Checkpoint]) -> None:
        """Training must not begin anew, and overwrite it all, because nothing can be read just now."""
        lost = engine is not None and (any(c.published for c in held) or bool(engine.about().committed))
        if lost and not self._coordinator:
            raise PersistError(
                Code.DAMAGED,
                f"{self.path} had checkpoints, but none can be read (see the log, or 'checkmate persist verify'); "
                f"remove the file to begin anew",
            )
        if self._coordinator and not self._coordinator.all_well(not lost):
            raise PersistError(
                Code.DAMAGED,
                f"{self.path}: the ranks had checkpoints, but there is none that all of them can read (see their "
                f"logs, or 'checkmate persist verify'); remove the files of all ranks to begin anew",
            )

    def _load_agreed(
        self, coordinator: Coordinator, engine: Engine | None, found: Sequence[Checkpoint], map_location: MapLocation
    ) -> tuple[Checkpoint, Any] | None:
        held = dict(_identities(engine, found)) if engine else {}
        while choice := coordinator.choose(list(held)):
            assert engine
            state, problem = None, ""
            try:
                state = read_state(engine, held[choice], map_location)
            except CheckmateError as error:
                problem = str(error)
            if coordinator.all_well(not problem):
                return held[choice], state
            log.warning("%s: step %d is passed over: %s", self.path, choice[0], problem or "another rank's is damaged")
            del held[choice]
        return None


@dataclass(frozen=True)
class _Job:
    """One save after its bytes were given: what its background thread does."""

    engine: Engine
    ticket: Ticket
    snapshot: Snapshot
    metadata: bytes
    step: int
    nbytes: int
    start: float
    coordinator: Coordinator | None
    number: int
    undecided: dict[int, int]

    def run(self, timeout_s: float) -> Saved:
        try:
            self.snapshot.copy()
            self.ticket.finish(self.metadata, publish=self.coordinator is None)
            state = self.ticket.wait(timeout_s)
        except BaseException as error:
            with contextlib.suppress(PersistError):
                self.ticket.abort()
            if self.coordinator:
                self.coordinator.fail(self.number, str(error))
            raise
        if self.coordinator:
            state = self._commit(self.coordinator)
        return Saved(self.step, self.nbytes, time.monotonic() - self.start, state is State.COMMITTED)

    def _commit(self, coordinator: Coordinator) -> State:
        try:
            coordinator.commit(self.number, self.step)
        except StoreError:  # the others may have committed: it stays as it is until the store, or recovery, decides
            self.undecided[self.number] = self.ticket.counter
            raise
        except AgreementError:
            self.engine.discard(self.ticket.counter)
            raise
        return self.engine.publish(self.ticket.counter)


def examine(engine: Engine, checkpoint: Checkpoint) -> Finding:
    """Verify one checkpoint."""
    try:
        engine.verify(checkpoint.counter)
        read_manifest(engine, checkpoint)
    except CheckmateError as error:
        return Finding(checkpoint, str(error))
    return Finding(checkpoint, None)


def _identities(engine: Engine, found: Sequence[Checkpoint]) -> Iterator[tuple[tuple[int, str], Checkpoint]]:
    for checkpoint in found:
        with contextlib.suppress(PersistError, StateError):
            manifest = read_manifest(engine, checkpoint)
            yield (checkpoint.step, f"{manifest['run']}/{manifest['save']}"), checkpoint


def _forget_newer(engine: Engine, resumed: Checkpoint) -> None:
    """Training goes on from this one: the newer ones are damaged, or not all ranks hold them. They'd be kept for it."""
    if not resumed.published:
        engine.publish(resumed.counter)
    for checkpoint in engine.list():
        if checkpoint.counter > resumed.counter:
            engine.discard(checkpoint.counter)


def _memory_of(optimizer: Optimizer, only_stepped: bool) -> Iterator[MemoryKey]:
    """Of parameters and their state; ``only_stepped``: of those with a gradient."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if only_stepped and param.grad is None:
                continue
            for tensor in (param, *optimizer.state.get(param, {}).values()):
                if isinstance(tensor, Tensor) and tensor.numel():
                    yield memory_key(tensor)
