"""Which step may be applied next: the pure part of a shadow, without sockets, clocks or tensors.

An iteration is applied when all of its gradients, a step record and the boundary of every rank are there, and the
iteration before it was applied. What can't be applied is *broken*: the shadow then stands still before it, says why,
and goes on from a seed of that step or a later one. Nothing is ever guessed.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from checkmate.protocol import Layout, StepRecord

_LAYOUTS = 64
"""Layouts remembered; a trainer has two or three (DDP rebuilds its buckets once)."""
_GAPS = 64
"""Broken iterations remembered for ``status``."""


@dataclass(frozen=True)
class Gradient:
    """A complete, verified bucket of an iteration; ``handle`` is what its owner needs to find and free it."""

    iteration: int
    bucket: int
    dtype: str
    nbytes: int
    handle: Any


@dataclass(frozen=True)
class Ready:
    """All that is needed to apply one step. ``boundaries``: by rank. ``gradients``: by bucket."""

    record: StepRecord
    layout: Layout
    gradients: dict[int, Gradient]
    boundaries: dict[int, dict[str, Any]]


@dataclass(frozen=True)
class Gap:
    """An iteration that could not be followed, and why."""

    iteration: int
    reason: str


@dataclass
class _Iteration:
    gradients: dict[int, Gradient] = field(default_factory=dict)
    record: StepRecord | None = None
    record_rank: int = 0
    boundaries: dict[int, dict[str, Any]] = field(default_factory=dict)
    broken: str | None = None


class Staging:
    """Sets of gradients, step records and boundaries on their way to the optimizer. Not thread-safe.

    ``step``: the newest step that the state here leads to (None: there is none, a seed is needed). ``committed``: of
    that step all is here, with the boundaries of all ranks. ``damage``: why the shadow stands still (None: it does
    not). ``heard``: trainers told of a step in this incarnation. ``queued``: iterations that were taken and still hold
    gradients, counted against ``sets``.
    ``sets``: iterations whose gradients are held at most. ``patience_s``: how long a piece may be missing once later
    ones are there. ``release``: called once for every gradient that was not taken. ``detail``: text on what is missing
    of an iteration.
    """

    def __init__(
        self,
        sets: int,
        patience_s: float,
        release: Callable[[Gradient], None],
        detail: Callable[[int], str] = lambda iteration: "",
    ) -> None:
        self.world = 0
        self.step: int | None = None
        self.committed = False
        self.boundaries: dict[int, dict[str, Any]] = {}
        self.damage: str | None = None
        self.gaps: deque[Gap] = deque(maxlen=_GAPS)
        self.gap_count = 0
        self.late = 0
        self.queued = 0
        self.heard = False
        self._sets = sets
        self._patience_s = patience_s
        self._release = release
        self._detail = detail
        self._pieces: dict[int, _Iteration] = {}
        self._layouts: OrderedDict[str, Layout] = OrderedDict()
        self._incoming: int | None = None
        self._blocked: int | None = None
        self._trimmed = 0
        self._newest = 0
        self._resumed = False
        self._stalled: tuple[int, float] | None = None

    # What happened ------------------------------------------------------------------------------------------------

    def begin(self, world: int, step: int | None, boundaries: dict[int, dict[str, Any]]) -> None:
        """A new incarnation of ``world`` ranks starts from the committed ``step``; all partial sets are dropped."""
        for iteration in list(self._pieces):
            self._drop(iteration)
        self.world, self.step, self.boundaries = world, step, boundaries
        self._newest = step or 0
        self.heard = False
        self.committed = step is not None
        self.damage = self._incoming = self._blocked = self._stalled = None
        self._trimmed = 0
        self._resumed = step is not None

    def lose(self, reason: str) -> None:
        """The state that was stepped is no longer usable: only a seed helps."""
        self.step, self.committed, self.boundaries, self.damage = None, False, {}, reason

    def seed_announced(self, step: int | None) -> None:
        """A seed of this step is on its way: what comes after it is kept. None: it will not come."""
        self._incoming = step
        self._trim()

    def judge_seed(self, step: int, committed: int | None) -> str:
        """``adopt``, ``verify`` (the state here is of the same step) or ``ignore`` (it is older).

        ``committed``: the step that would be served now. An older one replaces it only when this incarnation was told
        of it and training went on from an older step all the same.
        """
        if step == self.step:
            return "verify"
        held = self.step if self.step is not None else committed
        return "adopt" if self._resumed or held is None or step >= held else "ignore"

    def adopt(self, step: int) -> None:
        """The state is now a seed of ``step``. It is committed when the boundaries of that step are there."""
        if step != self.step:
            piece = self._pieces.get(step)
            self.boundaries = piece.boundaries if piece else {}
            self.committed = False
        self._incoming = None
        self._newest = max(self._newest, step)
        self._advance(step)
        broken = min((number for number, piece in self._pieces.items() if piece.broken is not None), default=None)
        self._blocked = broken
        self.damage = f"iteration {broken}: {self._pieces[broken].broken}" if broken is not None else None
        self._trim()

    def add_layout(self, layout: Layout) -> None:
        """A rank says what the bytes of each bucket are."""
        known = self._layouts.setdefault(layout.digest, layout)
        if known != layout:
            self.add_damage(None, f"two different layouts have the digest {layout.digest}")
        self._layouts.move_to_end(layout.digest)
        while len(self._layouts) > _LAYOUTS:
            self._layouts.popitem(last=False)

    def add_gradient(self, gradient: Gradient) -> None:
        """A bucket is complete. Takes over the gradient: it is released when it is no longer needed."""
        piece = self._piece(gradient.iteration)
        if piece is None or piece.broken is not None:
            self._release(gradient)
        elif gradient.bucket in piece.gradients:
            self._release(gradient)
            self._break(gradient.iteration, f"bucket {gradient.bucket} was reduced twice")
        else:
            piece.gradients[gradient.bucket] = gradient
            self._compare(gradient.iteration, piece)
            self._trim()

    def add_record(self, rank: int, record: StepRecord) -> None:
        """A rank's step record; the ranks' records of one step must be the same."""
        self._newest, self.heard = max(self._newest, record.step), True
        if self._resumed and self.step is not None and record.step <= self.step:
            self._rewind(rank, record.step)
        piece = self._piece(record.step)
        if piece is None:
            return
        if piece.record is None:
            piece.record, piece.record_rank = record, rank
            if record.layout not in self._layouts:
                self._break(record.step, f"rank {rank}'s step record names a layout that was not sent: {record.layout}")
            if record.unfollowed is not None:
                self._break(record.step, f"the trainer says: {record.unfollowed}")
            self._compare(record.step, piece)
        elif record != piece.record:
            self._break(
                record.step,
                f"rank {rank}'s step record differs from rank {piece.record_rank}'s in "
                f"{', '.join(_differences(piece.record, record))}",
            )

    def add_boundary(self, rank: int, step: int, state: dict[str, Any], unfollowed: str | None = None) -> None:
        """A rank's state after ``step``; ``unfollowed``: why that isn't what the step makes, but what a seed holds."""
        self._newest = max(self._newest, step)
        if step == self.step:  # a seed's: trainers take it at the boundary
            self.boundaries.setdefault(rank, state)
            return
        piece = self._piece(step)
        if piece is not None:
            piece.boundaries.setdefault(rank, state)
            if unfollowed is not None:
                self._break(step, f"the trainer says: {unfollowed}")

    def add_damage(self, iteration: int | None, reason: str) -> None:
        """Gradients were lost. ``iteration`` None: of any iteration whose gradients are not known to be complete."""
        if iteration is not None:
            if self._piece(iteration) is not None:
                self._break(iteration, reason)
            return
        suspects = [number for number, piece in self._pieces.items() if piece.gradients and self._missing(piece)]
        if not suspects and self.step is not None:
            suspects = [self.step + 1]
            while suspects[0] in self._pieces and not self._missing(self._pieces[suspects[0]]):
                suspects[0] += 1
        for number in suspects:
            self.add_damage(number, reason)

    def needs(self, bucket: int | None) -> bool:
        """Whether a loss in this bucket matters, by the newest layout: if it errs, the bucket is missing later."""
        newest = next(reversed(self._layouts.values()), None)
        return bucket is None or newest is None or bucket not in newest.elsewhere

    def check(self, now: float) -> None:
        """Look for what should long be there; ``now`` in seconds of a monotonic clock."""
        missing = self._overdue()
        if missing is None or self.step is None:
            self._stalled = None
        elif self._stalled is None or self._stalled[0] != self.step + 1:
            self._stalled = (self.step + 1, now)
        elif now - self._stalled[1] > self._patience_s:
            detail = self._detail(self.step + 1)
            reason = f"missing for {self._patience_s:g} s: {missing}" + (f" ({detail})" if detail else "")
            self.add_damage(self.step + 1, reason)

    # What to do ---------------------------------------------------------------------------------------------------

    def ready(self) -> Ready | None:
        """The next step, when everything of it is there."""
        if self.step is None or self.step + 1 == self._blocked or not self.world:
            return None
        piece = self._pieces.get(self.step + 1)
        if piece is None or piece.record is None or self._missing(piece):
            return None
        if any(rank not in piece.boundaries for rank in range(self.world)):
            return None
        return Ready(piece.record, self._layouts[piece.record.layout], dict(piece.gradients), piece.boundaries)

    def taken(self, step: int) -> None:
        """The step that ``ready`` gave will be made, whatever comes; its gradients are the caller's."""
        piece = self._pieces[step]
        self.boundaries, piece.gradients = piece.boundaries, {}
        self.committed = True
        self._advance(step)

    def refuse(self, step: int, reason: str) -> None:
        """The step that ``ready`` gave can't be made."""
        self._break(step, reason)

    def commit_seed(self) -> bool:
        """True once: an adopted seed became a committed state. That of step 0 needs no boundaries."""
        if self.step is None or self.committed:
            return False
        self.committed = self.step == 0 or all(rank in self.boundaries for rank in range(self.world))
        return self.committed

    @property
    def useless(self) -> int:
        """Gradients of iterations up to this one will not be used, whatever comes."""
        if self.step is None or self.step + 1 == self._blocked:
            return max(self._trimmed, self.step or 0)
        return self.step

    @property
    def horizon(self) -> int:
        """No gradients of later iterations can come yet: trainers tell of each step on an authenticated connection."""
        return self._newest + self._ahead

    @property
    def seed_is_coming(self) -> bool:
        """A seed was announced."""
        return self._incoming is not None

    @property
    def held(self) -> int:
        """Iterations whose gradients are held."""
        return sum(bool(piece.gradients) for piece in self._pieces.values())

    # Inside -------------------------------------------------------------------------------------------------------

    def _piece(self, iteration: int) -> _Iteration | None:
        """The iteration's pieces, None when it is over. One that is too far ahead of a healthy shadow is broken."""
        if iteration < 0 or (self.step is not None and iteration <= self.step):
            self.late += 1
            return None
        self._pieces.setdefault(iteration, _Iteration())
        if self.step is not None and self.damage is None and iteration > self.step + self._ahead:
            self._break(iteration, f"the trainer is at step {iteration}, the shadow still at {self.step}")
        while len(self._pieces) > self._ahead + 1:
            applicable = self._applicable()
            self._drop(min((number for number in self._pieces if number not in applicable), default=iteration))
        return self._pieces.get(iteration)

    @property
    def _ahead(self) -> int:
        """How many iterations' records and boundaries are kept; they are small and come before the gradients."""
        return 4 * self._sets + 16

    def _missing(self, piece: _Iteration) -> list[int]:
        """Buckets that are not there, or [-1] when it is not known yet which there should be."""
        if piece.record is None or piece.record.layout not in self._layouts:
            return [-1]
        if piece.record.skipped:
            return []
        buckets = [bucket["bucket"] for bucket in self._layouts[piece.record.layout].buckets]
        return [bucket for bucket in buckets if bucket not in piece.gradients]

    def _compare(self, iteration: int, piece: _Iteration) -> None:
        """Break the iteration when what arrived is not what its layout says."""
        if piece.record is None or piece.record.layout not in self._layouts or piece.record.skipped:
            return
        lines = {bucket["bucket"]: bucket for bucket in self._layouts[piece.record.layout].buckets}
        elsewhere = self._layouts[piece.record.layout].elsewhere
        for gradient in [piece.gradients[bucket] for bucket in elsewhere if bucket in piece.gradients]:
            self._release(piece.gradients.pop(gradient.bucket))
        for gradient in piece.gradients.values():
            line = lines.get(gradient.bucket)
            if line is None:
                self._break(iteration, f"bucket {gradient.bucket} arrived, which the layout doesn't have")
            elif (gradient.nbytes, gradient.dtype) != (line["bytes"], line["dtype"]):
                self._break(
                    iteration,
                    f"bucket {gradient.bucket} has {gradient.nbytes} bytes of {gradient.dtype}, "
                    f"{line['bytes']} of {line['dtype']} in the layout",
                )
            if piece.broken is not None:
                return

    def _break(self, iteration: int, reason: str) -> None:
        piece = self._pieces[iteration]
        if piece.broken is not None:
            return
        piece.broken = reason
        self._free(piece)
        self._blocked = iteration if self._blocked is None else min(self._blocked, iteration)
        if self.step is None and self.damage is None:
            return  # never seeded: nothing is expected to be whole
        self.gap_count += 1
        self.gaps.append(Gap(iteration, reason))
        if self.damage is None:
            self.damage = f"iteration {iteration}: {reason}"

    def _rewind(self, rank: int, step: int) -> None:
        """The trainer did not continue from the state that is here: it is as if none were."""
        self.damage = f"rank {rank} is at step {step}: training was not resumed from step {self.step} of this shadow"
        self.step, self.committed, self.boundaries = None, False, {}

    def _advance(self, step: int) -> None:
        self.step = step
        self._resumed = False
        self._stalled = None
        for iteration in [number for number in self._pieces if number <= step]:
            self._drop(iteration)

    def _applicable(self) -> set[int]:
        """Iterations that can still be applied without a seed."""
        if self.step is None:
            return set()
        return {number for number in self._pieces if self._blocked is None or number < self._blocked}

    def _trim(self) -> None:
        """Hold the gradients of ``sets`` iterations at most: those that can be applied, then those after a seed."""
        holding = sorted(number for number, piece in self._pieces.items() if piece.gradients)
        applicable = self._applicable()
        sets = max(0, self._sets - self.queued)
        usable = [number for number in holding if number in applicable]
        for number in usable[sets:]:
            self._break(number, f"the trainer is {self._sets} iterations ahead: no room for more gradients")
        others = [number for number in holding if number not in applicable]
        room = max(0, sets - len(usable))
        if self._incoming is None:
            # One set stays free: a receiver whose sets are all taken could not show us newer iterations.
            room = min(room, max(1, self._sets - 1))
            surplus = others[: len(others) - room]
            self._trimmed = max([self._trimmed, *surplus])
        else:
            after = [number for number in others if number > self._incoming]
            surplus = [number for number in others if number <= self._incoming] + after[room:]
        for number in surplus:
            self._break(number, "dropped: no room while waiting for a seed")

    def _overdue(self) -> str | None:
        """What is missing of the next iteration although the trainer is past it; None when nothing is."""
        if self.step is None:
            return None
        number = self.step + 1
        piece = self._pieces.get(number, _Iteration())
        later = any(other > number for other in self._pieces)
        absent = [rank for rank in range(self.world) if rank not in piece.boundaries]
        if piece.broken is not None or not (later or not absent):
            return None
        parts = []
        if piece.record is None:
            parts.append("the step record")
        elif missing := self._missing(piece):
            parts.append(f"bucket {', '.join(map(str, missing))}")
        if absent:
            parts.append(f"the boundary of rank {', '.join(map(str, absent))}")
        return " and ".join(parts) or None

    def _free(self, piece: _Iteration) -> None:
        gradients, piece.gradients = list(piece.gradients.values()), {}
        for gradient in gradients:
            self._release(gradient)

    def _drop(self, iteration: int) -> None:
        self._free(self._pieces.pop(iteration))


def _differences(left: StepRecord, right: StepRecord) -> list[str]:
    """Names and values of the fields in which two records differ."""
    texts = [
        f"{name} ({getattr(left, name)!r} against {getattr(right, name)!r})"
        for name in ("layout", "skipped", "unfollowed", "absent", "changes", "scaler")
        if getattr(left, name) != getattr(right, name)
    ]
    if len(left.groups) != len(right.groups):
        return [*texts, f"the number of groups ({len(left.groups)} against {len(right.groups)})"]
    for index, (ours, theirs) in enumerate(zip(left.groups, right.groups, strict=True)):
        texts += [
            f"{key} of group {index} ({ours.get(key)!r} against {theirs.get(key)!r})"
            for key in sorted(ours.keys() | theirs.keys())
            if ours.get(key) != theirs.get(key)
        ]
    return texts
