"""Checkpointing as others do it, behind one interface, each written from its paper; and ours behind the same.

All are durable when they say so: data are flushed before what points at them. None is made slower than its paper has
it; where a paper uses a GPU's copy engine, here the CPU copies.
"""

import argparse
import math
import mmap
import multiprocessing
import os
import socket
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgpack
import torch
import torch.distributed.checkpoint as dcp
from common import add_kinds_option, add_storage_option, count
from torch.optim import Optimizer

from checkmate.persist import Checkpointer
from checkmate.persist.engine import Options
from checkmate.persist.interchange import read_dcp
from checkmate.persist.state import Packed, Stored, pack

State = Callable[[], dict[str, Any]]
Found = tuple[int, Any] | None
WAIT_S = 600.0
_PIECE = 8 << 20


class Saver(ABC):
    """Saves what ``state`` returns, into a folder. ``save`` is called after the optimizer's step of an iteration."""

    name = ""

    def __init__(self, folder: Path, state: State, optimizer: Optimizer) -> None:
        self.folder, self.state, self.optimizer = folder, state, optimizer

    @abstractmethod
    def save(self, step: int) -> None:
        """Start a checkpoint; returns when training may go on."""

    def finish(self) -> None:  # noqa: B027 - those that save at once have nothing to wait for
        """Wait until all that was started is durable."""

    @abstractmethod
    def load(self) -> Found:
        """Step and state of the newest durable checkpoint."""

    def close(self) -> None:
        """Finish, and let everything go."""
        self.finish()


class NoSaver(Saver):
    """No checkpoints: what all others are compared with."""

    name = "none"

    def save(self, step: int) -> None:
        """Nothing."""

    def load(self) -> Found:
        return None


class _TorchFile(Saver):
    """Checkpoints are files of ``torch.save``, of which at most one is being written."""

    _running: Future[None] | None = None

    def finish(self) -> None:
        if self._running:
            self._running.result(WAIT_S)

    def load(self) -> Found:
        return _read_torch(self.folder)


class TorchSave(_TorchFile):
    """Synchronous ``torch.save``: training stands still until the file is flushed and has its name."""

    name = "torch.save"

    def save(self, step: int) -> None:
        _write_torch(self.folder, step, self.state())


class TorchAsync(_TorchFile):
    """``torch.save`` in a thread, on a copy that training waits for; the next save waits for the one before."""

    name = "torch async"

    def __init__(self, folder: Path, state: State, optimizer: Optimizer) -> None:
        super().__init__(folder, state, optimizer)
        self._thread = ThreadPoolExecutor(1)

    def save(self, step: int) -> None:
        self.finish()
        self._running = self._thread.submit(_write_torch, self.folder, step, _copy(self.state()))

    def close(self) -> None:
        self.finish()
        self._thread.shutdown()


class DcpAsync(Saver):
    """``torch.distributed.checkpoint.async_save``: a staged copy, then a writer in the background, one at a time."""

    name = "DCP async_save"

    def __init__(self, folder: Path, state: State, optimizer: Optimizer) -> None:
        super().__init__(folder, state, optimizer)
        self._running: Any = None
        self._saves = 0

    def save(self, step: int) -> None:
        self.finish()
        self._saves += 1
        target = self.folder / f"dcp{self._saves % 2}"  # the other one holds the checkpoint before
        (target / ".metadata").unlink(missing_ok=True)  # what it points at is overwritten
        self._running = dcp.async_save({**self.state(), "step": step}, checkpoint_id=target, no_dist=True)

    def finish(self) -> None:
        if self._running:
            self._running.result()
            self._running = None

    def load(self) -> Found:
        complete = [slot for slot in (0, 1) if (self.folder / f"dcp{slot}/.metadata").exists()]
        states = [(read_dcp(self.folder / f"dcp{slot}"), slot) for slot in complete]
        state, self._saves = max(states, key=lambda found: found[0]["step"], default=(None, 0))
        return (state["step"], state) if state else None


class CheckFreq(_TorchFile):
    """CheckFreq (FAST 2021): snapshot and persist are two phases, each overlapped with computation; one is in flight.

    The snapshot is taken while the next iteration computes, and must be complete before its weight update. It is
    written by one thread; the next snapshot waits for that. ``profiled_interval`` is its rule for how often.
    """

    name = "CheckFreq"

    def __init__(self, folder: Path, state: State, optimizer: Optimizer) -> None:
        super().__init__(folder, state, optimizer)
        self._snapshotter, self._writer = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._snapshot: Future[dict[str, Any]] | None = None
        self._hook = optimizer.register_step_pre_hook(lambda *_: self._wait_for_snapshot())

    def save(self, step: int) -> None:
        self.finish()
        snapshot = self._snapshot = self._snapshotter.submit(_copy, self.state())
        self._running = self._writer.submit(lambda: _write_torch(self.folder, step, snapshot.result()))

    def _wait_for_snapshot(self) -> None:
        if self._snapshot:
            self._snapshot.result(WAIT_S)
            self._snapshot = None

    def close(self) -> None:
        self.finish()
        self._hook.remove()
        self._snapshotter.shutdown()
        self._writer.shutdown()

    def profile(self, iteration_s: float, update_s: float) -> int:
        """The interval that it chooses: one checkpoint is taken and written to measure what that needs."""
        start = time.perf_counter()
        self.save(0)
        self._wait_for_snapshot()
        snapshot_s = time.perf_counter() - start
        self.finish()
        persist_s = time.perf_counter() - start - snapshot_s
        return self.profiled_interval(iteration_s, update_s, snapshot_s, persist_s)

    @staticmethod
    def profiled_interval(iteration_s: float, update_s: float, snapshot_s: float, persist_s: float) -> int:
        """Iterations between checkpoints for an overhead of 3.5 %, its paper's bound, as we read its policy.

        What of the snapshot doesn't fit beside the computation of one iteration is its cost; a checkpoint must be
        written before the next begins.
        """
        cost = max(0.0, snapshot_s - (iteration_s - update_s))
        return max(1, math.ceil((snapshot_s + persist_s) / iteration_s), math.ceil(cost / (0.035 * iteration_s)))


class Gpm(Saver):
    """GPM (ASPLOS 2022): the device writes straight to mapped storage, with no copy in DRAM; training stands still.

    Two slots in one mapped file; a slot's header is flushed after its data.
    """

    name = "GPM"
    _HEADER = struct.Struct("<QQQ")
    """Step + 1 (0: empty), bytes of the manifest, bytes of data."""

    def __init__(self, folder: Path, state: State, optimizer: Optimizer) -> None:
        super().__init__(folder, state, optimizer)
        self._path = folder / "gpm"
        self._map: mmap.mmap | None = None
        self._saves = 0

    def save(self, step: int) -> None:
        packed = pack(self.state())
        metadata = packed.metadata()
        memory = self._mapped(packed.data_bytes + len(metadata))
        base = (self._saves % 2) * (len(memory) // 2)
        self._saves += 1
        memory[base : base + 8] = bytes(8)
        memory.flush()
        start = base + mmap.PAGESIZE
        target = torch.frombuffer(memory, dtype=torch.uint8)
        for span in packed.spans.values():
            target[start + span.offset : start + span.end] = span.memory
        end = start + packed.data_bytes
        memory[end : end + len(metadata)] = metadata
        memory.flush()
        memory[base : base + self._HEADER.size] = self._HEADER.pack(step + 1, len(metadata), packed.data_bytes)
        memory.flush()

    def _mapped(self, nbytes: int) -> mmap.mmap:
        if self._map is None:
            slot = mmap.PAGESIZE * (2 + nbytes * 2 // mmap.PAGESIZE)
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT)
            os.posix_fallocate(descriptor, 0, 2 * slot)
            self._map = mmap.mmap(descriptor, 2 * slot)
            os.close(descriptor)
        return self._map

    def load(self) -> Found:
        if not self._path.exists():
            return None
        with self._path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
            half = len(memory) // 2
            (number, meta_bytes, data_bytes), slot = max(
                (self._HEADER.unpack_from(memory, slot * half), slot) for slot in (0, 1)
            )
            if not number:
                return None
            self._saves = slot + 1  # the next one goes to the other slot
            start = slot * half + mmap.PAGESIZE
            data = memory[start : start + data_bytes + meta_bytes]
            return number - 1, _unpack(data[data_bytes:], memoryview(data)[:data_bytes])


class Gemini(Saver):
    """Gemini (SOSP 2023): to the memory of another machine over the network, one in flight, nothing on disk.

    The other machine is a process that holds the two newest checkpoints; the network is TCP over the loopback. Pieces
    go straight from live memory while the next iteration computes; the weight update waits until all have been sent.
    """

    name = "Gemini"

    def __init__(self, folder: Path, state: State, optimizer: Optimizer) -> None:
        super().__init__(folder, state, optimizer)
        ours, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._peer = context.Process(target=_serve_memory, args=(theirs,), daemon=True)
        self._peer.start()
        self._socket = socket.create_connection(("127.0.0.1", ours.recv()), timeout=WAIT_S)
        self._thread = ThreadPoolExecutor(1)
        self._running: Future[None] | None = None
        self._hook = optimizer.register_step_pre_hook(lambda *_: self.finish())

    def save(self, step: int) -> None:
        self.finish()
        self._running = self._thread.submit(self._send, pack(self.state()), step)

    def _send(self, packed: Packed, step: int) -> None:
        metadata = packed.metadata()
        _tell(self._socket, [step, len(metadata), packed.data_bytes])
        for span in packed.spans.values():
            data = span.memory.numpy().data
            for start in range(0, len(data), _PIECE):
                self._socket.sendall(data[start : start + _PIECE])
        self._socket.sendall(metadata)
        assert _exactly(self._socket, 1) == b"k"

    def finish(self) -> None:
        if self._running:
            self._running.result(WAIT_S)
            self._running = None

    def load(self) -> Found:
        _tell(self._socket, [-1, 0, 0])
        step, meta_bytes, data_bytes = _hear(self._socket)
        if step < 0:
            return None
        data = _exactly(self._socket, data_bytes + meta_bytes)
        return step, _unpack(bytes(data[data_bytes:]), memoryview(data)[:data_bytes])

    def close(self) -> None:
        self.finish()
        self._hook.remove()
        self._thread.shutdown()
        self._socket.close()
        self._peer.join(WAIT_S)


class PCcheck(Saver):
    """Ours: N in flight, chunks, several writers; ``options`` and ``in_flight`` as of Checkpointer."""

    name = "PCcheck"

    def __init__(
        self,
        folder: Path,
        state: State,
        optimizer: Optimizer,
        in_flight: int | None = None,
        options: Options | None = None,
        memory: int | None = None,
    ) -> None:
        super().__init__(folder, state, optimizer)
        self.checkpointer = Checkpointer(folder / "pccheck", in_flight=in_flight, options=options, memory=memory)
        self.checkpointer.attach(optimizer)
        self._running: list[Future[Any]] = []
        self.write_s: list[float] = []
        """Of each checkpoint, from ``save`` until durable."""

    def save(self, step: int) -> None:
        self._running = [future for future in self._running if not self._took(future, 0)]
        self._running.append(self.checkpointer.save(self.state(), step))

    def _took(self, future: Future[Any], wait_s: float) -> bool:
        if not (wait_s or future.done()):
            return False
        self.write_s.append(future.result(wait_s).write_s)
        return True

    def finish(self) -> None:
        for future in self._running:
            self._took(future, WAIT_S)
        self._running = []

    def load(self) -> Found:
        return self.checkpointer.load()

    def close(self) -> None:
        self.finish()
        self.checkpointer.close()


SAVERS: dict[str, type[Saver]] = {
    saver.name: saver for saver in (NoSaver, PCcheck, CheckFreq, Gpm, Gemini, TorchAsync, DcpAsync, TorchSave)
}


def make(name: str, folder: Path, state: State, optimizer: Optimizer, in_flight: int) -> Saver:
    """A saver in a folder of its own in ``folder``, where one of its name may have been. ``in_flight``: PCcheck's N."""
    place = folder / name.replace(" ", "-")
    place.mkdir(exist_ok=True)
    if name == PCcheck.name:
        return PCcheck(place, state, optimizer, in_flight)
    return SAVERS[name](place, state, optimizer)


def add_saver_options(parser: argparse.ArgumentParser, *, leave_out: str = "") -> None:
    """``--kinds``, ``--in-flight`` and ``--storage``."""
    add_kinds_option(parser, tuple(name for name in SAVERS if name != leave_out))
    parser.add_argument("--in-flight", type=count, default=2, help="N of PCcheck")
    add_storage_option(parser)


def drop_cache(folder: Path) -> None:
    """What is read from files in ``folder`` comes from storage then, as on a machine that did not write them."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def _copy(state: Any) -> Any:
    """All tensors copied; other values are not changed by training."""
    if isinstance(state, torch.Tensor):
        return state.detach().cpu().clone()
    if isinstance(state, dict):
        return {key: _copy(value) for key, value in state.items()}
    return [_copy(value) for value in state] if isinstance(state, list) else state


def _write_torch(folder: Path, step: int, state: Any) -> None:
    new, path = folder / "new.pt", folder / "checkpoint.pt"
    with new.open("wb") as file:
        torch.save({"step": step, "state": state}, file)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _read_torch(folder: Path) -> Found:
    path = folder / "checkpoint.pt"
    if not path.exists():
        return None
    found = torch.load(path, weights_only=True)
    return found["step"], found["state"]


def _unpack(metadata: bytes, data: memoryview) -> Any:
    stored = Stored.of(metadata, len(data))
    for span in stored.spans:
        span.memory.numpy()[:] = data[span.offset : span.end]
    return stored.unpack()


def _serve_memory(pipe: Any) -> None:
    """Gemini's other machine: until the connection closes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname()[1])
        connection, _ = server.accept()
    slots: list[tuple[int, bytearray, int] | None] = [None, None]
    newest = 0
    with connection:
        while message := _hear(connection):
            step, meta_bytes, data_bytes = message
            if step < 0:
                _answer(connection, slots[newest])
                continue
            slot = 1 - newest
            held = slots[slot]
            buffer = held[1] if held and len(held[1]) == data_bytes + meta_bytes else bytearray(data_bytes + meta_bytes)
            slots[slot] = None
            _fill(connection, memoryview(buffer))
            slots[slot], newest = (step, buffer, meta_bytes), slot
            connection.sendall(b"k")


def _answer(connection: socket.socket, held: tuple[int, bytearray, int] | None) -> None:
    if held is None:
        _tell(connection, [-1, 0, 0])
        return
    step, buffer, meta_bytes = held
    _tell(connection, [step, meta_bytes, len(buffer) - meta_bytes])
    connection.sendall(buffer)


def _tell(connection: socket.socket, numbers: list[int]) -> None:
    body = msgpack.packb(numbers)
    connection.sendall(struct.pack("<I", len(body)) + body)


def _hear(connection: socket.socket) -> list[int]:
    head = connection.recv(4, socket.MSG_WAITALL)
    if len(head) < 4:
        return []
    numbers: list[int] = msgpack.unpackb(bytes(_exactly(connection, struct.unpack("<I", head)[0])))
    return numbers


def _exactly(connection: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    _fill(connection, memoryview(data))
    return data


def _fill(connection: socket.socket, view: memoryview) -> None:
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionError("the connection was closed")
        view = view[count:]
