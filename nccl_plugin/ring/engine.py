"""The C ring engine as Python objects: one ``Ring`` per communicator, one ``Operation`` per collective.

The declarations come from ``ring.h``. Calls that wait do so without the GIL and return to Python at least every
half second, so that signals are handled.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cffi

from checkmate import native

_ERROR_BYTES = 512
_SLICE_S = 0.5

_HEADERS = [native.header("checkmate.nccl_plugin.ring", "ring.h")]
ffi = cffi.FFI()
ffi.cdef(native.declarations(_HEADERS))
_loaded: list[Any] = []


def lib() -> Any:
    """The engine's library; loaded at the first call. Raises CheckmateError when it was not built."""
    if not _loaded:
        _loaded.append(native.load(ffi, native.library("libcheckmate_ring.so"), _HEADERS))
    return _loaded[0]


class RingError(Exception):
    """A communicator failed (a peer died, a time-out, an abort): it stays failed. The text says what and where."""


@dataclass(frozen=True)
class RingConfig:
    """What one rank's communicator is made of; ``slice_bytes`` is the largest message.

    ``host_ranks``: ranks on each host, in the order of the ranks: a ring passes each host once.
    """

    plugin: Path | str
    name: str
    comm_id: int
    rank: int
    nranks: int
    nchannels: int
    slice_bytes: int
    host_ranks: Sequence[int]


@dataclass(frozen=True)
class Task:
    """One operation on memory addresses; see ``struct ckm_ring_task`` for what each function expects."""

    func: int
    dtype: int
    count: int
    inputs: Sequence[int] = ()
    outputs: Sequence[int] = ()
    redop: int = 0
    root: int = 0
    timeout_s: float | None = None


class Operation:
    """An operation on its way. Its memory must stay where it is until ``done``."""

    def __init__(self, pointer: Any) -> None:
        self._op = ffi.gc(pointer, lib().ckm_ring_op_free)

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Whether it has ended well, waiting at most ``timeout_s``. Raises RingError when it failed."""
        result = lib().ckm_ring_op_wait(self._op, int(timeout_s * 1000))
        if result < 0:
            raise RingError(_text(lib().ckm_ring_op_error(self._op)))
        return bool(result)

    def wait(self, timeout_s: float | None = None) -> bool:
        """As ``poll``, for as long as it takes when ``timeout_s`` is None."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = _SLICE_S if end is None else min(_SLICE_S, max(0.0, end - time.monotonic()))
            if self.poll(left):
                return True
            if end is not None and time.monotonic() >= end:
                return False

    def notify(self, cookie: int) -> bool:
        """Ask that ``Ring.next_done`` return ``cookie`` when this has ended. False: it has ended already."""
        return bool(lib().ckm_ring_op_notify(self._op, cookie) == 0)


class Ring:
    """One rank's end of a communicator.

    ``handles`` of all ranks, exchanged by the caller, go to ``connect``. Raises RingError when the plugin cannot be
    loaded or used.
    """

    def __init__(self, setup: RingConfig) -> None:
        text = [ffi.new("char[]", str(s).encode()) for s in (setup.plugin, setup.name)]
        hosts = ffi.new("uint32_t[]", list(setup.host_ranks))
        error = ffi.new("char[]", _ERROR_BYTES)
        numbers = (setup.comm_id, setup.rank, setup.nranks, setup.nchannels, setup.slice_bytes, len(hosts))
        c_config = ffi.new("struct ckm_ring_config *", (*text, *numbers, hosts))
        self._ring = lib().ckm_ring_create(c_config, error, _ERROR_BYTES)
        if not self._ring:
            raise RingError(_text(error))
        self._ring = ffi.gc(self._ring, lib().ckm_ring_destroy)

    def handles(self) -> bytes:
        """What the other ranks need in order to connect to this one."""
        buffer = ffi.new("char[]", lib().ckm_ring_handle_bytes(self._ring))
        lib().ckm_ring_handles(self._ring, buffer)
        return bytes(ffi.buffer(buffer))

    def connect(self, handles: Sequence[bytes], timeout_s: float) -> None:
        """Connect all channels; ``handles`` in rank order. Raises RingError on failure or after the time-out."""
        lib().ckm_ring_connect(self._ring, ffi.from_buffer(b"".join(handles)))
        end = time.monotonic() + timeout_s
        while (result := lib().ckm_ring_connected(self._ring, int(_SLICE_S * 1000))) == 0:
            if time.monotonic() >= end:
                raise RingError(f"the other ranks did not connect within {timeout_s:g} s")
        if result < 0:
            raise RingError(self.error())

    def submit(self, task: Task) -> Operation:
        """Start an operation. Raises RingError when the communicator is closed or has failed."""
        inputs = ffi.new("void *[]", [ffi.cast("void *", p) for p in task.inputs] or 1)
        outputs = ffi.new("void *[]", [ffi.cast("void *", p) for p in task.outputs] or 1)
        timeout_ms = -1 if task.timeout_s is None else int(task.timeout_s * 1000)
        c_task = ffi.new(
            "struct ckm_ring_task *",
            (task.func, task.dtype, task.redop, task.root, task.count, inputs, outputs, timeout_ms),
        )
        error = ffi.new("char[]", _ERROR_BYTES)
        pointer = lib().ckm_ring_submit(self._ring, c_task, error, _ERROR_BYTES)
        if not pointer:
            raise RingError(_text(error))
        return Operation(pointer)

    def next_done(self) -> int | None:
        """Cookie of an operation that has ended, None after a while without one. Raises EOFError when closed."""
        cookie = ffi.new("uint64_t *")
        result = lib().ckm_ring_next_done(self._ring, int(_SLICE_S * 1000), cookie)
        if result < 0:
            raise EOFError
        return int(cookie[0]) if result else None

    def error(self) -> str:
        """The first error, or an empty string."""
        return _text(lib().ckm_ring_error(self._ring))

    def abort(self, reason: str) -> None:
        """Fail every operation, now and later, and close the connections; the neighbours notice at once."""
        lib().ckm_ring_abort(self._ring, reason.encode())

    def close(self) -> None:
        """End the proxy thread and close everything. What is still going on fails."""
        lib().ckm_ring_close(self._ring)


def _text(pointer: Any) -> str:
    return bytes(ffi.string(pointer)).decode(errors="replace")  # type: ignore[arg-type]
