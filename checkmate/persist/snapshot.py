"""From live tensors to the engine's staging buffers, and how long their owner must wait before changing them."""

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from checkmate.persist.device import DeviceCopy, PinnedPool
from checkmate.persist.engine import Part, PersistError, Ticket
from checkmate.persist.state import MemoryKey, Packed, Span, StateError

_FEW_BYTES = 1 << 16
"""Copied sooner than a thread that does it would be awake."""

Check = Callable[[Span], bool]


class Snapshot:
    """The live memory of one checkpoint until it is copied.

    The trainer calls ``start``, then ``settle``, which returns when all but gated memory may change, and ``release``
    before an optimizer's step; a background thread calls ``copy``. A tensor is checked when it was copied and before
    its owner may change it: one that was changed in between makes the checkpoint fail, because it would hold neither
    the old state nor the new. (torch doesn't count changes by fused optimizers or through ``.data``: a change can go
    unnoticed, but none is reported that was not made.)
    """

    def __init__(
        self, packed: Packed, ticket: Ticket, chunk_bytes: int, pinned: PinnedPool | None, timeout_s: float
    ) -> None:
        self._ticket = ticket
        self._timeout_s = timeout_s
        self._spans = packed.spans
        self._versions = [(tensor, _version(tensor), span) for tensor, span in packed.tensors]
        self._device = DeviceCopy(packed, ticket, chunk_bytes, pinned, timeout_s) if pinned else None
        self._lock = threading.Lock()
        self._copies: list[Any] = []
        self._released: set[int] = set()
        """Offsets of the spans that their owner may change."""
        self._problem: Exception | None = None

    def start(self) -> None:
        """Give the CPU's memory to the engine. Raises PersistError."""
        first = self._device.end if self._device else 0
        parts: list[Part] = []
        for span in self._spans.values():
            skip = max(0, first - span.offset)
            if not skip and not span.gated and span.nbytes <= _FEW_BYTES:
                parts.append((span.offset, self._copied(span), span.nbytes))
            elif skip < span.nbytes:
                parts.append((span.offset + skip, span.address + skip, span.nbytes - skip))
        self._ticket.write_parts(parts)

    def _copied(self, span: Span) -> int:
        """Address of a copy, so that the span may change now."""
        copy = ctypes.create_string_buffer(span.nbytes)
        ctypes.memmove(copy, span.address, span.nbytes)
        self._copies.append(copy)
        self._released.add(span.offset)
        return ctypes.addressof(copy)

    def settle(self) -> None:
        """Wait until everything that isn't gated is copied."""
        self._release([span for span in self._spans.values() if not span.gated])

    def settle_all(self) -> None:
        """Wait until everything is copied."""
        self._release(list(self._spans.values()))

    def release(self, memory: Iterable[MemoryKey]) -> None:
        """Wait until this memory is copied: it may change then. Never raises: the checkpoint fails instead."""
        spans = self._spans
        self._release([spans[key] for key in memory if key in spans])

    def copy(self) -> None:
        """Copy what is on devices and wait for all. Raises PersistError, TimeoutError, StateError."""
        if self._device:
            self._device.run()
        try:
            self._ticket.wait_copied(self._timeout_s)
        except PersistError as error:
            raise self._problem or error from None
        with self._lock:
            self._check(lambda span: span.offset not in self._released)
            self._released.update(span.offset for span in self._spans.values())
            self._spans, self._versions, self._copies = {}, [], []  # what was saved may be freed
            if self._problem:
                raise self._problem

    def _release(self, spans: list[Span]) -> None:
        with self._lock:
            waiting = [span for span in spans if span.offset not in self._released]
            if not waiting:
                return
            offsets = {span.offset for span in waiting}
            try:
                for start, end in _ranges(waiting):
                    self._wait_for(start, end)
                self._check(lambda span: span.offset in offsets)
            except Exception as error:  # training goes on, whatever it is
                self._problem = self._problem or error
                self._give_up()
            self._released |= offsets

    def _give_up(self) -> None:
        if self._device:
            self._device.abort()  # `copy` ends the ticket, when what is being copied into its buffers has arrived
        else:
            with contextlib.suppress(PersistError):
                self._ticket.abort()

    def _wait_for(self, start: int, end: int) -> None:
        device_end = self._device.end if self._device else 0
        if self._device and start < device_end:
            self._device.wait(start, min(end, device_end))
        if end > device_end:
            self._ticket.wait_copied(self._timeout_s, max(start, device_end), end - max(start, device_end))

    def _check(self, wanted: Check) -> None:
        for tensor, version, span in self._versions:
            if wanted(span) and _version(tensor) != version:
                self._problem = self._problem or StateError(
                    f"a tensor of shape {list(tensor.shape)} was changed while it was being saved, and not by the step "
                    f"of an attached optimizer; call wait_copied() before changing it"
                )


def _ranges(spans: Iterable[Span]) -> list[tuple[int, int]]:
    """First and last + 1 byte of each run of spans that lie one behind the other."""
    ranges: list[tuple[int, int]] = []
    for span in sorted(spans, key=lambda span: span.offset):
        if ranges and ranges[-1][1] == span.offset:
            ranges[-1] = ranges[-1][0], span.end
        else:
            ranges.append((span.offset, span.end))
    return ranges


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
