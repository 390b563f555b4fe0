"""The commit of several shadows: cases, and random histories of deliveries, losses and deaths.

The machine below runs the real rules of both ends (``Course``, ``decide``, ``newest_position``) over its own network.
Every value that a trainer reaches is unique, so that a restore of steps that don't belong together would show.
"""

import itertools
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from checkmate.protocol import Begun, Layout, Ready, Release, StepRecord
from checkmate.shadow.course import MOST_LINES, Course, Line
from checkmate.shadow.staging import Ready as Complete
from checkmate.train.agreement import common_spans, newest_position
from checkmate.train.coordinator import Heard, Orders, agreed, decide
from checkmate.train.fleet import Unrestorable, agree


@dataclass
class State:
    """A shadow's state: the trainer's value at this step."""

    step: int
    value: int


def complete(step: int, before: int, value: int) -> Complete:
    """A step that leads from one value to the next."""
    return Complete(StepRecord(step, "", [{"before": before, "value": value}]), Layout("", []), {}, {})


class Shadow:
    """What an engine does with its course."""

    def __init__(self) -> None:
        self.course: Course[State] = Course(lambda step: None)
        self.incarnation = 0
        self.blocked = False
        self.sent: Ready | None = None

    def begin(self, incarnation: int) -> list[list[int]]:
        self.course.begin(True, None)
        self.incarnation, self.blocked, self.sent = incarnation, False, None
        return self.course.spans()

    def take(self, step: int, before: int, value: int) -> None:
        """All of a step arrived."""
        last = self.course.last
        if last is not None and not self.blocked and last.reach == step - 1:
            last.steps.append(complete(step, before, value))

    def seed(self, step: int, value: int, history: int, whole: bool) -> None:
        last = self.course.last
        is_newer = last is None or step > last.reach
        if is_newer and self.course.add(Line(State(step, value), history, {}, whole)):
            self.blocked = False

    def settle(self, history: int, step: int) -> bool:
        if self.course.main is None and (line := self.course.settle(history, step)) is not None:
            self._make(line, step)
        main = self.course.main
        return main is not None and (main.history, main.state.step) == (history, step)

    def release(self, message: Release) -> None:
        self.course.release(message.step, message.number)
        if (goal := self.course.goal()) is not None:
            line, step = goal
            if line is not self.course.main:
                self.course.move(line)
            self._make(line, step)

    def report(self) -> Ready | None:
        if (spans := self.course.report(self.blocked)) is None:
            return None
        self.sent = Ready(self.course.number, spans, self.blocked)
        return self.sent

    def value_at(self, position: tuple[int, int]) -> int:
        """What it would restore there."""
        history, step = position
        for line in reversed([*self.course.held, *self.course.lines]):
            if line.history == history and line.leads_to(step):
                made = list(line.steps)[: step - line.state.step]
                return int(made[-1].record.groups[0]["value"]) if made else line.state.value
        raise AssertionError(f"nothing at {position}")

    def _make(self, line: Line[State], step: int) -> None:
        while line.state.step < step:
            group = line.steps.popleft().record.groups[0]
            assert line.state.value == group["before"], "a step on another state than the trainer's"
            line.state.step, line.state.value = line.state.step + 1, group["value"]
            line.whole = True


@dataclass
class Commits:
    """A coordinator and its connections."""

    incarnation: int
    heard: dict[str, Heard] = field(default_factory=dict)
    released: int | None = None
    up: dict[int, deque[Ready]] = field(default_factory=dict)
    down: dict[int, deque[Release]] = field(default_factory=dict)

    def cut(self, number: int) -> None:
        self.heard[str(number)] = Heard()
        self.up[number], self.down[number] = deque(), deque()

    def answer(self) -> None:
        self.released = agreed(self.heard, self.released)
        for address, answer in decide(self.heard, self.released).items():
            self.heard[address].told = answer
            self.down[int(address)].append(answer)


which = st.integers(0, 2)


class Histories(RuleBasedStateMachine):
    @initialize(count=st.integers(2, 3))
    def start(self, count: int) -> None:
        self.shadows = [Shadow() for _ in range(count)]
        self.values = itertools.count(1)
        self.incarnation = 0
        self.coordinators: list[Commits] = []
        self.seeds: list[tuple[int, int, int, int, int]] = []
        self.newest: tuple[int, int] | None = None
        self.pick: tuple[int, int] | None = None
        self.phase = "begin"
        self._start_job(zombie=False)
        self.all_goes_well()

    @rule()
    def all_goes_well(self) -> None:
        """Everything that is under way arrives."""
        for number in [*range(len(self.shadows))] * (self.phase == "begin"):
            self.a_shadow_begins(number)
        for number in [*range(len(self.shadows))] * (self.phase == "restore"):
            self.a_shadow_restores(number)
        while self.seeds:
            self.a_seed_arrives_or_not(0, True, True)
        self.reports_and_releases_arrive()

    @rule()
    def reports_and_releases_arrive(self) -> None:
        for number in [*range(len(self.shadows))] * 3:
            self.a_shadow_reports(number)
            self.the_coordinator_hears(number, True)
            self.a_shadow_hears(number, True)

    def _start_job(self, zombie: bool) -> None:
        """A new rank 0; the old one's coordinator may live on for a while."""
        self.coordinators = self.coordinators[-1:] if zombie else []
        self.incarnation += 1
        self.begun: dict[int, list[list[int]]] = {}
        self.restored: set[int] = set()
        self.phase = "begin"

    @rule(zombie=st.booleans())
    def rank_0_dies(self, zombie: bool) -> None:
        self._start_job(zombie)

    @precondition(lambda self: self.phase == "begin")
    @rule(number=which)
    def a_shadow_begins(self, number: int) -> None:
        number %= len(self.shadows)
        if number in self.begun:
            return
        self.begun[number] = self.shadows[number].begin(self.incarnation)
        if len(self.begun) == len(self.shadows):
            said = {str(n): Begun(self.incarnation, None, spans) for n, spans in self.begun.items()}
            try:
                self.pick = agree(said, {})
            except Unrestorable:
                assert self.newest is None, "our own protocol made the job unrestorable"
                self.shadows = [Shadow() for _ in self.shadows]  # as the message says
                self._start_job(zombie=False)
                return
            self.phase = "restore" if self.pick else "train"
            if self.pick is None:
                self._train(self.incarnation, 0, 0)

    @precondition(lambda self: self.phase == "restore")
    @rule(number=which)
    def a_shadow_restores(self, number: int) -> None:
        assert self.pick is not None
        number %= len(self.shadows)
        assert self.shadows[number].settle(*self.pick)
        self.restored.add(number)
        if len(self.restored) == len(self.shadows):
            values = {shadow.course.main.state.value for shadow in self.shadows if shadow.course.main}
            assert len(values) == 1, "mixed states were restored"
            self._train(self.pick[0], self.pick[1], values.pop())

    @precondition(lambda self: self.phase == "restore")
    @rule()
    def the_script_starts_anew(self) -> None:
        if not self.restored:
            self._train(self.incarnation, 0, next(self.values))

    def _train(self, history: int, step: int, value: int) -> None:
        self.history, self.step, self.value, self.phase = history, step, value, "train"
        self.coordinators.append(Commits(self.incarnation))
        for number in range(len(self.shadows)):
            self.coordinators[-1].cut(number)
        self.seeds = []
        if step == 0:
            self.a_seed_is_taken()

    @precondition(lambda self: self.phase == "train")
    @rule(lost=st.lists(which, max_size=1))
    def the_trainer_steps(self, lost: list[int]) -> None:
        before, self.value = self.value, next(self.values)
        self.step += 1
        for number, shadow in enumerate(self.shadows):
            if shadow.incarnation != self.incarnation:
                shadow.begin(self.incarnation)  # it was killed, and meets its trainers now
                shadow.course.hold()
            if number in lost:
                shadow.blocked = True
            else:
                shadow.take(self.step, before, self.value)

    @precondition(lambda self: self.phase == "train")
    @rule()
    def a_seed_is_taken(self) -> None:
        for number in range(len(self.shadows)):
            self.seeds.append((number, self.step, self.value, self.history, self.incarnation))

    @precondition(lambda self: self.seeds)
    @rule(index=st.integers(0, 5), arrives=st.booleans(), whole=st.booleans())
    def a_seed_arrives_or_not(self, index: int, arrives: bool, whole: bool) -> None:
        number, step, value, history, incarnation = self.seeds.pop(index % len(self.seeds))
        shadow = self.shadows[number]
        if arrives and shadow.incarnation == incarnation:
            shadow.seed(step, value, history, whole or step == 0)

    @rule(number=which)
    def seeds_are_ordered(self, number: int) -> None:
        shadow = self.shadows[number % len(self.shadows)]
        if shadow.blocked:
            shadow.course.shorten()

    @rule(number=which)
    def boundaries_arrive(self, number: int) -> None:
        last = self.shadows[number % len(self.shadows)].course.last
        if last is not None:
            last.whole = True

    @rule(number=which)
    def a_shadow_reports(self, number: int) -> None:
        number %= len(self.shadows)
        shadow = self.shadows[number]
        if (message := shadow.report()) is not None:
            for commits in self._connected(shadow):
                commits.up[number].append(message)

    @rule(number=which, newest=st.booleans())
    def the_coordinator_hears(self, number: int, newest: bool) -> None:
        number %= len(self.shadows)
        for commits in self.coordinators[-1 if newest else 0 :][:1]:
            if commits.up[number]:
                message = commits.up[number].popleft()
                heard = commits.heard[str(number)]
                heard.number, heard.spans = message.number, message.spans
                heard.needs_seed = message.needs_seed
                commits.answer()

    @rule(number=which, newest=st.booleans())
    def a_shadow_hears(self, number: int, newest: bool) -> None:
        number %= len(self.shadows)
        for commits in self.coordinators[-1 if newest else 0 :][:1]:
            if commits.down[number] and commits.incarnation == self.shadows[number].incarnation:
                self.shadows[number].release(commits.down[number].popleft())

    @rule(number=which)
    def a_connection_breaks_and_comes_back(self, number: int) -> None:
        number %= len(self.shadows)
        shadow = self.shadows[number]
        for commits in self.coordinators:
            commits.cut(number)
        for commits in self._connected(shadow):
            if shadow.sent is not None:
                commits.up[number].append(shadow.sent)

    @precondition(lambda self: self.phase == "train")
    @rule(number=which)
    def a_shadow_dies(self, number: int) -> None:
        number %= len(self.shadows)
        self.shadows[number] = Shadow()
        for commits in self.coordinators:
            commits.cut(number)
        self.newest = None  # its part is gone until it is seeded

    def _connected(self, shadow: Shadow) -> list[Commits]:
        return [commits for commits in self.coordinators if commits.incarnation == shadow.incarnation]

    @invariant()
    def what_could_be_restored_still_can(self) -> None:
        """The newest step that all shadows can be at is never lost, never goes back, and is one of the trainer's."""
        if not hasattr(self, "shadows"):
            return
        spans: list[Any] = [shadow.course.spans() for shadow in self.shadows]
        position = newest_position(spans)
        if self.newest is not None:
            assert position is not None, spans
        if position is None:
            return
        assert len({shadow.value_at(position) for shadow in self.shadows}) == 1, "mixed states could be restored"
        for shadow in self.shadows:
            main = shadow.course.main
            if self.newest is not None and main is not None and main.history == position[0]:
                assert main.state.step <= position[1], "a shadow is beyond what all can be at"
        self.newest = position


Histories.TestCase.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
TestHistories = Histories.TestCase


def test_min_of_ends_would_not_do() -> None:
    """One shadow lost step 6 and has a seed of 10; the other is at 8: only 5 can be restored from both."""
    assert newest_position([[(1, 5, 5), (1, 10, 11)], [(1, 5, 8)]]) == (1, 5)
    heard = {"a": Heard([[5, 5], [10, 11]], 3), "b": Heard([[5, 8]], 7)}
    assert decide(heard, agreed(heard, None))["b"] == Release(5, 7, ["b"])
    heard["b"].spans = [[5, 8], [10, 10]]
    assert decide(heard, agreed(heard, 5))["a"] == Release(10, 3, [])


def test_where_all_can_be() -> None:
    assert common_spans([]) == []
    both = common_spans([[(1, 5, 8), (1, 10, 12)], [(1, 7, 11), (2, 7, 11)]])
    assert both == [(1, 7, 8), (1, 10, 11)]
    assert newest_position([both, [(1, 1, 9)]]) == (1, 8)


def test_histories_have_nothing_in_common() -> None:
    assert newest_position([[(1, 5, 9)], [(3, 0, 9)]]) is None
    assert newest_position([[(1, 5, 9), (3, 0, 2)], [(1, 6, 20), (3, 0, 1)]]) == (3, 1)


def test_nothing_is_released_while_a_shadow_is_gone() -> None:
    heard = {"a": Heard([[5, 9]], 1), "b": Heard()}
    assert decide(heard, agreed(heard, None)) == {"a": Release(None, 1, ["b"])}
    heard["a"].told = Release(None, 1, ["b"])
    assert decide(heard, agreed(heard, None)) == {}


@pytest.mark.parametrize(
    ("spans", "failed", "text"),
    [
        ({"a": [[1, 5, 7]], "b": []}, {}, "a holds step 7, but b holds no state, because it was started anew"),
        ({"a": [[1, 5, 7]]}, {"b": "refused"}, r"a holds step 7, but b can't be reached \(refused\)"),
        ({"a": [[1, 5, 7]], "b": [[2, 5, 7]]}, {}, "no step can be restored from all shadows"),
    ],
)
def test_state_that_cannot_be_restored_is_refused_by_name(spans: Any, failed: Any, text: str) -> None:
    with pytest.raises(Unrestorable, match=text):
        agree({address: Begun(1, None, lines) for address, lines in spans.items()}, failed)


def test_shadows_without_any_state_are_a_fresh_start() -> None:
    assert agree({"a": Begun(1, None), "b": Begun(1, None)}, {}) is None


def followed() -> Shadow:
    """At step 5, where it lost step 6, with a seed of 10 beside it, and both reported."""
    shadow = Shadow()
    shadow.begin(1)
    shadow.seed(5, 5, 1, True)
    assert shadow.report() == Ready(1, [[5, 5]])
    shadow.release(Release(5, 1))
    shadow.seed(10, 10, 1, True)
    assert shadow.report() == Ready(2, [[5, 5], [10, 10]])
    return shadow


def test_a_seed_that_was_reported_is_kept_until_its_withdrawal_was_heard() -> None:
    shadow = followed()
    shadow.seed(12, 12, 1, True)
    assert shadow.report() == Ready(3, [[5, 5], [12, 12]])
    assert [1, 10, 10] in shadow.course.spans()
    shadow.release(Release(5, 2))
    assert [1, 10, 10] in shadow.course.spans(), "the coordinator may have released it before it heard"
    shadow.release(Release(5, 3))
    assert shadow.course.spans() == [[1, 5, 5], [1, 12, 12]]


def test_a_withdrawn_seed_that_was_released_is_taken() -> None:
    shadow = followed()
    shadow.seed(12, 12, 1, True)
    shadow.report()
    shadow.release(Release(10, 2))
    shadow.release(Release(10, 3))
    assert shadow.course.spans() == [[1, 10, 10], [1, 12, 12]]


def test_no_more_states_are_held_than_there_is_room_for() -> None:
    shadow = followed()
    for step in (12, 14, 16):
        shadow.seed(step, step, 1, True)
        shadow.report()
    assert len(shadow.course.lines) == MOST_LINES
    assert [1, 10, 10] in shadow.course.spans()


def test_a_new_incarnation_keeps_what_was_promised_and_goes_to_the_step_that_it_is_told() -> None:
    shadow = followed()
    shadow.take(11, 10, 11)
    shadow.take(12, 11, 12)
    assert shadow.begin(2) == shadow.begin(3) == [[1, 5, 5], [1, 10, 12]]
    assert not shadow.settle(3, 11), "another history"
    assert shadow.settle(1, 11)
    assert shadow.course.spans() == [[1, 11, 11]], "what is beyond will be trained again"
    assert not shadow.settle(1, 10)


def test_a_run_that_begins_anew_is_another_history() -> None:
    shadow = followed()
    shadow.begin(2)
    shadow.seed(0, 0, 2, True)
    for step in range(1, 11):
        shadow.take(step, step - 1 if step > 1 else 0, step)
    assert shadow.report() == Ready(3, [[0, 10]])
    assert shadow.course.spans() == [[1, 5, 5], [1, 10, 10], [2, 0, 10]]
    shadow.release(Release(10, 3))
    assert shadow.course.spans() == [[2, 10, 10]]


def test_what_was_released_stays_so_for_a_shadow_that_did_not_hear_of_it() -> None:
    """Both had promised step 10, and one is there; the other's connection broke before, and it has withdrawn it."""
    heard = {"a": Heard([[10, 11]], 4), "b": Heard([[5, 5], [12, 12]], 3)}
    assert decide(heard, agreed(heard, 10))["b"].step == 10
    shadow = followed()
    shadow.seed(12, 12, 1, True)
    shadow.report()
    shadow.release(decide(heard, agreed(heard, 10))["b"])
    assert shadow.course.spans() == [[1, 10, 10], [1, 12, 12]]


def blocked() -> Shadow:
    """At step 10, with two steps that others lack, and without the one after them."""
    shadow = followed()
    shadow.release(Release(10, 2))
    shadow.take(11, 10, 11)
    shadow.take(12, 11, 12)
    assert shadow.report() == Ready(3, [[10, 12]])
    shadow.blocked = True
    return shadow


def test_steps_make_room_for_those_after_a_seed_when_the_coordinator_has_heard() -> None:
    shadow = blocked()
    shadow.course.shorten()
    assert shadow.report() == Ready(4, [[10, 10]], True)
    shadow.release(Release(10, 3))
    assert shadow.course.spans() == [[1, 10, 12]], "the coordinator may have released 12 before it heard"
    shadow.release(Release(10, 4))
    assert shadow.course.spans() == [[1, 10, 10]]


def test_steps_that_were_released_meanwhile_are_made() -> None:
    shadow = blocked()
    shadow.course.shorten()
    shadow.report()
    shadow.release(Release(11, 4))
    assert shadow.course.spans() == [[1, 11, 11]]


def test_all_are_seeded_at_one_step_to_come() -> None:
    """Groups that are seeded each at its own step may have none in common for ever."""
    step = 100
    orders = Orders(lambda: (step, 0.1))
    heard = {"a": Heard([[90, 93]], 1, needs_seed=True), "b": Heard()}
    orders.update(heard, 90, 50.0)
    assert orders.at is None and orders.wait_s(heard, 50.0) is None, "one is not there to be seeded"
    heard["b"].spans = []
    orders.update(heard, 90, 50.0)
    assert orders.at == 106
    assert {answer.seed_at for answer in decide(heard, 90, orders.at).values()} == {106}
    step = 107
    orders.update(heard, 90, 51.0)
    assert orders.at is None and orders.wait_s(heard, 51.0) == 4.5
    orders.update(heard, 90, 55.5)
    assert orders.at == 118, "that did not help: more time until the next one"
    orders.update(heard, 119, 56.0)
    heard["a"].needs_seed = False
    assert orders.wait_s(heard, 60.0) is None


def test_late_shadows_are_seeded_as_soon_as_all_can_be_asked() -> None:
    """They would wait for a seed that nobody sends unasked."""
    orders = Orders(lambda: (100, 0.1))
    heard = {"a": Heard([], 1), "b": Heard()}
    orders.wanted = True
    orders.update(heard, None, 50.0)
    assert orders.at is None, "one can't be asked yet"
    heard["b"].spans = []
    orders.update(heard, None, 50.1)
    assert orders.at == 106
    orders.update(heard, None, 60.0)
    assert orders.at == 106 and orders.wait_s(heard, 60.0) is None, "once"


def test_repeated_starts_that_never_settle_leave_room() -> None:
    shadow = followed()
    for incarnation in range(2, 9):
        shadow.begin(incarnation)
        shadow.course.keep(1, 5)
        assert [line[:2] for line in shadow.course.spans()] == [[1, 5]], "what was agreed can still be restored"
        assert shadow.course.add(Line(State(0, 0), incarnation, {}, True))
        shadow.report()
