"""Sustained write rate of the persistence engine against a plain C writer: same file system, chunk size, writers.

The plain writer sends memory to a file by direct I/O from as many threads, flushes once for each checkpoint, and does
nothing else: no copy, no checksums, no metadata. Both write the same number of checkpoints in turn, to files whose
space was written before; the engine has N of them in flight. Needs a C compiler::

    python benchmarks/persist_write.py [--folder .] [--megabytes 128] [--checkpoints 6] [--repetitions 9] [--json]
"""

import argparse
import mmap
import os
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cffi import FFI
from common import MIB, Spread, add_output_options, console, count, draw, print_json, progress, ratios, turns
from rich.table import Table

from checkmate.persist.engine import Backend, Engine, Options, Ticket, create

TARGET = 0.9
WAIT_S = 300.0
_DECLARATION = """
double plain_writes(const char *path, const uint8_t *data, uint64_t bytes, uint64_t chunk, uint32_t writers,
                    uint32_t slots, uint32_t times);
"""


@dataclass(frozen=True)
class Load:
    """One checkpoint is ``nbytes`` long; ``slots`` is N + 1; sizes in bytes."""

    nbytes: int
    checkpoints: int
    slots: int
    chunk: int
    writers: int
    pool: int
    backend: Backend


class Plain:
    """The plain writer on a file of its own."""

    def __init__(self, folder: Path, load: Load, source: memoryview) -> None:
        library = folder / "plain.so"
        here = Path(__file__).with_suffix(".c")
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-pthread", "-o", library, here], check=True)
        self._ffi: Any = FFI()
        self._ffi.cdef(_DECLARATION)
        self._lib = self._ffi.dlopen(str(library))
        self._load, self._source, self._path = load, source, folder / "plain"
        with self._path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, load.slots * load.nbytes)

    def write(self) -> float:
        """Bytes/s."""
        load = self._load
        source = self._ffi.from_buffer("uint8_t[]", self._source)
        taken = self._lib.plain_writes(
            bytes(self._path), source, load.nbytes, load.chunk, load.writers, load.slots, load.checkpoints
        )
        if taken < 0:
            raise SystemExit(f"the plain writer failed: {os.strerror(round(-taken))}")
        return load.nbytes * load.checkpoints / taken


class Ours:
    """The engine on a file of its own."""

    def __init__(self, engine: Engine, load: Load, source: memoryview) -> None:
        self._engine, self._load, self._source = engine, load, source
        self._step = 0

    def _begin(self) -> Ticket:
        self._step += 1
        ticket = self._engine.begin(self._step, self._load.nbytes, timeout_s=WAIT_S)
        ticket.write(0, self._source)
        ticket.finish()
        return ticket

    def write(self) -> float:
        """Bytes/s, until the last checkpoint is committed."""
        in_flight: deque[Ticket] = deque()
        start = time.perf_counter()
        for _ in range(self._load.checkpoints):
            if len(in_flight) == self._load.slots - 1:
                in_flight.popleft().wait(WAIT_S)
            in_flight.append(self._begin())
        for ticket in in_flight:
            ticket.wait(WAIT_S)
        return self._load.nbytes * self._load.checkpoints / (time.perf_counter() - start)


@contextmanager
def writers(folder: Path, load: Load) -> Iterator[dict[str, Plain | Ours]]:
    """Both, warmed up: all slots were written once."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="persist-write-") as name, mmap.mmap(-1, load.nbytes) as memory:
        place = Path(name)
        memory.madvise(mmap.MADV_HUGEPAGE)  # the plain writer's memory is as good as the engine's staging buffers
        source = memoryview(memory)
        for at in range(0, load.nbytes, MIB):
            source[at : at + MIB] = os.urandom(MIB)
        create(place / "ours", slots=load.slots, data_bytes=load.nbytes, meta_bytes=0)
        options = Options(backend=load.backend, writers=load.writers, pool_chunks=load.pool, chunk_bytes=load.chunk)
        plain = Plain(place, load, source)
        with Engine(place / "ours", options) as engine:
            both: dict[str, Plain | Ours] = {"plain": plain, "engine": Ours(engine, load, source)}
            for writer in both.values():
                writer.write()
            yield both
        source.release()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(), help="on the file system to be measured")
    parser.add_argument("--megabytes", type=count, default=128, help="of a checkpoint, in MiB")
    parser.add_argument("--checkpoints", type=count, default=6, help="written in each repetition")
    parser.add_argument("--concurrent", type=count, default=2, help="N: the engine's checkpoints in flight")
    parser.add_argument("--chunk", type=count, default=4, help="MiB of a write")
    parser.add_argument("--writers", type=count, default=4, help="writes in flight")
    parser.add_argument("--pool", type=count, default=16, help="staging buffers of the engine")
    parser.add_argument("--backend", choices=[backend.name.lower() for backend in Backend], default="auto")
    parser.add_argument("--repetitions", type=count, default=9)
    add_output_options(parser)
    arguments = parser.parse_args()
    if arguments.megabytes % arguments.chunk:
        parser.error(f"--megabytes {arguments.megabytes}: must be a multiple of --chunk {arguments.chunk}")
    return arguments


def main() -> None:
    arguments = parse()
    load = Load(
        nbytes=arguments.megabytes * MIB,
        checkpoints=arguments.checkpoints,
        slots=arguments.concurrent + 1,
        chunk=arguments.chunk * MIB,
        writers=arguments.writers,
        pool=arguments.pool,
        backend=Backend[arguments.backend.upper()],
    )
    to = console(arguments)
    rates: dict[str, list[float]] = {"plain": [], "engine": []}
    with (
        writers(arguments.folder, load) as both,
        progress(to, "writing", 2 * arguments.repetitions) as done,
    ):
        for repetition in range(arguments.repetitions):
            for name in turns(list(both), repetition):
                rates[name].append(both[name].write())
                done(name)
    ratio = ratios(rates["engine"], rates["plain"])
    table = Table(title=f"Sustained write, {arguments.repetitions} repetitions: median (quartiles)")
    for column in ("writer", "MB/s", "against plain"):
        table.add_column(column)
    table.add_row("plain C", Spread.of([rate / 1e6 for rate in rates["plain"]]).text(0), "1")
    table.add_row("engine", Spread.of([rate / 1e6 for rate in rates["engine"]]).text(0), ratio.text(2))
    to.print(table)
    verdict = "reached" if ratio.median >= TARGET else "missed"
    to.print(f"bar: {TARGET} x of the plain writer: {verdict}")
    if arguments.plot:
        draw(arguments.plot, lambda axes: axes.boxplot(list(rates.values()), tick_labels=list(rates)))
    if arguments.json:
        print_json(asdict(load) | {"folder": arguments.folder}, rates=rates, ratio=asdict(ratio))


if __name__ == "__main__":
    main()
