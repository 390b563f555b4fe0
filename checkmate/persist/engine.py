"""The persistence engine in Python: a file of N+1 slots, N checkpoints in flight, durable before they are committed.

All work is done by C threads (``src/``); every call releases the GIL. A checkpoint is a flat range of bytes plus a
small block of metadata; what they mean is the caller's affair. README.md holds the format and the order of writes.
"""

import contextlib
import enum
import errno
import functools
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cffi import FFI

from checkmate.config import CheckmateError, library

_LIBRARY = "libcheckmate_persist.so"
_CLOSE_S = 60.0
_MAX_COUNT = (1 << 32) - 1
_MAX_BYTES = 1 << 62

Memory = memoryview | bytearray | bytes | tuple[int, int]
"""Contiguous bytes: a buffer, or (address, length) of memory that the caller keeps alive."""


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

    ``chunk_bytes`` is a multiple of 64 KiB; files hold checkpoints of any chunk size side by side.
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

    ``latest``: counter of the newest committed checkpoint, 0 for none. ``warning``: the first of ``warnings`` things
    that recovery passed over. ``pool``: (address, length) of the staging memory, to be pinned for a GPU.
    """

    slots: int
    data_bytes: int
    meta_bytes: int
    file_bytes: int
    options: Options
    latest: int
    warnings: int
    warning: str
    pool: tuple[int, int]
    commits: int
    failures: int
    bytes_written: int


def create(path: Path, *, slots: int, data_bytes: int, meta_bytes: int) -> None:
    """Make a new file for ``slots`` - 1 checkpoints in flight, each of at most ``data_bytes`` and ``meta_bytes``.

    The space is allocated here. Raises PersistError: EINVAL for fewer than 2 slots, EEXIST for any existing path,
    ENOSPC, EROFS, EACCES …; nothing is left behind.
    """
    raise NotImplementedError


def probe(folder: Path, options: Options, nbytes: int) -> float:
    """Bytes/s of writing and flushing an unnamed file of ``nbytes`` in ``folder`` with these options."""
    raise NotImplementedError


class Ticket:
    """One checkpoint in flight. Give its bytes, ``finish``, then ``wait`` (or ``abort``). Any thread may call."""

    counter: int

    def write(self, offset: int, memory: Memory) -> None:
        """Give bytes of the checkpoint: any order, each byte once. Returns at once.

        The engine reads the memory when all bytes of a chunk were given: it must stay unchanged until ``wait_copied``
        for this range, or until ``abort`` returned. Buffers are kept alive; a pair is the caller's to keep.
        """
        raise NotImplementedError

    def lease(self, chunk: int, timeout_s: float) -> memoryview:
        """The staging buffer of a whole chunk, to be filled in place instead of ``write``; then ``submit``.

        Waits for a free one: TimeoutError. A lease that is never submitted stops the others: submit in time or abort.
        """
        raise NotImplementedError

    def submit(self, chunk: int) -> None:
        """The lent buffer of a chunk is full."""
        raise NotImplementedError

    def wait_copied(self, timeout_s: float, offset: int = 0, nbytes: int | None = None) -> None:
        """Wait until the sources of a range (default: all) may change. PersistError when the ticket failed."""
        raise NotImplementedError

    def finish(self, metadata: bytes = b"", *, publish: bool = True) -> None:
        """All bytes were given: make it durable in the background. Raises PersistError (Code.GAP) when not all were."""
        raise NotImplementedError

    def wait(self, timeout_s: float) -> State:
        """Wait until it is durable (and committed, when published). Call it once for every finished ticket.

        Raises TimeoutError, after which it may be called again, or PersistError: the checkpoint failed, its slot is
        free again, older checkpoints are untouched.
        """
        raise NotImplementedError

    def abort(self) -> None:
        """Give up: when this returns the source memory is free. PersistError (EBUSY): the commit is under way, wait."""
        raise NotImplementedError


class Engine:
    """An open file. Raises PersistError when it cannot be opened; the file is left as it was.

    One process at a time, and one engine in it; a forked child can not use its parent's.
    """

    def __init__(self, path: Path, options: Options | None = None) -> None:
        raise NotImplementedError

    def about(self) -> About:
        """Geometry, options in force, counters."""
        raise NotImplementedError

    def begin(self, step: int, data_bytes: int, meta_bytes: int = 0, *, timeout_s: float) -> Ticket:
        """Start a checkpoint; waits while N are in flight. TimeoutError; PersistError: too large (EFBIG), closed …"""
        raise NotImplementedError

    def list(self) -> list[Checkpoint]:
        """Complete checkpoints, newest first."""
        raise NotImplementedError

    def hold(self, counter: int) -> contextlib.AbstractContextManager[None]:
        """Keep a checkpoint from being overwritten while it is read."""
        raise NotImplementedError

    def read(self, counter: int, offset: int, memory: bytearray | memoryview | tuple[int, int]) -> None:
        """Fill ``memory`` from a checkpoint and verify each chunk. PersistError (Code.DAMAGED) names chunk and offset.

        Whole chunks are read: ask for multiples of ``Checkpoint.chunk_bytes``, in order. Several threads may read.
        """
        raise NotImplementedError

    def metadata(self, counter: int) -> bytes:
        """The metadata that was given to ``Ticket.finish``, verified."""
        raise NotImplementedError

    def verify(self, counter: int) -> None:
        """Read all of a checkpoint: PersistError (Code.DAMAGED) names the first damaged chunk."""
        raise NotImplementedError

    def newest(self) -> Checkpoint | None:
        """The newest published checkpoint that verifies; each damaged one before it is logged as a warning."""
        raise NotImplementedError

    def publish(self, counter: int) -> State:
        """Commit a prepared checkpoint; also one that an earlier process prepared. Returns when that is durable."""
        raise NotImplementedError

    def discard(self, counter: int) -> None:
        """Remove a complete checkpoint, durably."""
        raise NotImplementedError

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Finish what was finished by the caller, abort the rest, free everything.

        Raises the first error of a ticket that nobody had waited for; TimeoutError leaves the engine open.
        """
        raise NotImplementedError
