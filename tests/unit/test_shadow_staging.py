"""What may be applied, and what never is: cases, and random histories against the rules."""

import itertools
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from checkmate.protocol import Layout, StepRecord
from checkmate.shadow.staging import Gradient, Ready, Staging

BUCKETS = (0, 1)
LAYOUT = Layout("two", [{"bucket": b, "bytes": 8, "dtype": "float32", "params": []} for b in BUCKETS])


def record(step: int, layout: str = "two", **fields: Any) -> StepRecord:
    return StepRecord(step, layout, fields.pop("groups", [{"lr": 0.1}]), **fields)


class Rig:
    """A staging of two ranks and what it released."""

    def __init__(self, sets: int = 3, world: int = 2, seeded: bool = True) -> None:
        self.released: list[Any] = []
        self.staging = Staging(
            sets, 5.0, lambda g: self.released.append((g.iteration, g.bucket)), lambda t: f"holes in {t}"
        )
        self.world = world
        self.staging.begin(world, 0 if seeded else None, {})
        self.staging.add_layout(LAYOUT)

    def gradient(self, step: int, *buckets: int, dtype: str = "float32", nbytes: int = 8) -> None:
        for bucket in buckets or BUCKETS:
            self.staging.add_gradient(Gradient(step, bucket, dtype, nbytes, (step, bucket)))

    def records(self, step: int, **fields: Any) -> None:
        for rank in range(self.world):
            self.staging.add_record(rank, record(step, **fields))

    def boundaries(self, step: int, *ranks: int) -> None:
        for rank in ranks or range(self.world):
            self.staging.add_boundary(rank, step, {"rank": rank, "step": step})

    def all(self, step: int) -> None:
        self.gradient(step)
        self.records(step)
        self.boundaries(step)

    def apply(self) -> list[int]:
        steps = []
        while (ready := self.staging.ready()) is not None:
            steps.append(ready.record.step)
            self.staging.taken(ready.record.step)
            self.released += [gradient.handle for gradient in ready.gradients.values()]
        return steps


def test_applies_in_order_and_frees() -> None:
    rig = Rig()
    rig.all(2)
    assert rig.apply() == []
    rig.all(1)
    ready = rig.staging.ready()
    assert ready is not None and sorted(ready.gradients) == [0, 1] and rig.released == []
    assert ready.boundaries == {0: {"rank": 0, "step": 1}, 1: {"rank": 1, "step": 1}}
    assert rig.apply() == [1, 2]
    assert sorted(rig.released) == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert rig.staging.boundaries[1] == {"rank": 1, "step": 2}


@pytest.mark.parametrize("missing", ["gradient", "record", "boundary"])
def test_every_piece_is_needed(missing: str) -> None:
    rig = Rig()
    rig.gradient(1, 0, *([] if missing == "gradient" else [1]))
    if missing != "record":
        rig.records(1)
    rig.boundaries(1, 0, *([] if missing == "boundary" else [1]))
    assert rig.apply() == []
    match missing:
        case "gradient":
            rig.gradient(1, 1)
        case "record":
            rig.records(1)
        case _:
            rig.boundaries(1, 1)
    assert rig.apply() == [1]


def test_a_bucket_that_was_reduced_twice_is_damage() -> None:
    rig = Rig()
    rig.gradient(1, 0, 0)
    assert rig.staging.damage == "iteration 1: bucket 0 was reduced twice"


def test_one_record_is_enough() -> None:
    rig = Rig()
    rig.gradient(1)
    rig.staging.add_record(1, record(1))
    rig.boundaries(1)
    assert rig.apply() == [1]


def test_a_skipped_step_needs_no_gradients() -> None:
    rig = Rig()
    rig.records(1, skipped=True)
    rig.boundaries(1)
    assert rig.apply() == [1]
    rig.gradient(1)
    assert rig.released == [(1, 0), (1, 1)] and rig.staging.damage is None


def test_late_and_repeated_messages_are_harmless() -> None:
    rig = Rig()
    rig.all(1)
    rig.apply()
    rig.all(1)
    rig.staging.add_damage(1, "late")
    rig.staging.add_layout(LAYOUT)
    assert rig.staging.damage is None and rig.staging.late > 0 and rig.staging.gap_count == 0
    assert len(rig.released) == 4
    rig.all(2)
    rig.records(2)
    rig.boundaries(2)
    assert rig.apply() == [2]


@pytest.mark.parametrize(
    ("break_it", "text"),
    [
        (lambda rig: rig.staging.add_damage(1, "bad CRC"), "iteration 1: bad CRC"),
        (lambda rig: rig.staging.add_damage(None, "lost"), "iteration 1: lost"),
        (lambda rig: rig.staging.add_record(1, record(1, groups=[{"lr": 9.0}])), "lr of group 0 (0.1 against 9.0)"),
        (lambda rig: rig.staging.add_record(1, record(1, groups=[])), "number of groups (1 against 0)"),
        (lambda rig: rig.staging.add_record(1, record(1, skipped=True)), "skipped (False against True)"),
        (
            lambda rig: rig.staging.add_record(1, record(1, groups=[{"lr": 0.1, "x": 1}])),
            "x of group 0 (None against 1)",
        ),
        (lambda rig: rig.gradient(1, 7), "bucket 7 arrived, which the layout doesn't have"),
        (lambda rig: rig.gradient(1, 1, nbytes=4), "bucket 1 has 4 bytes of float32, 8 of float32 in the layout"),
        (lambda rig: rig.gradient(1, 1, dtype="bfloat16"), "bucket 1 has 8 bytes of bfloat16, 8 of float32"),
    ],
)
def test_damage_stops_before_the_step_and_is_named(break_it: Any, text: str) -> None:
    rig = Rig()
    rig.gradient(1, 0)
    rig.staging.add_record(0, record(1))
    break_it(rig)
    assert text in str(rig.staging.damage)
    assert [gap.iteration for gap in rig.staging.gaps] == [1] and rig.staging.gap_count == 1
    rig.all(1)
    rig.all(2)
    assert rig.apply() == []
    assert (1, 0) in rig.released, "gradients of a broken iteration are freed at once"


def test_unknown_layout_and_unfollowed() -> None:
    rig = Rig()
    rig.records(1, layout="other")
    assert "names a layout that was not sent: other" in str(rig.staging.damage)
    rig = Rig()
    rig.records(1, unfollowed="clipped")
    assert "the trainer says: clipped" in str(rig.staging.damage)
    rig = Rig()
    rig.staging.add_layout(Layout("two", []))
    assert "two different layouts" in str(rig.staging.damage)


@pytest.mark.parametrize("seed", [None, 1])
def test_a_skipped_step_with_differing_records_is_not_applied(seed: int | None) -> None:
    rig = Rig()
    step = 1 if seed is None else 2
    rig.staging.add_record(0, record(step, skipped=True))
    rig.staging.add_record(1, record(step, skipped=True, groups=[]))
    rig.boundaries(step)
    if seed is not None:
        rig.staging.adopt(seed)
        rig.boundaries(step)
    assert rig.apply() == [] and rig.staging.damage is not None


def test_what_came_before_the_damage_is_still_applied() -> None:
    rig = Rig()
    rig.gradient(1)
    rig.gradient(2)
    rig.staging.add_damage(2, "gap")
    rig.records(1)
    rig.boundaries(1)
    assert rig.apply() == [1]


def test_unnamed_damage_spares_complete_gradients() -> None:
    rig = Rig()
    rig.gradient(1)
    rig.records(1)
    rig.gradient(2, 0)
    rig.staging.add_damage(None, "gap")
    rig.boundaries(1)
    assert rig.apply() == [1]
    rig.all(2)
    assert rig.apply() == []
    rig = Rig()
    rig.gradient(1)
    rig.records(1)
    rig.staging.add_damage(None, "gap")
    rig.boundaries(1)
    rig.all(2)
    assert rig.apply() == [1]
    assert "iteration 2" in str(rig.staging.damage)


def test_a_missing_piece_is_damage_only_when_training_is_past_it() -> None:
    rig = Rig()
    rig.gradient(1, 0)
    rig.records(1)
    rig.boundaries(1, 0)
    for now in (0.0, 100.0, 200.0):
        rig.staging.check(now)
    assert rig.staging.damage is None, "a rank may compute for as long as it likes"
    rig.boundaries(1, 1)
    rig.staging.check(300.0)
    rig.staging.check(304.0)
    assert rig.staging.damage is None
    rig.staging.check(305.1)
    assert rig.staging.damage == "iteration 1: missing for 5 s: bucket 1 (holes in 1)"


def test_patience_starts_anew_with_each_step() -> None:
    rig = Rig()
    rig.gradient(2)
    rig.staging.check(0.0)
    rig.all(1)
    assert rig.apply() == [1]
    rig.boundaries(2)
    rig.staging.check(6.0)
    rig.staging.check(10.0)
    assert rig.staging.damage is None
    rig.gradient(3, 0)
    rig.staging.check(11.1)
    assert "missing for 5 s: the step record" in str(rig.staging.damage)


def test_overflow_breaks_the_newest() -> None:
    rig = Rig(sets=2)
    for step in (1, 2, 3):
        rig.gradient(step)
    assert "iteration 3: the trainer is 2 iterations ahead" in str(rig.staging.damage)
    assert {step for step, _ in rig.released} == {3}
    for step in (1, 2, 3):
        rig.records(step)
        rig.boundaries(step)
    assert rig.apply() == [1, 2]
    assert rig.staging.useless == 2, "nothing was trimmed yet"


def test_records_far_ahead_are_damage_and_bounded() -> None:
    rig = Rig()
    for step in range(1, 500):
        rig.records(step)
    assert "the trainer is at step 29, the shadow still at 0" in str(rig.staging.damage)
    assert len(rig.staging._pieces) < 40
    rig = Rig(seeded=False)
    for step in range(1, 500):
        rig.records(step)
        rig.boundaries(step)
        rig.gradient(step)
    assert len(rig.staging._pieces) < 40 and rig.staging.held <= 2


def test_unseeded_keeps_the_newest_and_follows_from_a_seed() -> None:
    rig = Rig(seeded=False)
    for step in range(1, 10):
        rig.all(step)
    assert rig.apply() == [] and rig.staging.damage is None and rig.staging.gap_count == 0
    assert rig.staging.judge_seed(7, None) == "adopt"
    rig.staging.adopt(7)
    assert rig.staging.commit_seed() and not rig.staging.commit_seed()
    assert rig.staging.boundaries[1] == {"rank": 1, "step": 7}
    assert rig.apply() == [8, 9]


def test_a_seed_before_what_was_dropped_is_not_enough() -> None:
    rig = Rig(seeded=False)
    for step in range(1, 10):
        rig.all(step)
    rig.staging.adopt(5)
    assert rig.apply() == []
    assert "iteration 6: dropped" in str(rig.staging.damage)


def test_while_a_seed_arrives_what_follows_it_is_kept() -> None:
    rig = Rig(sets=3, seeded=False)
    rig.all(4)
    rig.staging.seed_announced(4)
    assert rig.staging.seed_is_coming
    for step in range(5, 10):
        rig.all(step)
    rig.staging.adopt(4)
    assert rig.apply() == [5, 6, 7]
    assert "iteration 8" in str(rig.staging.damage)


def test_seed_after_damage() -> None:
    rig = Rig()
    rig.staging.add_damage(1, "gap")
    rig.all(2)
    assert rig.staging.useless == 0
    rig.staging.adopt(1)
    assert rig.staging.damage is None and not rig.staging.committed
    assert not rig.staging.commit_seed()
    rig.boundaries(1)
    assert rig.staging.commit_seed()
    assert rig.apply() == [2]


@pytest.mark.parametrize(("step", "verdict"), [(0, "ignore"), (1, "ignore"), (2, "verify"), (3, "adopt")])
def test_judging_seeds(step: int, verdict: str) -> None:
    rig = Rig()
    rig.all(1)
    rig.all(2)
    rig.apply()
    assert rig.staging.judge_seed(step, 2) == verdict


def test_judging_seeds_without_a_state_to_step() -> None:
    rig = Rig(seeded=False)
    assert [rig.staging.judge_seed(step, 5) for step in (4, 5, 6)] == ["ignore", "adopt", "adopt"]
    assert rig.staging.judge_seed(0, None) == "adopt"


def test_training_that_went_back() -> None:
    rig = Rig()
    rig.all(1)
    rig.all(2)
    rig.apply()
    rig.staging.begin(2, 2, {})
    assert rig.staging.judge_seed(0, 2) == "adopt"
    rig.staging.add_record(1, record(1))
    assert rig.staging.damage == "rank 1 is at step 1: training was not resumed from step 2 of this shadow"
    assert rig.staging.step is None and rig.staging.judge_seed(1, 2) == "adopt"
    rig.staging.adopt(1)
    rig.staging.add_record(0, record(1))
    assert rig.staging.damage is None, "only the first record of an incarnation tells"


def test_begin_drops_everything_partial() -> None:
    rig = Rig()
    rig.gradient(1, 0)
    rig.staging.add_damage(2, "gap")
    rig.staging.begin(3, 0, {0: {"kept": 1}})
    rig.world = 3
    assert rig.released == [(1, 0)] and rig.staging.damage is None
    assert rig.staging.boundaries == {0: {"kept": 1}}
    rig.all(1)
    assert rig.apply() == [1]


def test_lost_state() -> None:
    rig = Rig()
    rig.all(1)
    rig.staging.lose("out of memory")
    assert rig.apply() == [] and rig.staging.damage == "out of memory"
    rig.staging.adopt(1)
    assert rig.staging.damage is None


class Histories(RuleBasedStateMachine):
    """Any order of events: only whole steps are applied, in order, each buffer is freed once, memory is bounded."""

    @initialize(world=st.integers(1, 3), sets=st.integers(1, 4), seeded=st.booleans())
    def start(self, world: int, sets: int, seeded: bool) -> None:
        self.world, self.sets = world, sets
        self.numbers = itertools.count()
        self.given: set[Any] = set()
        self.freed: set[Any] = set()
        self.broken: set[int] = set()
        self.now = 0.0
        self.staging = Staging(sets, 5.0, self._release)
        self.staging.begin(world, 0 if seeded else None, {})
        self.staging.add_layout(LAYOUT)
        self.state = 0 if seeded else None

    def _release(self, gradient: Gradient) -> None:
        assert gradient.handle in self.given and gradient.handle not in self.freed
        self.freed.add(gradient.handle)

    def near(self, offset: int) -> int:
        return max(1, (self.state or 0) + offset)

    @rule(offset=st.integers(-1, 6), bucket=st.sampled_from(BUCKETS))
    def gradient(self, offset: int, bucket: int) -> None:
        step = self.near(offset)
        handle = (step, bucket, next(self.numbers))
        self.given.add(handle)
        self.staging.add_gradient(Gradient(step, bucket, "float32", 8, handle))

    @rule(offset=st.integers(-1, 40), rank=st.integers(0, 2), skipped=st.sampled_from([False] * 9 + [True]))
    def record(self, offset: int, rank: int, skipped: bool) -> None:
        if rank < self.world:
            self.staging.add_record(rank, record(self.near(offset), skipped=skipped))

    @rule(offset=st.integers(-1, 6), rank=st.integers(0, 2))
    def boundary(self, offset: int, rank: int) -> None:
        if rank < self.world:
            step = self.near(offset)
            self.staging.add_boundary(rank, step, {"rank": rank, "step": step})

    @rule(offset=st.integers(1, 3))
    def whole_step(self, offset: int) -> None:
        step = self.near(offset)
        for bucket in BUCKETS:
            handle = (step, bucket, next(self.numbers))
            self.given.add(handle)
            self.staging.add_gradient(Gradient(step, bucket, "float32", 8, handle))
        for rank in range(self.world):
            self.staging.add_record(rank, record(step))
            self.staging.add_boundary(rank, step, {"rank": rank, "step": step})

    @rule(offset=st.integers(-1, 4))
    def damage(self, offset: int) -> None:
        step = self.near(offset)
        if self.staging.step is None or step > self.staging.step:
            self.broken.add(step)
        self.staging.add_damage(step, "gap")
        assert self.staging.step is None or step <= self.staging.step or self.staging.damage is not None

    @rule()
    def unnamed_damage(self) -> None:
        self.staging.add_damage(None, "gap")
        assert self.staging.step is None or self.staging.damage is not None

    @rule(seconds=st.floats(0, 10))
    def check(self, seconds: float) -> None:
        self.now += seconds
        self.staging.check(self.now)

    @rule(offset=st.integers(-2, 6))
    def announce(self, offset: int) -> None:
        self.staging.seed_announced(self.near(offset))

    @rule(offset=st.integers(-2, 6))
    def seed(self, offset: int) -> None:
        step = self.near(offset)
        if self.staging.judge_seed(step, self.state) != "adopt":
            self.staging.seed_announced(None)
            return
        self.staging.adopt(step)
        self.state = step
        self.broken = {number for number in self.broken if number > step}
        assert self.staging.damage is None or any(number > step for number in self.staging._pieces)

    @precondition(lambda self: self.staging.committed)
    @rule(world=st.integers(1, 3))
    def restart(self, world: int) -> None:
        self.world = world
        self.staging.begin(world, self.staging.step, dict(self.staging.boundaries))
        self.broken.clear()
        assert self.given == self.freed

    @rule()
    def lose(self) -> None:
        self.staging.lose("error")
        self.state = None

    @rule()
    def apply(self) -> None:
        self.staging.commit_seed()
        while (ready := self.staging.ready()) is not None:
            self._examine(ready)
            self.staging.taken(ready.record.step)
            for gradient in ready.gradients.values():
                self._release(gradient)
            self.state = ready.record.step

    def _examine(self, ready: Ready) -> None:
        step = ready.record.step
        assert self.state is not None and step == self.state + 1
        assert step not in self.broken
        assert ready.record.skipped or set(ready.gradients) == set(BUCKETS)
        for bucket, gradient in ready.gradients.items():
            assert gradient.handle[:2] == (step, bucket) and gradient.handle not in self.freed
        for rank in range(self.world):
            assert ready.boundaries[rank] == {"rank": rank, "step": step}

    @invariant()
    def bounded(self) -> None:
        if not hasattr(self, "staging"):
            return
        assert self.staging.held <= self.sets
        held = {handle[0] for handle in self.given - self.freed}
        assert len(held) == self.staging.held
        assert len(self.staging._pieces) <= 4 * self.sets + 17
        if self.staging.step is not None:
            assert all(step > self.staging.step for step in held)

    @invariant()
    def a_committed_state_is_whole(self) -> None:
        if not hasattr(self, "staging") or not self.staging.committed or not self.staging.step:
            return
        for rank, state in self.staging.boundaries.items():
            assert state == {"rank": rank, "step": self.staging.step}


Histories.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestHistories = Histories.TestCase


def test_the_horizon_follows_what_trainers_say_and_nothing_else() -> None:
    staging = Staging(3, 1.0, lambda gradient: None)
    staging.begin(1, 5, {})
    ahead = staging.horizon - 5
    assert 3 < ahead < 100
    staging.add_gradient(Gradient(1 << 63, 0, "float32", 4, None))
    staging.add_damage(1 << 62, "gap")
    assert staging.horizon == 5 + ahead
    staging.add_boundary(0, 9, {})
    assert staging.horizon == 9 + ahead
    staging.begin(1, 6, {})
    assert staging.horizon == 6 + ahead
