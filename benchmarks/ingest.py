"""Shadow ingest per core: reassembly, CRC32C and placement of packets in memory, against chunked memcpy of the same.

Both take CPU time of one thread, in turns, in one run; the copy goes through equal packets in the same order and does
nothing but memcpy. Packets of two channels' flows (first and last of four ranks) arrive interleaved. Needs a C
compiler::

    python benchmarks/ingest.py [--payloads 1448,8948] [--megabytes 32] [--repetitions 9] [--json]
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from cffi import FFI
from common import count
from rich.console import Console
from rich.table import Table

from checkmate.shadow.rx.receiver import OpComplete, Receiver, RxConfig

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from support.copies import AllReduce, Sender, gradients, interleave

TARGET = 0.75
TARGET_PAYLOAD = 1448
HEADERS = 54
_DECLARATIONS = """
double time_copy(uint8_t *to, const uint8_t *const *packets, const uint32_t *lengths, uint32_t n, uint32_t skip);
double time_ingest(void *feed, void *core, const uint8_t *const *packets, const uint32_t *lengths, uint32_t n);
"""


@dataclass(frozen=True)
class Result:
    """Rates in GB/s of TCP payload; ratios are of neighbours in time, so that a slow moment hits both."""

    payload: int
    copy_gbs: list[float]
    ingest_gbs: list[float]

    @property
    def ratios(self) -> list[float]:
        return [ingest / copy for ingest, copy in zip(self.ingest_gbs, self.copy_gbs, strict=True)]


class Packets:
    """Packets in memory as a driver hands them over: an array of pointers and one of lengths."""

    def __init__(self, packets: list[bytes]) -> None:
        self.lengths = np.array([len(p) for p in packets], np.uint32)
        self._memory = np.frombuffer(bytearray(b"".join(packets)), np.uint8)
        starts = np.concatenate([[0], np.cumsum(self.lengths[:-1], dtype=np.uint64)]).astype(np.uint64)
        self.pointers: npt.NDArray[np.uint64] = starts + np.uint64(self._memory.ctypes.data)
        self.payload_bytes = int(self.lengths.sum()) - HEADERS * len(packets)

    def arguments(self, ffi: FFI) -> tuple[Any, Any, int]:
        """As C takes them."""
        pointers = ffi.cast("const uint8_t *const *", self.pointers.ctypes.data)
        return pointers, ffi.cast("const uint32_t *", self.lengths.ctypes.data), len(self.lengths)


def load_yardstick(directory: str) -> tuple[FFI, Any]:
    """Compiles ingest.c."""
    target = Path(directory) / "ingest.so"
    source = Path(__file__).with_suffix(".c")
    subprocess.run(["cc", "-O3", "-shared", "-fPIC", "-o", target, source], check=True)
    ffi = FFI()
    ffi.cdef(_DECLARATIONS)
    return ffi, ffi.dlopen(str(target))


def measure(payload: int, nbytes: int, repetitions: int, ffi: FFI, lib: Any) -> Iterator[tuple[float, float]]:
    """(copy, ingest) seconds per payload byte of each repetition after the one that teaches the layout.

    Each goes through its own packets, fresh in memory as from a NIC, and once; they take turns in being first.
    """
    op = AllReduce(count=nbytes // 4, nchannels=2, elements_per_slice=131072)
    sender = Sender()
    with Receiver(RxConfig()) as receiver:
        receiver.set_incarnation(1)
        feed, core = _pointers(receiver, ffi)
        destination = np.ones(2 * nbytes, np.uint8)
        to = ffi.cast("uint8_t *", destination.ctypes.data)
        for iteration in range(1, repetitions + 2):
            content = gradients(op, iteration)
            packets = interleave(sender.packets(op, content, payload, iteration=iteration), iteration)
            copied, taken = Packets(packets), Packets(packets)
            if iteration % 2:
                copy_s = lib.time_copy(to, *copied.arguments(ffi), HEADERS)
                ingest_s = lib.time_ingest(feed, core, *taken.arguments(ffi))
            else:
                ingest_s = lib.time_ingest(feed, core, *taken.arguments(ffi))
                copy_s = lib.time_copy(to, *copied.arguments(ffi), HEADERS)
            (event,) = receiver.poll(0)
            assert isinstance(event, OpComplete)
            assert receiver.buffer(event) == content
            receiver.release(event)
            if iteration > 1:
                yield copy_s / copied.payload_bytes, ingest_s / taken.payload_bytes


def _pointers(receiver: Receiver, ffi: FFI) -> tuple[Any, Any]:
    """The core's feed function and the core, for the yardstick's loop."""
    inner = receiver._ffi
    feed = inner.cast("uintptr_t", inner.addressof(receiver._lib, "ckm_core_feed"))
    return ffi.cast("void *", int(feed)), ffi.cast("void *", int(inner.cast("uintptr_t", receiver._shared.core)))


def run(payloads: list[int], nbytes: int, repetitions: int) -> list[Result]:
    """One result for each payload size; what was received is compared with what was sent in every repetition."""
    with tempfile.TemporaryDirectory() as directory:
        ffi, lib = load_yardstick(directory)
        results = []
        for payload in payloads:
            pairs = list(measure(payload, nbytes, repetitions, ffi, lib))
            results.append(Result(payload, [1e-9 / c for c, _ in pairs], [1e-9 / i for _, i in pairs]))
    return results


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}..{max(values):.2f})"


def show(results: list[Result], nbytes: int, repetitions: int) -> None:
    """Prints the table: median (least to most) of all repetitions."""
    table = Table(title=f"Shadow ingest, {nbytes / 1e6:g} MB of fp32 gradients, {repetitions} repetitions, one core")
    for column in ("payload", "chunked memcpy GB/s", "ingest GB/s", "ingest / memcpy", "target"):
        table.add_column(column, justify="right")
    for result in results:
        target = f"≥ {TARGET}" if result.payload == TARGET_PAYLOAD else ""
        row = [_spread(values) for values in (result.copy_gbs, result.ingest_gbs, result.ratios)]
        table.add_row(str(result.payload), *row, target)
    Console().print(table)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--payloads", default="1448,8948", help="TCP payload bytes of a packet, comma-separated")
    parser.add_argument("--megabytes", type=float, default=32, help="gradients of one all-reduce")
    parser.add_argument("--repetitions", type=count, default=9)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    options = parser.parse_args()
    nbytes = int(options.megabytes * 1e6) // 4 * 4
    results = run([int(p) for p in options.payloads.split(",")], nbytes, options.repetitions)
    if options.json:
        rows = [asdict(r) | {"ratio": statistics.median(r.ratios)} for r in results]
        print(json.dumps({"bytes": nbytes, "repetitions": options.repetitions, "results": rows}))
    else:
        show(results, nbytes, options.repetitions)


if __name__ == "__main__":
    main()
