"""The interval controller on simulated training: the rule is reached, and the budget kept."""

import itertools
import json
from pathlib import Path

import pytest
import torch

from checkmate.config import CheckmateError
from checkmate.persist.checkpointer import Checkpointer
from checkmate.persist.engine import Options
from checkmate.persist.interval import AutoSaver, IntervalController
from checkmate.persist.tune import tuning_path


def run(
    controller: IntervalController, iterations: int, iteration_s: float, write_s: float, contention: float
) -> tuple[float, list[int]]:
    """Mean slowdown of the last half, and the intervals chosen. A write makes iterations longer by ``contention``."""
    now, spent = 0.0, 0.0
    flying: list[float] = []
    saved_at: list[int] = []
    for number in range(iterations):
        seconds = iteration_s * (1 + contention * len(flying))
        saving = bool(flying)
        now += seconds
        spent += seconds if number >= iterations // 2 else 0.0
        for end in [end for end in flying if end <= now]:
            flying.remove(end)
            controller.written(write_s)
        if controller.iteration(seconds, saving):
            saved_at.append(number)
            flying.append(now + write_s)
    gaps = [later - earlier for earlier, later in itertools.pairwise(saved_at)]
    return spent / ((iterations - iterations // 2) * iteration_s), gaps


@pytest.mark.parametrize(("in_flight", "interval"), [(1, 10), (2, 5), (4, 3)])
def test_without_contention_the_rule_decides(in_flight: int, interval: int) -> None:
    controller = IntervalController(1.05, in_flight)
    slowdown, gaps = run(controller, 400, 0.1, 1.0, 0.0)
    assert slowdown == pytest.approx(1.0)
    assert min(gaps[3:]) == interval
    assert sum(gap > interval for gap in gaps[3:]) <= 4  # to measure t again


@pytest.mark.parametrize("contention", [0.05, 0.2, 0.6])
def test_contention_is_paid_for_with_longer_intervals(contention: float) -> None:
    controller = IntervalController(1.05, 2)
    slowdown, gaps = run(controller, 4000, 0.1, 1.0, contention)
    assert slowdown < 1.05 + 0.02
    # the save of 10 iterations, in flight for 10 of f, slows those by the contention: 5 % of all
    assert 0.4 < gaps[-1] / max(5, 10 * contention / 0.05) < 2.5


def test_it_recovers_when_storage_becomes_fast() -> None:
    controller = IntervalController(1.05, 2)
    run(controller, 1000, 0.1, 3.0, 0.3)
    slow = controller.interval
    run(controller, 3000, 0.1, 0.4, 0.0)
    assert controller.interval < slow / 3


def test_nothing_is_saved_before_an_iteration_alone_is_known() -> None:
    controller = IntervalController(1.05, 2, warm_up=5)
    assert [controller.iteration(0.1, False) for _ in range(6)] == [False] * 4 + [True, True]
    assert controller.iteration_s == pytest.approx(0.1)
    assert controller.write_s is None


@pytest.mark.parametrize(("budget", "in_flight", "text"), [(0.9, 1, "q is 0.9"), (1.05, 0, "N is 0")])
def test_values_that_make_no_sense(budget: float, in_flight: int, text: str) -> None:
    with pytest.raises(CheckmateError, match=text):
        IntervalController(budget, in_flight)


def test_n_is_the_files_and_not_the_one_before_it_was_made(tmp_path: Path) -> None:
    tuning = {"chunk_bytes": 65536, "writers": 1, "in_flight": 3, "rate": 1.0}
    with Checkpointer(tmp_path / "c", options=Options(chunk_bytes=65536)) as checkpointer:
        saver = AutoSaver(checkpointer)
        tuning_path(tmp_path / "c").write_text(json.dumps(tuning))  # as the probe at the first save does
        for step in range(20):
            if future := saver.after_iteration(0.5, {"t": torch.ones(10)}, step):
                future.result(60)
        assert checkpointer.in_flight == saver.controller.in_flight == 3


def test_with_a_checkpointer(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "c", in_flight=2, options=Options(chunk_bytes=65536)) as checkpointer:
        saver = AutoSaver(checkpointer, budget=1.05)
        saved = []
        for step in range(40):
            if future := saver.after_iteration(0.5, lambda: {"t": torch.ones(1000)}, step):
                future.result(60)
                saved.append(step)
        assert saved[0] == 7, "the first eight iterations are measured without saves"
        assert len(saved) > 5
        checkpointer.wait_copied()
    with Checkpointer(tmp_path / "c") as checkpointer:
        loaded = checkpointer.load()
        assert loaded
        assert loaded.step == saved[-1]
