"""What the shadow's optimizer step costs, against the memory bandwidth that is measured beside it.

A fused AdamW step reads θ, m, v and the gradient and writes θ, m, v: 28 bytes an element, 26 with 16-bit gradients. Of
master copies it writes the model's 16-bit parameters, too: 28 bytes again. The floor is a C loop over as many elements
that reads and writes just these streams (``optimizer.c``; needs a C compiler). They take turns, in CPU time of one
thread, which a busy machine disturbs less.
"""

import argparse
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from cffi import FFI
from common import (
    MIB,
    Spread,
    add_kinds_option,
    add_output_options,
    console,
    count,
    print_json,
    progress,
    ratios,
    turns,
)
from rich.table import Table
from torch import nn

from checkmate.protocol import Layout, Seed, StepRecord
from checkmate.shadow.optim.replica import Replica
from checkmate.tensors import MASTER, pack_group, pack_state

BUCKET_BYTES = 25 * MIB
"""As DDP cuts them."""
TARGETS = {"flat": 1.15, "parameters": 1.3, "bf16 gradients": 1.3, "bf16 masters": 1.3}
FLOORS = {
    "traffic_32": ["const float *"],
    "traffic_16": ["const uint16_t *"],
    "traffic_copy": ["const uint16_t *", "uint16_t *"],
}
"""Functions of ``optimizer.c``, and what they take after θ, m and v."""


@dataclass(frozen=True)
class Job:
    """A step of one kind, ready to be made again and again."""

    replica: Replica
    record: StepRecord
    layout: Layout
    buckets: dict[int, memoryview]
    elements: int
    floor: str

    def step(self) -> None:
        """One optimizer step."""
        self.replica.apply(self.record, self.layout, self.buckets)


def sizes(elements: int, kind: str) -> list[int]:
    """Elements of each parameter: one for all, or those of a transformer's layers of width 768."""
    if kind == "flat":
        return [elements]
    width = 768
    layer = [3 * width * width, 3 * width, width * width, width, 4 * width * width, 4 * width, 4 * width * width, width]
    found: list[int] = []
    while sum(found) < elements:
        found += layer
    return found


def make(elements: int, kind: str) -> Job:
    params = {f"p{index}": nn.Parameter(torch.randn(size)) for index, size in enumerate(sizes(elements, kind))}
    optimizer = torch.optim.AdamW(params.values(), lr=1e-4, fused=True)
    dtype = torch.bfloat16 if kind.startswith("bf16") else torch.float32
    named = list(params.items())
    if kind == "bf16 masters":
        named = [(name, nn.Parameter(param.detach().to(dtype))) for name, param in named]
        named += [(MASTER + name, param) for name, param in params.items()]
    description, manifest, tensors = pack_state(named, [], optimizer)
    replica = Replica(Seed(0, description, manifest), tensors)
    lines, buckets, members = [], {}, list(params.items())
    while members:
        place, first = [], 0
        while members and (not place or first * dtype.itemsize < BUCKET_BYTES):
            name, param = members.pop()
            place.append([name, first, param.numel()])
            first += param.numel()
        data = torch.randn(first).to(dtype).view(torch.uint8).numpy().data
        name_of = str(dtype).removeprefix("torch.")
        lines.append({"bucket": len(lines), "bytes": data.nbytes, "dtype": name_of, "params": place})
        buckets[len(buckets)] = data
    record = StepRecord(1, "layout", [pack_group(group) for group in optimizer.param_groups])
    total = sum(param.numel() for param in params.values())
    floor = {"bf16 gradients": "traffic_16", "bf16 masters": "traffic_copy"}.get(kind, "traffic_32")
    job = Job(replica, record, Layout("layout", lines), buckets, total, floor)
    job.step()
    return job


def make_floor(elements: int, name: str) -> Callable[[], object]:
    """A step's memory traffic, by a function of ``optimizer.c``."""
    kinds = ["float *"] * 3 + FLOORS[name]
    ffi = FFI()
    ffi.cdef(f"void {name}({', '.join(kinds)}, size_t n);")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "optimizer.so")
        source = Path(__file__).with_suffix(".c")
        subprocess.run(["cc", "-O3", "-march=native", "-shared", "-fPIC", "-o", target, source], check=True)
        library = ffi.dlopen(str(target))
    streams = [torch.ones(elements, dtype=torch.float32 if "float" in kind else torch.bfloat16) for kind in kinds]
    pointers = [ffi.cast(type_, stream.data_ptr()) for type_, stream in zip(kinds, streams, strict=True)]

    def floor(_keep: object = streams) -> None:
        getattr(library, name)(*pointers, elements)

    return floor


def seconds(work: Callable[[], object]) -> float:
    start = time.thread_time()
    work()
    return time.thread_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=count, default=20_000_000, help="parameters, about")
    parser.add_argument("--repetitions", type=count, default=15)
    add_kinds_option(parser, tuple(TARGETS))
    add_output_options(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    to = console(arguments)
    found: dict[str, Spread] = {}
    table = Table(
        "gradients", "step, CPU ms", "floor, CPU ms", "step / floor", "target", title="A shadow's optimizer step"
    )
    with progress(to, "steps", len(arguments.kinds) * arguments.repetitions) as done:
        for kind in arguments.kinds:
            job = make(arguments.elements, kind)
            works = {"step": job.step, "floor": make_floor(job.elements, job.floor)}
            times: dict[str, list[float]] = {"step": [], "floor": []}
            for repetition in range(arguments.repetitions):
                for name in turns(("step", "floor"), repetition):
                    times[name].append(seconds(works[name]))
                done(kind)
            found[kind] = ratios(times["step"], times["floor"])
            cells = [Spread.of([1000 * taken for taken in list_]).text(1) for list_ in times.values()]
            table.add_row(kind, *cells, found[kind].text(2), f"{TARGETS[kind]:.2f}")
    to.print(table)
    if arguments.json:
        options = {"elements": arguments.elements, "repetitions": arguments.repetitions}
        print_json(options, ratios={kind: asdict(spread) for kind, spread in found.items()})


if __name__ == "__main__":
    main()
