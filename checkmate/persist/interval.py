"""How often to save: the rule of PCcheck with what is measured while training runs, and a budget that is kept."""

import math
import statistics
from collections import deque
from concurrent.futures import Future

from checkmate.config import CheckmateError
from checkmate.costmodel import min_interval
from checkmate.persist.checkpointer import Checkpointer, Saved

_KEPT = 32
"""Iterations, and writes, that count."""
_STEP_UP = 1.25
_STEP_DOWN = 0.9
"""Of the factor on the rule's interval: up at once when the budget is exceeded, down slowly."""


class IntervalController:
    """Decides after each iteration whether to save, so that training is slowed down by at most the factor q.

    The interval is f = ⌈T_w/(N·q·t)⌉ (PCcheck) times a factor that grows while training is slowed down by
    more than q and shrinks when it isn't: contention that the rule does not know of (shared storage, memory bandwidth)
    is paid for by saving less often. T_w is the worst recent write; t the median of iterations while nothing was being
    saved: the first ``warm_up`` ones, and every ``remeasure`` intervals one more.

    ``budget``: q, such as 1.05. ``in_flight``: N. Raises CheckmateError for values that make no sense.
    """

    def __init__(self, budget: float, in_flight: int, *, warm_up: int = 8, remeasure: int = 50) -> None:
        min_interval(0.0, in_flight, budget, 1.0)  # refuses values that make no sense
        if warm_up < 1 or remeasure < 1:
            raise CheckmateError(f"warm_up is {warm_up} and remeasure {remeasure}: both must be at least 1")
        self._budget = budget
        self.in_flight = in_flight
        """N: may change between iterations."""
        self._warm_up = warm_up
        self._remeasure = remeasure
        self._alone: deque[float] = deque(maxlen=_KEPT)
        self._recent: list[float] = []
        self._writes: deque[float] = deque(maxlen=_KEPT)
        self._factor = 1.0
        self._since = 0
        self._intervals = 0

    @property
    def iteration_s(self) -> float | None:
        """t: an iteration without checkpoints; None before the first."""
        return statistics.median(self._alone) if self._alone else None

    @property
    def write_s(self) -> float | None:
        """T_w: the worst recent write; None before the first."""
        return max(self._writes) if self._writes else None

    @property
    def interval(self) -> int:
        """f, in iterations. Before the first write is known: 1, since one has to be seen."""
        if self.iteration_s is None or self.write_s is None:
            return 1
        rule = min_interval(self.write_s, self.in_flight, self._budget, self.iteration_s)
        return max(1, math.ceil(rule * self._factor))

    def iteration(self, seconds: float, saving: bool) -> bool:
        """An iteration is over, waits for checkpoints included; ``saving``: one was in flight. True: save now."""
        if not saving:
            self._alone.append(seconds)
        self._recent.append(seconds)
        self._since += 1
        if len(self._alone) < self._warm_up or self._since < self._due():
            return False
        if self._writes or not saving:
            self._adapt()
            self._since = 0
            self._intervals += 1
            return True
        return False  # the first write is still going on

    def written(self, seconds: float) -> None:
        """A write has become durable."""
        self._writes.append(seconds)

    def _due(self) -> int:
        """Every so often an interval is long enough for an iteration alone: t may have changed."""
        longer = self._intervals and self._intervals % self._remeasure == 0
        if not (longer and self.write_s and self.iteration_s):
            return self.interval
        return max(self.interval, math.ceil(self.write_s / self.iteration_s) + 1)

    def _adapt(self) -> None:
        if self.iteration_s is None:
            return
        slowdown = statistics.fmean(self._recent) / self.iteration_s
        self._factor = max(1.0, self._factor * (_STEP_UP if slowdown > self._budget else _STEP_DOWN))
        self._recent.clear()


class AutoSaver:
    """A checkpointer and a controller: ``after_iteration`` saves when it is time.

    ``budget``: q, the factor that an iteration may take longer, 1.05 for 5 %. Raises CheckmateError for less than 1.
    """

    def __init__(self, checkpointer: Checkpointer, budget: float = 1.05) -> None:
        self._checkpointer = checkpointer
        self._flying: list[Future[Saved]] = []
        self.controller = IntervalController(budget, checkpointer.in_flight)

    def after_iteration(self, seconds: float, state: object, step: int) -> Future[Saved] | None:
        """``seconds``: the whole iteration. ``state``: what to save, or a function that makes it. None: not now.

        Raises what ``Checkpointer.save`` does, and CheckmateError when ``seconds`` are not more than 0.
        """
        self.controller.in_flight = self._checkpointer.in_flight  # tuned when the file is made, at the first save
        saving = bool(self._flying)
        for future in [future for future in self._flying if future.done()]:
            self._flying.remove(future)
            if future.exception() is None:
                self.controller.written(future.result().write_s)
        if not self.controller.iteration(seconds, saving):
            return None
        future = self._checkpointer.save(state() if callable(state) else state, step)
        self._flying.append(future)
        return future
