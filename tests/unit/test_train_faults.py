"""No fault of a shadow stalls or stops training."""

import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.train.fake_shadow import FakePlugin, FakeShadow, order
from support.train.model import build, train
from support.train.processes import finish, start

import checkmate
from checkmate.protocol import Boundary, Hello, StepRecord
from checkmate.train import checkpoint as checkpoint_module
from checkmate.train.fleet import Fleet

pytest_plugins = ["support.train.world"]


def test_without_a_shadow_training_goes_on_and_is_followed_later(
    shadow: FakeShadow,
    plugin: FakePlugin,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(checkpoint_module, "BEGIN_S", 0.5)
    shadow.close()
    ddp, optimizer = build()
    started = time.monotonic()
    checkpoint = checkmate.attach(ddp, optimizer)
    assert checkpoint.resume() is None
    train(ddp, optimizer, 5)
    assert time.monotonic() - started < 5
    assert "training goes on without checkpoints" in caplog.text
    assert plugin.tagged == []
    late = FakeShadow(1, shadow.port)
    step = 5
    end = time.monotonic() + 15
    while not late.seeds and time.monotonic() < end:
        train(ddp, optimizer)
        step += 1
        time.sleep(0.1)
    train(ddp, optimizer, 2)
    checkpoint.close()
    seeded = late.seeds[0][0].step
    assert 5 < seeded <= step
    assert {seeded + 1, seeded + 2} <= {record.step for record in late.of(StepRecord)}
    assert {seeded + 1, seeded + 2} <= {iteration for iteration, _, _ in plugin.tagged}
    late.close()


def test_what_an_earlier_run_committed_is_not_this_runs(shadow: FakeShadow) -> None:
    shadow.committed = 7
    ddp, optimizer = build()
    checkpoint = checkmate.attach(ddp, optimizer)
    (link,) = checkpoint._links._links
    assert link.wait(lambda: link.committed == (0, 7), 10)
    assert checkpoint.committed is None
    train(ddp, optimizer, 2)  # anew, without resume()
    assert link.wait(lambda: checkpoint.committed == 1, 10)
    checkpoint.close()


def test_a_seed_that_is_asked_for_at_the_end_is_of_the_last_step(shadow: FakeShadow) -> None:
    ddp, optimizer = build()
    checkpoint = checkmate.attach(ddp, optimizer)
    checkpoint.resume()
    train(ddp, optimizer, 3)
    shadow.last = 3
    checkpoint.close()
    assert checkpoint.committed == 3 and [seed.step for seed, _ in shadow.seeds] == [0, 3]


def test_a_group_that_ends_first_waits_for_the_others(
    shadow: FakeShadow, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checkpoint_module, "CLOSE_S", 0.1)
    ddp, optimizer = build()
    checkpoint = checkmate.attach(ddp, optimizer)
    checkpoint.resume()
    train(ddp, optimizer, 2)
    checkpoint._peers.leaders = [0, 1]
    shadow.withheld_s = 1.0  # shadows of all groups commit the last step when the last group has ended, too
    checkpoint.close()
    assert checkpoint.committed == 2 and "the last step is" not in caplog.text


def test_an_incarnation_is_not_taken_up_after_close(shadow: FakeShadow, plugin: FakePlugin) -> None:
    """The search for a late shadow may have found it at the same moment."""
    ddp, optimizer = build()
    checkpoint = checkmate.attach(ddp, optimizer)
    checkpoint.close()
    checkpoint._adopt(5, None)
    assert plugin.incarnation == 0 and checkpoint._incarnation != 5


def test_a_late_shadow_keeps_what_it_holds_beyond_us(
    shadow: FakeShadow, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checkpoint_module, "BEGIN_S", 0.1)
    shadow.close()
    ddp, optimizer = build()
    checkpoint = checkmate.attach(ddp, optimizer)
    late = FakeShadow(1, shadow.port)
    late.committed = 1000
    checkpoint.resume()
    end = time.monotonic() + 15
    while "not seeding: the shadow holds step 1000" not in caplog.text and time.monotonic() < end:
        train(ddp, optimizer)
        time.sleep(0.05)
    checkpoint.close()
    assert "not seeding: the shadow holds step 1000" in caplog.text
    assert late.seeds == []
    late.close()


def test_a_shadow_that_dies_and_returns_is_followed_again(shadow: FakeShadow) -> None:
    ddp, optimizer = build()
    checkpoint = checkmate.attach(ddp, optimizer)
    checkpoint.resume()
    train(ddp, optimizer, 3)
    shadow.close()
    started = time.monotonic()
    train(ddp, optimizer, 5)
    assert time.monotonic() - started < 5
    returned = FakeShadow(1, shadow.port)
    returned.seed_always = True
    end = time.monotonic() + 15
    while not returned.seeds and time.monotonic() < end:
        train(ddp, optimizer)
        time.sleep(0.05)
    checkpoint.close()
    assert returned.seeds[0][0].step > 8
    assert order(returned, 0)[0] == "L"  # a new connection needs the layout again
    assert checkpoint.dropped > 0
    returned.close()


def test_a_shadow_that_accepts_and_is_silent_costs_bounded_time(
    shadow: FakeShadow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checkpoint_module, "BEGIN_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("CHECKMATE_SHADOWS", f"127.0.0.1:{silent.getsockname()[1]}")
        started = time.monotonic()
        ddp, optimizer = build()
        checkpoint = checkmate.attach(ddp, optimizer)
        assert checkpoint.resume() is None
        train(ddp, optimizer, 3)
        checkpoint.close()
        assert time.monotonic() - started < 10
    assert "training goes on without checkpoints" in caplog.text


def test_a_seed_that_is_not_acknowledged_is_a_warning(
    shadow: FakeShadow, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checkpoint_module, "SEED_S", 0.3)
    shadow.silent_seeds = True
    ddp, optimizer = build()
    checkpoint = checkmate.attach(ddp, optimizer)
    started = time.monotonic()
    checkpoint.resume()
    train(ddp, optimizer, 2)
    checkpoint.close()
    assert time.monotonic() - started < 8
    assert "did not acknowledge the initial state" in caplog.text


def test_a_seed_that_an_error_of_our_own_broke_is_sent_again(
    shadow: FakeShadow, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    send, failed = Fleet.send_seed, threading.Event()

    def fail_once(self: Fleet, *args: Any) -> None:
        if not failed.is_set():
            failed.set()
            raise TypeError("bug")
        send(self, *args)

    monkeypatch.setattr(Fleet, "send_seed", fail_once)
    ddp, optimizer = build()
    checkpoint = checkmate.attach(ddp, optimizer)
    checkpoint.resume()
    end = time.monotonic() + 30
    while not shadow.seeds and time.monotonic() < end:
        train(ddp, optimizer)
        time.sleep(0.05)
    checkpoint.close()
    assert failed.is_set() and shadow.seeds
    assert "error of Checkmate's own" in caplog.text


def test_a_wrong_token_is_a_warning(
    shadow: FakeShadow, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Path(os.environ["CHECKMATE_TOKEN_FILE"]).write_bytes(b"not the job's token")
    ddp, optimizer = build()
    started = time.monotonic()
    checkpoint = checkmate.attach(ddp, optimizer)
    checkpoint.resume()
    train(ddp, optimizer)
    checkpoint.close()
    assert time.monotonic() - started < 5
    assert "refused: wrong job token" in caplog.text


def test_an_error_of_our_own_stops_following_and_nothing_else(
    shadow: FakeShadow, plugin: FakePlugin, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ddp, optimizer = build()
    checkpoint = checkmate.attach(ddp, optimizer)
    checkpoint.resume()

    def broken(*args: Any) -> None:
        raise RuntimeError("bug")

    monkeypatch.setattr(plugin, "register_bucket", broken)
    train(ddp, optimizer, 2)
    assert "stops following this run at step 0" in caplog.text
    assert plugin.incarnation == 0 and shadow.of(Boundary) == []


def test_two_ranks_join_a_late_shadow_together(tmp_path: Path) -> None:
    absent = FakeShadow(2)
    absent.close()
    processes = start(2, "late.py", ["0.5"], tmp_path, absent.environment(tmp_path))
    for process in processes:
        assert process.stdout is not None
        while "training" not in process.stdout.readline():
            assert process.poll() is None
    late = FakeShadow(2, absent.port)
    finish(processes)
    late.close()
    seeded = late.seeds[0][0].step
    assert seeded > 0 and late.incarnation == 1
    for rank in range(2):
        assert {seeded + 1, seeded + 2} <= {record.step for record in late.of(StepRecord, rank)}
        assert {hello.incarnation for hello in late.of(Hello, rank)} == {1}
