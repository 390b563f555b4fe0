"""From packets to weights: the real receive core and the real optimizer, with the switch's copies made by hand."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.copies import AllReduce, Sender, interleave
from support.shadow import JOB, TOKEN, Job, wait
from support.trainer import Trainer, differing

from checkmate.shadow.daemon import Shadow, ShadowConfig
from checkmate.shadow.engine import Tuning
from checkmate.shadow.rx.receiver import Receiver, RxConfig
from checkmate.tensors import named_state, pack_state

GAP_S = 0.1


class Copies(Receiver):
    """A receiver that is fed the packets of whole buckets; ``lose`` drops the n-th packet of the next bucket."""

    lose: int | None = None

    def __init__(self, config: RxConfig) -> None:
        super().__init__(dataclasses.replace(config, gap_timeout_s=GAP_S))
        self._sender = Sender()

    def complete(self, incarnation: int, iteration: int, bucket: int, data: bytes) -> None:
        """The packets of one all-reduce arrive, flows mixed."""
        op = AllReduce(count=len(data) // 4, nranks=4, nchannels=2)
        packets = interleave(
            self._sender.packets(op, bytes(data), incarnation=incarnation, iteration=iteration, bucket=bucket),
            iteration,
        )
        if self.lose is not None:
            del packets[self.lose]
            self.lose = None
        for packet in packets:
            self.feed(packet)

    def poll(self, timeout_s: float) -> list:  # type: ignore[type-arg]
        """Without ports nothing else tells the core what time it is."""
        self.tick()
        return super().poll(min(timeout_s, 0.02))


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    rx = RxConfig(sets=3, pool_bytes=16 << 20, max_op_bytes=1 << 20)
    made: list[Copies] = []

    def make(config: RxConfig) -> Copies:
        made.append(Copies(config))
        return made[-1]

    tuning = Tuning(patience_s=0.5, quiet_s=0.05, ask_s=(0.2, 5.0))
    with Shadow(
        ShadowConfig(JOB, TOKEN, ("127.0.0.1", 0), tmp_path / "s", rx, 1, tuning), make_receiver=make
    ) as shadow:
        job = Job(shadow, made[0], Trainer())  # type: ignore[arg-type]
        job.begin()
        job.seed()
        yield job
        job.kill()


def assert_equal(job: Job) -> None:
    state, tensors = job.client().restore(job.incarnation)
    want = pack_state(*named_state(job.trainer.net), job.trainer.optimizer)[2]
    assert state.step == job.trainer.step
    assert differing(tensors, [tensor.detach() for tensor in want]) == []


def test_packets_become_the_trainers_state(job: Job) -> None:
    for _ in range(5):
        job.step()
        assert_equal(job)
    receiver = job.status()["receiver"]
    assert (receiver["ops"], receiver["damages"]) == (15, 0)
    assert job.status()["gap_count"] == 0


def test_a_lost_packet_is_named_and_healed(job: Job) -> None:
    job.step()
    job.receiver.lose = 1  # type: ignore[attr-defined]
    lost = job.trainer.train()
    job.gradients(lost)
    job.records(lost)
    job.boundaries(2)
    later = job.trainer.train()
    job.gradients(later)
    job.records(later)
    job.boundaries(3)
    wait(job.ranks[0].requests, "request for a seed")
    assert job.status()["committed"] == 1
    assert "iteration 2" in job.status()["reason"] or "iteration 2" in job.ranks[0].requests()[0]
    job.seed()
    job.committed(3)
    for _ in range(3):
        job.step()
        assert_equal(job)
    assert job.status()["state"] == "following"
