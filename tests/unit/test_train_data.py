"""DataLoaders of a restarted script continue exactly where they stopped."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
)

from checkmate.config import CheckmateError
from checkmate.train import rng
from checkmate.train.data import LoaderTracker


class Noisy(Dataset[Tensor]):
    """Items that say which they are and hold a random number, as augmentation does."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        self.loaded.append(index)
        in_worker = torch.utils.data.get_worker_info() is not None
        noise = 0.0 if in_worker else torch.rand(()).item() + random.random() + np.random.rand()
        return torch.tensor([index, noise], dtype=torch.float64)


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor([float(i)]) for i in range(20))


class GlobalShuffle(Sampler[int]):
    """Draws from the global generators, eagerly."""

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(10).tolist()
        random.shuffle(order)
        return iter(order)


@pytest.fixture
def tracker() -> Iterator[Callable[[], LoaderTracker]]:
    made: list[LoaderTracker] = []

    def fresh() -> LoaderTracker:
        """The tracker of a (re)started process."""
        for old in made:
            old.remove()
        made.append(LoaderTracker())
        made[-1].install()
        return made[-1]

    yield fresh
    for old in made:
        old.remove()


Script = Callable[[], Iterator[Tensor]]


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def run(tracker: LoaderTracker, script: Script, seed: int, stop_after: int | None = None) -> Any:
    """Run a script whose batches are each one training step; after ``stop_after`` steps return what is restored."""
    seed_all(seed)
    seen = []
    after = positions = None
    for batch in script():
        if after is not None:  # the forward after the last step before the kill
            return seen, {"after": after, "data": positions, "progress": tracker.progress()}
        seen.append(batch.clone())
        torch.rand(3)  # dropout
        if len(seen) == stop_after:
            after, positions = rng.capture(), msgpack.unpackb(msgpack.packb(tracker.positions()))
    return seen, after and {"after": after, "data": positions, "progress": tracker.progress()}


def resume(tracker: LoaderTracker, script: Script, state: Any, other_world: bool = False) -> list[Tensor]:
    """What a restarted script sees: its own seeds differ, and resume happens at its first loader."""
    seed_all(999)

    def restore() -> None:
        tracker.before_iterate = None
        tracker.replay(state["data"], state["progress"], state["after"], other_world)
        rng.apply(state["after"])

    tracker.before_iterate = restore
    seen = []
    for batch in script():
        tracker.arrive()
        seen.append(batch.clone())
        torch.rand(3)
    return seen


def epochs(make: Callable[[], DataLoader[Any]], count: int = 3) -> Script:
    def script() -> Iterator[Tensor]:
        loader = make()
        for epoch in range(count):
            if isinstance(loader.sampler, DistributedSampler):
                loader.sampler.set_epoch(epoch)
            yield from loader

    return script


def own_generator() -> DataLoader[Any]:
    data = Noisy(10)
    return DataLoader(data, 3, sampler=RandomSampler(data, generator=torch.Generator().manual_seed(5)))


def shared_generator(workers: int) -> DataLoader[Any]:
    return DataLoader(Noisy(10), 3, shuffle=True, num_workers=workers, generator=torch.Generator().manual_seed(6))


def validating() -> Iterator[Tensor]:
    """Validation through a loader of its own, half of it, after every epoch."""
    loader, check = DataLoader(Noisy(10), 2, shuffle=True), DataLoader(Noisy(6), 1, shuffle=True)
    for _ in range(3):
        yield from loader
        for index, _batch in enumerate(check):
            if index == 2:
                break


def validating_all() -> Iterator[Tensor]:
    """Random numbers are drawn by the validation of the first epochs, which a restart does not repeat."""
    loader, check = DataLoader(Noisy(5), 2, shuffle=True), DataLoader(Noisy(3), 1, shuffle=True)
    for _ in range(4):
        yield from loader
        for _batch in check:
            torch.rand(2)


def zipped() -> Iterator[Tensor]:
    left, right = DataLoader(Noisy(8), 2, shuffle=True), DataLoader(Noisy(12), 3, shuffle=True)
    for _ in range(2):
        for a, b in zip(left, right, strict=True):
            yield torch.cat([a, b])


def broken_off() -> Iterator[Tensor]:
    """Epochs of at most three batches, and a new loader for each epoch."""
    for _ in range(3):
        for index, batch in enumerate(DataLoader(Noisy(12), 2, shuffle=True)):
            if index == 3:
                break
            yield batch


def by_hand() -> Iterator[Tensor]:
    loader = DataLoader(Noisy(6), 2, shuffle=True)
    iterator = iter(loader)
    for _ in range(3):
        while (batch := next(iterator, None)) is not None:
            yield batch
        iterator = iter(loader)


SCRIPTS: dict[str, Script] = {
    "sequential": epochs(lambda: DataLoader(Noisy(7), 2)),
    "shuffled": epochs(lambda: DataLoader(Noisy(10), 3, shuffle=True)),
    "distributed": epochs(lambda: DataLoader((d := Noisy(20)), 3, sampler=DistributedSampler(d, 2, 1, seed=3))),
    "own generator": epochs(own_generator),
    "shared generator": epochs(lambda: shared_generator(0)),
    "no batching": epochs(lambda: DataLoader((d := Noisy(5)), batch_size=None, sampler=RandomSampler(d)), 2),
    "replacement": epochs(lambda: DataLoader((d := Noisy(9)), 2, sampler=RandomSampler(d, True, 8))),
    "eager sampler": epochs(lambda: DataLoader(Noisy(10), 3, sampler=GlobalShuffle())),
    "iterable": epochs(lambda: DataLoader(Stream(), 3), 2),
    "validating": validating,
    "validating all": validating_all,
    "zipped": zipped,
    "by hand": by_hand,
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_continues_bit_for_bit(name: str, tracker: Callable[[], LoaderTracker]) -> None:
    script = SCRIPTS[name]
    whole, _ = run(tracker(), script, seed=1)
    for stop in range(1, len(whole)):
        _, state = run(tracker(), script, seed=1, stop_after=stop)
        rest = resume(tracker(), script, state)
        assert len(rest) == len(whole) - stop, f"after {stop} steps"
        assert all(torch.equal(a, b) for a, b in zip(rest, whole[stop:], strict=True)), f"after {stop} steps"


class Split(Sampler[list[int]]):
    """As accelerate's sampler: what is known of it is where its class is."""

    def __init__(self, inner: Sampler[list[int]]) -> None:
        self.batch_sampler = inner

    def __len__(self) -> int:
        return len(self.batch_sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[list[int]]:
        yield from self.batch_sampler


Split.__module__ = "accelerate.data_loader"


def looking_ahead() -> Iterator[Tensor]:
    """As accelerate's loader: it draws a batch before it hands out the one before."""
    sampler = RandomSampler(data := Noisy(10), generator=torch.Generator().manual_seed(5))
    loader = DataLoader(data, batch_sampler=Split(BatchSampler(sampler, 3, False)))
    for _ in range(3):
        drawn = iter(loader)
        if (newest := next(drawn, None)) is None:
            continue
        for batch in drawn:
            yield newest
            newest = batch
        yield newest


def test_a_batch_that_was_drawn_and_not_used_is_drawn_again(tracker: Callable[[], LoaderTracker]) -> None:
    whole, _ = run(tracker(), looking_ahead, seed=1)
    assert len(whole) == 12
    for stop in range(1, len(whole)):
        _, state = run(tracker(), looking_ahead, seed=1, stop_after=stop)
        rest = resume(tracker(), looking_ahead, state)
        assert [b.tolist() for b in rest] == [b.tolist() for b in whole[stop:]], f"after {stop} steps"


@pytest.mark.parametrize("make", [own_generator, lambda: shared_generator(0)])
def test_a_script_that_restores_its_loops_begins_with_the_epoch_under_way(
    make: Callable[[], DataLoader[Any]], tracker: Callable[[], LoaderTracker]
) -> None:
    whole, _ = run(tracker(), epochs(make), seed=1)
    for stop in range(1, len(whole)):
        _, state = run(tracker(), epochs(make), seed=1, stop_after=stop)
        restarted = tracker()
        restarted.from_the_top = False
        rest = resume(restarted, epochs(make, 3 - stop // 4), state)
        assert [b.tolist() for b in rest] == [b.tolist() for b in whole[stop:]], f"after {stop} steps"


@pytest.mark.parametrize("persistent", [False, True])
def test_continues_with_workers(persistent: bool, tracker: Callable[[], LoaderTracker]) -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(Noisy(10), 3, shuffle=True, num_workers=2, persistent_workers=persistent)

    for make in (loader, lambda: shared_generator(2)):
        script = epochs(make, 2)
        whole, _ = run(tracker(), script, seed=2)
        assert len(whole) == 8
        for stop in (2, 4, 5):
            _, state = run(tracker(), script, seed=2, stop_after=stop)
            rest = resume(tracker(), script, state)
            assert [b.tolist() for b in rest] == [b.tolist() for b in whole[stop:]]


def test_an_epoch_that_the_script_broke_off_is_over(tracker: Callable[[], LoaderTracker]) -> None:
    whole, _ = run(tracker(), broken_off, seed=1)
    for stop in (3, 6):  # ends of epochs: in between, the script's own counter starts anew
        _, state = run(tracker(), broken_off, seed=1, stop_after=stop)
        rest = resume(tracker(), broken_off, state)
        assert [b.tolist() for b in rest] == [b.tolist() for b in whole[stop:]]


def test_skipped_batches_are_not_loaded(tracker: Callable[[], LoaderTracker]) -> None:
    made: list[Noisy] = []

    def script() -> Iterator[Tensor]:
        made.append(Noisy(12))
        yield from DataLoader(made[-1], 2)

    _, state = run(tracker(), script, seed=1, stop_after=4)
    resume(tracker(), script, state)
    assert made[-1].loaded == [8, 9, 10, 11]


def test_following_changes_nothing(tracker: Callable[[], LoaderTracker]) -> None:
    seed_all(4)
    unfollowed = [b.tolist() for b in SCRIPTS["shuffled"]()]
    state = torch.get_rng_state()
    tracker()
    seed_all(4)
    assert [b.tolist() for b in SCRIPTS["shuffled"]()] == unfollowed
    assert torch.equal(torch.get_rng_state(), state)


def rank_of(rank: int, world: int, batch: int) -> Script:
    """Two epochs of 48 items, split over ranks."""
    return epochs(lambda: DataLoader((d := Noisy(48)), batch, sampler=DistributedSampler(d, world, rank, seed=3)), 2)


@pytest.mark.parametrize(
    ("before", "now", "seen_twice"),
    [((4, 3), (3, 4), 0), ((4, 2), (2, 4), 0), ((2, 2), (4, 2), 4), ((4, 2), (3, 2), 0), ((2, 2), (2, 3), 0)],
)
def test_another_number_of_ranks_goes_on_where_all_of_them_stopped(
    before: tuple[int, int], now: tuple[int, int], seen_twice: int, tracker: Callable[[], LoaderTracker]
) -> None:
    """(ranks, batch of each): after three steps no sample of the epoch is left out, at most a step's are repeated."""
    seen: list[int] = []
    for rank in range(before[0]):
        batches, state = run(tracker(), rank_of(rank, *before), seed=rank, stop_after=3)
        seen += [int(item) for batch in batches for item in batch[:, 0]]
    rest: list[int] = []
    for rank in range(now[0]):  # all from the last rank's state, as ranks that did not exist before
        batches = resume(tracker(), rank_of(rank, *now), state, other_world=True)
        items = [int(item) for batch in batches for item in batch[:, 0]]
        rest += items[: len(items) - 48 // now[0]]  # without the second epoch
    assert sorted(set(seen + rest)) == list(range(48))
    assert len(seen + rest) == 48 + seen_twice


@pytest.mark.parametrize("name", ["eager sampler", "iterable"])
def test_a_position_that_cannot_be_split_otherwise_is_refused(name: str, tracker: Callable[[], LoaderTracker]) -> None:
    _, state = run(tracker(), SCRIPTS[name], seed=1, stop_after=2)
    with pytest.raises(CheckmateError, match=r"another number of ranks.*DistributedSampler"):
        resume(tracker(), SCRIPTS[name], state, other_world=True)
