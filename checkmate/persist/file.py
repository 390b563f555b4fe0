"""One checkpoint file and its engine: made when the size is known, made anew when it grows, read back as states."""

import contextlib
import errno
import logging
import operator
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, SupportsIndex

from checkmate.persist.engine import MAX_SLOTS, Checkpoint, Code, Engine, Options, PersistError, create
from checkmate.persist.state import MapLocation, Span, Stored, chunk_pieces, parse_manifest
from checkmate.persist.tune import Tuning, read_tuning, tune

log = logging.getLogger(__name__)

MIB = 1 << 20
_META_BYTES = 1 * MIB
_DEFAULT = Tuning(chunk_bytes=4 * MIB, writers=2, in_flight=2, rate=0.0)
_LEAST_CHUNKS = 4
"""Of staging memory: less would stop the pipeline."""
_READERS = 4
"""Chunks read at a time: a drive is as little busy with one as it is with one write."""


class CheckpointFile:
    """A path, and the engine that has it open. Not thread-safe: its owner saves one state after the other.

    The arguments are those of ``Checkpointer``. Raises PersistError for a path that cannot be used.
    """

    def __init__(
        self, path: Path, in_flight: int | None, options: Options, capacity: int, memory: int | None, timeout_s: float
    ) -> None:
        if in_flight is not None:
            require_whole("in_flight", in_flight, 1, MAX_SLOTS - 1)
        require_whole("capacity", capacity, 0)
        if memory is not None:
            require_whole("memory", memory, 1)
        require_seconds("timeout_s", timeout_s)
        _require_name(path)
        self.path = Path(os.path.realpath(path)) if path.is_symlink() else path  # what it points to grows, not the link
        self._in_flight = in_flight
        self._options = options
        self._capacity = capacity
        self._memory = memory
        self._timeout_s = timeout_s
        self.engine: Engine | None = None
        self._inode = (0, 0)
        if self.path.exists():
            self._use(self._open(self.path))
            with contextlib.suppress(OSError):
                self._new.unlink(missing_ok=True)  # of a process that died while it made the file anew
        else:
            _require_writable(self.path)

    @property
    def in_flight(self) -> int:
        """N, of the file or, while there is none, wanted."""
        if self.engine:
            return self.engine.about().slots - 1
        return self._in_flight or (read_tuning(self.path) or _DEFAULT).in_flight

    def fit(self, data_bytes: int, meta_bytes: int) -> Engine:
        """The engine of a file that takes a state of this size: it is made, or made anew with its newest checkpoint.

        Nothing may be in flight when it grows. Raises PersistError, TimeoutError; the old file is then as it was.
        """
        if self.engine:
            self._require_there(self.engine)
        if self.engine and not self.needs_rest(data_bytes, meta_bytes):
            return self.engine
        about = self.engine.about() if self.engine else None
        wanted = self._in_flight or (about.slots - 1 if about else self._tuned().in_flight)
        data_bytes = max(data_bytes, self._capacity, about.data_bytes if about else 0, 1)
        meta_bytes = max(_META_BYTES, 2 * meta_bytes, about.meta_bytes if about else 0)
        return self._make(wanted + 1, data_bytes, meta_bytes)

    def needs_rest(self, data_bytes: int, meta_bytes: int) -> bool:
        """True when ``fit`` will make the file anew."""
        if not self.engine:
            return False
        about = self.engine.about()
        fits = about.data_bytes >= data_bytes and about.meta_bytes >= meta_bytes
        return not fits or (self._in_flight or about.slots - 1) != about.slots - 1

    def close(self, timeout_s: float) -> None:
        """Raises PersistError for an error that nobody had waited for, TimeoutError."""
        if self.engine:
            self.engine.close(timeout_s)
            self.engine = None

    @property
    def _new(self) -> Path:
        """Where the file is made anew: only who has the old one locked touches it."""
        return self.path.with_name(f".{self.path.name}.new")

    def _tuned(self) -> Tuning:
        return read_tuning(self.path) or tune(self.path, self._options)

    def _make(self, slots: int, data_bytes: int, meta_bytes: int) -> Engine:
        old = self.engine
        place = self._new if old else self.path
        try:
            create(place, slots=slots, data_bytes=data_bytes, meta_bytes=meta_bytes)
        except PersistError as error:
            raise PersistError(error.code, str(error).replace(str(place), str(self.path), 1)) from None
        engine = None
        try:
            engine = self._open(place)
            if old:
                self._carry_over(old, engine)
                shutil.copymode(self.path, place)
                place.replace(self.path)
        except BaseException as error:
            if engine:
                engine.close(self._timeout_s)
            if getattr(error, "code", None) != Code.LOCKED:  # else it is another's already
                place.unlink(missing_ok=True)
            raise
        self._use(engine)
        if old:
            with contextlib.suppress(PersistError):  # errors of its saves are in their futures
                old.close(self._timeout_s)
            _sync(self.path.parent)
        return engine

    def _use(self, engine: Engine) -> None:
        there = self.path.stat()
        self.engine, self._inode = engine, (there.st_dev, there.st_ino)

    def _require_there(self, engine: Engine) -> None:
        """Nobody would find what is saved to a file without a name, or to what is left of one that was cut."""
        with contextlib.suppress(FileNotFoundError):
            there = self.path.stat()
            if (there.st_dev, there.st_ino) == self._inode and there.st_size >= engine.about().file_bytes:
                return
        raise PersistError(
            errno.ESTALE,
            f"{self.path} was removed, replaced or cut short while it was open: nothing can be saved to it any more; "
            f"make a new Checkpointer",
        )

    def _carry_over(self, old: Engine, new: Engine) -> None:
        checkpoint = old.newest()
        if checkpoint is None:
            return
        ticket = new.begin(checkpoint.step, checkpoint.data_bytes, checkpoint.meta_bytes, timeout_s=self._timeout_s)
        step = checkpoint.chunk_bytes
        for offset in range(0, checkpoint.data_bytes, step):
            part = bytearray(min(step, checkpoint.data_bytes - offset))
            old.read(checkpoint.counter, offset, part)
            ticket.write(offset, part)
        ticket.finish(old.metadata(checkpoint.counter))
        ticket.wait(self._timeout_s)

    def _open(self, path: Path) -> Engine:
        with contextlib.closing(Engine(path, Options(read_only=True))) as reader:
            data_bytes = reader.about().data_bytes
        options = (read_tuning(self.path) or _DEFAULT).options(self._options)
        if not options.pool_chunks:
            memory = self._memory or min(2 * data_bytes, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4)
            options = replace(options, pool_chunks=max(_LEAST_CHUNKS, -(-memory // options.chunk_bytes)))
        return Engine(path, options)


def read_state(engine: Engine, checkpoint: Checkpoint, map_location: MapLocation = None) -> Any:
    """The state of a checkpoint. Raises PersistError (Code.DAMAGED), StateError."""
    counter, chunk_bytes = checkpoint.counter, checkpoint.chunk_bytes

    def read(chunk: int, pieces: Sequence[tuple[Span, int, int]]) -> None:
        span, start, nbytes = pieces[0]
        if len(pieces) == 1:  # straight to its place
            engine.read(counter, chunk * chunk_bytes, (span.address + start, nbytes))
            return
        part = memoryview(bytearray(sum(piece[2] for piece in pieces)))
        engine.read(counter, chunk * chunk_bytes, part)
        for span, start, nbytes in pieces:
            span.memory.numpy()[start : start + nbytes] = part[:nbytes]
            part = part[nbytes:]

    with engine.hold(counter):
        stored = Stored.of(engine.metadata(counter), checkpoint.data_bytes)
        readers = ThreadPoolExecutor(_READERS, "checkmate-read")
        try:
            for _ in readers.map(lambda chunk: read(*chunk), chunk_pieces(stored.spans, chunk_bytes)):
                pass  # raises the error of the first chunk that has one
        finally:
            readers.shutdown(cancel_futures=True)
    return stored.unpack(map_location)


def read_manifest(engine: Engine, checkpoint: Checkpoint) -> dict[str, Any]:
    """The manifest of a checkpoint, with what its saver added. Raises PersistError (damaged), StateError."""
    return parse_manifest(engine.metadata(checkpoint.counter))


@contextlib.contextmanager
def reading(path: Path) -> Iterator[Engine]:
    """An engine that only reads. Raises PersistError, also when a training process has the file open."""
    engine = Engine(path, Options(read_only=True))
    try:
        yield engine
    finally:
        engine.close()


def require_whole(name: str, value: SupportsIndex, least: int, most: int = (1 << 63) - 1) -> int:
    """As an int. Raises PersistError for what is no whole number in this range."""
    with contextlib.suppress(TypeError):
        if least <= (number := operator.index(value)) <= most:
            return number
    raise PersistError(errno.EINVAL, f"{name} is {value!r}: it must be a whole number from {least} to {most}")


def require_seconds(name: str, value: float) -> None:
    """Raises PersistError for what is no time to wait for."""
    if not 0 < value <= threading.TIMEOUT_MAX:
        most = f"{threading.TIMEOUT_MAX:.0f}"
        raise PersistError(errno.EINVAL, f"{name} is {value!r}: it must be more than 0 and at most {most} s")


def _require_name(path: Path) -> None:
    """Not too long, without null bytes, in folders that may be entered."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise PersistError(error.errno or errno.EINVAL, f"{path}: {error.strerror}; choose another path") from None
    except ValueError as error:
        raise PersistError(errno.EINVAL, f"{path}: {error}; choose another path") from None


def _require_writable(path: Path) -> None:
    """Said at once, not after the first iterations."""
    folder = path.parent
    if not folder.is_dir():
        raise PersistError(errno.ENOENT, f"{path}: the folder {folder} does not exist; make it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PersistError(
            errno.EACCES, f"{path}: nothing can be written to {folder}; choose a folder that you may write"
        )


def _sync(folder: Path) -> None:
    """Make a rename durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
