"""The shadow's receiver: copies from the switch in, complete gradient buffers and damage reports out.

All work is done in C (``rx/`` and ``reassembly/``): a thread receives, reassembles and places; ``Receiver.poll``
hands over what became of it. Without interfaces the receiver is fed by hand (``feed``) and needs no DPDK.
"""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cffi import FFI

from checkmate.config import DSCP_TAG, CheckmateError, library

_POLL_SLICE_S = 0.2
"""Longest time in C without a look at Python's signals."""
_EVENTS = 64
_TEXT_BYTES = 4096


@dataclass(frozen=True)
class RxConfig:
    """Sizes and bounds of a receiver; all sizes in bytes.

    ``ifaces``: (interface, network namespace) of each port; the namespace is a name in /run/netns, a path, or None for
    the present one. ``devargs``: PCI ports as EAL device arguments, for example ``0000:81:00.0``. ``mtu``: largest IP
    packet that arrives. ``sets``: iterations in flight at most. ``pool_bytes``: bound of all gradient buffers.
    ``reorder_bytes``: bound of what a flow holds out of order. ``gap_timeout_s``: how long a hole with later bytes
    behind it may stay. ``ring_frames``: packets that the kernel holds for a port (None: enough for a full-speed burst).
    ``memory_mb``, ``huge_pages``: DPDK's own memory, taken at the first receiver of a process.
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


@dataclass(frozen=True, slots=True)
class OpComplete:
    """One all-reduce (bucket) of one iteration is whole and verified.

    ``buffer_index`` names the buffer: ``Receiver.buffer`` gives its bytes, ``Receiver.release`` gives it back.
    ``datatype`` is NCCL's number (``checkmate.wire.DATATYPES``), ``count`` its elements, ``nbytes`` its bytes.
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
    _address: Any = field(repr=False, compare=False)


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


class Receiver:
    """Ports, reassembly and gradient buffers of one shadow. Methods may be called from any thread.

    Raises CheckmateError when a port can't be opened: the text names the interface and what to do.
    """

    def __init__(self, config: RxConfig) -> None: ...

    def poll(self, timeout_s: float) -> list[Event]:
        """Events so far, waiting up to ``timeout_s`` for the first; the wait is in C, without the GIL."""
        ...

    def buffer(self, op: OpComplete) -> memoryview:
        """The operation's bytes in place, writable and not copied; valid until ``release``."""
        ...

    def release(self, op: OpComplete) -> None:
        """Give the buffer back. Raises CheckmateError when it was given back before."""
        ...

    def set_incarnation(self, incarnation: int) -> None:
        """Take frames of this incarnation from now on (0, as at first: of none); others are counted as stale.

        What was complete stays valid until released; what was not is forgotten.
        """
        ...

    def discard(self, iteration: int) -> None:
        """Forget what is incomplete of iterations up to this one, for example after a reseed; no Damage is raised."""
        ...

    def incomplete(self, incarnation: int, iteration: int) -> str:
        """What is missing of an iteration, as text; empty when no operation of it is known to be incomplete."""
        ...

    def counters(self) -> dict[str, int]:
        """Counters since the start; ``reassembly/api.h`` describes each."""
        ...

    def feed(self, packet: bytes, now_s: float | None = None) -> None:
        """Take one Ethernet frame as if it had arrived on a port, at ``now_s`` (None: now, monotonic)."""
        ...

    def tick(self, now_s: float | None = None) -> None:
        """Give up holes older than the time-out; with ports the receive thread does this by itself."""
        ...

    def close(self) -> None:
        """Stop the ports. Buffers stay valid as long as a memoryview of them is in use."""
        ...
