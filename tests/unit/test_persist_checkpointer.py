"""Checkpointer on a real file: what is loaded after kills and damage, and what bad input gets told."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from checkmate.config import CheckmateError
from checkmate.persist import tune as tuning
from checkmate.persist.checkpointer import Checkpointer
from checkmate.persist.engine import Backend, Engine, Options, PersistError

CHUNK = 64 << 10
PATIENCE_S = 60.0
SMALL = Options(chunk_bytes=CHUNK, writers=2)


def opened(path: Path, **more: object) -> Checkpointer:
    return Checkpointer(path, **{"in_flight": 2, "options": SMALL, "timeout_s": PATIENCE_S, **more})  # type: ignore[arg-type]


def state(step: int, elements: int = 100_000) -> dict[str, object]:
    generator = torch.Generator().manual_seed(step)
    return {
        "data": torch.randn(elements, generator=generator),
        "marker": torch.full((64,), 1000.0 + step),
        "step": step,
    }


def saved(path: Path, *steps: int) -> None:
    with opened(path) as checkpointer:
        for step in steps:
            checkpointer.save(state(step), step).result(PATIENCE_S)


def damage(path: Path, step: int, data: bytes) -> None:
    """Overwrite the start of a step's data on storage."""
    content = path.read_bytes()
    pattern = state(step)["data"].numpy().tobytes()[:64]  # type: ignore[attr-defined]
    assert content.count(pattern) == 1
    with path.open("r+b") as file:
        file.seek(content.index(pattern))
        file.write(data)


@pytest.mark.parametrize("elements", [0, 1, 3, 16_381, 16_384, 16_387, 100_003])
def test_p7_any_size_is_restored_to_the_last_byte(tmp_path: Path, elements: int) -> None:
    with opened(tmp_path / "c") as checkpointer:
        checkpointer.save({"t": torch.arange(float(elements))}, 1).result(PATIENCE_S)
        loaded = checkpointer.load()
        assert loaded
        assert torch.equal(loaded.state["t"], torch.arange(float(elements)))


def test_a_new_process_finds_the_newest(tmp_path: Path) -> None:
    saved(tmp_path / "c", 10, 20, 30)
    with opened(tmp_path / "c") as checkpointer:
        loaded, older = checkpointer.load(), checkpointer.load(step=20)
        assert loaded
        assert older
        assert loaded.step == 30
        assert torch.equal(loaded.state["data"], state(30)["data"])  # type: ignore[arg-type]
        assert torch.equal(older.state["data"], state(20)["data"])  # type: ignore[arg-type]
        with pytest.raises(PersistError, match=r"no checkpoint of step 5; it holds \[10, 20, 30\]"):
            checkpointer.load(step=5)


def test_what_was_never_committed_is_not_offered(tmp_path: Path) -> None:
    saved(tmp_path / "c", 1)
    with Engine(tmp_path / "c") as engine:
        ticket = engine.begin(2, 0, timeout_s=PATIENCE_S)
        ticket.finish(publish=False)
        ticket.wait(PATIENCE_S)
    with opened(tmp_path / "c") as checkpointer:
        assert [one.step for one in checkpointer.list()] == [2, 1]
        with pytest.raises(PersistError, match=r"no checkpoint of step 2; it holds \[1\]"):
            checkpointer.load(step=2)


def test_what_a_process_left_that_died_while_the_file_grew_goes(tmp_path: Path) -> None:
    saved(tmp_path / "c", 1)
    (tmp_path / ".c.new").write_bytes(b"half a file")
    with opened(tmp_path / "c") as checkpointer:
        assert [path.name for path in tmp_path.iterdir()] == ["c"]
        checkpointer.save(state(2, 200_000), 2).result(PATIENCE_S)
        assert [c.step for c in checkpointer.list()] == [2, 1]


def test_nothing_saved_yet(tmp_path: Path) -> None:
    with opened(tmp_path / "c") as checkpointer:
        assert checkpointer.load() is None
        assert checkpointer.list() == []
        assert checkpointer.verify() == []
    assert list(tmp_path.iterdir()) == []


DYING = """
import os, signal, sys, threading
from pathlib import Path
from checkmate.persist import checkpointer, engine
import torch
c = checkpointer.Checkpointer(Path(sys.argv[1]), in_flight=2, options=engine.Options(chunk_bytes=65536, writers=2))
c.save({"t": torch.ones(50_000)}, 1).result(60)
returned = threading.Event()
engine.Ticket.finish = lambda *a, **k: returned.wait(60) and os.kill(os.getpid(), signal.SIGKILL)
future = c.save({"t": torch.zeros(50_000)}, 2)
returned.set()
future.result(60)
"""


def test_p1_killed_before_the_data_is_durable(tmp_path: Path) -> None:
    path = tmp_path / "c"
    done = subprocess.run(
        [sys.executable, "-P", "-c", DYING, path], timeout=120, check=False, capture_output=True, text=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    with opened(path) as checkpointer:
        loaded = checkpointer.load()
        assert loaded
        assert loaded.step == 1
        assert torch.equal(loaded.state["t"], torch.ones(50_000))


@pytest.mark.parametrize("data", [b"\0" * CHUNK, None], ids=["zeros (P2)", "one byte (P3)"])
def test_damage_is_named_and_passed_over(tmp_path: Path, data: bytes | None, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "c"
    saved(path, 1, 2)
    first = state(2)["data"].numpy().tobytes()[0]  # type: ignore[attr-defined]
    damage(path, 2, data or bytes([first ^ 1]))
    with opened(path) as checkpointer:
        loaded = checkpointer.load()
        assert loaded
        assert loaded.step == 1
        assert torch.equal(loaded.state["data"], state(1)["data"])  # type: ignore[arg-type]
        assert "step 2 is passed over" in caplog.text
        assert "chunk 0" in caplog.text
        with pytest.raises(PersistError, match="chunk 0"):
            checkpointer.load(step=2)
        assert [finding.problem is None for finding in checkpointer.verify()] == [False, True]


def test_a_damaged_manifest_is_passed_over_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "c"
    saved(path, 1, 2)
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(content.rindex(b"marker"))
        file.write(b"M")
    with opened(path) as checkpointer:
        loaded = checkpointer.load()
        assert loaded and loaded.step == 1
        assert "checkpoint 2 of step 2 in slot 1 is damaged" in caplog.text


@pytest.mark.parametrize("where", ["data", "header"])
def test_training_does_not_begin_anew_when_all_is_damaged(tmp_path: Path, where: str) -> None:
    path = tmp_path / "c"
    saved(path, 1)
    if where == "data":
        damage(path, 1, b"\0" * CHUNK)
    else:
        content = path.read_bytes()
        with path.open("r+b") as file:
            file.seek(content.index(b"CKMSLOT\n"))
            file.write(b"x")
    with opened(path) as checkpointer, pytest.raises(PersistError, match=r"had checkpoints, but none can be read"):
        checkpointer.load()


@pytest.mark.parametrize(
    "text", ['{"chunk_bytes": 1048576.0, "writers": 1, "in_flight": 1, "rate": 1}', "[" * 5000, '{"in_flight": 9999}']
)
def test_a_tuning_that_makes_no_sense_is_made_anew(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c"
    tuning.tuning_path(path).write_text(text)
    assert tuning.read_tuning(path) is None


def test_after_a_fall_back_the_checkpoint_that_was_loaded_is_kept_until_there_is_a_newer(tmp_path: Path) -> None:
    path = tmp_path / "c"
    with opened(path, in_flight=1) as checkpointer:
        for step in (1, 2):
            checkpointer.save(state(step), step).result(PATIENCE_S)
    damage(path, 2, b"\0" * 64)
    with opened(path, in_flight=1) as checkpointer:
        assert checkpointer.load()
        checkpointer.save(state(3), 3).result(PATIENCE_S)
        assert [c.step for c in checkpointer.list()] == [3, 1]


def test_save_goes_on_where_an_earlier_process_ended(tmp_path: Path) -> None:
    saved(tmp_path / "c", 1)
    saved(tmp_path / "c", 2)
    with opened(tmp_path / "c") as checkpointer:
        assert [c.step for c in checkpointer.list()] == [2, 1]


def test_another_n_is_taken_over(tmp_path: Path) -> None:
    saved(tmp_path / "c", 7)
    with opened(tmp_path / "c", in_flight=4) as checkpointer:
        assert checkpointer.save(state(8), 8).result(PATIENCE_S).step == 8
        assert checkpointer.in_flight == 4
        assert [c.step for c in checkpointer.list()] == [8, 7]


def test_probe_at_first_use_is_kept(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "c", timeout_s=PATIENCE_S) as checkpointer:
        checkpointer.save(state(1), 1).result(PATIENCE_S)
        kept = (tmp_path / "c.tune.json").read_text()
        assert 1 <= checkpointer.in_flight <= 3
    with Checkpointer(tmp_path / "c", timeout_s=PATIENCE_S) as checkpointer:
        checkpointer.save(state(2), 2).result(PATIENCE_S)
    assert (tmp_path / "c.tune.json").read_text() == kept
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "c.tune.json"]


@pytest.mark.parametrize(("pwrite", "chosen"), [(1.5, Backend.PWRITE), (1.01, Backend.AUTO)])
def test_the_back_end_is_chosen_by_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pwrite: float, chosen: Backend
) -> None:
    monkeypatch.setattr(
        tuning, "probe", lambda folder, options, nbytes: pwrite if options.backend is Backend.PWRITE else 1.0
    )
    assert tuning.tune(tmp_path / "c", nbytes=4 << 20).backend is chosen
    kept = tuning.read_tuning(tmp_path / "c")
    assert kept
    assert kept.options(Options()).backend is chosen
    forced = tuning.tune(tmp_path / "c", Options(backend=Backend.URING), nbytes=4 << 20)
    assert forced.backend is Backend.URING


def test_a_tuning_of_before_names_no_back_end(tmp_path: Path) -> None:
    tuning.tuning_path(tmp_path / "c").write_text('{"chunk_bytes": 65536, "writers": 3, "in_flight": 2, "rate": 1.0}')
    assert tuning.read_tuning(tmp_path / "c") == tuning.Tuning(65536, 3, 2, 1.0, Backend.AUTO)


def foreign(path: Path) -> Path:
    path.write_bytes(b"something else" * 10_000)
    return path


def truncated(path: Path) -> Path:
    saved(path, 1)
    os.truncate(path, path.stat().st_size // 2)
    return path


def folder(path: Path) -> Path:
    path.mkdir()
    return path


def empty(path: Path) -> Path:
    path.touch()
    return path


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (folder, "directory"),
        (foreign, "not a"),
        (truncated, "should have"),
        (empty, "c"),
        (lambda path: path / "below", "does not exist"),
        (lambda path: path.with_name("c" * 300), "File name too long"),
        (lambda path: path.with_name("c\0c"), "null byte"),
    ],
    ids=["directory", "foreign", "truncated", "empty", "no folder", "long", "null"],
)
def test_a_path_that_cannot_be_used(tmp_path: Path, make: object, text: str) -> None:
    assert callable(make)
    path = make(tmp_path / "c")
    before = {entry: entry.read_bytes() for entry in tmp_path.rglob("*") if entry.is_file()}
    with pytest.raises(CheckmateError, match=text) as caught:
        opened(path)
    assert path.name in str(caught.value)
    assert {entry: entry.read_bytes() for entry in tmp_path.rglob("*") if entry.is_file()} == before


def test_too_little_space_is_said_and_nothing_is_left(tmp_path: Path) -> None:
    checkpointer = opened(tmp_path / "c", capacity=1 << 48)
    with pytest.raises(PersistError, match="/c: the file needs"):
        checkpointer.save(state(1), 1)
    checkpointer.close()
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_fit_is_not_tried(tmp_path: Path) -> None:
    """An allocation that fails may have filled the disk: the free space in its message would be none."""
    checkpointer = opened(tmp_path / "c", capacity=shutil.disk_usage(tmp_path).total)
    with pytest.raises(PersistError, match=r"has \d{6,} free"):
        checkpointer.save(state(1), 1)
    checkpointer.close()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("in_flight", value) for value in (0, -1, 1.5, 1024)],
        *[("capacity", value) for value in (-1, "1 GB")],
        *[("memory", value) for value in (0, -1)],
        *[("timeout_s", value) for value in (0, -1.0, float("nan"), float("inf"))],
        ("on_error", "ignore"),
    ],
)
def test_options_that_make_no_sense(tmp_path: Path, name: str, value: object) -> None:
    with pytest.raises(PersistError, match=f"{name} is {value!r}: it must be"):
        opened(tmp_path / "c", **{name: value})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", [-1, "7", 1.0])
def test_a_step_that_is_no_whole_number(tmp_path: Path, step: int) -> None:
    with opened(tmp_path / "c") as checkpointer:
        with pytest.raises(PersistError, match=f"step is {step!r}: it must be"):
            checkpointer.save(state(1), step)
        assert list(tmp_path.iterdir()) == []


def test_one_process_at_a_time(tmp_path: Path) -> None:
    saved(tmp_path / "c", 1)
    with opened(tmp_path / "c"), pytest.raises(PersistError):
        opened(tmp_path / "c")


def test_training_resumed_is_training_that_went_on(tmp_path: Path) -> None:
    def parts() -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.3), torch.nn.Linear(32, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)

    def train(checkpointer: Checkpointer | None, start: int, stop: int) -> list[torch.Tensor]:
        model, optimizer, scheduler = parts()
        if checkpointer:
            checkpointer.attach(optimizer)
            if loaded := checkpointer.load():
                model.load_state_dict(loaded.state["model"])
                optimizer.load_state_dict(loaded.state["optimizer"])
                scheduler.load_state_dict(loaded.state["scheduler"])
                torch.set_rng_state(loaded.state["rng"])
        for step in range(start, stop):
            optimizer.zero_grad()
            model(torch.full((8, 16), float(step))).square().mean().backward()
            optimizer.step()
            scheduler.step()
            if checkpointer:
                everything = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
                saving = {name: part.state_dict() for name, part in everything.items()}
                checkpointer.save({**saving, "rng": torch.get_rng_state()}, step)
        return [parameter.detach() for parameter in model.parameters()]

    with opened(tmp_path / "c") as checkpointer:
        train(checkpointer, 0, 6)
    with opened(tmp_path / "c") as checkpointer:
        resumed = train(checkpointer, 6, 12)
    for left, right in zip(resumed, train(None, 0, 12), strict=True):
        assert torch.equal(left, right)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_the_state_is_that_of_the_call(tmp_path: Path) -> None:
    model = torch.nn.Linear(2000, 2000, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(64, 2000, device="cuda")
    with opened(tmp_path / "c") as checkpointer:
        checkpointer.attach(optimizer)
        for step in range(8):
            model(batch).square().mean().backward()
            optimizer.step()
            was = [tensor.clone() for tensor in model.state_dict().values()]
            checkpointer.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "n": step}, step)
            model(batch).square().mean().backward()
            optimizer.step()
            checkpointer.wait_copied()
            checkpointer._drain()
            loaded = checkpointer.load()
            assert loaded
            for tensor, value in zip(was, loaded.state["model"].values(), strict=True):
                assert value.is_cuda
                assert torch.equal(tensor, value)


def test_killed_between_a_fall_back_and_the_next_commit(tmp_path: Path) -> None:
    """What was loaded is the newest still, though the damaged one has been removed."""
    path = tmp_path / "c"
    saved(path, 1, 2)
    damage(path, 2, b"\0" * 64)
    with opened(path) as checkpointer:
        assert checkpointer.load()
        checkpointer._engine_for(1, 1)  # as the next save begins
        assert [c.step for c in checkpointer.list()] == [1]
    with opened(path) as checkpointer:
        loaded = checkpointer.load()
        assert loaded
        assert loaded.step == 1
