"""Digests that a trainer sends: every block in its turn, never more than its share of time, no false alarms."""

import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.shadow import JOB, TOKEN, FakeReceiver, wait
from support.train.draws import STEPS, Training, draw
from support.train.fake_shadow import FakeShadow
from support.train.model import build, train
from support.train.verified import Mirror, VerifyingShadow
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import checkmate
from checkmate import blocks
from checkmate.config import CheckmateError
from checkmate.protocol import Boundary, Digests, Message, Seed, StepRecord
from checkmate.shadow.daemon import Shadow, ShadowConfig
from checkmate.shadow.engine import Tuning
from checkmate.shadow.rx.receiver import RxConfig
from checkmate.tensors import MASTER, named_state, pack_state
from checkmate.train import attach as attach_module
from checkmate.train import digests as digests_module
from checkmate.train.digests import BURST_S, DigestSender
from checkmate.train.masters import Masters
from checkmate.train.settings import VERIFY_SHARE

pytest_plugins = ["support.train.world"]

DRAWS = [*range(6), *[seed for seed in range(6, 60) if draw(seed).scaler and not draw(seed).masters][:4]]
"""Seeds of random configurations, some with steps that a GradScaler skips."""


class Clock:
    """Each look at it takes some time; ``now`` may be moved."""

    def __init__(self, tick: float, now: float = 0.0) -> None:
        self.now, self.tick = now, tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


class Params(nn.Module):
    """Parameters of these sizes."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.all = nn.ParameterList([nn.Parameter(torch.randn(size)) for size in sizes])


def stepped(sizes: list[int]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """With optimizer state."""
    module = Params(sizes)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    for param in module.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return module, optimizer


def blocks_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> set[tuple[str, str, int]]:
    """All that there are."""
    _, manifest, tensors = pack_state(*named_state(module), optimizer)
    return {
        (name, kind, first)
        for (name, kind, *_), tensor in zip(manifest, tensors, strict=True)
        for first in blocks.firsts(tensor.nbytes)
    }


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    pauses=st.lists(st.floats(0.001, 0.02), min_size=1, max_size=30),
    tick=st.floats(1e-5, 1e-3),
    most=st.integers(1, 7),
)
def test_each_block_has_its_turn_once_a_round(sizes: list[int], pauses: list[float], tick: float, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_BYTES", 16)
        patch.setattr(digests_module, "MOST_BLOCKS", most)
        module, optimizer = stepped(sizes)
        everything = blocks_of(module, optimizer)
        clock = Clock(tick)
        sender = DigestSender(1.0, module, optimizer, Masters(module, {}), clock)
        sent: list[tuple[str, str, int]] = []
        for step in range(1, 300):
            messages: list[Any] = []
            sender.send(step, messages.append)
            clock.now += pauses[step % len(pauses)]
            assert all(message.step == step and 0 < len(message.blocks) <= most for message in messages)
            sent += [(name, kind, first) for message in messages for name, kind, first, _, _ in message.blocks]
        rounds, count = len(sent) // len(everything), len(everything)
        assert rounds >= 1
        for number in range(rounds):
            assert set(sent[number * count : (number + 1) * count]) == everything


def test_state_that_comes_later_is_digested_from_then_on() -> None:
    module = Params([8, 8])
    optimizer = torch.optim.SGD(module.parameters(), momentum=0.9)
    sender = DigestSender(1.0, module, optimizer, Masters(module, {}), Clock(0.002))

    def kinds() -> set[str]:
        messages: list[Any] = []
        for step in range(8):
            sender.send(step, messages.append)
        return {block[1] for message in messages for block in message.blocks}

    assert kinds() == {"param"}
    assert optimizer.state_dict()["state"] == {}, "looking makes no state"
    for param in module.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert kinds() == {"param", "state.momentum_buffer"}


def test_master_copies_stand_for_their_parameters() -> None:
    module = Params([8, 8])
    copy = next(module.parameters()).detach().double()
    optimizer = torch.optim.SGD([copy, *list(module.parameters())[1:]])
    sender = DigestSender(1.0, module, optimizer, Masters(module, {"all.0": copy}), Clock(0.002))
    messages: list[Any] = []
    for step in range(4):
        sender.send(step, messages.append)
    assert {block[0] for message in messages for block in message.blocks} == {MASTER + "all.0", "all.1"}


@settings(max_examples=40)
@given(
    share=st.floats(0, 1),
    pauses=st.lists(st.floats(0, 30), min_size=1, max_size=60),
    tick=st.floats(1e-6, 1e-2),
)
def test_no_more_than_the_share_of_time_is_spent(share: float, pauses: list[float], tick: float) -> None:
    module, optimizer = stepped([300_000, 20])
    clock = Clock(tick)
    sender = DigestSender(share, module, optimizer, Masters(module, {}), clock)
    spent = 0.0
    longest = 0.0
    for step, pause in enumerate(pauses):
        start = clock.now
        sender.send(step, lambda _: None)
        longest = max(longest, clock.now - start)
        spent += clock.now - start
        clock.now += pause
    looks = tick * (len(pauses) + 1)  # one look at the clock is not worth charging
    overshoot = 4 * tick  # of the last block
    assert spent <= share * clock.now + looks + overshoot + 1e-9
    assert longest <= BURST_S + overshoot


@pytest.mark.parametrize("value", ["-0.1", "1.5", "nan", "much"])
def test_a_wrong_setting_is_refused_by_name(shadow: FakeShadow, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("CHECKMATE_VERIFY", value)
    with pytest.raises(CheckmateError, match=f"CHECKMATE_VERIFY={value} is not a share of the training time"):
        checkmate.attach(*build())


@pytest.mark.parametrize("share", ["0", "1"])
def test_digests_are_of_the_state_right_after_the_step(
    shadow: FakeShadow, monkeypatch: pytest.MonkeyPatch, share: str
) -> None:
    """Between the step's record and its boundary, whatever the script changes in between; none when switched off."""
    monkeypatch.setenv("CHECKMATE_VERIFY", share)
    ddp, optimizer = build()
    checkpoint = checkmate.attach(ddp, optimizer)
    checkpoint.resume()
    want: dict[int, dict[str, blocks.Digest | None]] = {}
    for step in range(1, 6):
        train(ddp, optimizer)
        want[step] = {name: blocks.digest(param, 0) for name, param in ddp.module.named_parameters()}
        with torch.no_grad():
            next(ddp.parameters()).add_(1)
    checkpoint.close()
    sent = shadow.of(Digests)
    assert bool(sent) == (share == "1")
    for message in sent:
        for name, kind, first, *digest in message.blocks:
            assert first == 0 and (kind != "param" or tuple(digest) == want[message.step][name])
    stages = [type(m) for _, m in shadow.messages if isinstance(m, StepRecord | Digests | Boundary)]
    for before, after in pairwise(stages):
        assert after is not Digests or before is StepRecord
        assert before is not Digests or after is Boundary


@pytest.fixture
def verifying(direct: Any, monkeypatch: pytest.MonkeyPatch) -> VerifyingShadow:
    """All blocks that a step has time for are compared."""
    monkeypatch.setenv("CHECKMATE_VERIFY", "1")
    direct.__class__ = VerifyingShadow
    direct.__init__()
    return direct  # type: ignore[no-any-return]


def test_whatever_is_followed_raises_no_alarm(verifying: VerifyingShadow) -> None:
    """Skipped steps, frozen and unused parameters, buffers, several passes, master copies, every optimizer."""
    for seed in DRAWS:
        verifying.__init__()  # type: ignore[misc]
        training = Training(draw(seed))
        checkpoint = checkmate.attach(training.ddp, training.optimizer, masters=training.masters)
        training.make_scheduler()
        checkpoint.resume()
        for step in range(1, STEPS + 1):
            training.iterate()
            checkpoint.before_forward()
            assert checkpoint.committed == step, f"draw {seed}: {draw(seed)}: {verifying.summary}"
        checkpoint.close()
        summary = verifying.summary
        assert summary.mismatches == 0 and summary.compared > 0
        assert 0 < summary.proved <= summary.blocks


def test_steps_that_the_shadow_takes_as_seeds_raise_no_alarm(verifying: VerifyingShadow) -> None:
    """The script changes parameters after each step: the seed of that step is the state, not what was digested."""
    ddp, optimizer = build()
    checkpoint = checkmate.attach(ddp, optimizer)
    checkpoint.resume()
    for step in range(1, 9):
        train(ddp, optimizer)
        if step % 3 == 0:
            with torch.no_grad():
                next(ddp.parameters()).clamp_(-0.1, 0.1)
        checkpoint.before_forward()
        wait(lambda step=step: checkpoint.committed == step, f"step {step}")  # type: ignore[misc]
    checkpoint.close()
    assert len(verifying.seeds) == 3
    assert verifying.summary.mismatches == 0 and verifying.summary.compared > 0


def test_the_default_costs_less_than_a_thousandth_of_training(direct: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    direct.__class__ = VerifyingShadow
    direct.__init__()
    spent: list[float] = []
    sent: list[Message] = []
    original = DigestSender.send

    def timed(self: DigestSender, step: int, send: Callable[[Message], Any]) -> None:
        start = time.perf_counter()
        original(self, step, sent.append)
        spent.append(time.perf_counter() - start)

    monkeypatch.setattr(DigestSender, "send", timed)
    net = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))
    ddp = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(ddp.parameters(), fused=True)
    checkpoint = checkmate.attach(ddp, optimizer)
    checkpoint.resume()
    inputs = torch.randn(256, 512)
    blocks.digest(inputs, 0)  # loads the library, as the initial seed does elsewhere
    start = time.perf_counter()
    while time.perf_counter() - start < 3.0:
        optimizer.zero_grad()
        ddp(inputs).square().mean().backward()
        optimizer.step()
    elapsed = time.perf_counter() - start
    checkpoint.close()
    ratio = sum(spent) / elapsed
    print(f"digests: {100 * ratio:.4f} % of {len(spent)} iterations of {1e3 * elapsed / len(spent):.2f} ms")
    assert VERIFY_SHARE < 0.001
    assert sent, "some were sent"
    assert sum(sorted(spent)[:-2]) < 0.001 * elapsed  # the longest may have been preempted; that is paid back later


# The whole way: attach, sockets, and the real engine


@pytest.fixture
def receiver() -> FakeReceiver:
    return FakeReceiver()


@pytest.fixture
def real(
    tmp_path: Path, receiver: FakeReceiver, shadow: FakeShadow, plugin: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Shadow]:
    """A real shadow, to which ``attach`` leads."""
    shadow.close()
    tuning = Tuning(patience_s=5.0, quiet_s=0.05, fence_s=1.0, ask_s=(0.2, 5.0), grace_s=0.2)
    token = tmp_path / "shadow-token"
    token.write_bytes(TOKEN)
    token.chmod(0o600)
    config = ShadowConfig(JOB, TOKEN, ("127.0.0.1", 0), tmp_path / "status", RxConfig(sets=3), 1, tuning)
    with Shadow(config, make_receiver=lambda _: receiver) as running:
        monkeypatch.setenv("CHECKMATE_SHADOWS", "{}:{}".format(*running.control))
        monkeypatch.setenv("CHECKMATE_TOKEN_FILE", str(token))
        monkeypatch.setenv("CHECKMATE_JOB", JOB)
        monkeypatch.setenv("CHECKMATE_VERIFY", "1")
        monkeypatch.setattr(attach_module, "load_plugin", lambda: Mirror(receiver))
        yield running


class Followed:
    """A small job on the real shadow."""

    def __init__(self, real: Shadow) -> None:
        self.real = real
        self.ddp, self.optimizer = build()
        self.checkpoint = checkmate.attach(self.ddp, self.optimizer)
        self.start = self.checkpoint.resume()
        self.step = self.start or 0
        self.clock = self.checkpoint._digests._clock = Clock(1e-6, time.perf_counter())

    def train(self) -> None:
        """One step and its boundary, without outrunning the shadow."""
        self.clock.now += 1.0  # time for as many digests as a message holds
        train(self.ddp, self.optimizer)
        self.step += 1
        self.checkpoint.before_forward()

    def committed(self) -> None:
        """The newest step is, and equals what the trainer has."""
        wait(lambda: self.real.status()["committed"] == self.step, f"commit of {self.step}: {self.real.status()}")
        params, buffers = named_state(self.ddp.module)
        description, manifest, tensors = pack_state(params, buffers, self.optimizer)
        with self.real._engine.reading(lambda: None) as committed:
            assert committed is not None
            assert committed.replica.differences(Seed(self.step, description, manifest), tensors) == []


def flip(real: Shadow, kind: str, name: str) -> None:
    """A bit of the shadow's memory: not the last of a number, which rounding may heal within a few steps."""
    with real._engine.reading(lambda: None) as committed:
        assert committed is not None
        tensor = committed.replica.tensor(name, kind)
        assert tensor is not None
        data = tensor.detach().view(torch.uint8).view(-1)
        data[2] ^= 0x40


@pytest.mark.parametrize("kind", ["param", "state.exp_avg", "state.exp_avg_sq"])
def test_a_flipped_bit_is_found_within_a_round_and_healed(
    real: Shadow, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(digests_module, "MOST_BLOCKS", 3)
    job = Followed(real)
    for _ in range(30):
        job.train()
        job.committed()
    verification = real.status()["verification"]
    count = verification["blocks"]
    assert (verification["proved"], verification["mismatches"]) == (count, 0)
    assert job.step - verification["oldest"][0]["step"] <= count // 3 + 2, "every block was proved in the last round"
    flip(real, kind, "first.weight")
    flipped_at = job.step
    while not real.status()["verification"]["mismatches"]:
        assert job.step - flipped_at <= count // 3 + 2, "a round"
        job.train()
        wait(
            lambda: real.status()["committed"] == job.step or real.status()["verification"]["mismatches"],
            f"step {job.step}: {real.status()}",
        )
    text = real.status()["verification"]["last_mismatch"]
    assert f"step {job.step}" in text and "first.weight, bytes 0 to 127 (bucket" in text
    assert text in caplog.text
    seeder = job.checkpoint._seeder
    wait(lambda: seeder._wanted or seeder._job or real.status()["seeds"]["adopted"] == 2, "a seed wanted or sent")
    job.train()
    job.committed()
    for _ in range(count):
        job.train()
        job.committed()
    verification = real.status()["verification"]
    assert verification["mismatches"] <= 3, "none since"
    assert verification["proved"] == verification["blocks"] == count
    job.checkpoint.close()
    assert real.status()["state"] == "following"


def test_restarts_raise_no_alarm(real: Shadow, restarted: Callable[[], None]) -> None:
    """Each incarnation rebuilds the buckets, begins its own round, and what the last one sent proves nothing."""
    step = 0
    for incarnation in range(1, 4):
        job = Followed(real)
        assert (job.start or 0) == step
        for _ in range(4):
            job.train()
            job.committed()
        step = job.step
        assert real.status()["incarnation"] == incarnation
        train(job.ddp, job.optimizer)  # digests of a step whose boundary never comes
        job.checkpoint.close(finished=False)
        restarted()
    verification = real.status()["verification"]
    assert verification["mismatches"] == 0 and verification["compared"] > 0
    assert real.status()["seeds"]["adopted"] == 1
