"""The persistence engine in Python: a file of N+1 slots, N checkpoints in flight, durable before they are committed.

All work is done by C threads (``src/``); every call releases the GIL. A checkpoint is a flat range of bytes plus a
small block of metadata; what they mean is the caller's affair. README.md holds the format and the order of writes.
"""

import contextlib
import enum
import errno
import functools
import itertools
import logging
import os
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from checkmate import native
from checkmate.config import CheckmateError

log = logging.getLogger("checkmate.persist")

_LIBRARY = "libcheckmate_persist.so"
_CLOSE_S = 60.0
_SLICE_S = 0.2
"""Longest time in C without a look at Python's signals."""
MAX_SLOTS = 1024

Memory = memoryview | bytearray | bytes | tuple[int, int]
"""Contiguous bytes: a buffer, or (address, length) of memory that the caller keeps alive."""
Part = tuple[int, int, int]
"""Bytes of a checkpoint that the caller keeps alive: offset, address, length."""


class Code(enum.IntEnum):
    """What went wrong, where errno has no word for it (``enum ckp_code`` of src/api.h)."""

    FOREIGN = 1001
    VERSION = 1002
    TRUNCATED = 1003
    DAMAGED = 1004
    LOCKED = 1005
    NOT_FOUND = 1006
    GAP = 1007
    ABORTED = 1008
    READ_ONLY = 1009
    CLOSED = 1010


class PersistError(CheckmateError):
    """``code`` is a ``Code`` or an errno, such as ENOSPC or EIO."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Backend(enum.IntEnum):
    """How bytes reach the storage; AUTO probes: PMEM on a DAX file system, else URING, else PWRITE."""

    AUTO = 0
    PWRITE = 1
    URING = 2
    PMEM = 3


class State(enum.IntEnum):
    """How a checkpoint ended: COMMITTED, it is the newest; SUPERSEDED, durable and readable, but a newer one was there
    first; PREPARED, durable, for ``Engine.publish`` or ``Engine.discard``."""

    COMMITTED = 1
    SUPERSEDED = 2
    PREPARED = 3


@dataclass(frozen=True)
class Options:
    """Knobs of an open file; 0 is the default. ``writers``: writes in flight. ``pool_chunks``: staging buffers.

    ``chunk_bytes`` is a multiple of 4096; files hold checkpoints of any chunk size side by side.
    """

    backend: Backend = Backend.AUTO
    writers: int = 0
    pool_chunks: int = 0
    chunk_bytes: int = 0
    read_only: bool = False


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on storage. ``counter`` orders checkpoints and is never used twice in a file.

    ``published`` False: complete but never committed. ``time_ns``: wall clock when it became complete.
    """

    counter: int
    step: int
    data_bytes: int
    meta_bytes: int
    chunk_bytes: int
    time_ns: int
    slot: int
    published: bool


@dataclass(frozen=True)
class About:
    """An open file: its geometry, the options in force, and counters since it was opened.

    ``latest``: counter of the newest committed checkpoint, 0 for none. ``committed``: the same as recorded when the
    file was opened; it may be damaged. ``warning``: the first of ``warnings`` things that recovery passed over.
    ``pool``: (address, length) of the staging memory, to be pinned for a GPU.
    """

    slots: int
    data_bytes: int
    meta_bytes: int
    file_bytes: int
    options: Options
    latest: int
    committed: int
    warnings: int
    warning: str
    pool: tuple[int, int]
    commits: int
    failures: int
    bytes_written: int


@functools.cache
def _load() -> tuple[Any, Any]:
    return native.bind(native.library(_LIBRARY), [native.header("checkmate.persist", "src/api.h")])


class _Call:
    """The library, and the error that its last call left: one for each call, because any thread may call."""

    def __init__(self) -> None:
        self.ffi, self.lib = _load()
        self.error = self.ffi.new("struct ckp_error *")

    def check(self, result: int) -> None:
        if result < 0:
            raise PersistError(-result, bytes(self.ffi.string(self.error.text)).decode(errors="replace"))

    def memory(self, memory: Memory, *, writable: bool = False) -> tuple[Any, int]:
        """A pointer, which keeps a buffer alive, and a length."""
        if isinstance(memory, tuple):
            return self.ffi.cast("void *", memory[0]), memory[1]
        pointer = self.ffi.from_buffer(memory, require_writable=writable)
        return pointer, len(pointer)

    def options(self, options: Options) -> Any:
        _check_range(32, writers=options.writers, pool_chunks=options.pool_chunks)
        _check_range(64, chunk_bytes=options.chunk_bytes)
        return self.ffi.new(
            "struct ckp_options *",
            {
                "backend": options.backend,
                "writers": options.writers,
                "pool_chunks": options.pool_chunks,
                "chunk_bytes": options.chunk_bytes,
                "read_only": options.read_only,
            },
        )


def _check_range(bits: int, **values: int) -> None:
    """What does not fit into the C type; the rest C refuses itself."""
    for name, value in values.items():
        if not 0 <= value < 1 << bits:
            raise PersistError(errno.EINVAL, f"{name} is {value}: it must be 0 to {(1 << bits) - 1}")


def _until(timeout_s: float, call: Callable[[int], int]) -> int:
    """Call with short time-outs, in milliseconds, until it is another result than "timed out" or the time is over."""
    deadline = time.monotonic() + timeout_s
    while True:
        left = deadline - time.monotonic()
        result = call(max(0, round(min(left, _SLICE_S) * 1000)))
        if result != -errno.ETIMEDOUT or left <= _SLICE_S:
            return result


def create(path: Path, *, slots: int, data_bytes: int, meta_bytes: int) -> None:
    """Make a new file for ``slots`` - 1 checkpoints in flight, each of at most ``data_bytes`` and ``meta_bytes``.

    The space is allocated here. Raises PersistError: EINVAL for fewer than 2 slots, EEXIST for any existing path,
    ENOSPC, EROFS, EACCES …; nothing is left behind.
    """
    _check_range(32, slots=slots)
    _check_range(64, data_bytes=data_bytes, meta_bytes=meta_bytes)
    call = _Call()
    sizes = {"slots": slots, "data_bytes": data_bytes, "meta_bytes": meta_bytes}
    geometry = call.ffi.new("struct ckp_geometry *", sizes)
    call.check(call.lib.ckp_create(bytes(path), geometry, call.error))


def probe(folder: Path, options: Options, nbytes: int) -> float:
    """Bytes/s of writing and flushing an unnamed file of ``nbytes`` in ``folder`` with these options."""
    _check_range(64, nbytes=nbytes)
    call = _Call()
    rate = call.ffi.new("double *")
    call.check(call.lib.ckp_probe(bytes(folder), call.options(options), nbytes, rate, call.error))
    return float(rate[0])


class Ticket:
    """One checkpoint in flight. Give its bytes, ``finish``, then ``wait`` (or ``abort``). Any thread may call."""

    def __init__(self, engine: "Engine", counter: int, step: int, data_bytes: int) -> None:
        self.counter = counter
        self.step = step
        self.data_bytes = data_bytes
        self._engine = engine
        self._alive: list[Any] = []

    def write(self, offset: int, memory: Memory) -> None:
        """Give bytes of the checkpoint: any order, each byte once. Returns at once.

        The engine reads the memory when all bytes of a chunk were given: it must stay unchanged until ``wait_copied``
        for this range, or until ``abort`` returned. Buffers are kept alive; a pair is the caller's to keep. A byte that
        was given before fails the ticket (PersistError, EINVAL).
        """
        _check_range(64, offset=offset)
        with self._engine.call() as call:
            pointer, nbytes = call.memory(memory)
            self._alive.append(pointer)
            self._write(call, call.ffi.new("struct ckp_part[]", [(offset, pointer, nbytes)]))

    def write_parts(self, parts: Iterable[Part]) -> None:
        """``write`` many parts in one call."""
        columns = array("Q", itertools.chain.from_iterable(parts))
        with self._engine.call() as call:
            self._write(call, call.ffi.from_buffer("struct ckp_part[]", columns))

    def _write(self, call: _Call, parts: Any) -> None:
        call.check(call.lib.ckp_write(self._engine.handle, self.counter, parts, len(parts), call.error))

    def lease(self, chunk: int, timeout_s: float) -> memoryview:
        """The staging buffer of a whole chunk, to be filled in place instead of ``write``; then ``submit``.

        Waits for a free one: TimeoutError. A lease that is never submitted stops the others: submit in time or abort.
        """
        with self._engine.call() as call:
            buffer = call.ffi.new("uint8_t **")
            nbytes = call.ffi.new("uint64_t *")
            lease = functools.partial(call.lib.ckp_lease, self._engine.handle, self.counter, chunk)
            self._engine.wait(call, timeout_s, lambda ms: lease(ms, buffer, nbytes, call.error))
            return memoryview(call.ffi.buffer(buffer[0], nbytes[0]))

    def submit(self, chunk: int) -> None:
        """The lent buffer of a chunk is full."""
        with self._engine.call() as call:
            call.check(call.lib.ckp_submit(self._engine.handle, self.counter, chunk, call.error))

    def wait_copied(self, timeout_s: float, offset: int = 0, nbytes: int | None = None) -> None:
        """Wait until the sources of a range (default: all) may change. PersistError when the ticket failed."""
        nbytes = self.data_bytes - offset if nbytes is None else nbytes
        with self._engine.call() as call:
            copied = functools.partial(call.lib.ckp_wait_copied, self._engine.handle, self.counter, offset, nbytes)
            self._engine.wait(call, timeout_s, lambda ms: copied(ms, call.error))

    def finish(self, metadata: bytes = b"", *, publish: bool = True) -> None:
        """All bytes were given: make it durable in the background. Raises PersistError (Code.GAP) when not all were."""
        with self._engine.call() as call:
            call.check(
                call.lib.ckp_finish(
                    self._engine.handle,
                    self.counter,
                    call.ffi.from_buffer(metadata),
                    len(metadata),
                    publish,
                    call.error,
                )
            )

    def wait(self, timeout_s: float) -> State:
        """Wait until it is durable (and committed, when published). Call it once for every finished ticket.

        Raises TimeoutError, after which it may be called again, or PersistError: the checkpoint failed, its slot is
        free again, older checkpoints are untouched.
        """
        with self._engine.call() as call:
            state = call.ffi.new("uint32_t *")
            wait = functools.partial(call.lib.ckp_wait, self._engine.handle, self.counter)
            self._engine.wait(call, timeout_s, lambda ms: wait(ms, state, call.error))
        self._alive.clear()
        return State(state[0])

    def abort(self) -> None:
        """Give up: when this returns the source memory is free. PersistError (EBUSY): the commit is under way, wait."""
        with self._engine.call() as call:
            call.check(call.lib.ckp_abort(self._engine.handle, self.counter, call.error))
        self._alive.clear()


class Engine:
    """An open file. Raises PersistError when it cannot be opened; the file is left as it was.

    One process at a time, and one engine in it; a forked child can not use its parent's.
    """

    def __init__(self, path: Path, options: Options | None = None) -> None:
        call = _Call()
        self.handle: Any = call.lib.ckp_open(bytes(path), call.options(options or Options()), call.error)
        """The C engine, for ``Ticket``."""
        if not self.handle:
            call.check(call.error.code)
        self._pid = os.getpid()
        self._calls = 0
        self._closed = False
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def call(self) -> Iterator[_Call]:
        """Around every call into C: the engine is not freed under it."""
        if os.getpid() != self._pid:  # the lock may be one that a thread of the parent holds for ever
            raise PersistError(Code.CLOSED, "the checkpoint file was opened by the parent of this process")
        with self._changed:
            if self._closed:
                raise PersistError(Code.CLOSED, "the checkpoint file is closed")
            self._calls += 1
        try:
            yield _Call()
        finally:
            with self._changed:
                self._calls -= 1
                self._changed.notify_all()

    def wait(self, call: _Call, timeout_s: float, wait: Callable[[int], int]) -> None:
        """Wait in C, in slices; TimeoutError."""
        result = _until(timeout_s, wait)
        if result == -errno.ETIMEDOUT:
            raise TimeoutError(f"{bytes(call.ffi.string(call.error.text)).decode()}, after {timeout_s:g} s")
        call.check(result)

    def about(self) -> About:
        """Geometry, options in force, counters."""
        with self.call() as call:
            raw = call.ffi.new("struct ckp_about *")
            call.lib.ckp_describe(self.handle, raw)
            options = raw.options
            return About(
                slots=int(raw.geometry.slots),
                data_bytes=int(raw.geometry.data_bytes),
                meta_bytes=int(raw.geometry.meta_bytes),
                file_bytes=int(raw.file_bytes),
                options=Options(
                    backend=Backend(options.backend),
                    writers=int(options.writers),
                    pool_chunks=int(options.pool_chunks),
                    chunk_bytes=int(options.chunk_bytes),
                    read_only=bool(options.read_only),
                ),
                latest=int(raw.latest),
                committed=int(raw.committed),
                warnings=int(raw.warnings),
                warning=bytes(call.ffi.string(raw.warning)).decode(),
                pool=(int(call.ffi.cast("uintptr_t", raw.pool)), int(raw.pool_bytes)),
                commits=int(raw.commits),
                failures=int(raw.failures),
                bytes_written=int(raw.bytes_written),
            )

    def begin(self, step: int, data_bytes: int, meta_bytes: int = 0, *, timeout_s: float) -> Ticket:
        """Start a checkpoint; waits while N are in flight. TimeoutError; PersistError: too large (EFBIG), closed …"""
        _check_range(64, step=step, data_bytes=data_bytes, meta_bytes=meta_bytes)
        with self.call() as call:
            counter = call.ffi.new("uint64_t *")
            begin = functools.partial(call.lib.ckp_begin, self.handle, step, data_bytes, meta_bytes)
            self.wait(call, timeout_s, lambda ms: begin(ms, counter, call.error))
            return Ticket(self, int(counter[0]), step, data_bytes)

    def list(self) -> list[Checkpoint]:
        """Complete checkpoints, newest first."""
        with self.call() as call:
            found = call.ffi.new("struct ckp_checkpoint[]", MAX_SLOTS)
            count = call.lib.ckp_list(self.handle, found, MAX_SLOTS)
            names = [name for name in Checkpoint.__dataclass_fields__ if name != "published"]
            return [
                Checkpoint(**{name: int(getattr(raw, name)) for name in names}, published=bool(raw.published))
                for raw in found[0 : max(count, 0)]
            ]

    @contextlib.contextmanager
    def hold(self, counter: int) -> Iterator[None]:
        """Keep a checkpoint from being overwritten while it is read."""
        with self.call() as call:
            call.check(call.lib.ckp_hold(self.handle, counter, call.error))
        try:
            yield
        finally:
            with contextlib.suppress(PersistError), self.call() as call:  # closed: nothing is held any more
                call.lib.ckp_release(self.handle, counter)

    def read(self, counter: int, offset: int, memory: bytearray | memoryview | tuple[int, int]) -> None:
        """Fill ``memory`` from a checkpoint and verify each chunk. PersistError (Code.DAMAGED) names chunk and offset.

        Whole chunks are read: ask for multiples of ``Checkpoint.chunk_bytes``, in order. Several threads may read.
        """
        _check_range(64, offset=offset)
        with self.call() as call:
            pointer, nbytes = call.memory(memory, writable=True)
            call.check(call.lib.ckp_read(self.handle, counter, offset, pointer, nbytes, call.error))

    def metadata(self, counter: int) -> bytes:
        """The metadata that was given to ``Ticket.finish``, verified."""
        nbytes = next((found.meta_bytes for found in self.list() if found.counter == counter), 0)
        meta = bytearray(nbytes)
        with self.call() as call:
            pointer = call.ffi.from_buffer(meta)
            call.check(call.lib.ckp_read_meta(self.handle, counter, pointer, nbytes, call.error))
        return bytes(meta)

    def verify(self, counter: int) -> None:
        """Read all of a checkpoint: PersistError (Code.DAMAGED) names the first damaged chunk."""
        with self.call() as call:
            chunk = call.ffi.new("uint64_t *")
            call.check(call.lib.ckp_verify(self.handle, counter, chunk, call.error))

    def newest(self) -> Checkpoint | None:
        """The newest published checkpoint that verifies; each damaged one before it is logged as a warning."""
        for checkpoint in self.list():
            if not checkpoint.published:
                continue
            try:
                self.verify(checkpoint.counter)
            except PersistError as error:
                if error.code not in (Code.DAMAGED, Code.NOT_FOUND, errno.EIO):
                    raise
                log.warning("%s; falling back to the one before", error)
            else:
                return checkpoint
        return None

    def publish(self, counter: int) -> State:
        """Commit a prepared checkpoint; also one that an earlier process prepared. Returns when that is durable."""
        with self.call() as call:
            state = call.ffi.new("uint32_t *")
            call.check(call.lib.ckp_publish(self.handle, counter, state, call.error))
            return State(state[0])

    def discard(self, counter: int) -> None:
        """Remove a complete checkpoint, durably."""
        with self.call() as call:
            call.check(call.lib.ckp_discard(self.handle, counter, call.error))

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Finish what was finished by the caller, abort the rest, free everything. Again: nothing.

        Raises the first error of a ticket that nobody had waited for; TimeoutError leaves the engine open.
        """
        with self._changed:
            if self._closed:
                return
        with self.call() as call:
            result = _until(timeout_s, lambda ms: int(call.lib.ckp_close(self.handle, ms, call.error)))
        if result == -errno.ETIMEDOUT:
            raise TimeoutError(f"{bytes(call.ffi.string(call.error.text)).decode()}, after {timeout_s:g} s")
        self._free(call)
        call.check(result)

    def _free(self, call: _Call) -> None:
        """All waits in C return at once now."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.wait_for(lambda: self._calls == 0)
        call.lib.ckp_free(self.handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
