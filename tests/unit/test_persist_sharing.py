"""A Checkpointer among others: threads, forked children, interrupts; files that others make, move or cut meanwhile."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from checkmate.persist.checkpointer import Checkpointer, Saved
from checkmate.persist.engine import Engine, Options, PersistError, Ticket
from checkmate.persist.snapshot import Snapshot

PATIENCE_S = 60.0


def opened(path: Path) -> Checkpointer:
    return Checkpointer(path, in_flight=1, options=Options(chunk_bytes=65536), timeout_s=PATIENCE_S)


def state(step: int, elements: int = 100) -> dict[str, object]:
    return {"t": torch.full((elements,), float(step))}


def steps(path: Path) -> list[int]:
    with opened(path) as checkpointer:
        return [one.step for one in checkpointer.list()]


def test_a_file_that_another_program_made_meanwhile_stays(tmp_path: Path) -> None:
    path = tmp_path / "c"
    with opened(path) as checkpointer:
        path.write_text("a thesis")
        with pytest.raises(PersistError, match="c: exists already"):
            checkpointer.save(state(1), 1)
    assert path.read_text() == "a thesis"
    assert list(tmp_path.iterdir()) == [path]


def test_the_second_to_make_a_file_does_not_take_it_from_the_first(tmp_path: Path) -> None:
    path = tmp_path / "c"
    with opened(path) as first, opened(path) as second:
        first.save(state(1), 1).result(PATIENCE_S)
        with pytest.raises(PersistError, match="c: exists already"):
            second.save(state(7), 7)
        first.save(state(2), 2).result(PATIENCE_S)
    assert steps(path) == [2, 1]


@pytest.mark.parametrize("elements", [100, 100_000], ids=["fits", "grows"])
@pytest.mark.parametrize("how", ["removed", "replaced", "cut"])
def test_what_nobody_would_find_is_not_saved(tmp_path: Path, how: str, elements: int) -> None:
    path = tmp_path / "c"
    with opened(path) as checkpointer:
        checkpointer.save(state(1), 1).result(PATIENCE_S)
        if how == "cut":
            os.truncate(path, 4096)
        else:
            path.unlink()
        if how == "replaced":
            path.write_text("a thesis")
        error = checkpointer.save(state(2, elements), 2).exception(PATIENCE_S)
        assert isinstance(error, PersistError) and "removed, replaced or cut short" in str(error)
        with pytest.raises(PersistError, match="removed"):
            checkpointer.close()
    assert how != "replaced" or path.read_text() == "a thesis"


def test_a_link_stays_one_and_permissions_stay_when_a_file_grows(tmp_path: Path) -> None:
    (tmp_path / "large").mkdir()
    link, target = tmp_path / "c", tmp_path / "large" / "run"
    link.symlink_to(target)
    with opened(link) as checkpointer:
        checkpointer.save(state(1), 1).result(PATIENCE_S)
        target.chmod(0o600)
        checkpointer.save(state(2, 100_000), 2).result(PATIENCE_S)
    assert link.is_symlink() and steps(target) == [2, 1]
    assert target.stat().st_mode & 0o777 == 0o600
    assert sorted(entry.name for entry in tmp_path.rglob("*")) == ["c", "large", "run"]


def test_the_name_of_a_file_made_anew_is_durable_before_anything_is_saved_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut an unflushed folder leads to the old file, which the new checkpoints are not in."""
    events: list[str] = []
    flush, begin = os.fsync, Engine.begin

    def flushing(descriptor: int) -> None:
        flush(descriptor)
        if os.fstat(descriptor).st_ino == tmp_path.stat().st_ino:
            events.append("folder")

    def beginning(self: Engine, step: int, *args: int, timeout_s: float) -> Ticket:
        events.append(f"save {step}")
        return begin(self, step, *args, timeout_s=timeout_s)

    with opened(tmp_path / "c") as checkpointer:
        checkpointer.save(state(1), 1).result(PATIENCE_S)
        monkeypatch.setattr(os, "fsync", flushing)
        monkeypatch.setattr(Engine, "begin", beginning)
        checkpointer.save(state(2, 100_000), 2).result(PATIENCE_S)
    assert events == ["save 1", "folder", "save 2"]  # the one before is carried over first


def test_several_threads_save(tmp_path: Path) -> None:
    """Each state is larger than those of the thread before: the file is made and made anew under the others."""
    futures: list[Future[Saved]] = []
    with opened(tmp_path / "c") as checkpointer:

        def saves(thread: int) -> None:
            for number in range(4):
                step = 10 * thread + number
                futures.append(checkpointer.save(state(step, 5000 * step), step))

        threads = [threading.Thread(target=saves, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert len([future.result(PATIENCE_S) for future in futures]) == 16
        for one in checkpointer.list():
            loaded = checkpointer.load(one.step)
            assert loaded and (loaded.state["t"] == one.step).all()


def test_close_waits_for_the_save_of_another_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, outcome = threading.Event(), []
    settle = Snapshot.settle

    def slow(self: Snapshot) -> None:
        started.set()
        time.sleep(0.2)
        settle(self)

    monkeypatch.setattr(Snapshot, "settle", slow)
    checkpointer = opened(tmp_path / "c")
    saver = threading.Thread(target=lambda: outcome.append(checkpointer.save(state(1), 1)))
    saver.start()
    started.wait(PATIENCE_S)
    checkpointer.close()
    saver.join(PATIENCE_S)
    assert outcome[0].result(0).step == 1
    assert steps(tmp_path / "c") == [1]


def test_an_error_reaches_close_however_late_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = opened(tmp_path / "c")
    ended = checkpointer._ended

    def late(future: Future[Saved]) -> None:
        time.sleep(0.3)
        ended(future)

    def broken(self: Snapshot) -> None:
        raise PersistError(5, "Input/output error")

    monkeypatch.setattr(checkpointer, "_ended", late)
    monkeypatch.setattr(Snapshot, "copy", broken)
    checkpointer.save(state(1), 1)
    with pytest.raises(PersistError, match="Input/output error"):
        checkpointer.close()


@pytest.mark.parametrize("where", [(Snapshot, "__init__"), (Snapshot, "start"), (Engine, "about")])
def test_an_interrupted_save_gives_its_slot_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: tuple[type, str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with opened(tmp_path / "c") as checkpointer:
        checkpointer.save(state(1), 1).result(PATIENCE_S)
        with monkeypatch.context() as patch:
            patch.setattr(*where, interrupted)
            for step in (2, 3):
                with pytest.raises(KeyboardInterrupt):
                    checkpointer.save(state(step), step)
        assert checkpointer.save(state(4), 4).result(PATIENCE_S).newest
        assert checkpointer.failures == 0


FORKED = """
import os, sys, threading, time
import torch
from checkmate.persist import Checkpointer
from checkmate.persist.engine import Options, PersistError

model = torch.nn.Linear(100, 100)
optimizer = torch.optim.SGD(model.parameters())
model(torch.ones(1, 100)).sum().backward()
with Checkpointer(sys.argv[1], in_flight=1, options=Options(chunk_bytes=65536), timeout_s=60) as checkpointer:
    checkpointer.attach(optimizer)
    checkpointer.save(model.state_dict(), 1)
    # Locks that other threads hold at the fork: they stay taken in the child.
    with checkpointer._lock, checkpointer._file.engine._changed:
        taken = threading.Thread(target=checkpointer._turn.acquire)
        taken.start()
        taken.join()
        child = os.fork()
    if child == 0:
        told = 0
        for act in (checkpointer.load, checkpointer.list, lambda: checkpointer.save({}, 2)):
            try:
                act()
            except PersistError as error:
                told += "opened by the parent" in str(error)
        optimizer.step()  # its own copy: nothing to wait for
        checkpointer.wait_copied()
        sys.exit(told)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(code)
"""


def test_a_forked_child_is_told_and_never_waits(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-c", FORKED, tmp_path / "c"],
        timeout=PATIENCE_S,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 3, done.stderr
