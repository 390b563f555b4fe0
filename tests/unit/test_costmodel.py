"""The cost model against the papers' figures, and against brute force where a formula claims an optimum or a root."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from checkmate.cli import app
from checkmate.config import CheckmateError
from checkmate.costmodel import (
    break_even_rate,
    daly_interval,
    goodput,
    llama3_405b,
    min_interval,
    repeated_work_saved,
    wasted_fraction,
    worst_rework,
    young_interval,
)
from checkmate.costreport import published

LLAMA = llama3_405b()


def test_the_published_figures_follow_from_their_inputs() -> None:
    assert LLAMA.checkpoint_bytes == pytest.approx(2.43e12)
    assert LLAMA.stall_s == pytest.approx(1.2, abs=0.02)
    assert LLAMA.mtbf_s == pytest.approx(11_100, rel=0.01)
    assert young_interval(1.2, 11_100) == pytest.approx(163, abs=0.5)
    assert round(LLAMA.best_interval_s() / LLAMA.iteration_s) == 36
    assert LLAMA.gpu_hours * LLAMA.wasted_conventional() > 300_000
    assert LLAMA.gpu_hours * LLAMA.wasted_per_iteration() == pytest.approx(4_367, abs=0.5)
    assert LLAMA.shadow_ports == 256
    assert 100 * LLAMA.shadow_port_share == pytest.approx(0.31, abs=0.005)


def test_where_the_papers_arithmetic_is_off() -> None:
    assert 100 * repeated_work_saved(15.3) == pytest.approx(93.5, abs=0.05)
    assert 100 * 1e-6 / LLAMA.failures_per_gpu_hour == pytest.approx(5, abs=0.1)
    differing = {row.published: row.computed for row in published() if not row.agrees}
    assert differing == {"91.5 %": "93.5 %", "0.5 %": "5 %", "1.1e-07": "8.9e-07"}


@pytest.mark.parametrize("share", [0.0011, 0.003125, 0.02])
def test_break_even_is_where_both_ways_cost_the_same(share: float) -> None:
    run = replace(LLAMA, failures_per_gpu_hour=break_even_rate(LLAMA, share))
    assert run.wasted_conventional() == pytest.approx(run.wasted_per_iteration() + share, rel=1e-9)


def test_break_even_values() -> None:
    assert break_even_rate(LLAMA) == pytest.approx(8.9e-7, rel=0.01)
    assert break_even_rate(LLAMA, 0.0011) == pytest.approx(1.1e-7, rel=0.01)
    with pytest.raises(CheckmateError, match="at no failure rate"):
        break_even_rate(LLAMA, 0.9)


@pytest.mark.parametrize("interval", [young_interval, daly_interval])
def test_the_best_interval_wastes_least(interval: object) -> None:
    assert callable(interval)
    best = interval(20.0, 10_000.0)
    least = min(wasted_fraction(seconds, 20.0, 10_000.0) for seconds in range(100, 3000))
    assert wasted_fraction(best, 20.0, 10_000.0) == pytest.approx(least, rel=2e-3)


def test_daly_for_stalls_longer_than_the_time_between_failures() -> None:
    assert daly_interval(300.0, 100.0) == 100.0


@pytest.mark.parametrize(
    ("write_s", "in_flight", "slowdown", "iteration_s", "interval"),
    [
        (10.0, 1, 1.0, 1.0, 10),
        (10.0, 2, 1.0, 1.0, 5),
        (10.5, 2, 1.05, 1.0, 5),
        (10.6, 2, 1.05, 1.0, 6),
        (0, 4, 1, 1, 1),
    ],
)
def test_interval_rule(write_s: float, in_flight: int, slowdown: float, iteration_s: float, interval: int) -> None:
    assert min_interval(write_s, in_flight, slowdown, iteration_s) == interval


@pytest.mark.parametrize(
    ("arguments", "name"),
    [((1, 0, 1, 1), "N is 0"), ((1, 1, 0.9, 1), "q is 0.9"), ((1, 1, 1, 0), "t is 0"), ((math.inf, 1, 1, 1), "T_w")],
)
def test_interval_rule_refuses(arguments: tuple[float, int, float, float], name: str) -> None:
    with pytest.raises(CheckmateError, match=name):
        min_interval(*arguments)


def test_rework_grows_with_the_checkpoints_in_flight() -> None:
    assert worst_rework(10, 100.0, 1, 1.0) == 20.0
    assert worst_rework(10, 100.0, 4, 1.0) == 50.0
    assert worst_rework(10, 5.0, 4, 1.0) == 15.0  # written long before the next: as much as its write lasts


def test_goodput() -> None:
    assert goodput([], 100.0, 1.0, 10, 0.0, 5.0) == 1.0
    # 47 iterations, 40 of them kept; 5 s of restart; 48 more
    assert goodput([47.0], 100.0, 1.0, 10, 0.0, 5.0) == pytest.approx(0.88)
    # the checkpoint at 40 was not durable yet
    assert goodput([47.0], 100.0, 1.0, 10, 8.0, 5.0) == pytest.approx(0.78)
    # a failure in the restart of another, and one that restarts past the end
    assert goodput([47.0, 49.0, 98.0], 100.0, 1.0, 10, 0.0, 5.0) == pytest.approx(0.80)


def test_command(tmp_path: Path) -> None:
    plot = tmp_path / "cost.png"
    result = CliRunner().invoke(app, ["costmodel", "--json", "--write-s", "90", "--plot", str(plot)])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.output)
    assert answer["figures"]["shadow_ports"] == 256
    assert answer["figures"]["overlapped_interval_iterations"] == 10
    assert plot.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--gpus", "0"], "--gpus 0"),
        (["--failures", "0"], "--failures 0: it must be more than 0"),
        (["--storage-gb-per-s", "nan"], "--storage-gb-per-s nan: it must be more than 0"),
        (["--params", "-5"], "params is -5: it must be a number greater than 0"),
        (["--shadow-share", "1"], "shadow_share is 1: it must be a fraction, 0 to less than 1"),
        (["--shadow-share", "-0.1"], "shadow_share is -0.1: it must be a fraction, 0 to less than 1"),
        (["--write-s", "1", "--in-flight", "0"], "N is 0"),
        (["--in-flight", "0"], "N is 0"),
        (["--slowdown", "0.9"], "q is 0.9"),
        (["--params", "1e200", "--bytes-per-param", "1e200"], "the numbers overflow"),
        (["--plot", "/nowhere/x.png"], "--plot /nowhere/x.png"),
        (["--plot", "x.nothing"], "--plot x.nothing"),
    ],
)
def test_command_refuses(arguments: list[str], text: str) -> None:
    result = CliRunner().invoke(app, ["costmodel", *arguments])
    assert text in str(result.exception)
    assert isinstance(result.exception, CheckmateError)
