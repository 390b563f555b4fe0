"""Where every DataLoader of this process stands, and how a restarted script's loaders come to stand there again.

Loaders are told apart by the order in which the script first iterates them, which is the same after a restart. A
position is the number of epochs started and the batches yielded in the newest. On resume the loops of the unmodified
script run again from the top, and

* an epoch that was over yields nothing;
* the epoch that was under way skips the batches that were consumed: in the index sampler, so no data is loaded for
  them (an IterableDataset has no such sampler: its items are drawn and discarded);
* random numbers are drawn for neither: samplers see the states that they saw the first time, everything else sees
  the states with which the first batch after the restored step was drawn; an epoch that began between that step and
  the next forward begins with the states with which it began.

A framework that restores its own loops does not run them from the top: its first epoch is the one that was under way.
Hugging Face accelerate draws each batch before it hands out the one before: at a step the newest is not used yet.
"""

import functools
import itertools
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

from checkmate.config import CheckmateError
from checkmate.train import rng

Position = dict[str, Any]
"""Of one loader: {"started": epochs, "batches": int | None (that epoch is over), "generators": [bytes]}, and of an
epoch under way "at_iter" (random states when it began), "iter_generators" and "at_first" (random states at its first
index), "samples" (of the dataset that a batch takes over all ranks, None: not known), and "ahead" where a batch was
drawn that is not among "batches" (random states when it was drawn)."""

Progress = dict[str, Any]
"""Of one loader since the positions were taken: {"epoch": the one under way or None}, and of one that began since
"started", "at_iter" and "iter_generators"."""


_WHOLE = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)


class _Mode(Enum):
    """What an epoch yields: all, what is left of a replayed one (its first index sees the random states of then), or
    nothing."""

    PLAIN = auto()
    REPLAY = auto()
    EMPTY = auto()


@dataclass(eq=False)
class _Loader:
    """One DataLoader; ``index``: its place in the order of first iteration."""

    index: int
    reference: weakref.ReferenceType[DataLoader[Any]]
    started: int = 0
    noted: int = 0
    skipped: int = 0
    iterator: Callable[[], Any] = lambda: None
    at_iter: dict[str, Any] = field(default_factory=dict)
    iter_generators: list[bytes] = field(default_factory=list)
    at_first: dict[str, Any] | None = None
    looks_ahead: bool = False
    ahead: dict[str, Any] | None = None

    def position(self) -> Position:
        """Where it stands now, as plain values."""
        loader, iterator = self.reference(), self.iterator()
        self.noted = self.started
        position: Position = {"started": self.started, "batches": None, "generators": []}
        if loader is not None:
            position["generators"] = [rng.capture_generator(g) for g in _generators(loader)]
        if iterator is not None:
            position |= {
                "batches": self.skipped + iterator._num_yielded,
                "at_iter": self.at_iter,
                "iter_generators": self.iter_generators,
                "at_first": self.at_first,
                "samples": None if loader is None else _samples(loader),
            }
            if self.ahead is not None:
                position |= {"batches": position["batches"] - 1, "ahead": self.ahead}
        return position

    def progress(self) -> Progress:
        """What became of it since ``position``."""
        progress: Progress = {"epoch": self.started if self.iterator() is not None else None}
        if self.started > self.noted:
            progress |= {"started": self.started, "at_iter": self.at_iter, "iter_generators": self.iter_generators}
        return progress


class LoaderTracker:
    """Counts the batches of all DataLoaders and replays positions.

    ``before_iterate`` is called before each epoch, ``before_fetch`` before each batch. ``from_the_top``: a restarted
    script repeats all its epochs.
    """

    def __init__(self) -> None:
        self.before_iterate: Callable[[], None] | None = None
        self.before_fetch: Callable[[], None] | None = None
        self.from_the_top = True
        self._looking_ahead: weakref.WeakKeyDictionary[Any, _Loader] = weakref.WeakKeyDictionary()
        self._loaders: list[_Loader] = []
        self._by_loader: weakref.WeakKeyDictionary[DataLoader[Any], _Loader] = weakref.WeakKeyDictionary()
        self._replay: dict[int, Position] = {}
        self._beginnings: dict[int, Progress] = {}
        self._at_fetch: dict[str, Any] | None = None
        self._other_world = False
        self._undo: Callable[[], None] | None = None

    def install(self) -> None:
        """Start to follow the iteration of every DataLoader of this process."""
        if self._undo is not None:
            return
        loader_class: Any = DataLoader
        iterator_class: Any = _BaseDataLoaderIter
        iterate_alone, fetch_alone = loader_class.__iter__, iterator_class.__next__
        pid = os.getpid()

        @functools.wraps(iterate_alone)
        def iterate(loader: DataLoader[Any]) -> Any:
            if os.getpid() != pid:  # in a loader's worker process
                return iterate_alone(loader)
            return self._iterate(loader, iterate_alone)

        @functools.wraps(fetch_alone)
        def fetch(iterator: _BaseDataLoaderIter) -> Any:
            if self.before_fetch is not None:
                self.before_fetch()
            if (entry := self._looking_ahead.get(iterator)) is None:
                return fetch_alone(iterator)
            states, entry.ahead = rng.capture(), None
            batch = fetch_alone(iterator)
            entry.ahead = states
            return batch

        def undo() -> None:
            loader_class.__iter__, iterator_class.__next__ = iterate_alone, fetch_alone

        loader_class.__iter__, iterator_class.__next__ = iterate, fetch
        self._undo = undo

    def remove(self) -> None:
        """Stop following."""
        if self._undo is not None:
            self._undo()
            self._undo = None

    @property
    def is_iterating(self) -> bool:
        """True when an epoch of some loader is under way."""
        return any(loader.iterator() is not None for loader in self._loaders)

    def positions(self) -> list[Position]:
        """Of all loaders, in the order of first iteration."""
        return [loader.position() for loader in self._loaders]

    def progress(self) -> list[Progress]:
        """Of all loaders since ``positions``, in the order of first iteration."""
        return [loader.progress() for loader in self._loaders]

    def replay(
        self,
        positions: Sequence[Position],
        later: Sequence[Progress],
        at_fetch: dict[str, Any],
        other_world: bool = False,
    ) -> None:
        """Bring the loaders to ``positions``, those just after a step.

        ``later``: ``progress`` at the first forward after it; an epoch that was not under way any more is over, even
        if batches were left. ``at_fetch``: random states with which the next batch is drawn. ``other_world``: the
        positions are of another number of ranks.
        """
        self._at_fetch, self._other_world = at_fetch, other_world
        self._beginnings = {index: progress for index, progress in enumerate(later) if "started" in progress}
        for index, (position, progress) in enumerate(zip(positions, later, strict=False)):
            is_over = progress["epoch"] != position["started"]
            self._replay[index] = {**position, "batches": None} if is_over else position

    def arrive(self) -> None:
        """The first forward after ``replay``: what is iterated from now on begins as it may."""
        self._beginnings.clear()
        self._at_fetch = None

    def _iterate(self, loader: DataLoader[Any], original: Callable[[DataLoader[Any]], Any]) -> Any:
        if self.before_iterate is not None:
            self.before_iterate()
        entry = self._by_loader.get(loader)
        if entry is None:
            entry = self._by_loader[loader] = _Loader(len(self._loaders), weakref.ref(loader))
            entry.looks_ahead = _looks_ahead(loader)
            self._loaders.append(entry)
            if not self.from_the_top and (goal := self._replay.get(entry.index)) is not None:
                entry.started = goal["started"] - (goal["batches"] is not None)
                _apply_generators(loader, goal["generators"])
        entry.started += 1
        goal = self._replay.get(entry.index)
        if goal is None or entry.started > goal["started"]:
            return self._start(entry, loader, original)
        if entry.started < goal["started"]:
            return iter(())
        if goal["batches"] is None:
            return self._pass_over(entry, loader, original, goal)
        return self._continue(entry, loader, original, goal)

    def _start(self, entry: _Loader, loader: DataLoader[Any], original: Callable[[DataLoader[Any]], Any]) -> Any:
        beginning = self._beginnings.get(entry.index)
        if beginning is not None and beginning["started"] == entry.started:
            rng.apply(beginning["at_iter"])
            _apply_generators(loader, beginning["iter_generators"])
        entry.skipped, entry.at_first = 0, None
        entry.at_iter = rng.capture()
        entry.iter_generators = [rng.capture_generator(g) for g in _generators(loader)]
        return self._open(entry, loader, original)

    def _pass_over(
        self, entry: _Loader, loader: DataLoader[Any], original: Callable[[DataLoader[Any]], Any], goal: Position
    ) -> Any:
        """The last epoch that was over. Workers that outlive it are there afterwards, as they were."""
        states = self._at_fetch or rng.capture()
        iterator: Any = iter(())
        if loader.persistent_workers:
            iterator = self._open(entry, loader, original, _Mode.EMPTY)
        rng.apply(states)
        _apply_generators(loader, goal["generators"])
        return iterator

    def _continue(
        self, entry: _Loader, loader: DataLoader[Any], original: Callable[[DataLoader[Any]], Any], goal: Position
    ) -> Any:
        batches = self._batches(loader, goal)
        states = self._at_fetch or rng.capture()
        entry.at_iter, entry.at_first = goal["at_iter"], goal["at_first"]
        entry.iter_generators = goal["iter_generators"]
        rng.apply(entry.at_iter)
        _apply_generators(loader, entry.iter_generators)
        if isinstance(loader.dataset, IterableDataset):
            entry.skipped = 0
            iterator = self._open(entry, loader, original)
            _discard(iterator, batches)
        else:
            entry.skipped = batches
            iterator = self._open(entry, loader, original, _Mode.REPLAY)
        if goal.get("ahead") is not None:
            rng.apply(goal["ahead"])
            iterator = itertools.chain([next(iterator)], iterator)
        rng.apply(states)
        return iterator

    def _batches(self, loader: DataLoader[Any], goal: Position) -> int:
        """How many batches of this loader hold the samples that the position's had: rather fewer, so that a sample is
        seen twice than never."""
        batches: int = goal["batches"]
        before, now = goal["samples"], _samples(loader)
        if before is not None and now is not None:
            return batches * int(before) // now
        if self._other_world:
            raise CheckmateError(
                "the restored position of a DataLoader is of another number of ranks, and how its samples are split "
                "over ranks is not known: use a torch DistributedSampler, or give your sampler `num_replicas`, or "
                "start with as many ranks as before"
            )
        return batches

    def _open(
        self,
        entry: _Loader,
        loader: DataLoader[Any],
        original: Callable[[DataLoader[Any]], Any],
        mode: _Mode = _Mode.PLAIN,
    ) -> Any:
        """The loader's own iterator, on an index sampler that we watch."""
        name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
        sampler = getattr(loader, name)
        inner = sampler.inner if isinstance(sampler, _WatchedSampler) else sampler
        loader.__dict__[name] = _WatchedSampler(inner, entry, mode)  # past __setattr__, which forbids it
        try:
            iterator = original(loader)
        finally:
            loader.__dict__[name] = sampler
        entry.iterator = weakref.ref(iterator)
        entry.ahead = None
        if entry.looks_ahead:
            self._looking_ahead[iterator] = entry
        return iterator


class _WatchedSampler:
    """An index sampler that notes the random states at its first index; ``mode`` is of the first epoch alone."""

    def __init__(self, inner: Any, entry: _Loader, mode: _Mode) -> None:
        self.inner = inner
        self._entry = entry
        self._mode = mode

    def __iter__(self) -> Iterator[Any]:
        return self._indices(iter(self.inner))  # the inner iterator now, the first index later: as without us

    def __len__(self) -> int:
        return len(self.inner)

    def _indices(self, inner: Iterator[Any]) -> Iterator[Any]:
        mode, self._mode = self._mode, _Mode.PLAIN
        if mode is _Mode.EMPTY:
            return
        if mode is _Mode.REPLAY and self._entry.at_first is not None:
            states = rng.capture()
            rng.apply(self._entry.at_first)
            _discard(inner, self._entry.skipped)
            rng.apply(states)
        else:
            self._entry.at_first = rng.capture()
        yield from inner


def _samples(loader: DataLoader[Any]) -> int | None:
    """Samples of the dataset that one batch takes over all ranks, None: not known.

    A sampler that splits the dataset over ranks has ``num_replicas``; torch's others give all of it to every rank.
    """
    batches, sampler = loader.batch_sampler, loader.sampler
    if isinstance(loader.dataset, IterableDataset) or (batches is not None and type(batches) is not BatchSampler):
        return None
    replicas = getattr(sampler, "num_replicas", 1 if type(sampler) in _WHOLE else None)
    return None if replicas is None else (1 if batches is None else batches.batch_size) * int(replicas)


def _discard(items: Iterator[Any], count: int) -> None:
    for _ in zip(range(count), items, strict=False):
        pass


def _generators(loader: DataLoader[Any]) -> list[torch.Generator]:
    """The generators that a loader and its samplers draw from, each once; accelerate's samplers seed theirs anew in
    every epoch."""
    found = [getattr(holder, "generator", None) for holder in _holders(loader) if not _is_of_accelerate(holder)]
    return list(dict.fromkeys(g for g in found if isinstance(g, torch.Generator)))


def _holders(item: Any) -> Iterator[Any]:
    """A loader or sampler, and the samplers inside it."""
    yield item
    for name in ("sampler", "batch_sampler"):
        if (inner := getattr(item, name, None)) is not None:
            yield from _holders(inner)


def _looks_ahead(loader: DataLoader[Any]) -> bool:
    """True for a loader inside one of accelerate's, which are known by what they split batches with."""
    return any(map(_is_of_accelerate, (loader.batch_sampler, loader.dataset)))


def _is_of_accelerate(part: object) -> bool:
    return type(part).__module__ == "accelerate.data_loader"


def _apply_generators(loader: DataLoader[Any], states: Sequence[bytes]) -> None:
    for generator, state in zip(_generators(loader), states, strict=True):
        rng.apply_generator(generator, state)


TRACKER = LoaderTracker()
"""The tracker of this process: DataLoader has one ``__iter__``."""
