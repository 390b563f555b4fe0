"""A short probe of a storage device: which chunk size, back end, how many writers and checkpoints in flight are best.

The result is kept beside the checkpoint file, as ``NAME.tune.json``; it is a matter of speed only and may be deleted.
"""

import contextlib
import errno
import json
import os
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from checkmate.persist.engine import MAX_SLOTS, Backend, Engine, Options, PersistError, create, probe

MIB = 1 << 20
CHUNKS = (1 * MIB, 4 * MIB, 16 * MIB)
WRITERS = (1, 2, 4)
IN_FLIGHT = (1, 2, 3)
_NOTICEABLE = 1.05
"""More writers or checkpoints in flight must gain so much: they cost memory, and N a slot of storage each. So must
pwrite over what can do more (persistent memory, io_uring)."""
_WAIT_S = 120.0


@dataclass(frozen=True)
class Tuning:
    """Choice for one device. ``rate``: bytes/s that it wrote with it, at the time of the probe."""

    chunk_bytes: int
    writers: int
    in_flight: int
    rate: float
    backend: Backend = Backend.AUTO

    def options(self, base: Options) -> Options:
        """``base`` with what it leaves open."""
        return replace(
            base,
            chunk_bytes=base.chunk_bytes or self.chunk_bytes,
            writers=base.writers or self.writers,
            backend=base.backend or self.backend,
        )


def tuning_path(path: Path) -> Path:
    """Where the tuning of a checkpoint file is kept."""
    return path.with_name(f"{path.name}.tune.json")


def read_tuning(path: Path) -> Tuning | None:
    """What was kept for a checkpoint file; None where there is nothing, or nothing of use."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
        fields = json.loads(tuning_path(path).read_text())
        tuning = Tuning(**{**fields, "backend": Backend(fields.get("backend", Backend.AUTO))})
        numbers = (tuning.chunk_bytes, tuning.writers, tuning.in_flight)
        if all(type(number) is int and number > 0 for number in numbers) and tuning.in_flight < MAX_SLOTS:
            return tuning
    return None


def tune(path: Path, base: Options | None = None, nbytes: int = 64 * MIB) -> Tuning:
    """Probe the device of a checkpoint file (which need not exist) with writes of ``nbytes``, and keep the result.

    Takes some seconds and, for that time, a few times ``nbytes`` of space. Raises PersistError.
    """
    base = base or Options()
    tried = [
        (probe(path.parent, _with(base, chunk, writers), nbytes), chunk, writers) for chunk, writers in _grid(base)
    ]
    fastest = max(rate for rate, _, _ in tried)
    rate, chunk, writers = min(
        (one for one in tried if one[0] * _NOTICEABLE >= fastest), key=lambda one: (one[2], -one[0])
    )
    base = replace(base, chunk_bytes=chunk, writers=writers)
    base, rate = _faster(path.parent, base, rate, nbytes)
    tuning = Tuning(chunk, writers, _in_flight(path.parent, base, nbytes // 4), rate, base.backend)
    _keep(path, asdict(tuning))
    return tuning


def _grid(base: Options) -> list[tuple[int, int]]:
    chunks = (base.chunk_bytes,) if base.chunk_bytes else CHUNKS
    writers = (base.writers,) if base.writers else WRITERS
    return [(chunk, count) for chunk in chunks for count in writers]


def _with(base: Options, chunk_bytes: int, writers: int) -> Options:
    return replace(base, chunk_bytes=chunk_bytes, writers=writers)


def _faster(folder: Path, options: Options, rate: float, nbytes: int) -> tuple[Options, float]:
    """With pwrite instead of what was chosen by what the machine can do, if that is faster."""
    if options.backend is not Backend.AUTO:
        return options, rate
    plain = replace(options, backend=Backend.PWRITE)
    plain_rate = probe(folder, plain, nbytes)
    rate = max(rate, probe(folder, options, nbytes))  # neighbours in time: the device may be shared
    return (plain, plain_rate) if plain_rate > rate * _NOTICEABLE else (options, rate)


def _in_flight(folder: Path, options: Options, nbytes: int) -> int:
    """The N with the least T_w/N: how often a checkpoint of ``nbytes`` can be started (PCcheck)."""
    periods = {n: _period(folder, replace(options, pool_chunks=0), nbytes, n) for n in IN_FLIGHT}
    best = min(periods.values())
    return next(n for n, period in periods.items() if period <= best * _NOTICEABLE)


def _period(folder: Path, options: Options, nbytes: int, in_flight: int) -> float:
    data = bytearray(nbytes)
    with tempfile.TemporaryDirectory(prefix=".checkmate-tune-", dir=folder) as place:
        path = Path(place, "probe")
        create(path, slots=in_flight + 1, data_bytes=nbytes, meta_bytes=4096)
        engine = Engine(path, options)
        try:
            start = time.monotonic()
            tickets = []
            for step in range(in_flight):
                ticket = engine.begin(step, nbytes, timeout_s=_WAIT_S)
                ticket.write(0, data)
                ticket.finish()
                tickets.append(ticket)
            for ticket in tickets:
                ticket.wait(_WAIT_S)
            return (time.monotonic() - start) / in_flight
        finally:
            engine.close()


def _keep(path: Path, tuning: dict[str, Any]) -> None:
    target = tuning_path(path)
    new = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        new.write_text(json.dumps(tuning) + "\n")
        new.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        reason = f"cannot keep the tuning in {target}: {error.strerror}; make room, or choose another path"
        raise PersistError(error.errno or errno.EIO, reason) from None
