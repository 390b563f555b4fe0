"""The shadow's receiver: copies from the switch in, complete gradient buffers and damage reports out.

All work is done in C (``rx/`` and ``reassembly/``): a thread receives, reassembles and places; ``Receiver.poll``
hands over what became of it. Without ports the receiver is fed by hand (``feed``) and needs no DPDK. A shadow of
several data-parallel groups has a receiver for each, behind the same ports (``open_receivers``).
"""

import functools
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cffi import FFI

from checkmate import native
from checkmate.config import DSCP_TAG, CheckmateError
from checkmate.rack import group_number

_CORE = "libcheckmate_shadow_core.so"
_WITH_PORTS = "libcheckmate_shadow.so"
_POLL_SLICE_S = 0.2
"""Longest time in C without a look at Python's signals."""
_MAX_EVENTS = 64
_ERROR_BYTES = 1024
_MIN_MTU = 576
_MAX_COUNT = (1 << 32) - 1


@dataclass(frozen=True)
class RxConfig:
    """Sizes and bounds of a receiver; all sizes in bytes.

    ``ifaces``: (interface, network namespace) of each port; the namespace is a name in /run/netns, a path, or None for
    the present one. ``devargs``: PCI ports as EAL device arguments, for example ``0000:81:00.0``. ``mtu``: largest IP
    packet that arrives. ``sets``: iterations in flight at most. ``pool_bytes``: bound of all gradient buffers.
    ``reorder_bytes``: bound of what a flow holds out of order. ``gap_timeout_s``: how long a hole with later bytes
    behind it may stay, and how long a flow may wait for a free set. ``ring_frames``: packets that the kernel holds for
    a port (None: enough for a full-speed burst). ``memory_mb``, ``huge_pages``: DPDK's own memory, taken at the first
    receiver with ports of a process.
    """

    ifaces: Sequence[tuple[str, str | None]] = ()
    devargs: Sequence[str] = ()
    mtu: int = 1500
    max_op_bytes: int = 1 << 30
    sets: int = 3
    pool_bytes: int = 4 << 30
    reorder_bytes: int = 32 << 20
    gap_timeout_s: float = 0.5
    max_flows: int = 1024
    dscp: int = DSCP_TAG
    ring_frames: int | None = None
    memory_mb: int = 128
    huge_pages: bool = False

    def __post_init__(self) -> None:
        for name in ("max_op_bytes", "pool_bytes", "reorder_bytes"):
            if getattr(self, name) < 1:
                raise CheckmateError(f"{name} is {getattr(self, name)}: it must be at least 1")
        for name in ("sets", "max_flows", "memory_mb"):
            if not 1 <= getattr(self, name) <= _MAX_COUNT:
                raise CheckmateError(f"{name} is {getattr(self, name)}: it must be 1 to {_MAX_COUNT}")
        if not 0 < self.dscp < 64:
            raise CheckmateError(f"dscp is {self.dscp}: it must be a non-zero mask of the 6-bit field")
        if self.gap_timeout_s <= 0:
            raise CheckmateError(f"gap_timeout_s is {self.gap_timeout_s}: it must be positive")
        if not _MIN_MTU <= self.mtu <= 65535:
            raise CheckmateError(f"mtu is {self.mtu}: it must be {_MIN_MTU} to 65535")


@dataclass(frozen=True, slots=True)
class OpComplete:
    """One all-reduce (bucket) of one iteration is whole and verified.

    ``buffer_index`` names the buffer: ``Receiver.buffer`` gives its bytes, ``Receiver.release`` gives it back.
    ``datatype`` is NCCL's number (``checkmate.wire.DATATYPES``), ``count`` its elements, ``nbytes`` its bytes, ``at``
    the time at which its last packet had been taken in, in seconds of ``time.monotonic``.
    """

    incarnation: int
    iteration: int
    bucket: int
    datatype: int
    count: int
    nbytes: int
    comm_id: int
    coll_seq: int
    buffer_index: int
    at: float = field(default=0.0, compare=False)
    _data: Any = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Damage:
    """Gradients of an iteration are lost or wrong and will never complete.

    ``iteration`` and ``bucket`` are None where the lost bytes don't tell: then nothing that is not yet complete may be
    waited for. ``reason`` says what happened, ``where`` which bytes of which flow or operation.
    """

    incarnation: int
    iteration: int | None
    bucket: int | None
    reason: str
    where: str


Event = OpComplete | Damage


class _Core:
    """Ports, reassembly and buffers, of one group or several. Raises CheckmateError when a port can't be opened."""

    def __init__(self, config: RxConfig, groups: Sequence[str]) -> None:
        with_ports = bool(config.ifaces or config.devargs)
        self.ffi, self.lib = _load(_WITH_PORTS if with_ports else _CORE)
        core_config = self.ffi.new(
            "struct ckm_core_config *",
            {
                "max_op_bytes": config.max_op_bytes,
                "pool_bytes": config.pool_bytes,
                "reorder_bytes": config.reorder_bytes,
                "gap_timeout_us": round(config.gap_timeout_s * 1e6),
                "sets": config.sets,
                "max_flows": config.max_flows,
                "dscp": config.dscp,
            },
        )
        numbers = self.ffi.new("uint16_t[]", [group_number(name) for name in groups])
        # Freed when neither a receiver nor a view of a buffer needs it any more.
        self.core = self.ffi.gc(self.lib.ckm_core_create(core_config, numbers, len(groups)), self.lib.ckm_core_destroy)
        self.stop_ports = (
            weakref.finalize(self, _close_ports, self.lib, self._open(config), self.core) if with_ports else None
        )
        self._lock = threading.Lock()
        self._users = len(groups)

    def leave(self) -> None:
        """A receiver was closed; the last one stops the ports."""
        with self._lock:
            self._users -= 1
            if not self._users and self.stop_ports:
                self.stop_ports()

    def _open(self, config: RxConfig) -> Any:
        new = self.ffi.new
        names = [new("char[]", name.encode()) for name in (*(i[0] for i in config.ifaces), *config.devargs)]
        spaces = [
            new("char[]", str(_netns_path(netns)).encode()) if netns else self.ffi.NULL for _, netns in config.ifaces
        ]
        ports = new("struct ckm_port_config[]", len(names))
        for i, (port, name) in enumerate(zip(ports, names, strict=True)):
            port.name = name
            port.pci = i >= len(spaces)
            port.netns = self.ffi.NULL if port.pci else spaces[i]
            port.mtu = config.mtu
            port.ring_frames = config.ring_frames or 0
        error = new("char[]", _ERROR_BYTES)
        opened = self.lib.ckm_ports_open(
            self.core, ports, len(names), config.memory_mb, config.huge_pages, error, _ERROR_BYTES
        )
        if not opened:
            raise CheckmateError(self.text(error))
        return opened

    def text(self, chars: Any) -> str:
        """What C wrote."""
        raw = self.ffi.string(chars)
        assert isinstance(raw, bytes)
        return raw.decode(errors="replace")


class Receiver:
    """What arrives of one data-parallel group. Methods may be called from any thread.

    By itself it has ports of its own and takes whatever group's frames arrive there. Raises CheckmateError when a port
    can't be opened: the text names the interface and what to do.
    """

    def __init__(self, config: RxConfig, shared: _Core | None = None, index: int = 0) -> None:
        self._shared = shared = shared or _Core(config, [""])
        self._ffi, self._lib = shared.ffi, shared.lib
        self._group = self._lib.ckm_core_group(shared.core, index)
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def poll(self, timeout_s: float) -> list[Event]:
        """Events so far, waiting up to ``timeout_s`` for the first; the wait is in C, without the GIL."""
        events = self._ffi.new("struct ckm_event[]", _MAX_EVENTS)
        deadline = time.monotonic() + timeout_s
        while True:
            wait_s = min(max(deadline - time.monotonic(), 0), _POLL_SLICE_S)
            n = self._lib.ckm_group_poll(self._live_group(), events, _MAX_EVENTS, round(wait_s * 1e6))
            if n or time.monotonic() >= deadline:
                return [self._event(events[i]) for i in range(n)]

    def _event(self, event: Any) -> Event:
        if event.kind == self._lib.CKM_EVENT_DAMAGE:
            return Damage(
                incarnation=event.incarnation,
                iteration=event.iteration if event.has_iteration else None,
                bucket=event.bucket if event.has_bucket else None,
                reason=self._shared.text(event.reason),
                where=self._shared.text(event.where),
            )
        return OpComplete(
            incarnation=event.incarnation,
            iteration=event.iteration,
            bucket=event.bucket,
            datatype=event.datatype,
            count=event.count,
            nbytes=event.bytes,
            comm_id=event.comm_id,
            coll_seq=event.coll_seq,
            buffer_index=event.op,
            at=event.at_us / 1e6,
            _data=event.data,
        )

    def buffer(self, op: OpComplete) -> memoryview:
        """The operation's bytes in place, writable and not copied; valid until ``release``."""
        self._live_group()
        # The view keeps the core, and so the memory, alive even when the receiver is closed first.
        data = self._ffi.gc(op._data, functools.partial(_keep, self._shared.core))
        return memoryview(self._ffi.buffer(data, op.nbytes))

    def release(self, op: OpComplete) -> None:
        """Give the buffer back. Raises CheckmateError when it was given back before."""
        if self._lib.ckm_group_release(self._live_group(), op.buffer_index):
            raise CheckmateError(
                f"buffer {op.buffer_index} (iteration {op.iteration}, bucket {op.bucket}) was released before"
            )

    def set_incarnation(self, incarnation: int) -> None:
        """Take frames of this incarnation from now on (0, as at first: of none); others are counted as stale.

        What was complete stays valid until released; what was not is forgotten.
        """
        self._lib.ckm_group_set_incarnation(self._live_group(), incarnation)

    def expect(self, iteration: int) -> None:
        """Take frames of iterations up to this one from now on; those of later ones are counted as beyond."""
        self._lib.ckm_group_expect(self._live_group(), iteration)

    def discard(self, iteration: int) -> None:
        """Forget what is incomplete of iterations up to this one, for example after a reseed; no Damage is raised."""
        self._lib.ckm_group_discard(self._live_group(), iteration)

    def incomplete(self, incarnation: int, iteration: int) -> str:
        """What is missing of an iteration, as text; empty when all that was seen of it is complete, or it is past."""
        size = 1024
        while True:
            text = self._ffi.new("char[]", size)
            needed = self._lib.ckm_group_incomplete(self._live_group(), incarnation, iteration, text, size)
            if needed < size:
                return self._shared.text(text)
            size = needed + 1024

    def counters(self) -> dict[str, int]:
        """Counters since the start; ``reassembly/api.h`` describes each."""
        counters = self._ffi.new("struct ckm_counters *")
        self._lib.ckm_core_counters(self._live_core(), counters)
        return {name: getattr(counters, name) for name, _ in self._ffi.typeof(counters[0]).fields}

    def feed(self, packet: bytes, now_s: float | None = None) -> None:
        """Take one Ethernet frame as if it had arrived on a port, at ``now_s`` (None: now, monotonic)."""
        packets = self._ffi.new("uint8_t *[]", [self._ffi.from_buffer(packet)])
        self._lib.ckm_core_feed(self._live_core(), packets, [len(packet)], 1, self._microseconds(now_s))

    def tick(self, now_s: float | None = None) -> None:
        """Give up holes older than the time-out; with ports the receive thread does this by itself."""
        self._lib.ckm_core_tick(self._live_core(), self._microseconds(now_s))

    def close(self) -> None:
        """Stop the ports, once no group needs them. Buffers stay valid as long as a memoryview of them is in use."""
        if not self._closed:
            self._closed = True
            self._shared.leave()

    def _live_group(self) -> Any:
        if self._closed:
            raise CheckmateError("the receiver is closed")
        return self._group

    def _live_core(self) -> Any:
        self._live_group()
        return self._shared.core

    def _microseconds(self, now_s: float | None) -> int:
        return int(self._lib.ckm_now_us()) if now_s is None else round(now_s * 1e6)


def open_receivers(config: RxConfig, groups: Sequence[str]) -> list[Receiver]:
    """A receiver for each data-parallel group of these names, behind the same ports and within the same bounds.

    Ports stop when all are closed. Each takes its own frames, a single one also those that name no group; others are
    counted as foreign. Raises CheckmateError as ``Receiver`` does.
    """
    shared = _Core(config, groups)
    return [Receiver(config, shared, index) for index in range(len(groups))]


def _close_ports(lib: Any, ports: Any, _core: Any) -> None:
    """The receive thread uses the core until it has ended."""
    lib.ckm_ports_close(ports)


def _keep(_core: Any, _data: Any) -> None:
    """Destructor of a buffer's view: only its reference to the core matters."""


def _netns_path(netns: str) -> Path:
    return Path(netns) if "/" in netns else Path("/run/netns") / netns


@functools.cache
def _load(name: str) -> tuple[FFI, Any]:
    try:
        path = native.library(name)
    except CheckmateError as error:
        if name == _WITH_PORTS:
            raise CheckmateError(f"{error} (ports need DPDK: on Debian `apt install libdpdk-dev dpdk`)") from None
        raise
    headers = ["reassembly/api.h"] + ["rx/api.h"] * (name == _WITH_PORTS)
    return native.bind(path, [native.header("checkmate.shadow", each) for each in headers])
