"""A commit of all ranks, or of none: each rank with a file of its own, over one store."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore

from checkmate.persist.checkpointer import Checkpointer
from checkmate.persist.coordinator import AgreementError, Coordinator, StoreError
from checkmate.persist.engine import Options, PersistError

WORLD = 3
PATIENCE_S = 60.0


def together(act: Callable[[int], object], world: int = WORLD) -> list[object]:
    """One thread for each rank; the first error is raised."""
    with ThreadPoolExecutor(world) as pool:
        return [future.result(PATIENCE_S) for future in [pool.submit(act, rank) for rank in range(world)]]


class Job:
    """The ranks of one run of a job; a restart is another one with another store."""

    def __init__(self, folder: Path, timeout_s: float = PATIENCE_S, world: int = WORLD) -> None:
        self._folder, self._store = folder, HashStore()
        self.ranks: list[Checkpointer] = together(lambda rank: self._open(rank, world, timeout_s), world)  # type: ignore[assignment]

    def _open(self, rank: int, world: int, timeout_s: float) -> Checkpointer:
        coordinator = Coordinator(self._store, rank, world, "test", timeout_s)
        options = Options(chunk_bytes=65536, writers=1)
        return Checkpointer(self._folder / "c", in_flight=2, options=options, coordinator=coordinator)

    def save(self, step: int, elements: int = 5000) -> list[object]:
        """Each rank's outcome: True, or the error."""

        def act(rank: int) -> object:
            future = self.ranks[rank].save({"rank": rank, "t": torch.full((elements,), float(step))}, step)
            return future.exception(PATIENCE_S) or future.result().newest

        return together(act, len(self.ranks))

    def load(self) -> list[object]:
        return together(lambda rank: (loaded := self.ranks[rank].load()) and loaded.step, len(self.ranks))

    def close(self) -> None:
        for rank in self.ranks:
            with contextlib.suppress(AgreementError):  # the tests have seen them
                rank.close()


def gone(self: Coordinator, save: int, step: int) -> None:
    """In place of ``commit``: the store died before it had the outcome."""
    raise StoreError("the job's store failed: connection reset")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    job.close()


def test_all_ranks_commit_and_load_the_same_step(job: Job, tmp_path: Path) -> None:
    assert job.load() == [None] * WORLD
    assert job.save(1) == [True] * WORLD
    assert job.save(2) == [True] * WORLD
    assert job.load() == [2] * WORLD
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"c.{rank}-of-3" for rank in range(WORLD)]


def test_a_rank_that_fails_fails_the_step_on_all_at_once(job: Job) -> None:
    job.save(1)
    start = time.monotonic()

    def act(rank: int) -> object:
        if rank == 1:
            with pytest.raises(Exception, match="cannot be stored"):
                job.ranks[rank].save({"t": object()}, 2)
            return None
        return job.ranks[rank].save({"t": torch.ones(9)}, 2).exception(PATIENCE_S)

    errors = together(act)
    assert "rank 1 failed" in str(errors[0])
    assert "rank 1 failed" in str(errors[2])
    assert time.monotonic() - start < PATIENCE_S / 2
    assert all([c.step for c in rank.list()] == [1] for rank in job.ranks)
    assert job.save(3) == [True] * WORLD
    assert job.load() == [3] * WORLD


def test_a_silent_rank_is_named_after_the_time_out(tmp_path: Path) -> None:
    job = Job(tmp_path, timeout_s=1.0)
    job.save(1)
    futures = [job.ranks[rank].save({"t": torch.ones(9)}, 2) for rank in (0, 2)]
    for future in futures:
        error = future.exception(PATIENCE_S)
        assert isinstance(error, AgreementError)
        assert "ranks 1 do not" in str(error)
    assert all([c.step for c in rank.list()] == [1] for rank in job.ranks)
    job.close()


def test_a_late_rank_learns_that_the_others_gave_up(tmp_path: Path) -> None:
    job = Job(tmp_path, timeout_s=1.0)
    early = [job.ranks[rank].save({"t": torch.ones(9)}, 1) for rank in (0, 2)]
    assert all(isinstance(future.exception(PATIENCE_S), AgreementError) for future in early)
    assert isinstance(job.ranks[1].save({"t": torch.ones(9)}, 1).exception(PATIENCE_S), AgreementError)
    assert all(rank.list() == [] for rank in job.ranks)
    job.close()


def test_ranks_that_save_different_steps_commit_neither(job: Job) -> None:
    errors = together(lambda rank: job.ranks[rank].save({}, rank // 2).exception(PATIENCE_S))
    assert all(isinstance(error, AgreementError) for error in errors)


def test_recovery_takes_the_newest_that_all_ranks_hold(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for step in (1, 2):
        job.save(step)
    job.close()
    with_damage = job.ranks[1].path
    content = with_damage.read_bytes()
    pattern = torch.full((50,), 2.0).numpy().tobytes()
    assert pattern in content
    with with_damage.open("r+b") as file:
        file.seek(content.index(pattern))
        file.write(b"\0" * 200)
    again = Job(tmp_path)
    assert again.load() == [1] * WORLD
    assert again.save(7) == [True] * WORLD
    assert all([c.step for c in rank.list()][:2] == [7, 1] for rank in again.ranks)
    again.close()


def test_a_step_that_not_all_hold_is_not_restored(tmp_path: Path) -> None:
    """Rank 2 lost its disk's newest writes: the others' newer checkpoint is of no use."""
    job = Job(tmp_path)
    job.save(1)
    job.close()
    before = job.ranks[2].path.read_bytes()
    more = Job(tmp_path)
    more.save(2)
    more.close()
    job.ranks[2].path.write_bytes(before)
    again = Job(tmp_path)
    assert again.load() == [1] * WORLD
    again.close()


@pytest.mark.parametrize("what", ["damaged", "missing"])
def test_a_rank_that_lost_its_file_keeps_all_from_beginning_anew(tmp_path: Path, what: str) -> None:
    job = Job(tmp_path)
    job.save(1)
    job.close()
    file = tmp_path / "c.1-of-3"
    if what == "missing":
        file.unlink()
    else:
        with file.open("r+b") as opened:  # all but the superblock and the commit records
            size = file.stat().st_size
            opened.seek(1 << 16)
            opened.write(b"\xff" * (size - (1 << 16)))
    job = Job(tmp_path)

    def load(rank: int) -> str:
        with pytest.raises(PersistError, match="there is none that all of them can read") as raised:
            job.ranks[rank].load()
        return str(raised.value)

    texts = [str(text) for text in together(load)]
    assert all(f"c.{rank}-of-3: " in text for rank, text in enumerate(texts))
    job.close()


def test_prepared_on_all_ranks_is_held_by_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store died between the vote and its outcome: nobody published, and nothing is lost."""

    job = Job(tmp_path)
    job.save(1)
    with monkeypatch.context() as patch:
        patch.setattr(Coordinator, "commit", gone)
        assert all(isinstance(outcome, StoreError) for outcome in job.save(2))
    job.close()
    again = Job(tmp_path)
    assert again.load() == [2] * WORLD
    assert again.save(3) == [True] * WORLD
    again.close()


def test_a_store_that_comes_back_frees_the_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More saves than slots fail, each at once: a trainer does not wait for a slot that cannot become free."""
    job = Job(tmp_path)
    job.save(1)
    with monkeypatch.context() as broken:
        broken.setattr(Coordinator, "commit", gone)
        broken.setattr(Coordinator, "_decide", gone)
        start = time.monotonic()
        for step in range(2, 7):
            assert all(isinstance(error, StoreError) for error in job.save(step))
        assert time.monotonic() - start < PATIENCE_S / 2
    assert job.save(7) == [True] * WORLD
    assert job.load() == [7] * WORLD
    assert all([c.step for c in rank.list()] == [7, 1] for rank in job.ranks)
    job.close()


def test_a_rank_that_did_not_hear_of_the_commit_commits_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, commit = Job(tmp_path), Coordinator.commit

    def deaf(self: Coordinator, save: int, step: int) -> None:
        commit(self, save, step)
        if self.rank == 0 and step == 2:
            gone(self, save, step)

    monkeypatch.setattr(Coordinator, "commit", deaf)
    job.save(1)
    error, *others = job.save(2)
    assert isinstance(error, StoreError) and others == [True] * (WORLD - 1)
    assert job.save(3) == [True] * WORLD
    assert all([(c.step, c.published) for c in rank.list()] == [(3, True), (2, True), (1, True)] for rank in job.ranks)
    job.close()


def test_what_all_hold_is_committed_though_the_last_died_right_after_it_said_so() -> None:
    first, last = (Coordinator(store, rank, 2, "test", 0.5) for store in [HashStore()] for rank in range(2))
    last._set("save/1/1", "7")
    first.commit(1, 7)
    last._set("save/2/1", "another step")
    with pytest.raises(AgreementError, match="ranks 1 do not"):
        first.commit(2, 8)


def test_what_was_resumed_outlives_a_larger_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody had published it, and the first save after the restart makes the file anew, with its newest."""

    job = Job(tmp_path)
    job.save(1)
    with monkeypatch.context() as patch:
        patch.setattr(Coordinator, "commit", gone)
        job.save(2)
    job.close()
    again = Job(tmp_path)
    assert again.load() == [2] * WORLD
    assert again.save(3, elements=50_000) == [True] * WORLD
    assert [one.step for one in again.ranks[0].list()] == [3, 2]
    again.close()


def test_a_rank_that_never_comes(tmp_path: Path) -> None:
    with pytest.raises(AgreementError, match=r"rank 0 has not made its checkpointer within 0\.2 s"):
        Coordinator(HashStore(), 1, 2, "test", 0.2)


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan"), float("inf")])
def test_a_time_out_that_is_none_is_named(timeout_s: float) -> None:
    with pytest.raises(PersistError, match=f"timeout_s is {timeout_s!r}: it must be more than 0"):
        Coordinator(HashStore(), 0, 1, "test", timeout_s)


def test_the_store_does_not_grow_with_the_run() -> None:
    store = HashStore()
    coordinator = Coordinator(store, 0, 1, "test", PATIENCE_S)
    sizes = []
    for _ in range(200):
        save = coordinator.next_save()
        coordinator.commit(save, save)
        sizes.append(store.num_keys())
    assert sizes[199] == sizes[99] < 200
    coordinator._decide = gone  # type: ignore[assignment, method-assign] - it is not even asked
    with pytest.raises(StoreError, match="restart the job"):
        coordinator.settle(1)


def test_a_wait_does_not_hold_up_the_jobs_own_store(tmp_path: Path) -> None:
    store = TCPStore("127.0.0.1", 0, 2, is_master=True, timeout=timedelta(seconds=30), wait_for_workers=False)
    coordinator = Coordinator(store, 0, 2, "test", 2.0)

    def wait() -> None:
        with pytest.raises(AgreementError):
            coordinator.commit(1, 1)

    waiting = threading.Thread(target=wait)
    waiting.start()
    start = time.monotonic()
    store.set("a key of the job", "1")
    assert time.monotonic() - start < 1.5
    waiting.join(PATIENCE_S)


PEER = """
import os, signal, sys
from datetime import timedelta
from pathlib import Path
import torch
from torch.distributed import TCPStore
from checkmate.persist.checkpointer import Checkpointer
from checkmate.persist.coordinator import Coordinator
from checkmate.persist.engine import Options
store = TCPStore("127.0.0.1", int(sys.argv[2]), 2, is_master=False, timeout=timedelta(seconds=60))
coordinator = Coordinator(store, 1, 2, "test", 60.0)
c = Checkpointer(Path(sys.argv[1]), in_flight=2, options=Options(chunk_bytes=65536), coordinator=coordinator)
c.save({"t": torch.ones(9)}, 1).result(60)
Coordinator.commit = lambda *a: os.kill(os.getpid(), signal.SIGKILL)  # durable here, and never said
c.save({"t": torch.zeros(9)}, 2).result(60)
"""


def test_p8_a_peer_that_dies_in_mid_commit(tmp_path: Path) -> None:
    store = TCPStore("127.0.0.1", 0, 2, is_master=True, timeout=timedelta(seconds=60), wait_for_workers=False)
    peer = subprocess.Popen(
        [sys.executable, "-P", "-c", PEER, str(tmp_path / "c"), str(store.port)], env=dict(os.environ)
    )
    try:
        coordinator = Coordinator(store, 0, 2, "test", 60.0)
        options = Options(chunk_bytes=65536)
        ours = Checkpointer(tmp_path / "c", in_flight=2, options=options, coordinator=coordinator)
        assert ours.save({"t": torch.ones(9)}, 1).result(PATIENCE_S).newest
        coordinator._timeout_s = 3.0
        error = ours.save({"t": torch.zeros(9)}, 2).exception(PATIENCE_S)
        assert isinstance(error, AgreementError)
        assert "ranks 1 do not" in str(error)
        assert [c.step for c in ours.list()] == [1]
        with pytest.raises(AgreementError):
            ours.close()
        assert peer.wait(PATIENCE_S) != 0
    finally:
        peer.kill()
        peer.wait()
    both = Job(tmp_path, world=2)
    assert both.load() == [1, 1]
    both.close()


def test_over_the_process_group_of_the_job(tmp_path: Path) -> None:
    with pytest.raises(AgreementError, match="init_process_group"):
        Coordinator.of_job()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        options = Options(chunk_bytes=65536)
        with Checkpointer(
            tmp_path / "c", in_flight=1, options=options, coordinator=Coordinator.of_job()
        ) as checkpointer:
            assert checkpointer.save({"t": torch.ones(9)}, 1).result(PATIENCE_S).newest
            assert checkpointer.load()
    finally:
        dist.destroy_process_group()
