"""The engine's interface in memory, for what a real device does not do on command: copy when told, fail when told."""

import contextlib
import errno
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cffi import FFI

from checkmate.persist import file
from checkmate.persist.engine import About, Backend, Checkpoint, Code, Options, PersistError, State

_FFI = FFI()
_FILES: dict[int, "_File"] = {}
"""By inode, so that a rename moves a file."""


class _File:
    def __init__(self, slots: int, data_bytes: int, meta_bytes: int) -> None:
        self.slots, self.data_bytes, self.meta_bytes = slots, data_bytes, meta_bytes
        self.complete: dict[int, tuple[Checkpoint, bytes, bytes]] = {}
        self.counter = 0
        self.changed = threading.Condition()
        self.copying = threading.Event()
        """Cleared: nothing is copied."""
        self.copying.set()
        self.fail: PersistError | None = None
        """What the next ``finish`` ends with."""


def _view(memory: Any) -> memoryview:
    if isinstance(memory, tuple):
        memory = _FFI.buffer(_FFI.cast("char *", memory[0]), memory[1])
    return memoryview(memory)


def held(path: Path) -> _File:
    """The file behind a path, to give orders to."""
    return _FILES[path.stat().st_ino]


def create(path: Path, *, slots: int, data_bytes: int, meta_bytes: int) -> None:
    path.touch(exist_ok=False)
    _FILES[path.stat().st_ino] = _File(slots, data_bytes, meta_bytes)


class Ticket:
    def __init__(self, engine: "Engine", step: int, data_bytes: int) -> None:
        self._engine, self._step = engine, step
        self.counter = engine.file.counter = engine.file.counter + 1
        self._sources: list[tuple[int, object]] = []
        self._data = bytearray(data_bytes)
        self._copied = False
        self._aborted = False
        self._state: State | PersistError | None = None
        self._meta = b""

    def write(self, offset: int, memory: object) -> None:
        self._sources.append((offset, memory))

    def write_parts(self, parts: Iterable[tuple[int, int, int]]) -> None:
        for offset, address, nbytes in parts:
            self.write(offset, (address, nbytes))

    def wait_copied(self, timeout_s: float, offset: int = 0, nbytes: int | None = None) -> None:
        deadline = time.monotonic() + timeout_s
        while not self._engine.file.copying.wait(0.005):
            if self._aborted:
                raise PersistError(Code.ABORTED, "aborted")
            if time.monotonic() > deadline:
                raise TimeoutError("not copied")
        with self._engine.file.changed:
            if not self._copied:
                self._copy()

    def _copy(self) -> None:
        for offset, memory in self._sources:
            part = _view(memory)
            self._data[offset : offset + len(part)] = part
        self._copied = True

    def finish(self, metadata: bytes = b"", *, publish: bool = True) -> None:
        file = self._engine.file
        with file.changed:
            if not self._copied:
                self._copy()
            if file.fail:
                self._state, file.fail = file.fail, None
                self._engine.flying -= 1
            else:
                self._state = State.COMMITTED if publish else State.PREPARED
                self._engine.flying -= 1
                file.complete[self.counter] = (
                    Checkpoint(self.counter, self._step, len(self._data), len(metadata), 4096, 0, 0, publish),
                    bytes(self._data),
                    metadata,
                )
                for old in sorted(file.complete)[: -file.slots]:
                    del file.complete[old]
            file.changed.notify_all()

    def wait(self, timeout_s: float) -> State:
        if isinstance(self._state, PersistError):
            raise self._state
        assert self._state
        return self._state

    def abort(self) -> None:
        if not self._aborted and self._state is None:
            self._engine.flying -= 1
        self._aborted = True


class Engine:
    def __init__(self, path: Path, options: Options | None = None) -> None:
        self.file = _FILES[path.stat().st_ino]
        self._options = options or Options()
        self.flying = 0

    def about(self) -> About:
        f = self.file
        options = Options(Backend.PWRITE, 1, 1, self._options.chunk_bytes or 4096)
        return About(f.slots, f.data_bytes, f.meta_bytes, 0, options, 0, 0, 0, "", (0, 0), 0, 0, 0)

    def begin(self, step: int, data_bytes: int, meta_bytes: int = 0, *, timeout_s: float) -> Ticket:
        with self.file.changed:
            if not self.file.changed.wait_for(lambda: self.flying < self.file.slots - 1, timeout_s):
                raise TimeoutError("no slot")
            if data_bytes > self.file.data_bytes:
                raise PersistError(errno.EFBIG, "too large")
            self.flying += 1
            return Ticket(self, step, data_bytes)

    def list(self) -> list[Checkpoint]:
        return [self.file.complete[counter][0] for counter in sorted(self.file.complete, reverse=True)]

    @contextlib.contextmanager
    def hold(self, counter: int) -> Iterator[None]:
        yield

    def read(self, counter: int, offset: int, memory: object) -> None:
        view = _view(memory)
        view[:] = self.file.complete[counter][1][offset : offset + len(view)]

    def metadata(self, counter: int) -> bytes:
        return self.file.complete[counter][2]

    def verify(self, counter: int) -> None:
        pass

    def newest(self) -> Checkpoint | None:
        return next((c for c in self.list() if c.published), None)

    def publish(self, counter: int) -> State:
        checkpoint, data, meta = self.file.complete[counter]
        self.file.complete[counter] = (Checkpoint(**{**vars(checkpoint), "published": True}), data, meta)
        return State.COMMITTED

    def discard(self, counter: int) -> None:
        del self.file.complete[counter]

    def close(self, timeout_s: float = 60.0) -> None:
        pass


@pytest.fixture
def memory_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every checkpoint file is one in memory."""
    monkeypatch.setattr(file, "Engine", Engine)
    monkeypatch.setattr(file, "create", create)
