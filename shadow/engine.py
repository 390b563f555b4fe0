"""The one thread that owns a shadow's state: takes events and messages in order, applies steps, asks for seeds.

Everything else (the receive thread, the control server's threads, status) hands it work through a bounded queue or
reads what it publishes: the committed state, guarded by a gate, and a snapshot for ``status``.
"""

import contextlib
import functools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from checkmate.config import CheckmateError
from checkmate.protocol import (
    SETTLE_S,
    Begun,
    Boundary,
    Digests,
    Hello,
    Layout,
    Message,
    Release,
    Seed,
    State,
    StepRecord,
)
from checkmate.shadow.course import Course, Line
from checkmate.shadow.gate import Gate
from checkmate.shadow.optim.replica import Refusal, Replica
from checkmate.shadow.rx.receiver import Event, OpComplete
from checkmate.shadow.staging import Gap, Gradient, Ready, Staging
from checkmate.shadow.verify import Mismatch, Proof, Verification, Verifier
from checkmate.wire import DATATYPES

log = logging.getLogger("checkmate.shadow")

T = TypeVar("T")

_INBOX = 4096
"""Tasks waiting for the engine; a peer that sends more is held up."""
_IDLE_S = 0.5
_POLL_S = 0.5
_CALL_S = 30.0
_COMMITS = 64
"""Commits that rates are computed from."""


class EventSource(Protocol):
    """What the engine needs of ``Receiver``."""

    def poll(self, timeout_s: float) -> list[Event]:
        """Events so far, waiting for the first."""

    def buffer(self, op: OpComplete) -> memoryview:
        """Bytes of a bucket, in place."""

    def release(self, op: OpComplete) -> None:
        """Give the buffer back."""

    def set_incarnation(self, incarnation: int) -> None:
        """Take frames of this incarnation only."""

    def expect(self, iteration: int) -> None:
        """Take frames of iterations up to this one only."""

    def discard(self, iteration: int) -> None:
        """Forget what is incomplete up to this iteration."""

    def incomplete(self, incarnation: int, iteration: int) -> str:
        """What is missing, as text."""

    def counters(self) -> dict[str, int]:
        """Counters since the start."""


class Listener(Protocol):
    """Who hears of changes; called on the engine's thread, must not block."""

    def committed(self, step: int | None, history: int) -> None:
        """Another step is committed, of this history; None: none any more."""

    def ready(self, number: int, spans: list[list[int]], needs_seed: bool) -> None:
        """Steps that this shadow of several can be at, the ``number``-th report."""

    def ask_for_seed(self, reason: str, at: int | None) -> bool:
        """Ask rank 0 for a seed, ``at`` this step or at once; False when it can't be reached now."""

    def incarnation(self, incarnation: int) -> None:
        """A new incarnation is open; older ones are stale."""

    def following(self, following: bool) -> None:
        """Whether a complete state is held and kept up to date."""


@dataclass(frozen=True)
class Tuning:
    """Bounds of the engine, in seconds unless said otherwise.

    ``sets``: iterations whose gradients are held. ``patience_s``: how long a missing piece is waited for. ``quiet_s``,
    ``fence_s``: a new incarnation begins when nothing was received for ``quiet_s``, at the latest after ``fence_s``.
    ``ask_s``: first and longest pause between two requests for a seed. ``grace_s``: how long a restore may hold up a
    step. ``threads``: of torch (None: leave as they are).
    """

    sets: int = 3
    patience_s: float = 5.0
    quiet_s: float = 0.2
    fence_s: float = 2.0
    ask_s: tuple[float, float] = (5.0, 300.0)
    grace_s: float = 1.0
    threads: int | None = None


@dataclass(frozen=True)
class Commit:
    """A step that was made here, or a seed: ``at`` (monotonic) it was committed, from this many bytes of gradients.

    ``wait_s``: from the last packet of its gradients until it was begun: records and boundaries come at the trainer's
    next forward, other shadows have to be ready. ``step_s``: from then on. Both 0 without gradients.
    """

    step: int
    at: float
    gradient_bytes: int
    wait_s: float = 0.0
    step_s: float = 0.0


@dataclass(frozen=True)
class Snapshot:
    """The engine at one moment, for ``status``. ``commits``: the newest ones.

    ``shadows``: of the job. ``ready``: the newest step that could be committed; ``waits_for``: shadows that hold it up.
    """

    incarnation: int = 0
    world: int = 0
    shadows: int = 1
    committed: int | None = None
    ready: int | None = None
    waits_for: tuple[str, ...] = ()
    state: str = "waiting for seed"
    reason: str | None = None
    gaps: tuple[Gap, ...] = ()
    gap_count: int = 0
    late: int = 0
    held: int = 0
    commit_count: int = 0
    seeds: dict[str, int] = field(default_factory=dict)
    state_bytes: int = 0
    verification: Verification = field(default_factory=Verification)
    commits: tuple[Commit, ...] = ()


@dataclass(frozen=True)
class Committed:
    """A whole state: ``replica.step``, the boundaries of that step by rank, and its history."""

    replica: Replica
    boundaries: dict[int, dict[str, Any]]
    history: int


@dataclass
class _Fence:
    """A ``begin`` that waits for what was already sent to arrive."""

    world: int
    shadows: int
    proposed: int
    done: "Future[Begun]"
    started: float
    active: float
    packets: int = -1


class Engine:
    """Runs from ``start`` to ``stop``. Methods may be called from any thread."""

    _listener: Listener

    def __init__(self, receiver: EventSource, tuning: Tuning | None = None) -> None:
        self._receiver = receiver
        self._tuning = tuning or Tuning()
        self._staging = Staging(
            self._tuning.sets,
            self._tuning.patience_s,
            lambda gradient: receiver.release(gradient.handle),
            lambda iteration: receiver.incomplete(self._incarnation, iteration),
        )
        self._verifier = Verifier()
        self._gate = Gate(self._tuning.grace_s)
        self._inbox: queue.Queue[Callable[[], None]] = queue.Queue(_INBOX)
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, name="shadow-engine"),
            threading.Thread(target=self._receive, name="shadow-events"),
        ]
        self._incarnation = 0
        self._shadows = 1
        self._waits_for: tuple[str, ...] = ()
        self._committed: Committed | None = None
        self._course: Course[Replica] = Course(self._free)
        self._answers: list[Callable[[], None]] = []
        self._fences: deque[_Fence] = deque()
        self._refused: str | None = None
        self._full: str | None = None
        self._ordered: int | None = None
        self._passed: int | None = None
        self._asked = 0.0
        self._ask_pause = 0.0
        self._ask_from = 0.0
        self._discarded = 0
        self._horizon = -1
        self._commits: deque[Commit] = deque(maxlen=_COMMITS)
        self._commit_count = 0
        self._state_bytes = 0
        self._grows = False
        self._seeds = dict.fromkeys(
            ("adopted", "verified", "mismatches", "ignored", "refused", "no_room", "requested"), 0
        )
        self.snapshot = Snapshot()

    def start(self, listener: Listener) -> None:
        """Start the threads; ``listener`` hears of changes."""
        self._listener = listener
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop and join the threads; pending calls fail."""
        self._stopping.set()
        with contextlib.suppress(queue.Full):
            self._inbox.put_nowait(lambda: None)  # wakes the engine
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        while self._fences:
            self._fences.popleft().done.cancel()

    @property
    def alive(self) -> bool:
        """Both threads run."""
        return all(thread.is_alive() for thread in self._threads)

    # Called by the control server ---------------------------------------------------------------------------------

    def admit(self, hello: Hello) -> str | None:
        """Reason to refuse a records, seed or restore connection; a newer incarnation than ours is taken up."""
        return self._call(functools.partial(self._admit, hello))

    def begin(self, world: int, shadows: int, proposed: int) -> Begun:
        """Open a new incarnation of a job with this many ranks here and shadows in all."""
        done: Future[Begun] = Future()
        now = time.monotonic()
        self._put(lambda: self._fences.append(_Fence(world, shadows, proposed, done, now, now)))
        return done.result(self._tuning.fence_s + _CALL_S)

    def release(self, incarnation: int, message: Release) -> None:
        """The job's coordinator says which step all shadows may commit."""
        self._put(functools.partial(self._release, incarnation, message))

    def settle(self, incarnation: int, history: int, step: int) -> None:
        """The incarnation goes on from this step: be there. Raises CheckmateError when that can't be."""
        self._call(functools.partial(self._settle, incarnation, history, step), SETTLE_S)

    def deliver(self, incarnation: int, rank: int, message: Message) -> None:
        """Take a message of a records connection; waits while the engine is far behind."""
        self._put(functools.partial(self._message, incarnation, rank, message))

    def announce_seed(self, incarnation: int, step: int | None) -> None:
        """The seed of this step begins to arrive; None: it did not."""
        self._put(functools.partial(self._announce, incarnation, step))

    def seed(self, incarnation: int, seed: Seed, tensors: Sequence[Tensor]) -> int | None:
        """Take a seed; returns the committed step. Raises CheckmateError when it is refused."""
        return self._call(functools.partial(self._seed, incarnation, seed, tensors))

    def proofs(self) -> list[Proof]:
        """When each block of the committed state was last proved equal to the trainer's."""
        return self._call(lambda: self._verifier.proofs(self._main_state))

    def rank0_connected(self) -> None:
        """Rank 0 can be asked now."""
        self._put(self._ask_again)

    @contextlib.contextmanager
    def reading(self, cancel: Callable[[], None]) -> Iterator[Committed | None]:
        """The committed state, which stays as it is meanwhile; ``cancel`` is called when that takes too long."""
        with self._gate.reading(cancel):
            yield self._committed

    @contextlib.contextmanager
    def restoring(self, rank: int, cancel: Callable[[], None]) -> Iterator[tuple[State, list[Tensor]]]:
        """Message and live tensors for a rank that restores."""
        with self.reading(cancel) as committed:
            if committed is None:
                yield State(None), []
                return
            description, manifest, tensors = committed.replica.pack()
            boundary = committed.boundaries.get(rank) or committed.boundaries.get(0, {})  # a rank that was not there
            yield State(committed.replica.step, description, manifest, boundary), tensors

    def _call(self, work: Callable[[], T], timeout: float = _CALL_S) -> T:
        """Run on the engine's thread and wait for the result."""
        done: Future[T] = Future()

        def task() -> None:
            try:
                self._answers.append(functools.partial(done.set_result, work()))
            except Exception as error:
                self._answers.append(functools.partial(done.set_exception, error))

        self._put(task)
        return done.result(timeout)

    def _put(self, task: Callable[[], None]) -> None:
        while not self._stopping.is_set():
            try:
                self._inbox.put(task, timeout=_IDLE_S)
                return
            except queue.Full:
                continue
        raise CheckmateError("the shadow is stopping")

    # Threads ------------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        while not self._stopping.is_set():
            for event in self._receiver.poll(_POLL_S):
                try:
                    self._put(functools.partial(self._event, event))
                except CheckmateError:
                    return

    def _run(self) -> None:
        if self._tuning.threads is not None:
            torch.set_num_threads(self._tuning.threads)  # of this thread
        while not self._stopping.is_set():
            try:
                self._turn()
            except Exception as error:
                log.exception("the shadow lost its state because of an error of its own")
                self._lose(None, f"internal error: {error!r}")
            finally:  # only now: who got an answer also sees what followed from it
                answers, self._answers = self._answers, []
                for answer in answers:
                    answer()

    def _turn(self) -> None:
        """One task and all that follows from it."""
        try:
            self._inbox.get(timeout=self._tuning.quiet_s / 10 if self._fences else _IDLE_S)()
        except queue.Empty:
            pass
        else:
            if self._fences:
                self._fences[0].active = time.monotonic()
        self._take_complete()
        self._note_whole()
        self._advance()
        if self._inbox.empty():
            self._staging.check(time.monotonic())
            self._tend_fence()
        self._bound_iterations()
        self._report()
        self._publish()
        self._tend_seed()

    # Tasks --------------------------------------------------------------------------------------------------------

    def _event(self, event: Event) -> None:
        if event.incarnation != self._incarnation:
            if isinstance(event, OpComplete):
                self._receiver.release(event)
        elif isinstance(event, OpComplete):
            dtype = DATATYPES[event.datatype].name
            self._staging.add_gradient(Gradient(event.iteration, event.bucket, dtype, event.nbytes, event))
        else:
            bucket = "" if event.bucket is None else f"bucket {event.bucket}: "
            level = logging.WARNING if self._staging.damage is None else logging.DEBUG  # a seed is needed as it is
            log.log(level, "damage in iteration %s: %s%s (%s)", event.iteration, bucket, event.reason, event.where)
            if not self._staging.needs(event.bucket):
                return
            self._staging.add_damage(event.iteration, f"{bucket}{event.reason} ({event.where})")

    def _message(self, incarnation: int, rank: int, message: Message) -> None:
        if incarnation != self._incarnation:
            return
        match message:
            case Layout():
                self._staging.add_layout(message)
            case StepRecord():
                self._staging.add_record(rank, message)
            case Digests() if rank == 0:
                self._verifier.expect(message)
            case Boundary():
                self._staging.add_boundary(rank, message.step, message.state, message.unfollowed)

    def _admit(self, hello: Hello) -> str | None:
        if hello.incarnation < max(self._incarnation, 1):
            return f"incarnation {hello.incarnation} is stale, {self._incarnation} is open: restart the job"
        if hello.incarnation > self._incarnation:
            if hello.purpose in ("restore", "commit"):
                return f"incarnation {hello.incarnation} was not begun here: nothing to {hello.purpose}"
            log.warning("incarnation %d was begun without this shadow", hello.incarnation)
            self._open(hello.incarnation, hello.world, hello.shadows)
            self._course.hold()
            self._staging.begin(hello.world, None, {})
            if self._committed is not None:
                self._staging.damage = f"incarnation {hello.incarnation} was begun without this shadow"
        elif hello.purpose != "commit" and hello.world != self._staging.world:
            return f"rank {hello.rank} counts {hello.world} ranks, this incarnation has {self._staging.world}"
        return None

    def _release(self, incarnation: int, message: Release) -> None:
        if incarnation == self._incarnation:
            self._course.release(message.step, message.number)
            self._staging.queued = self._course.queued
            self._waits_for = tuple(message.waits_for)
            if message.seed_at is not None and message.seed_at != self._ordered:
                self._ordered = message.seed_at
                if self._needs_seed:
                    self._course.shorten()
                self._pass_order()

    def _settle(self, incarnation: int, history: int, step: int) -> None:
        if incarnation != self._incarnation:
            raise CheckmateError(f"incarnation {self._incarnation} was opened")
        line = self._course.main
        if line is None and (line := self._course.settle(history, step)) is not None:
            self._commit(Committed(line.state, line.boundaries, line.history))
            self._make(line, step)
            self._staging.begin(self._staging.world, line.state.step, line.boundaries)
        if line is None or line is not self._course.main or (line.history, line.state.step) != (history, step):
            raise CheckmateError(
                f"this shadow can't go on from step {step} of history {history}, but from {self._course.spans()}"
            )

    def _announce(self, incarnation: int, step: int | None) -> None:
        if incarnation == self._incarnation:
            self._staging.seed_announced(step)

    def _seed(self, incarnation: int, seed: Seed, tensors: Sequence[Tensor]) -> int | None:
        if incarnation != self._incarnation:
            raise CheckmateError(f"a seed of incarnation {incarnation}, but {self._incarnation} is open")
        self._staging.seed_announced(None)
        main, last = self._course.main, self._course.last
        is_held = self._course.shared and main is None  # and stays so until the seed is released
        verdict = self._staging.judge_seed(seed.step, None if is_held else self._committed_step)
        if verdict == "verify":
            verdict = self._verify(last, seed, tensors) if last is not None else "ignore"
        if verdict == "ignore":
            self._seeds["ignored"] += 1
            log.info("ignored a seed of step %d: the state here is of step %s", seed.step, self._staging.step)
        elif verdict == "adopt":
            self._adopt(seed, tensors)
        return self._committed_step

    def _verify(self, held: Line[Replica], seed: Seed, tensors: Sequence[Tensor]) -> str:
        if held.reach != seed.step:  # its steps were given up
            return "adopt"
        if held.steps:
            return "ignore"
        differences = held.state.differences(seed, tensors)
        if not differences:
            self._seeds["verified"] += 1
            return "verified"
        self._seeds["mismatches"] += 1
        log.error(
            "the state of step %d differs from the trainer's in %s: taking the trainer's", seed.step, differences[:8]
        )
        return "adopt"

    def _adopt(self, seed: Seed, tensors: Sequence[Tensor]) -> None:
        try:
            line = Line(Replica(seed, tensors), seed.history, {}, False)
        except CheckmateError as error:
            self._seeds["refused"] += 1
            self._refused = str(error)
            log.error("refused the seed of step %d: %s", seed.step, error)
            raise
        main = self._course.main
        if seed.agreed is not None:
            self._course.keep(*seed.agreed)
        replaces = main is not None and main is self._course.last and main.state.step == seed.step
        if not self._course.add(line):
            self._seeds["no_room"] += 1
            self._full = (
                f"no room for a seed of step {seed.step}: the shadow keeps states that can still be restored, of "
                f"{self._course.spans()}; if this lasts, restart the job's shadows to begin anew"
            )
            raise CheckmateError(self._full)
        self._seeds["adopted"] += 1
        self._refused = self._full = None
        self._grows = True
        self._staging.adopt(seed.step)
        line.boundaries, line.whole = self._staging.boundaries, self._staging.committed
        log.info("following from a seed of step %d", seed.step)
        if replaces and line.whole:  # the same step, as the trainer has it
            self._enter(line)
        self._note_whole()
        self._advance()

    @property
    def _committed_step(self) -> int | None:
        return self._committed.replica.step if self._committed else None

    def _ask_again(self) -> None:
        if self._asked:  # that request may not have been heard: it is made once more, and counted once
            self._asked = 0.0
            self._ask_pause /= 2
        if self._ordered != self._passed:
            self._pass_order()

    def _pass_order(self) -> None:
        """Ask rank 0 for the seed that the coordinator ordered; where it can't be reached, when it is connected."""
        if self._ask(self._ordered):
            self._passed = self._ordered

    # What follows -------------------------------------------------------------------------------------------------

    def _take_complete(self) -> None:
        """Complete steps join the last line; a job's only shadow makes each at once."""
        while (ready := self._staging.ready()) is not None and not self._stopping.is_set():
            line = self._course.last
            assert line is not None
            try:
                line.state.check(ready.record, ready.layout)
            except Refusal as error:
                log.error("step %d can't be followed: %s", ready.record.step, error)
                self._staging.refuse(ready.record.step, str(error))
                return
            self._staging.taken(ready.record.step)
            line.steps.append(ready)
            self._staging.queued = self._course.queued
            self._advance()

    def _note_whole(self) -> None:
        """The last line begins with a seed whose boundaries are there now."""
        if self._staging.commit_seed() and (line := self._course.last) is not None:
            line.boundaries, line.whole = self._staging.boundaries, True

    def _advance(self) -> None:
        """Go where this shadow may and can."""
        while not self._stopping.is_set() and (goal := self._course.goal()) is not None:
            line, step = goal
            if line is not self._course.main:
                self._enter(line)
            if line.state.step >= step:
                return
            self._make(line, step)

    def _enter(self, line: Line[Replica]) -> None:
        """From the line before to this one."""
        self._course.move(line)
        self._staging.queued = self._course.queued
        if line.whole:
            self._commit(Committed(line.state, line.boundaries, line.history))

    def _make(self, line: Line[Replica], step: int) -> None:
        """Make the steps of the main line up to this one, which all are there."""
        while line.state.step < step and line is self._course.main:
            self._apply(line, line.steps.popleft())
            self._staging.queued = self._course.queued

    def _apply(self, line: Line[Replica], ready: Ready) -> None:
        step, replica, started = ready.record.step, line.state, time.monotonic()
        try:
            buckets = {bucket: self._receiver.buffer(gradient.handle) for bucket, gradient in ready.gradients.items()}
            with self._gate.writing(), self._withdrawing(replica):
                replica.apply(ready.record, ready.layout, buckets)
                self._verifier.compare(replica, ready.layout)
                self._committed = Committed(replica, ready.boundaries, line.history)
        except Mismatch as error:
            log.error("%s: taking the trainer's state", error)
            self._lose(line, str(error))
        except Exception as error:
            log.exception("step %d could not be applied", step)
            self._lose(line, f"step {step} could not be applied: {error!r}")
        else:
            line.boundaries, line.whole = ready.boundaries, True
            if self._verifier.is_content:
                self._ask_pause = 0.0
            self._commit(self._committed, [gradient.handle for gradient in ready.gradients.values()], started)
        finally:
            self._free(ready)

    def _free(self, ready: Ready) -> None:
        for gradient in ready.gradients.values():
            self._receiver.release(gradient.handle)

    def _commit(self, committed: Committed, gradients: Sequence[OpComplete] = (), started: float = 0.0) -> None:
        """Make it the state that is served, and tell. ``started``: when the step with these gradients was."""
        if committed is not self._committed:
            with self._gate.writing():
                self._committed = committed
        if self._grows:  # the first step after a seed may create optimizer state
            self._state_bytes = committed.replica.nbytes
            self._grows = not gradients
        self._commit_count += 1
        self._commits.append(_describe(committed.replica.step, gradients, started))
        self._listener.committed(committed.replica.step, committed.history)

    @contextlib.contextmanager
    def _withdrawing(self, replica: Replica) -> Iterator[None]:
        """Inside the gate: a state that turns out wrong is gone before anybody can read it."""
        try:
            yield
        except BaseException:
            self._withdraw(replica)
            raise

    def _withdraw(self, replica: Replica) -> None:
        if self._committed is not None and self._committed.replica is replica:
            self._committed = None
            self._listener.committed(None, 0)

    def _lose(self, line: Line[Replica] | None, reason: str) -> None:
        """The line's state may be half stepped, or is wrong: it must never be served. None: the last one's."""
        is_last = line is self._course.last or line is None
        if (lost := line or self._course.last) is not None:
            with self._gate.writing():
                self._withdraw(lost.state)
            self._course.lose(lost)
        if is_last:
            self._staging.lose(reason)
        self._staging.queued = self._course.queued

    def _report(self) -> None:
        """Tell the coordinator what has become possible."""
        needs_seed = self._needs_seed
        if (spans := self._course.report(needs_seed)) is not None:
            self._listener.ready(self._course.number, spans, needs_seed)

    def _tend_fence(self) -> None:
        if not self._fences:
            return
        fence, now = self._fences[0], time.monotonic()
        packets = self._receiver.counters().get("packets", 0)
        if packets != fence.packets:
            fence.packets, fence.active = packets, now
        if now - fence.active < self._tuning.quiet_s and now - fence.started < self._tuning.fence_s:
            return
        self._fences.popleft()
        self._open(max(self._incarnation + 1, fence.proposed), fence.world, fence.shadows)
        self._ask_from = now + self._tuning.ask_s[0]  # who hears that there is no state sends one unasked
        begun = Begun(self._incarnation, self._committed_step, self._course.spans())
        self._answers.append(functools.partial(fence.done.set_result, begun))

    def _open(self, incarnation: int, world: int, shadows: int) -> None:
        self._incarnation, self._shadows, self._waits_for = incarnation, shadows, ()
        self._receiver.set_incarnation(incarnation)
        start = self._course.begin(shadows > 1, self._committed.replica if self._committed else None)
        self._staging.begin(world, start.state.step if start else None, start.boundaries if start else {})
        self._staging.queued = self._course.queued
        self._verifier.begin()
        self._refused = self._full = self._ordered = self._passed = None
        self._ask_pause = self._asked = self._ask_from = 0.0
        self._discarded = 0
        self._listener.incarnation(incarnation)
        log.info("incarnation %d of %d ranks, from %s", incarnation, world, self._course.spans() or "no state")

    @property
    def _main_state(self) -> Replica | None:
        return self._course.main.state if self._course.main else None

    @property
    def _needs_seed(self) -> bool:
        staging = self._staging
        if not self._incarnation or self._refused or (staging.step is not None and staging.damage is None):
            return False
        if staging.seed_is_coming or self._waits_for_restore:
            return False
        return staging.step is not None or bool(staging.damage) or time.monotonic() >= self._ask_from

    def _tend_seed(self) -> None:
        """Ask for a seed when one is needed: at once, then ever more rarely while seeds don't help.

        Of several shadows the coordinator hears that one is needed, and lets all ask for one of the same step.
        """
        now = time.monotonic()
        if self._course.shared or not self._needs_seed or (self._asked and now - self._asked < self._ask_pause):
            return
        if self._ask(None):
            self._asked = now
            first, longest = self._tuning.ask_s
            self._ask_pause = min(max(first, 2 * self._ask_pause), longest)

    def _ask(self, at: int | None) -> bool:
        reason = self._staging.damage or ("the shadow has no state" if self._needs_seed else "another shadow needs one")
        asked = self._listener.ask_for_seed(reason, at)
        self._seeds["requested"] += asked
        return asked

    @property
    def _waits_for_restore(self) -> bool:
        """Ranks may still go on from a step that is held; that they make steps would show that they don't."""
        return bool(self._course.held) and not self._staging.heard and self._staging.damage is None

    def _bound_iterations(self) -> None:
        """The receiver holds what may still be used, and takes nothing that no trainer can be at."""
        horizon, useless = self._staging.horizon, self._staging.useless
        if horizon != self._horizon:
            self._horizon = horizon
            self._receiver.expect(horizon)
        if useless > self._discarded:
            self._discarded = useless
            self._receiver.discard(useless)

    def _publish(self) -> None:
        staging, committed = self._staging, self._committed
        state, reason = "following", None
        if self._refused is not None:
            state, reason = "refused", self._refused
        elif self._full is not None:
            state, reason = "no room", self._full
        elif staging.damage is not None:
            state, reason = "damaged", staging.damage
        elif self._waits_for_restore:
            state = "waiting for restore"
        elif staging.step is None or committed is None:
            state = "waiting for seed"
        if (state == "following") != (self.snapshot.state == "following"):
            self._listener.following(state == "following")
        self.snapshot = Snapshot(
            incarnation=self._incarnation,
            world=staging.world,
            shadows=self._shadows,
            committed=self._committed_step,
            ready=staging.step if staging.committed else None,
            waits_for=self._waits_for,
            state=state,
            reason=reason,
            gaps=tuple(staging.gaps),
            gap_count=staging.gap_count,
            late=staging.late,
            held=staging.held,
            commit_count=self._commit_count,
            seeds=dict(self._seeds),
            state_bytes=self._state_bytes,
            verification=self._verifier.summary(self._main_state),
            commits=tuple(self._commits),
        )


def _describe(step: int, gradients: Sequence[OpComplete], started: float) -> Commit:
    now = time.monotonic()
    if not gradients:
        return Commit(step, now, 0)
    last_packet = max(gradient.at for gradient in gradients)
    return Commit(step, now, sum(gradient.nbytes for gradient in gradients), started - last_packet, now - started)
