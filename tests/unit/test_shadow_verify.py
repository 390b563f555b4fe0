"""Digests against the state that a shadow made: what proves it, what doesn't, and what follows from a difference."""

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from support.shadow import JOB, TOKEN, FakeReceiver, Job, wait
from support.trainer import Trainer, differing

from checkmate import blocks, status
from checkmate.protocol import Boundary, Digests, Layout, Refused, decode
from checkmate.shadow import verify as verify_module
from checkmate.shadow.daemon import Shadow, ShadowConfig
from checkmate.shadow.engine import Engine, Tuning
from checkmate.shadow.optim.replica import Replica
from checkmate.shadow.rx.receiver import RxConfig
from checkmate.shadow.verify import Mismatch, Verifier
from checkmate.tensors import named_state, pack_state

QUICK = Tuning(patience_s=5.0, quiet_s=0.05, fence_s=1.0, ask_s=(1.0, 10.0), grace_s=0.2)
WRONG = 0xBAD


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    receiver = FakeReceiver()
    config = ShadowConfig(JOB, TOKEN, ("127.0.0.1", 0), tmp_path / "status", RxConfig(sets=3), 1, QUICK)
    with Shadow(config, make_receiver=lambda _: receiver) as shadow:
        job = Job(shadow, receiver, Trainer())
        job.begin()
        job.seed()
        yield job
        job.kill()


def digests(trainer: Trainer) -> list[list[Any]]:
    """Of everything that the trainer has now."""
    _, manifest, tensors = pack_state(*named_state(trainer.net), trainer.optimizer)
    return [
        [name, kind, first, *(blocks.digest(tensor, first) or ())]
        for (name, kind, *_), tensor in zip(manifest, tensors, strict=True)
        for first in blocks.firsts(tensor.nbytes)
    ]


def send(job: Job, what: list[list[Any]] | None = None, rank: int = 0) -> None:
    """A whole step, with digests of everything, or others."""
    step = job.trainer.train()
    job.gradients(step)
    job.records(step)
    job.ranks[rank].send(Digests(step.record.step, digests(job.trainer) if what is None else what))
    job.boundaries(step.record.step)


def verified(job: Job) -> dict[str, Any]:
    result: dict[str, Any] = job.status()["verification"]
    return result


def assert_served_is_the_trainers(job: Job) -> None:
    state, tensors = job.client().restore(job.incarnation)
    _, _, theirs = pack_state(*named_state(job.trainer.net), job.trainer.optimizer)
    assert state.step == job.trainer.step
    assert differing(tensors, [tensor.detach() for tensor in theirs]) == []


def test_status_says_when_each_block_was_last_proved(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 512)
    for _ in range(3):
        send(job)
        job.committed(job.trainer.step)
    everything = digests(job.trainer)
    assert len(everything) > len({(name, kind) for name, kind, *_ in everything}), "some tensors have several blocks"
    now = verified(job)
    assert now["blocks"] == now["proved"] == len(everything) and now["compared"] > 2 * len(everything)
    name, kind, first = everything[-1][:3]
    step = job.trainer.train()
    job.gradients(step)
    job.records(step)
    job.ranks[0].send(Digests(4, digests(job.trainer)[:-1]))
    job.boundaries(4)
    job.committed(4)
    oldest = verified(job)["oldest"]
    assert [oldest[0][key] for key in ("name", "kind", "first_byte", "step")] == [name, kind, first, 3]
    assert oldest[0]["age_s"] > 0 and {line["step"] for line in oldest[1:]} == {4}
    each = status.blocks(job.shadow._config.status)["blocks"]
    assert each[0] == {**oldest[0], "age_s": each[0]["age_s"]}
    assert sorted([line["name"], line["kind"], line["first_byte"]] for line in each) == sorted(
        b[:3] for b in everything
    )
    assert [line["step"] for line in each] == [3] + [4] * (len(everything) - 1)
    send(job, everything)  # of another step
    wait(lambda: verified(job)["mismatches"], "differences")
    assert (verified(job)["blocks"], verified(job)["proved"]) == (0, 0), "no state, no proof"
    assert status.blocks(job.shadow._config.status) == {"blocks": []}


def test_blocks_never_proved_are_told(job: Job) -> None:
    send(job, [])
    send(job)
    job.committed(2)
    assert verified(job)["proved"] == verified(job)["blocks"] > 0
    job.kill()
    job.begin()
    assert verified(job)["proved"] == verified(job)["blocks"] > 0, "the state is the same one"
    job.trainer = Trainer()
    job.seed()
    step = job.trainer.train()
    job.gradients(step)
    job.records(step)
    job.ranks[0].send(Digests(1, digests(job.trainer)[:1]))
    job.boundaries(1)
    job.committed(1)
    now = verified(job)
    assert (now["proved"], now["oldest"][0]["step"], now["oldest"][0]["age_s"]) == (1, None, None)


def test_a_difference_is_named_drops_the_state_and_is_healed(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    send(job)
    job.committed(1)
    with job.shadow._engine.reading(lambda: None) as committed:
        assert committed is not None
        moment = committed.replica.tensor("3.weight", "state.exp_avg")
        assert moment is not None
        moment[0, 0] = -moment[0, 0]
    with caplog.at_level(logging.ERROR):
        send(job)
        wait(job.ranks[0].requests, "request for a seed")
    text = "step 2: param 3.weight, bytes 0 to 5939 (bucket 1); state.exp_avg 3.weight, bytes 0 to 5939 (bucket 1)"
    assert job.ranks[0].requests() == [f"{text} differ from the trainer's"]
    assert text in caplog.text
    status = job.status()
    assert (status["state"], status["committed"], status["verification"]["mismatches"]) == ("damaged", None, 2)
    assert job.client().restore(job.incarnation)[0].step is None
    job.seed()
    job.boundaries(2)
    job.committed(2)
    for _ in range(3):
        send(job)
        job.committed(job.trainer.step)
        assert_served_is_the_trainers(job)
    assert (job.status()["state"], verified(job)["mismatches"]) == ("following", 2)


def test_nobody_reads_the_wrong_state_even_at_that_moment(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    send(job)
    job.committed(1)
    served: list[int | None] = []
    original = Verifier.compare

    def read() -> None:
        with job.shadow._engine.restoring(0, lambda: None) as (state, _):
            served.append(state.step)

    reader = threading.Thread(target=read)

    def compare(self: Verifier, replica: Replica, layout: Layout) -> None:
        reader.start()
        time.sleep(0.2)  # it waits at the gate now
        original(self, replica, layout)

    lose = Engine._lose

    def lose_late(self: Engine, *args: Any) -> None:
        reader.join(10)
        lose(self, *args)

    monkeypatch.setattr(Engine, "_lose", lose_late)
    monkeypatch.setattr(Verifier, "compare", compare)
    send(job, [["0.weight", "param", 0, 540, WRONG]])
    wait(lambda: served, "the reader")
    reader.join()
    assert served == [None]


def test_only_the_state_made_here_is_compared(job: Job) -> None:
    """Digests of seeded steps, of other ranks, of the past and of older incarnations prove and disprove nothing."""
    wrong = [["0.weight", "param", 0, 540, WRONG]]
    send(job, wrong, rank=1)
    job.committed(1)
    job.ranks[0].send(Digests(1, wrong))
    step = job.trainer.train()
    job.receiver.damage(2)
    job.records(step)
    job.ranks[0].send(Digests(2, wrong))
    wait(job.ranks[0].requests, "request for a seed")
    job.seed()
    job.boundaries(2)
    job.committed(2)
    job.ranks[0].send(Digests(3, wrong))
    job.kill()
    job.begin()
    job.step()
    send(job)
    job.committed(4)
    assert verified(job)["mismatches"] == 0 and verified(job)["compared"] == len(digests(job.trainer))


def test_skipped_steps_are_compared_too(job: Job) -> None:
    send(job)
    step = job.trainer.train(skip=True)
    job.records(step)
    job.ranks[0].send(Digests(2, digests(job.trainer)))
    job.boundaries(2)
    send(job)
    job.committed(3)
    assert verified(job)["mismatches"] == 0 and verified(job)["compared"] == 3 * len(digests(job.trainer))


def test_seeds_that_do_not_help_are_asked_for_ever_more_rarely(job: Job) -> None:
    """Arithmetic that differs between the machines: training must not copy its state after every step."""
    asked: list[float] = []
    for count in (1, 2, 3):
        send(job, [["0.weight", "param", 0, 540, WRONG]])
        wait(lambda count=count: len(job.ranks[0].requests()) == count, "request")  # type: ignore[misc]
        asked.append(time.monotonic())
        job.seed()
        job.boundaries(job.trainer.step)
        job.committed(job.trainer.step)
        send(job, [])
        job.committed(job.trainer.step)
    assert asked[1] - asked[0] > 0.9 and asked[2] - asked[1] > 1.9
    send(job)
    job.committed(job.trainer.step)  # proved: the next difference is news
    send(job, [["0.weight", "param", 0, 540, WRONG]])
    wait(lambda: len(job.ranks[0].requests()) == 4, "request")
    assert time.monotonic() - asked[2] < 3.9, "sooner than after the four seconds that it would have waited"


def test_what_the_shadow_lacks_differs(job: Job) -> None:
    send(job, [["ghost", "param", 0, 4, 1], ["0.weight", "state.ghost", 0, 4, 1], ["0.weight", "param", 999, 4, 1]])
    wait(job.ranks[0].requests, "request for a seed")
    text = job.ranks[0].requests()[0]
    assert "param ghost, of which there is no byte 0 here, (in no bucket)" in text
    assert "state.ghost 0.weight, of which" in text and "param 0.weight, of which there is no byte 999 here" in text


@pytest.mark.parametrize("block", [["0.weight", "param", 0, 540], ["0.weight", "param", 0, 540, "x"], [1, 2, 3, 4, 5]])
def test_malformed_digests_are_refused(job: Job, block: list[Any]) -> None:
    job.ranks[1].send(Digests(1, [block]))
    wait(lambda: [m for m in job.ranks[1].heard if isinstance(m, Refused)], "refusal")
    assert "malformed digests message: blocks is" in job.ranks[1].heard[-1].reason  # type: ignore[attr-defined]


def test_waiting_digests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, verifier = Trainer(), Verifier()
    replica = Replica(*trainer.seed())
    for step in range(1, 1000):
        verifier.expect(Digests(step, [["0.weight", "param", 0, 540, WRONG]]))
    assert len(verifier._pending) == verify_module._PENDING
    step = trainer.train()
    replica.apply(step.record, step.layout, {bucket: memoryview(data) for bucket, data in step.buckets.items()})
    verifier.compare(replica, step.layout)
    verifier.expect(Digests(1, [["0.weight", "param", 0, 540, WRONG]] * 20))
    with pytest.raises(Mismatch, match=r"param 0.weight, bytes 0 to 539 \(bucket 2\); .* and 12 more differ"):
        verifier.compare(replica, step.layout)
    del step
    assert verifier.summary(replica).mismatches == 20 and verifier.summary(None).blocks == 0


def test_messages_of_older_trainers_stay_readable() -> None:
    """As they are on the wire, without the newer ones' fields."""
    body = msgpack.packb({"type": "boundary", "step": 3, "state": {}})
    assert decode(body) == Boundary(3, {})
    old = {"type": "step", "step": 1, "layout": "x", "groups": [{"lr": 0.1}]}
    assert decode(msgpack.packb(old)).absent == []  # type: ignore[attr-defined]
    assert decode(Digests(2, [["a", "param", 0, 4, 7]]).encode()[4:]) == Digests(2, [["a", "param", 0, 4, 7]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_blocks_are_bytes_in_memory_order(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 64)
    tensor = torch.randn(3, 4, 5, 2).to(dtype).to(memory_format=torch.channels_last)
    again = torch.empty_like(tensor).copy_(tensor)
    firsts = blocks.firsts(tensor.nbytes)
    assert [blocks.digest(tensor, first) for first in firsts] == [blocks.digest(again, first) for first in firsts]
    assert sum(digest[0] for first in firsts if (digest := blocks.digest(tensor, first))) == tensor.nbytes
    again[2, 3, 4, 1] += 1
    assert sum(blocks.digest(tensor, first) != blocks.digest(again, first) for first in firsts) == 1
    assert blocks.digest(tensor, tensor.nbytes + 64) is None
    assert blocks.digest(tensor[:, ::2], 0) is None, "not dense"
    assert blocks.digest(torch.empty(0), 0) is None
