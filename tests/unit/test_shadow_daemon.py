"""A whole shadow in this process: real sockets, a real optimizer, gradients placed by hand."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from support.shadow import JOB, TOKEN, FakeReceiver, Job, wait
from support.trainer import Trainer, adamw, differing, small_model

from checkmate import plain
from checkmate import status as local
from checkmate.checked import Endpoint
from checkmate.config import CheckmateError
from checkmate.protocol import Boundary, Challenge, Hello, Layout, Refused, State, StepRecord, prove, receive
from checkmate.shadow import daemon
from checkmate.shadow.control import Limits
from checkmate.shadow.daemon import Shadow, ShadowConfig
from checkmate.shadow.engine import Tuning
from checkmate.shadow.rx.receiver import RxConfig
from checkmate.tensors import named_state, pack_state, unpack_state
from checkmate.train.client import Client, ShadowError, Unfollowable
from checkmate.train.settings import Settings

QUICK = Tuning(patience_s=0.3, quiet_s=0.05, fence_s=1.0, ask_s=(0.2, 5.0), grace_s=0.2)


def config(tmp_path: Path, **changes: Any) -> ShadowConfig:
    fields: dict[str, Any] = {
        "job": JOB, "token": TOKEN, "control": ("127.0.0.1", 0), "status": tmp_path / "status", "rx": RxConfig(sets=3),
        "threads": 1, "tuning": QUICK, "limits": Limits(handshake_s=0.5, stall_s=1.0),
    }  # fmt: skip
    return ShadowConfig(**(fields | changes))


@pytest.fixture
def receiver() -> FakeReceiver:
    return FakeReceiver()


@pytest.fixture
def shadow(tmp_path: Path, receiver: FakeReceiver) -> Iterator[Shadow]:
    before = threading.active_count()
    with Shadow(config(tmp_path), make_receiver=lambda _: receiver) as running:
        yield running
    wait(lambda: threading.active_count() <= before, f"all threads joined: {threading.enumerate()}")
    assert receiver.buffers == {} or running.status()["held_iterations"] >= 0


@pytest.fixture
def job(shadow: Shadow, receiver: FakeReceiver) -> Iterator[Job]:
    job = Job(shadow, receiver, Trainer())
    yield job
    job.kill()


def restored(job: Job, rank: int = 0) -> tuple[State, list[torch.Tensor]]:
    return job.client(rank).restore(job.incarnation)


def assert_state_is_the_trainers(job: Job) -> None:
    """What is served equals the trainer's state in every bit; hyperparameters are those of the step record."""
    state, tensors = restored(job)
    description, manifest, theirs = pack_state(*named_state(job.trainer.net), job.trainer.optimizer)
    assert state.step == job.trainer.step
    assert state.manifest == manifest
    assert differing(tensors, [tensor.detach() for tensor in theirs]) == []
    for ours, group in zip(state.optimizer["groups"], description["groups"], strict=True):
        assert ours["params"] == group["params"] and ours["weight_decay"] == group["weight_decay"]


def test_twenty_steps_are_committed_bit_for_bit(job: Job) -> None:
    assert job.begin() is None
    assert job.seed() == 0
    for _ in range(20):
        job.step()
        assert_state_is_the_trainers(job)
    wait(lambda: job.ranks[1].acks()[-1] == 20, "acknowledgement")
    status = job.status()
    assert (status["state"], status["committed"], status["gap_count"]) == ("following", 20, 0)
    assert status["commits"] == 21, "the seed and twenty steps"
    assert job.receiver.released == 60 and job.receiver.buffers == {}


@pytest.mark.parametrize("order", ["records first", "boundaries of one rank late", "next step's gradients first"])
def test_order_of_arrival_does_not_matter(job: Job, order: str) -> None:
    job.begin()
    job.seed()
    first, second = job.trainer.train(), job.trainer.train()
    match order:
        case "records first":
            job.records(first)
            job.boundaries(1)
            job.gradients(first)
        case "boundaries of one rank late":
            job.gradients(first)
            job.records(first)
            job.boundaries(1, [0])
            time.sleep(0.05)
            assert job.status()["committed"] == 0
            job.boundaries(1, [1])
        case _:
            job.gradients(second)
            job.gradients(first)
            job.records(first)
            job.boundaries(1)
    job.committed(1)
    if order != "next step's gradients first":
        job.gradients(second)
    job.records(second)
    job.boundaries(2)
    job.committed(2)
    assert_state_is_the_trainers(job)


MOMENTS = [
    "before the all-reduce",
    "inside it",
    "before the step",
    "inside the step",
    "before the boundary",
    "after it",
]


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_at(job: Job, moment: str) -> None:
    """A restart takes up the newest whole step, at most one is repeated, and the end is the same."""
    job.begin()
    job.seed()
    for _ in range(3):
        job.step()
    at_three = job.trainer.snapshot()
    step = job.trainer.train()
    at = MOMENTS.index(moment)
    if at >= 1:
        job.gradients(step, [0] if at == 1 else None)
    if at >= 3:
        job.records(step, [0] if at == 3 else None)
    if at >= 4:
        job.boundaries(4, [1] if at == 4 else None)
    if at == 5:
        job.committed(4)
    job.kill()
    committed = job.begin()
    assert committed == (4 if at == 5 else 3)
    state, tensors = restored(job, 1)
    assert state.step == committed
    assert state.boundary == job.boundary(1, committed)
    fresh = Trainer(model=lambda: small_model(5))
    unpack_state(*named_state(fresh.net), fresh.optimizer, state.optimizer, state.manifest, tensors)
    want = at_three if committed == 3 else job.trainer.snapshot()
    assert differing(dict(want["model"]), dict(fresh.net.state_dict())) == []
    assert differing(want["optimizer"]["state"], fresh.optimizer.state_dict()["state"]) == []
    fresh.step = committed
    fresh.scheduler.last_epoch = committed
    for group, base in zip(fresh.optimizer.param_groups, fresh.scheduler.base_lrs, strict=True):
        group["lr"] = base / (1 + committed)
    job.trainer = fresh
    while fresh.step < 6:
        job.step()
    uninterrupted = Trainer()
    for _ in range(6):
        uninterrupted.train()
    assert differing(uninterrupted.snapshot()["model"], fresh.snapshot()["model"]) == []
    assert_state_is_the_trainers(job)


def test_what_the_old_incarnation_still_sends_changes_nothing(job: Job) -> None:
    job.begin()
    job.seed()
    job.step()
    step, old = job.trainer.train(), job.ranks
    job.gradients(step)
    job.records(step)
    assert job.begin() == 1
    for rank in old:
        with contextlib.suppress(OSError):  # closed by the shadow
            rank.send(Boundary(2, {}))
    time.sleep(0.1)
    assert job.status()["committed"] == 1
    assert job.receiver.buffers == {}
    with pytest.raises(ShadowError, match="incarnation 1 is stale, 2 is open"):
        job.client().restore(1)


def test_begin_waits_for_what_is_under_way(job: Job) -> None:
    job.begin()
    job.seed()
    step = job.trainer.train()
    job.records(step)
    job.boundaries(1)
    with ThreadPoolExecutor(1) as pool:
        begun = pool.submit(job.client().begin, 7, 10.0)
        time.sleep(0.02)
        job.gradients(step)
        assert (begun.result(10).incarnation, begun.result(10).committed) == (7, 1)


def test_damage_is_named_stops_commits_and_a_seed_heals_it(job: Job) -> None:
    job.begin()
    job.seed()
    job.step()
    step = job.trainer.train()
    job.receiver.damage(2, 1, "bad CRC")
    job.gradients(step, [0, 2])
    job.records(step)
    job.boundaries(2)
    wait(job.ranks[0].requests, "request for a seed")
    assert "iteration 2: bucket 1: bad CRC (bytes 0 to 99 of 1000)" in job.ranks[0].requests()[0]
    assert job.ranks[1].requests() == [], "only rank 0 is asked"
    status = job.status()
    assert (status["state"], status["committed"], status["gap_count"]) == ("damaged", 1, 1)
    job.seed()
    job.committed(2)
    job.step()
    assert_state_is_the_trainers(job)
    assert job.status()["state"] == "following"


def test_a_lost_bucket_is_noticed_from_what_follows(job: Job) -> None:
    job.begin()
    job.seed()
    step = job.trainer.train()
    job.gradients(step, [0, 2])
    job.records(step)
    job.boundaries(1)
    wait(job.ranks[0].requests, "request for a seed")
    reason = job.status()["reason"]
    assert "iteration 1" in reason and "bucket 1" in reason and "bytes 8 to 15 of iteration 1" in reason
    assert job.status()["committed"] == 0


def test_differing_step_records_are_damage(job: Job) -> None:
    job.begin()
    job.seed()
    step = job.trainer.train()
    job.gradients(step)
    job.records(step, [0])
    step.record.groups[1]["lr"] = 0.5
    job.records(step, [1])
    job.boundaries(1)
    wait(lambda: job.status()["state"] == "damaged", "damage")
    assert re.search(
        r"rank \d's step record differs from rank \d's in lr of group 1 \(0.\d+ against", job.status()["reason"]
    )
    assert job.status()["committed"] == 0


def test_w3_an_unseeded_shadow_commits_and_serves_nothing(job: Job) -> None:
    """It comes up while training runs: asks at first contact, and follows only from the seed on."""
    for _ in range(3):
        job.trainer.train()
    job.incarnation = 5
    job.connect()
    wait(lambda: job.ranks[0].requests()[:1] == ["the shadow has no state"], "request at first contact")
    step = job.trainer.train()
    job.receiver.set_incarnation(5)
    job.gradients(step)
    job.records(step)
    job.boundaries(4)
    time.sleep(0.1)
    assert (job.status()["committed"], job.status()["state"]) == (None, "waiting for seed")
    assert restored(job)[0].step is None
    assert job.client().begin(0, 10).committed is None
    job.kill()
    job.begin()
    job.seed()
    assert job.status()["committed"] is None, "a seed without the ranks' boundaries is not whole"
    assert restored(job)[0].step is None
    job.boundaries(4)
    job.committed(4)
    job.step()
    assert_state_is_the_trainers(job)


def test_a_job_that_begins_without_state_is_asked_only_when_it_sends_none(job: Job) -> None:
    job.begin()
    time.sleep(0.1)
    assert job.ranks[0].requests() == []
    wait(job.ranks[0].requests, "request")


def test_a_seed_that_lost_its_boundaries_commits_with_the_next_step(job: Job) -> None:
    for _ in range(3):
        job.trainer.train()
    job.begin()
    job.seed()
    job.boundaries(3, [0])
    step = job.trainer.train()
    job.gradients(step)
    job.records(step)
    job.boundaries(4)
    job.committed(4)
    assert_state_is_the_trainers(job)


def test_a_restart_before_a_seed_is_whole_goes_back_to_the_state_before(job: Job) -> None:
    job.begin()
    job.seed()
    job.step()
    job.receiver.damage(2)
    wait(lambda: job.status()["state"] == "damaged", "damage")
    job.trainer.train()
    job.seed()
    job.boundaries(2, [0])
    job.kill()
    assert job.begin() == 1
    assert restored(job)[0].boundary == job.boundary(0, 1)


def test_seeds_of_the_present_step_are_verified_and_older_ones_ignored(job: Job) -> None:
    job.begin()
    job.seed()
    old = job.trainer.seed()
    job.step()
    assert job.seed() == 1
    assert job.client().send_seed(job.incarnation, *old, lambda _: None) == 1
    seeds = job.status()["seeds"]
    assert (seeds["verified"], seeds["ignored"], seeds["mismatches"]) == (1, 1, 0)
    with torch.no_grad():
        next(job.trainer.net.parameters())[0, 0, 0, 0] += 1
    assert job.seed() == 1
    assert job.status()["seeds"]["mismatches"] == 1
    assert_state_is_the_trainers(job)
    job.step()
    assert_state_is_the_trainers(job)


def test_a_run_that_starts_anew_is_followed_anew(job: Job) -> None:
    """resume() was not called: the trainer's own step counts, not the shadow's."""
    job.begin()
    job.seed()
    for _ in range(3):
        job.step()
    job.kill()
    assert job.begin() == 3
    job.trainer = Trainer()
    assert job.seed() == 0
    job.step()
    assert_state_is_the_trainers(job)


def test_a_run_that_starts_anew_without_a_seed_is_noticed(job: Job) -> None:
    job.begin()
    job.seed()
    for _ in range(3):
        job.step()
    job.kill()
    job.begin()
    job.trainer = Trainer()
    step = job.trainer.train()
    job.records(step)
    wait(job.ranks[0].requests, "request for a seed")
    assert "is at step 1: training was not resumed from step 3" in job.ranks[0].requests()[0]
    job.seed()
    job.boundaries(1)
    job.committed(1)
    job.step()
    assert_state_is_the_trainers(job)


def test_an_optimizer_that_cannot_be_followed_is_refused_once(job: Job) -> None:
    job.trainer = Trainer(lambda net: torch.optim.Adagrad(net.parameters()))
    job.begin()
    with pytest.raises(ShadowError, match="Adagrad can't be followed"):
        job.seed()
    time.sleep(0.3)
    assert (job.status()["state"], job.status()["committed"]) == ("refused", None)
    assert len(job.ranks[0].requests()) <= 1, "no use in asking again"


def test_unfollowed_steps_are_asked_for_ever_more_rarely(tmp_path: Path, receiver: FakeReceiver) -> None:
    slow = config(tmp_path, tuning=dataclasses.replace(QUICK, ask_s=(1.0, 60.0)))
    with Shadow(slow, make_receiver=lambda _: receiver) as shadow:
        job = Job(shadow, receiver, Trainer())
        job.begin()
        job.seed()
        job.step()
        for count in (1, 2):
            step = job.trainer.train()
            step.record = dataclasses.replace(step.record, unfollowed="clipped")
            job.records(step)
            job.boundaries(step.record.step)
            wait(lambda: job.status()["state"] == "damaged", "damage")
            if count == 2:
                time.sleep(0.1)
                assert len(job.ranks[0].requests()) == 1, "the first seed did not help: the next request waits"
            wait(lambda count=count: len(job.ranks[0].requests()) == count, "request")  # type: ignore[misc]
            assert "the trainer says: clipped" in job.ranks[0].requests()[-1]
            job.seed()
        job.kill()


def test_a_layout_that_does_not_fit_stops_commits(job: Job) -> None:
    job.begin()
    job.seed()
    step = job.trainer.train()
    step.layout.buckets[0]["params"][0][0] = "ghost"
    job.gradients(step)
    job.records(step)
    job.boundaries(1)
    wait(lambda: job.status()["state"] == "damaged", "damage")
    assert "'ghost' in bucket 0 is not a parameter of the seed" in job.status()["reason"]
    assert job.status()["committed"] == 0


def test_an_error_inside_the_step_never_leaves_a_half_stepped_state(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.begin()
    job.seed()
    job.step()

    def broken(self: Any) -> None:
        self.param_groups[0]["params"][0].add_(1)
        raise MemoryError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", broken)
        step = job.trainer.train()
        job.gradients(step)
        job.records(step)
        job.boundaries(2)
        wait(lambda: job.status()["state"] == "damaged", "damage")
    assert restored(job)[0].step is None
    job.seed()
    job.boundaries(2)
    job.committed(2)
    job.step()
    assert_state_is_the_trainers(job)


def test_outrun_shadow_drops_whole_iterations_and_bounds_memory(job: Job) -> None:
    job.begin()
    job.seed()
    steps = [job.trainer.train() for _ in range(12)]
    for step in steps:
        job.gradients(step)
    wait(lambda: job.receiver.events.empty() and job.status()["state"] == "damaged", "overflow")
    wait(lambda: len(job.receiver.buffers) <= 3 * 3, "what has no room to be given back")
    for step in steps:
        job.records(step)
        job.boundaries(step.record.step)
    job.committed(3)
    job.seed()
    job.committed(12)
    job.step()
    assert_state_is_the_trainers(job)


def test_eight_ranks_restore_in_parallel_past_stalled_ones(tmp_path: Path, receiver: FakeReceiver) -> None:
    def wide() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Conv2d(3, 5, 3), torch.nn.Flatten(), torch.nn.Linear(45, 60_000))

    with Shadow(config(tmp_path), make_receiver=lambda _: receiver) as shadow:
        job = Job(shadow, receiver, Trainer(model=wide), world=8)
        job.begin()
        job.seed()
        job.step()
        job.kill()
        job.begin()
        stalled = [job.client(rank).connect("restore", job.incarnation) for rank in range(4)]
        for sock in stalled:
            sock.sendall(b"\0\0\0\x0e\x81\xa4type\xa7restore")  # and never read
        half = socket.create_connection(shadow.control)
        half.sendall(b"\0\0")
        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(lambda rank: restored(job, rank), range(8)))
        want = [tensor.detach() for tensor in pack_state(*named_state(job.trainer.net), job.trainer.optimizer)[2]]
        for rank, (state, tensors) in enumerate(results):
            assert (state.step, state.boundary) == (1, job.boundary(rank, 1))
            assert differing(tensors, want) == []
        job.step()  # the stalled readers don't hold up training's shadow
        assert_state_is_the_trainers(job)
        for sock in (*stalled, half):
            sock.close()
        job.kill()


def test_another_number_of_ranks(job: Job) -> None:
    job.begin()
    job.seed()
    job.step()
    job.kill()
    job.world = 3
    assert job.begin() == 1
    assert restored(job, 1)[0].boundary == job.boundary(1, 1)
    assert restored(job, 2)[0].boundary == job.boundary(0, 1), "of a rank that was there"
    job.step()
    assert restored(job, 2)[0].boundary == job.boundary(2, 2)


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"token": b"another token"}, "wrong job token"),
        ({"job": "other"}, "job 'other': this shadow serves 'test'"),
    ],
)
def test_strangers_are_refused_and_logged(
    job: Job, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], pattern: str
) -> None:
    job.begin()
    job.seed()
    for purpose in ("begin", "restore"):
        with pytest.raises(ShadowError, match=pattern):
            client = job.client(**changes)
            client.begin(0, 5) if purpose == "begin" else client.restore(job.incarnation)
    assert pattern in caplog.text and "127.0.0.1:" in caplog.text
    assert job.status()["connections"]["refused"] == 2
    assert job.status()["incarnation"] == 1


def test_rank_0_that_connects_anew_is_asked_again_and_no_later(tmp_path: Path) -> None:
    """Pauses grow while seeds don't help; those were not even sent."""
    slow = dataclasses.replace(QUICK, ask_s=(30.0, 300.0))
    with Shadow(config(tmp_path, tuning=slow), make_receiver=FakeReceiver) as shadow:
        job = Job(shadow, FakeReceiver(), Trainer())
        job.incarnation = 3  # of a job that began without this shadow
        for _ in range(4):
            job.connect()
            wait(job.ranks[0].requests, "request for a seed")
        wait(lambda: shadow._engine._ask_pause == 30.0, "the first pause")
        job.kill()


def test_a_trainer_of_other_arithmetic_is_refused_for_good(job: Job) -> None:
    theirs = {"of": "another torch", "cases": [["SGD", {"lr": 0.1}, "float32"]], "digest": 1}
    client = dataclasses.replace(job.client(), arithmetic=theirs)
    with pytest.raises(Unfollowable, match="can't follow this job: its optimizer's steps have other bits here: the tr"):
        client.begin(0, 5)
    assert job.status()["incarnation"] == 0 and job.status()["connections"]["refused"] == 1
    job.begin()
    job.seed()
    job.boundaries(0)
    wait(lambda: job.status()["committed"] == 0, "the seed")
    with pytest.raises(Unfollowable, match="can't follow this job") as refused:
        client.begin(0, 5)
    assert refused.value.holds == 0, "a step that a run which begins anew would give up"


def refusal(job: Job, purpose: str, sent: bytes = b"", **hello: Any) -> str:
    with socket.create_connection(job.shadow.control, timeout=5) as sock:
        challenge: Any = receive(sock)
        fields = {
            "job": JOB, "proof": prove(TOKEN, challenge.nonce, purpose), "purpose": purpose, "rank": 0, "world": 2,
            "incarnation": 1,
        }  # fmt: skip
        sock.sendall(Hello(**(fields | hello)).encode() + sent)
        while not isinstance(message := receive(sock), Refused):
            assert message is not None
        return message.reason


@pytest.mark.parametrize(
    ("purpose", "hello", "sent", "pattern"),
    [
        ("records", {"version": 9}, b"", "version 9"),
        ("records", {"rank": 2}, b"", "rank 2 of 2"),
        ("records", {"rank": True}, b"", "makes no sense"),
        ("records", {"world": 3}, b"", "counts 3 ranks, this incarnation has 2"),
        ("records", {"incarnation": 0}, b"", "stale"),
        ("restore", {"incarnation": 9}, b"", "was not begun here"),
        ("nonsense", {}, b"", "unknown purpose"),
        ("records", {"proof": "text"}, b"", "malformed hello"),
        ("records", {}, State(1).encode(), "unexpected state"),
        ("records", {}, b"\xff\xff\xff\xff", "bytes announced"),
        ("records", {}, b"\0\0\0\1\xc1", "undecodable"),
        ("records", {}, Layout("d", [{"bucket": "0"}]).encode(), "malformed layout message: buckets"),
        ("records", {}, StepRecord(0, "d", []).encode(), "malformed step message: step is 0"),
        ("records", {}, Boundary(-1, {}).encode(), "malformed boundary"),
        ("begin", {"rank": 1}, b"", "only rank 0"),
        ("seed", {"rank": 1}, b"", "only rank 0"),
        ("seed", {}, State(1).encode(), "only rank 0"),
    ],
)
def test_bad_peers_are_told_why(job: Job, purpose: str, hello: dict[str, Any], sent: bytes, pattern: str) -> None:
    job.begin()
    if purpose in ("begin", "seed") and not sent:
        sent = State(1).encode()
    assert pattern in refusal(job, purpose, sent, **hello)
    job.kill()
    job.connect()
    job.seed()
    job.step()


def test_a_seed_that_breaks_off_is_forgotten(job: Job) -> None:
    job.begin()
    seed, tensors = job.trainer.seed()
    with job.client().connect("seed", job.incarnation) as sock:
        sock.sendall(seed.encode() + b"\0" * 64)
    wait(lambda: job.status()["connections"]["refused"] == 1, "broken seed")
    assert job.status()["committed"] is None
    assert job.client().send_seed(job.incarnation, seed, tensors, lambda _: None) == 0


def test_a_state_that_does_not_fit_is_refused_before_it_is_sent(tmp_path: Path, receiver: FakeReceiver) -> None:
    with Shadow(config(tmp_path, limits=Limits(seed_bytes=1000)), make_receiver=lambda _: receiver) as shadow:
        job = Job(shadow, receiver, Trainer(), world=1)
        job.begin()
        seed, _ = job.trainer.seed()
        with job.client().connect("seed", job.incarnation) as sock:
            sock.sendall(seed.encode())
            message: Any = receive(sock)
        assert "does not fit into this shadow, which takes 1000" in message.reason
        job.kill()


def test_connections_are_bounded_and_silence_is_ended(tmp_path: Path, receiver: FakeReceiver) -> None:
    limits = Limits(handshake_s=0.3, stall_s=0.3, strangers=4)
    with Shadow(config(tmp_path, limits=limits), make_receiver=lambda _: receiver) as shadow:
        idle = [socket.create_connection(shadow.control, timeout=5) for _ in range(6)]
        begun = time.monotonic()
        for sock in idle:
            while sock.recv(100):
                pass
        assert time.monotonic() - begun < 3
        job = Job(shadow, receiver, Trainer(), world=1)
        job.begin()
        job.seed()
        job.kill()
        for sock in idle:
            sock.close()


def test_strangers_take_nobodys_place(tmp_path: Path, receiver: FakeReceiver) -> None:
    limits = Limits(handshake_s=60, strangers=4)
    with Shadow(config(tmp_path, limits=limits), make_receiver=lambda _: receiver) as shadow, ExitStack() as stack:
        job = Job(shadow, receiver, Trainer(), world=1)
        job.begin()
        job.seed()
        idle = [stack.enter_context(socket.create_connection(shadow.control, timeout=5)) for _ in range(12)]
        for sock in idle[:8]:
            while sock.recv(100):
                pass
        job.step()
        assert restored(job, 0)[0].step == 1
        assert all(isinstance(receive(sock), Challenge) for sock in idle[-3:])
        job.kill()


def test_who_is_one_too_many_is_told_so(tmp_path: Path, receiver: FakeReceiver) -> None:
    with Shadow(config(tmp_path, limits=Limits(connections=0)), make_receiver=lambda _: receiver) as shadow:
        job = Job(shadow, receiver, Trainer(), world=1)
        with pytest.raises(ShadowError, match="has 0 connections, as many as it takes"):
            job.begin()


def test_export_loads_into_plain_pytorch(job: Job, tmp_path: Path) -> None:
    job.begin()
    job.seed()
    job.step()
    step = job.trainer.train()
    at_forward = {
        "groups": pack_state(*named_state(job.trainer.net), job.trainer.optimizer)[0]["groups"],
        "buffers": None,
    }
    job.gradients(step)
    job.records(step)
    job.ranks[0].send(Boundary(2, {"version": 2, "after": {}, "forward": at_forward}))
    job.boundaries(2, [1])
    job.committed(2)
    out = tmp_path / "model.pt"
    assert local.export(tmp_path / "status", out) == 2
    loaded = torch.load(out, weights_only=True)
    fresh = small_model(4)
    optimizer = adamw(fresh)
    fresh.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    assert loaded["step"] == 2
    assert differing(job.trainer.net.state_dict(), fresh.state_dict()) == []
    # A restored scheduler brings initial_lr; all else is the trainer's, the scheduled lr included.
    assert differing(job.trainer.optimizer.state_dict(), optimizer.state_dict()) == []
    assert [path.name for path in tmp_path.glob(".*")] == [], "no temporary file stays"


def test_export_takes_buffers_from_the_boundary(tmp_path: Path, receiver: FakeReceiver) -> None:
    def normed() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.BatchNorm2d(3), torch.nn.Flatten(), torch.nn.Linear(75, 4))

    with Shadow(config(tmp_path), make_receiver=lambda _: receiver) as shadow:
        job = Job(shadow, receiver, Trainer(model=normed), world=1)
        job.begin()
        job.seed()
        step = job.trainer.train()
        buffers = {name: plain.encode(buffer) for name, buffer in job.trainer.net.named_buffers()}
        job.gradients(step)
        job.records(step)
        job.ranks[0].send(Boundary(1, {"forward": {"groups": [], "buffers": buffers}}))
        job.committed(1)
        out = tmp_path / "model.pt"
        local.export(tmp_path / "status", out)
        assert differing(dict(job.trainer.net.state_dict()), dict(torch.load(out)["model"])) == []
        job.kill()


def test_local_socket(job: Job, tmp_path: Path) -> None:
    path = tmp_path / "status"
    assert path.stat().st_mode & 0o777 == 0o600
    status = local.query(path)
    assert status["state"] == "waiting for seed" and status["memory"]["process"] > 1 << 20
    with pytest.raises(CheckmateError, match="no committed state to export"):
        local.export(path, tmp_path / "x.pt")
    job.begin()
    job.seed()
    job.step()
    with pytest.raises(CheckmateError, match="No such file"):
        local.export(path, tmp_path / "missing" / "x.pt")
    status = local.query(path)
    assert status["rates"]["commits_per_s"] > 0 and status["memory"]["state"] > 0
    (newest,) = status["newest_steps"]
    assert newest["step"] == 1 and 0 < newest["wait_s"] < 60 and 0 < newest["step_s"] < 60
    for request in (b"nonsense\n", b"[]\n", b'{"command": "stop"}\n', b'{"command": "export", "path": "x"}\n'):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(path))
            sock.sendall(request)
            assert "error" in json.loads(sock.recv(4096))


def test_one_status_socket_one_shadow(shadow: Shadow, tmp_path: Path) -> None:
    with pytest.raises(CheckmateError, match="another process listens there"):
        Shadow(config(tmp_path), make_receiver=FakeReceiver).__enter__()
    with pytest.raises(CheckmateError, match="control address"):
        Shadow(config(tmp_path, control=shadow.control), make_receiver=FakeReceiver).__enter__()
    stale = tmp_path / "stale"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(stale))
    with Shadow(config(tmp_path, status=stale), make_receiver=FakeReceiver):
        assert local.query(stale)["committed"] is None
    assert not stale.exists()
    with pytest.raises(CheckmateError, match="a shadow or controller that runs"):
        local.query(stale)
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckmateError, match="there is a file of that name"):
        Shadow(config(tmp_path, status=tmp_path / "file"), make_receiver=FakeReceiver).__enter__()


def test_the_registrar_hears_whether_we_follow(tmp_path: Path, receiver: FakeReceiver) -> None:
    class Registration:
        mirrored = True

        def __init__(self) -> None:
            self.said: list[bool] = []
            self.closed = False

        def set_seeded(self, seeded: bool) -> None:
            self.said.append(seeded)

        def close(self) -> None:
            self.closed = True

    registration = Registration()
    with Shadow(config(tmp_path), lambda: registration, lambda _: receiver) as shadow:
        job = Job(shadow, receiver, Trainer(), world=1)
        job.begin()
        job.seed()
        job.step()
        receiver.damage(2)
        wait(lambda: registration.said == [False, True, False], "damage told")
        assert shadow.status()["registered"] is True
        job.kill()
    assert registration.closed


_PROGRAM = """
import pathlib
import checkmate.shadow.daemon as daemon
from checkmate.shadow.rx.receiver import RxConfig
daemon.run_shadow([daemon.ShadowConfig("test", b"token", ("127.0.0.1", 0), pathlib.Path({status!r}), RxConfig())])
print("clean")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_run_shadow_ends_cleanly_and_idles_cheaply(tmp_path: Path, number: int) -> None:
    status = tmp_path / "s"
    program = _PROGRAM.format(status=str(status))
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        wait(status.exists, "start", 60)
        wait(lambda: local.query(status)["state"] == "waiting for seed", "status", 10)
        before = _cpu_seconds(child.pid)
        time.sleep(2)
        used = _cpu_seconds(child.pid) - before
        child.send_signal(number)
        out, err = child.communicate(timeout=20)
    finally:
        child.kill()
        child.wait()
    assert (out, child.returncode) == ("clean\n", 0), err
    assert not status.exists()
    assert used <= 0.04, "2 % of a core"


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class _Registration:
    """What a shadow says to the registrar."""

    def __init__(self) -> None:
        self.mirrored = True
        self.said: list[bool] = []
        self.closed = 0

    def set_seeded(self, seeded: bool) -> None:
        self.said.append(seeded)

    def close(self) -> None:
        self.closed += 1


def test_a_shadow_of_several_groups_is_one_to_the_registrar(tmp_path: Path) -> None:
    registration = _Registration()
    calls: list[list[str]] = []
    configs = [config(tmp_path, status=tmp_path / name, group=name) for name in ("part0", "part1")]

    def register() -> _Registration:
        calls.append([local.query(one.status)["group"] for one in configs])  # all of it runs by then
        return registration

    before = threading.active_count()
    with daemon.running(configs, register) as shadows:
        assert calls == [["part0", "part1"]] and len({shadow.control for shadow in shadows}) == 2
        assert all(shadow.status()["registered"] for shadow in shadows)
        jobs = [
            Job(shadow, FakeReceiver(), Trainer(), group=one.group)
            for one, shadow in zip(configs, shadows, strict=True)
        ]
        for index, job in enumerate(jobs):
            assert registration.said[-1] is False, "not before all groups are followed"
            job.begin()
            job.seed()
            job.boundaries(0)
            wait(lambda one=shadows[index]: one.status()["state"] == "following", "the seed")  # type: ignore[misc]
        wait(lambda: registration.said[-1], "all groups are followed")
        jobs[0].begin()
        assert [shadow.status()["incarnation"] for shadow in shadows] == [2, 1], "each has incarnations of its own"
        for job in jobs:
            job.kill()
    assert registration.closed > 0 and not any(one.status.exists() for one in configs)
    wait(lambda: threading.active_count() <= before, f"all threads joined: {threading.enumerate()}")


def test_what_cannot_start_leaves_nothing_of_the_other_groups(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        configs = [
            config(tmp_path, status=tmp_path / "part0", group="part0"),
            config(tmp_path, status=tmp_path / "part1", group="part1", control=taken.getsockname()),
        ]
        before = threading.active_count()
        with pytest.raises(CheckmateError, match="Address already in use"), daemon.running(configs, _Registration):
            pytest.fail("it cannot run")
    assert not any(one.status.exists() for one in configs) and threading.active_count() <= before


def test_ranks_of_another_group_are_refused(tmp_path: Path) -> None:
    with Shadow(config(tmp_path, group="part0"), make_receiver=FakeReceiver) as running:
        endpoint = Endpoint(*running.control)
        for incarnation, group in enumerate(("part0", ""), 1):
            assert _of_group(endpoint, group).begin(0, 10.0).incarnation == incarnation
        _assert_refused(endpoint, "part1", 2)
        assert running.status()["incarnation"] == 2, "nobody of another group can begin one"


def test_a_shadow_of_several_groups_takes_ranks_of_named_groups_only(tmp_path: Path) -> None:
    """Their gradients would be nobody's, and what they restored perhaps another group's."""
    configs = [config(tmp_path, status=tmp_path / name, group=name) for name in ("part0", "part1")]
    with daemon.running(configs, None) as shadows:
        endpoint = Endpoint(*shadows[1].control)
        assert _of_group(endpoint, "part1").begin(0, 10.0).incarnation == 1
        _assert_refused(endpoint, "", 1)
        assert shadows[1].status()["incarnation"] == 1


def _of_group(endpoint: Endpoint, group: str) -> Client:
    return Client(Settings((endpoint,), TOKEN, JOB, group=group), endpoint, 0, 1)


def _assert_refused(endpoint: Endpoint, group: str, incarnation: int) -> None:
    """For good: a rank's group stays what it is."""
    client = _of_group(endpoint, group)
    reason = rf"group '{group}' \(CHECKMATE_GROUP\): this address of the shadow is for 'part"
    for ask in (
        lambda: client.begin(0, 10.0),
        lambda: client.restore(incarnation),
        lambda: client.send_seed(incarnation, *Trainer().seed(), lambda _: None),
    ):
        with pytest.raises(Unfollowable, match=reason):
            ask()


def test_what_a_group_tells_when_another_has_left_is_of_no_interest() -> None:
    """The first to leave ends the registration, which hears no more then."""
    registration = _Registration()
    node = daemon._Node(lambda: registration, 2)
    first, second = node.join(), node.join()
    first.set_seeded(True)
    second.close()
    first.set_seeded(False)
    first.close()
    assert (registration.said, registration.closed, first.mirrored) == ([False], 1, False)
