"""When a trainer waits, and for what: an engine in memory copies only when it is told to."""

import contextlib
import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.persist_engine import held, memory_engine
from torch import Tensor

from checkmate.persist.checkpointer import Checkpointer, CheckpointWarning
from checkmate.persist.engine import PersistError
from checkmate.persist.state import StateError
from checkmate.tensors import is_same

__all__ = ["memory_engine"]
pytestmark = pytest.mark.usefixtures("memory_engine")
PATIENCE_S = 20.0
LARGE = {"large": torch.zeros(1 << 15)}
"""Threads of the engine copy it."""


class Trainer:
    """A model with a buffer and a frozen parameter, and its optimizer."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        self.model[2].requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 8)).sum().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()

    def state(self) -> dict[str, object]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def copy(self) -> list[Tensor]:
        return [tensor.clone() for tensor in self.model.state_dict().values()]


@pytest.fixture
def trainer() -> Trainer:
    trainer = Trainer()
    trainer.step()
    return trainer


@contextlib.contextmanager
def blocked(action: object) -> Iterator[threading.Thread]:
    """Runs something that must wait; it must be over at the end of the block."""
    assert callable(action)
    thread = threading.Thread(target=action)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive(), "it did not wait"
    yield thread
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), "it still waits"


def opened(tmp_path: Path, trainer: Trainer, **options: object) -> Checkpointer:
    """With a file, and nothing in flight."""
    checkpointer = Checkpointer(tmp_path / "c", in_flight=2, timeout_s=PATIENCE_S, **options)  # type: ignore[arg-type]
    checkpointer.save(trainer.state(), 0).result(PATIENCE_S)
    return checkpointer


def test_without_attach_save_returns_when_all_is_copied(tmp_path: Path, trainer: Trainer) -> None:
    with opened(tmp_path, trainer, capacity=1 << 20) as checkpointer:
        engine = held(checkpointer.path)
        engine.copying.clear()
        with blocked(lambda: checkpointer.save(LARGE, 1)):
            engine.copying.set()


def test_t4_a_parameter_changed_after_save_is_stored_as_it_was(tmp_path: Path, trainer: Trainer) -> None:
    with opened(tmp_path, trainer) as checkpointer:
        weight = trainer.model[0].weight
        large = torch.randn(1 << 15)  # threads of the engine copy it
        was, large_was = weight.detach().clone(), large.clone()
        future = checkpointer.save({**trainer.state(), "large": large}, 1)
        weight.data.fill_(0.0)
        large.zero_()
        future.result(PATIENCE_S)
        loaded = checkpointer.load()
        assert loaded
        assert is_same(loaded.state["model"]["0.weight"], was)
        assert is_same(loaded.state["large"], large_was)


def test_t5_moments_that_were_allocated_anew_are_those_stored(tmp_path: Path, trainer: Trainer) -> None:
    with opened(tmp_path, trainer) as checkpointer:
        checkpointer.attach(trainer.optimizer)
        for step in (1, 2):
            state = trainer.optimizer.state[trainer.model[0].weight]
            state["exp_avg"] = torch.full_like(state["exp_avg"], float(step))
            checkpointer.save(trainer.state(), step).result(PATIENCE_S)
        loaded = checkpointer.load()
        assert loaded
        assert loaded.step == 2
        assert torch.all(loaded.state["optimizer"]["state"][0]["exp_avg"] == 2.0)


def test_an_attached_optimizer_waits_before_its_step_and_not_before(tmp_path: Path, trainer: Trainer) -> None:
    with opened(tmp_path, trainer) as checkpointer:
        checkpointer.attach(trainer.optimizer)
        engine = held(checkpointer.path)
        model = torch.nn.Linear(2, 2)  # all of the state is the optimizer's
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
        checkpointer.attach(optimizer)
        was = model.weight.detach().clone()
        engine.copying.clear()
        future = checkpointer.save(model.state_dict(), 1)  # returns
        trainer.step()  # other parameters: does not wait
        model(torch.ones(1, 2)).sum().backward()  # reading does not wait
        with blocked(optimizer.step):
            assert is_same(model.weight.detach(), was)
            engine.copying.set()
        assert not is_same(model.weight.detach(), was)
        assert future.result(PATIENCE_S).step == 1
        loaded = checkpointer.load()
        assert loaded
        assert is_same(loaded.state["weight"], was)


def test_parameters_without_gradient_are_not_waited_for(tmp_path: Path, trainer: Trainer) -> None:
    with opened(tmp_path, trainer) as checkpointer:
        checkpointer.attach(trainer.optimizer)
        engine = held(checkpointer.path)
        engine.copying.clear()
        future = checkpointer.save({"frozen": trainer.model[2].weight}, 1)
        trainer.step()
        assert not future.done()
        engine.copying.set()
        future.result(PATIENCE_S)


def test_buffers_are_copied_before_save_returns(tmp_path: Path, trainer: Trainer) -> None:
    """A forward pass changes them: no optimizer's hook could protect them."""
    with opened(tmp_path, trainer, capacity=1 << 20) as checkpointer:
        checkpointer.attach(trainer.optimizer)
        engine = held(checkpointer.path)
        engine.copying.clear()
        with blocked(lambda: checkpointer.save({**trainer.state(), "buffers": LARGE}, 1)):
            engine.copying.set()


def test_few_bytes_are_copied_by_the_caller(tmp_path: Path, trainer: Trainer) -> None:
    with opened(tmp_path, trainer) as checkpointer:
        checkpointer.attach(trainer.optimizer)
        engine = held(checkpointer.path)
        mean = trainer.model[1].running_mean
        was = mean.clone()
        engine.copying.clear()
        future = checkpointer.save(trainer.state(), 1)  # returns
        mean.add_(1.0)
        engine.copying.set()
        future.result(PATIENCE_S)
        loaded = checkpointer.load()
        assert loaded
        assert is_same(loaded.state["model"]["1.running_mean"], was)


def test_a_change_that_is_no_step_makes_the_save_fail(tmp_path: Path, trainer: Trainer) -> None:
    checkpointer = opened(tmp_path, trainer)
    checkpointer.attach(trainer.optimizer)
    engine = held(checkpointer.path)
    engine.copying.clear()
    future = checkpointer.save({"weight": trainer.model[0].weight}, 1)
    with torch.no_grad():
        trainer.model[0].weight.mul_(2.0)
    engine.copying.set()
    with pytest.raises(StateError, match="changed while it was being saved"):
        future.result(PATIENCE_S)
    assert [c.step for c in checkpointer.list()] == [0]
    with pytest.warns(CheckpointWarning, match="changed while"):
        checkpointer.save(trainer.state(), 2).result(PATIENCE_S)
    checkpointer.close()


def test_wait_copied_lets_anybody_change_anything(tmp_path: Path, trainer: Trainer) -> None:
    with opened(tmp_path, trainer) as checkpointer:
        checkpointer.attach(trainer.optimizer)
        engine = held(checkpointer.path)
        weight = trainer.model[0].weight
        was = weight.detach().clone()
        engine.copying.clear()
        future = checkpointer.save({"weight": weight}, 1)
        with blocked(checkpointer.wait_copied):
            engine.copying.set()
        with torch.no_grad():
            weight.mul_(2.0)
        future.result(PATIENCE_S)
        loaded = checkpointer.load()
        assert loaded
        assert is_same(loaded.state["weight"], was)


def test_what_was_saved_is_let_go(tmp_path: Path) -> None:
    """A closed-over state would double the memory."""
    trainer = Trainer()
    with opened(tmp_path, trainer) as checkpointer:
        tensor = torch.ones(10)
        seen = weakref.ref(tensor)
        future = checkpointer.save({"t": tensor}, 1)
        del tensor
        future.result(PATIENCE_S)
        gc.collect()
        assert seen() is None


def test_n_saves_are_in_flight_and_the_next_waits(tmp_path: Path, trainer: Trainer) -> None:
    with opened(tmp_path, trainer) as checkpointer:
        checkpointer.attach(trainer.optimizer)
        engine = held(checkpointer.path)
        engine.copying.clear()
        state = {"weight": trainer.model[0].weight}
        futures = [checkpointer.save(state, step) for step in (1, 2)]
        with blocked(lambda: futures.append(checkpointer.save(state, 3))):
            engine.copying.set()
        assert [future.result(PATIENCE_S).step for future in futures] == [1, 2, 3]


def test_a_copy_that_takes_too_long_fails_the_save_and_not_the_training(tmp_path: Path, trainer: Trainer) -> None:
    checkpointer = Checkpointer(tmp_path / "c", in_flight=2, timeout_s=0.3)
    checkpointer.save(trainer.state(), 0).result(PATIENCE_S)
    checkpointer.attach(trainer.optimizer)
    engine = held(checkpointer.path)
    engine.copying.clear()
    future = checkpointer.save({"weight": trainer.model[0].weight}, 1)
    trainer.step()
    with pytest.raises((TimeoutError, PersistError)):
        future.result(PATIENCE_S)
    engine.copying.set()
    assert checkpointer.failures == 1
    with pytest.warns(CheckpointWarning):
        assert checkpointer.save(trainer.state(), 2).result(PATIENCE_S).newest
    checkpointer.close()


def test_p4_an_error_is_told_and_the_next_save_works(tmp_path: Path, trainer: Trainer) -> None:
    checkpointer = opened(tmp_path, trainer)
    held(checkpointer.path).fail = PersistError(28, "No space left on device")
    future = checkpointer.save(trainer.state(), 1)
    with pytest.raises(PersistError, match="No space left"):
        future.result(PATIENCE_S)
    trainer.step()
    with pytest.warns(CheckpointWarning, match="No space left"):
        assert checkpointer.save(trainer.state(), 2).result(PATIENCE_S).newest
    assert checkpointer.failures == 1
    checkpointer.close()


def test_p4_on_error_raise(tmp_path: Path, trainer: Trainer) -> None:
    checkpointer = opened(tmp_path, trainer, on_error="raise")
    held(checkpointer.path).fail = PersistError(5, "Input/output error")
    with pytest.raises(PersistError):
        checkpointer.save(trainer.state(), 1).result(PATIENCE_S)
    with pytest.raises(PersistError, match="Input/output error"):
        checkpointer.save(trainer.state(), 2)
    checkpointer.save(trainer.state(), 2).result(PATIENCE_S)
    checkpointer.close()


def test_p5_the_last_error_reaches_the_caller_of_close(tmp_path: Path, trainer: Trainer) -> None:
    checkpointer = opened(tmp_path, trainer)
    held(checkpointer.path).fail = PersistError(5, "Input/output error")
    checkpointer.save(trainer.state(), 1)
    with pytest.raises(PersistError, match="Input/output error"):
        checkpointer.close()
    checkpointer.close()  # it is closed all the same
    with pytest.raises(PersistError, match="is closed"):
        checkpointer.save(trainer.state(), 2)


def test_a_close_that_timed_out_leaves_the_gate_and_can_be_tried_again(tmp_path: Path) -> None:
    """Memory that is still being copied must not change, whatever close() said."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    checkpointer = Checkpointer(tmp_path / "c", in_flight=2, timeout_s=PATIENCE_S)
    checkpointer.save(model.state_dict(), 0).result(PATIENCE_S)
    checkpointer.attach(optimizer)
    was = model.weight.detach().clone()
    engine = held(checkpointer.path)
    engine.copying.clear()
    future = checkpointer.save(model.state_dict(), 1)
    checkpointer._timeout_s = 0.5  # of close() alone
    with pytest.raises(TimeoutError, match=r"saves were not done within 0\.5 s"):
        checkpointer.close()
    with pytest.raises(PersistError, match="is closed"):
        checkpointer.save(model.state_dict(), 2)
    model(torch.ones(1, 2)).sum().backward()
    with blocked(optimizer.step):
        engine.copying.set()
    assert not is_same(model.weight.detach(), was)
    assert future.result(PATIENCE_S).step == 1
    loaded = checkpointer.load()
    assert loaded
    assert is_same(loaded.state["weight"], was)
    checkpointer.close()
    assert checkpointer.list() == [], "now it is"


def test_a_larger_state_makes_the_file_anew_with_its_newest_checkpoint(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "c", in_flight=1, timeout_s=PATIENCE_S) as checkpointer:
        checkpointer.save({"t": torch.ones(100)}, 1).result(PATIENCE_S)
        checkpointer.save({"t": torch.ones(9000)}, 2).result(PATIENCE_S)
        assert [c.step for c in checkpointer.list()] == [2, 1]
        loaded = checkpointer.load(step=1)
        assert loaded
        assert torch.equal(loaded.state["t"], torch.ones(100))
        assert [path.name for path in tmp_path.iterdir()] == ["c"]
