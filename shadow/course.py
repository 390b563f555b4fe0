"""Where a shadow can be: whole states, and the complete steps after each that are not made yet. Pure.

Shadows of one job commit together: a step is made when it is *released*, because every shadow said that it can be
there. What a shadow said is a promise: it keeps what the step takes until it is further, or until the coordinator has
heard that it can't any more. So there is always a step that all shadows can be at, the newest one released, whoever
dies when. A job's only shadow needs no release.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from checkmate.shadow.staging import Ready

MOST_LINES = 4
"""States held at once: the committed one, a seed, its successor, one of an earlier incarnation."""


class Stepped(Protocol):
    """``Replica``, as far as it matters here."""

    step: int


S = TypeVar("S", bound=Stepped)


@dataclass(eq=False)
class Line(Generic[S]):
    """A state and the complete steps that follow it.

    ``history``: the incarnation in which it began. ``boundaries``: of the state, by rank; ``whole``: all are there.
    ``promised``: it was reported. ``withdrawn``: number of the first report without it. ``shortened``: without its
    steps.
    """

    state: S
    history: int
    boundaries: dict[int, dict[str, Any]]
    whole: bool
    steps: deque[Ready] = field(default_factory=deque)
    promised: bool = False
    withdrawn: int | None = None
    shortened: int | None = None

    @property
    def reach(self) -> int:
        """The newest step that it leads to."""
        return self.state.step + len(self.steps)

    @property
    def span(self) -> list[int] | None:
        """First and last step that the shadow could be at; None: not any yet."""
        first = self.state.step + (not self.whole)
        return [first, self.reach] if first <= self.reach else None

    @property
    def offer(self) -> list[int] | None:
        """What of its span is still promised."""
        if self.withdrawn is not None or (self.shortened is not None and not self.whole):
            return None
        return self.span if self.shortened is None else [self.state.step, self.state.step]

    def leads_to(self, step: int) -> bool:
        """The shadow could be at this step."""
        return self.span is not None and self.span[0] <= step <= self.reach


class Course(Generic[S]):
    """All lines of a shadow. ``free`` is called for each step that will not be made.

    ``shared``: the job has other shadows. ``main``: the line of the committed state (None: none is committed in this
    incarnation). ``ahead``: of seeds, oldest first. ``held``: of earlier incarnations, as they were when this one
    began; nothing is added to them. Only the last line grows.
    """

    def __init__(self, free: Callable[[Ready], None]) -> None:
        self.shared = False
        self.main: Line[S] | None = None
        self.ahead: list[Line[S]] = []
        self.held: list[Line[S]] = []
        self.number = 0
        self._free = free
        self._released: int | None = None
        self._reported: tuple[list[int], bool] = ([], False)

    @property
    def lines(self) -> list[Line[S]]:
        """Those of this incarnation, oldest first."""
        return [*([self.main] if self.main else []), *self.ahead]

    @property
    def last(self) -> Line[S] | None:
        """The line that grows."""
        return self.lines[-1] if self.lines else None

    @property
    def queued(self) -> int:
        """Steps that hold gradients."""
        return sum(bool(ready.gradients) for line in (*self.held, *self.lines) for ready in line.steps)

    def spans(self) -> list[list[int]]:
        """For ``Begun``: everything that can be restored."""
        return [[line.history, *line.span] for line in (*self.held, *self.lines) if line.span]

    def begin(self, shared: bool, committed: S | None) -> Line[S] | None:
        """A new incarnation. Shared, all is held until ``settle`` says where it goes on, or it begins anew.

        Otherwise it goes on from the committed state: returns its line.
        """
        lines = [*self.held, *self.lines]
        kept = [line for line in lines if (line.span if shared else line.state is committed)]
        for line in lines:
            line.withdrawn = line.shortened = None
            if line not in kept:
                self._drop(line)
        self.shared, self.ahead, self._released, self._reported = shared, [], None, ([], False)
        self.main = kept[0] if kept and not shared else None
        self.held = kept if shared else []
        if self.main is not None:
            self._cut(self.main, self.main.state.step)
        return self.main

    def hold(self) -> None:
        """What there is must not be gone on from: the incarnation began without this shadow."""
        self.held, self.main, self.ahead = [*self.held, *self.lines], None, []

    def keep(self, history: int, step: int) -> None:
        """All shadows opened this incarnation, and this is the newest that all could be at: what doesn't lead there is
        dropped."""
        useless = [line for line in self.held if line.history != history or not line.leads_to(step)]
        self.held = [line for line in self.held if line not in useless]
        self._drop(*useless)

    def settle(self, history: int, step: int) -> Line[S] | None:
        """The incarnation goes on from this step: the line that leads to it, None: none does. All else is dropped."""
        for line in reversed(self.held):
            if line.history == history and line.leads_to(step):
                self._cut(line, step)
                self.move(line)
                return line
        return None

    def add(self, line: Line[S]) -> bool:
        """A seed. False: there is no room; what is promised has to be kept."""
        if not self.shared:
            self._drop(*self.ahead)
            self.ahead.clear()
        while self.ahead and not self.ahead[-1].promised:
            self._drop(self.ahead.pop())
        if len(self.held) + len(self.lines) >= MOST_LINES:
            return False
        if self.ahead and self.ahead[-1].withdrawn is None:
            self.ahead[-1].withdrawn = self.number + 1
        self.ahead.append(line)
        return True

    def release(self, step: int | None, number: int) -> None:
        """The coordinator heard report ``number`` before it released ``step``."""
        if step is not None and (self._released is None or step > self._released):
            self._released = step
        for line in list(self.ahead):
            if line.withdrawn is not None and line.withdrawn <= number and not self._is_due(line):
                self.ahead.remove(line)
                self._drop(line)
        for line in self.lines:
            if line.shortened is not None and line.shortened <= number:
                line.shortened = None
                self._cut(line, max(line.state.step, self._released or 0) if self._is_due(line) else line.state.step)

    def shorten(self) -> None:
        """A seed is due that this shadow needs: make room for the gradients after it once the coordinator has heard."""
        for line in self.lines:
            if line.steps and line.shortened is None:
                line.shortened = self.number + 1

    def goal(self) -> tuple[Line[S], int] | None:
        """The line and the step that the shadow must be at now; None: it stays where it is."""
        for line in reversed(self.lines):
            if self._is_due(line):
                return line, line.reach if self._released is None else self._released
        return None

    def move(self, line: Line[S]) -> None:
        """This line is the committed one now; what came before it is dropped."""
        later = self.ahead[self.ahead.index(line) + 1 :] if line in self.ahead else []
        self._drop(*(other for other in (*self.held, *self.lines) if other is not line and other not in later))
        line.withdrawn = line.shortened = None
        self.main, self.ahead, self.held = line, later, []

    def lose(self, line: Line[S]) -> None:
        """Its state can't be used any more."""
        if line is self.main:
            self.main = None
        elif line in self.ahead:
            self.ahead.remove(line)
        self._drop(line)

    def report(self, needs_seed: bool) -> list[list[int]] | None:
        """New spans to report under ``number``; None: what was reported still holds."""
        if not self.shared:
            return None
        lines = [line for line in self.lines if line.offer]
        spans = [line.offer for line in lines if line.offer]
        report = [last for _, last in spans], needs_seed
        if report == self._reported:
            return None
        self._reported = report
        self.number += 1
        for line in lines:
            line.promised = True
        return spans

    def _is_due(self, line: Line[S]) -> bool:
        if not self.shared:
            return line.span is not None
        return self._released is not None and line.leads_to(self._released)

    def _cut(self, line: Line[S], step: int) -> None:
        while line.reach > step:
            self._free(line.steps.pop())

    def _drop(self, *lines: Line[S]) -> None:
        for line in lines:
            self._cut(line, line.state.step)
