"""CUDA memory to staging buffers: the copy engine works on a stream of its own, the trainer's stream goes on."""

import threading
from typing import Any

import torch
from torch import Tensor

from checkmate.config import CheckmateError
from checkmate.persist.engine import Ticket
from checkmate.persist.state import Packed, Span, chunk_pieces

_DEPTH = 2
"""Chunks on their way at a time: the copy of one overlaps with handing over the one before."""


class PinnedPool:
    """The engine's staging memory, registered with CUDA while this object is open: copies need no second buffer."""

    def __init__(self, pool: tuple[int, int]) -> None:
        self._address, nbytes = pool
        _check(_runtime().cudaHostRegister(self._address, nbytes, 0), "cudaHostRegister")

    def close(self) -> None:
        """Only when no copy is under way."""
        _check(_runtime().cudaHostUnregister(self._address), "cudaHostUnregister")


class DeviceCopy:
    """Copies the chunks that hold bytes of CUDA tensors: all before ``end``, CPU bytes among them too."""

    def __init__(self, packed: Packed, ticket: Ticket, chunk_bytes: int, pinned: PinnedPool, timeout_s: float) -> None:
        self._pinned = pinned
        self._ticket = ticket
        self._timeout_s = timeout_s
        spans = list(packed.spans.values())
        cuda_bytes = max((span.end for span in spans if span.storage.is_cuda), default=0)
        self.end = min(packed.data_bytes, -(-cuda_bytes // chunk_bytes) * chunk_bytes)
        chunks = chunk_pieces(spans, chunk_bytes)
        self._chunks = [(chunk, pieces) for chunk, pieces in chunks if chunk * chunk_bytes < self.end]
        self._chunk_bytes = chunk_bytes
        devices = {span.storage.device for span in spans if span.storage.is_cuda}
        self._streams = {device: _stream(device) for device in devices}
        for device, stream in self._streams.items():
            stream.wait_stream(torch.cuda.current_stream(device))  # the state is as of the call of save
        self._copied: list[list[torch.cuda.Event]] = []
        self._progress = threading.Condition()
        self._ended = False

    def run(self) -> None:
        """Copy all chunks. Raises PersistError or TimeoutError."""
        try:
            for chunk, pieces in self._chunks:
                self._copy(chunk, pieces)
                if chunk >= _DEPTH - 1:
                    self._hand_over(chunk - _DEPTH + 1)
            for chunk in range(max(0, len(self._chunks) - _DEPTH + 1), len(self._chunks)):
                self._hand_over(chunk)
        finally:
            self.abort()
            for stream in self._streams.values():
                stream.synchronize()  # nothing is copied into a buffer that may be somebody else's soon

    def abort(self) -> None:
        """No more copies are started: who waits for one goes on."""
        with self._progress:
            self._ended = True
            self._progress.notify_all()

    def wait(self, start: int, end: int) -> None:
        """Make the current streams wait until a range is copied; the caller only until its copy has been started."""
        first, last = start // self._chunk_bytes, (end - 1) // self._chunk_bytes
        with self._progress:
            if not self._progress.wait_for(lambda: self._ended or len(self._copied) > last, self._timeout_s):
                raise TimeoutError(f"the copy from the device did not start within {self._timeout_s:g} s")
            if len(self._copied) <= last:
                raise CheckmateError("the copy from the device was given up")
            events = [event for chunk in self._copied[first : last + 1] for event in chunk]
        for event in events:
            for device in self._streams:
                torch.cuda.current_stream(device).wait_event(event)

    def _copy(self, chunk: int, pieces: list[tuple[Span, int, int]]) -> None:
        buffer = torch.frombuffer(self._ticket.lease(chunk, self._timeout_s), dtype=torch.uint8)
        offset = 0
        for span, start, nbytes in pieces:
            source, target = span.memory[start : start + nbytes], buffer[offset : offset + nbytes]
            offset += nbytes
            if source.is_cuda:
                _copy_async(target, source, self._streams[source.device])
            else:
                target.copy_(source)
        events = []
        for stream in self._streams.values():
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
            events.append(event)
        with self._progress:
            if self._ended:
                raise CheckmateError("the copy from the device was given up")
            self._copied.append(events)
            self._progress.notify_all()

    def _hand_over(self, chunk: int) -> None:
        for event in self._copied[chunk]:
            event.synchronize()
        self._ticket.submit(chunk)


def _copy_async(target: Tensor, source: Tensor, stream: torch.cuda.Stream) -> None:
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _check(code: object, call: str) -> None:
    number = int(getattr(code, "value", code))  # type: ignore[call-overload]
    if number:
        raise CheckmateError(f"{call} failed with CUDA error {number}: the staging memory cannot be used for copies")
