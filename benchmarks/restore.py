"""Restore rate: a shadow's whole state to one rank and to several at once, against one TCP stream and memcpy.

The shadow and each rank are processes of their own and talk over loopback; ranks restore as ``resume()`` does, every
tensor's CRC32C included. A rank that starts anew has no memory that it used before, so what it restores is in new
memory; a TCP stream carries as many bytes from the same process, and nothing looks at them, into new memory, and
for comparison into memory that is used again and again. The copy is one thread's, in used memory. Kinds take turns.
What was restored is compared with the shadow's state each time, by its CRC32C. Shadow and ranks have CPUs of
their own::

    python benchmarks/restore.py [--megabytes 500] [--ranks 1,4] [--repetitions 9] [--json]
"""

import argparse
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from common import (
    MIB,
    Spread,
    add_output_options,
    add_placement_options,
    console,
    count,
    counts,
    print_json,
    progress,
    ratios,
    turns,
)
from optimizer import sizes
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from checkmate.checked import Endpoint
from checkmate.config import CheckmateError
from checkmate.crc32c import crc32c
from checkmate.protocol import Seed
from checkmate.shadow.daemon import Shadow, ShadowConfig
from checkmate.shadow.rx.receiver import RxConfig
from checkmate.tensors import memory, pack_state
from checkmate.train.client import Client
from checkmate.train.settings import Settings

JOB, TOKEN = "bench", b"the benchmark's token"
STREAM, USED, COPY = "one TCP stream", "one TCP stream, used memory", "memcpy"
TARGET = 0.8
BYTES_PER_ELEMENT = 12
"""Parameter and two moments, of 4 bytes each."""
ANSWER_S = 120.0


@dataclass(frozen=True)
class Options:
    """``ranks``: how many restore at once, one measurement each."""

    megabytes: int
    ranks: tuple[int, ...]
    repetitions: int
    cpus: tuple[int, ...]
    rack_cpus: tuple[int, ...]


class Worker:
    """A process that answers each request it is sent; a failure there is one here."""

    def __init__(self, context: Any, work: Any, *arguments: Any) -> None:
        self._pipe, far = context.Pipe()
        self._process = context.Process(target=work, args=(far, *arguments), daemon=True)
        self._process.start()
        far.close()

    def send(self, request: Any) -> None:
        self._pipe.send(request)

    def answer(self) -> Any:
        if not self._pipe.poll(ANSWER_S):
            raise CheckmateError(f"a process of the benchmark is silent for {ANSWER_S:g} s")
        try:
            return self._pipe.recv()
        except EOFError:
            raise CheckmateError("a process of the benchmark ended; its error is above") from None

    def close(self) -> None:
        self._pipe.close()
        self._process.kill()
        self._process.join()


def client_of(control: tuple[str, int]) -> Client:
    """Of a job with one rank and this shadow."""
    endpoint = Endpoint(*control)
    return Client(Settings((endpoint,), TOKEN, JOB), endpoint, 0, 1)


def serve(pipe: Connection, nbytes: int, cpus: Sequence[int]) -> None:
    """The shadow's process: a state of about ``nbytes``, and a plain sender of as many bytes beside it."""
    prepare(cpus)
    seed, tensors = make_state(nbytes // BYTES_PER_ELEMENT)
    source = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors]).numpy().data
    plain = socket.create_server(("127.0.0.1", 0))
    with tempfile.TemporaryDirectory() as folder, closing(plain):
        config = ShadowConfig(JOB, TOKEN, ("127.0.0.1", 0), Path(folder, "status"), RxConfig())
        with Shadow(config) as shadow:
            client = client_of(shadow.control)
            incarnation = client.begin(0, 10.0).incarnation
            client.send_seed(incarnation, seed, tensors, lambda _: None)
            pipe.send((shadow.control, plain.getsockname(), incarnation, len(source), digest(tensors)))
            while pipe.recv():
                connection, _ = plain.accept()
                with connection:
                    connection.sendall(source)


def rank(pipe: Connection, place: tuple[Any, Any, int, int, int], cpus: Sequence[int]) -> None:
    """A rank's process: answers each request with when it began and ended, and the digest of what it has."""
    prepare(cpus)
    control, plain, incarnation, nbytes, _ = place
    client = client_of(control)
    used, other = torch.zeros(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
    tensors: list[Tensor] = []
    pipe.send("ready")
    while request := pipe.recv():
        tensors.clear()
        start = time.monotonic()
        if request in (STREAM, USED):
            with socket.create_connection(plain) as stream:
                take(stream, (torch.empty_like(used) if request == STREAM else used).numpy().data)
        elif request == COPY:
            used.copy_(other)
        else:
            tensors += client.restore(incarnation)[1]
        end = time.monotonic()
        pipe.send((start, end, digest(tensors)))


def prepare(cpus: Sequence[int]) -> None:
    torch.set_num_threads(1)
    if cpus:
        os.sched_setaffinity(0, cpus)


def make_state(elements: int) -> tuple[Seed, list[Tensor]]:
    """A transformer's parameters and AdamW's state of them, after a step."""
    params = {f"p{index}": nn.Parameter(torch.randn(size)) for index, size in enumerate(sizes(elements, "parameters"))}
    optimizer = torch.optim.AdamW(params.values(), fused=True)
    for param in params.values():
        param.grad = torch.randn_like(param)
    optimizer.step()
    description, manifest, tensors = pack_state(params.items(), [], optimizer)
    return Seed(0, description, manifest), tensors


def digest(tensors: Sequence[Tensor]) -> int:
    """CRC32C of all bytes."""
    crc = 0
    for tensor in tensors:
        data = memory(tensor)
        assert data is not None
        crc = crc32c(data, crc)
    return crc


def take(stream: socket.socket, view: memoryview) -> None:
    while view:
        got = stream.recv_into(view, min(len(view), MIB))
        if not got:
            raise CheckmateError("the plain stream ended early")
        view = view[got:]


@contextmanager
def workers(options: Options) -> Iterator[tuple[Worker, list[Worker], int, int]]:
    """The shadow, the ranks, bytes of the state and their digest."""
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        shadow = stack.enter_context(closing(Worker(context, serve, options.megabytes * 10**6, options.rack_cpus)))
        place = shadow.answer()
        made = [
            stack.enter_context(closing(Worker(context, rank, place, options.cpus))) for _ in range(max(options.ranks))
        ]
        for worker in made:
            worker.answer()
        yield shadow, made, place[3], place[4]


def run(options: Options, to: Console) -> dict[str, list[float]]:
    """Bytes a second of each kind, one value a repetition. Raises CheckmateError when what was restored differs."""
    kinds = [STREAM, USED, COPY, *(f"restore, {restoring(n)}" for n in options.ranks)]
    asked = dict(zip(kinds, (1, 1, 1, *options.ranks), strict=True))
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    total = len(kinds) * (options.repetitions + 1)
    with workers(options) as (shadow, made, nbytes, wanted), progress(to, "restores", total) as done:
        for repetition in range(-1, options.repetitions):  # the first one fills caches
            for kind in turns(kinds, repetition):
                if kind in (STREAM, USED):
                    shadow.send(kind)
                chosen = made[: asked[kind]]
                for worker in chosen:
                    worker.send(kind)
                starts, ends, digests = zip(*(worker.answer() for worker in chosen), strict=True)
                if kind.startswith("restore") and set(digests) != {wanted}:
                    raise CheckmateError(f"{kind}: the state that arrived is not the shadow's")
                if repetition >= 0:
                    rates[kind].append(asked[kind] * nbytes / (max(ends) - min(starts)))
                done(kind)
    return rates


def restoring(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def show(rates: dict[str, list[float]], options: Options, to: Console) -> None:
    table = Table(
        title=f"A state of {options.megabytes} MB",
        caption=f"median (quartiles) of {options.repetitions}; shadow on CPUs {options.rack_cpus or 'any'}, "
        f"ranks on {options.cpus or 'any'}",
    )
    against = (STREAM, USED, COPY)
    for heading in ("kind", "GB/s, all ranks", *(f"against {other}" for other in against), "target"):
        table.add_column(heading, justify="right")
    for kind, values in rates.items():
        goal = f"≥ {TARGET} of {STREAM}" if kind == f"restore, {restoring(1)}" else ""
        compared = [ratios(values, rates[other]).text(2) if kind != other else "" for other in against]
        table.add_row(kind, Spread.of([value / 1e9 for value in values]).text(2), *compared, goal)
    to.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=count, default=500, help="parameters and optimizer state")
    parser.add_argument("--ranks", type=counts, default=(1, 4), help="that restore at once, with commas")
    parser.add_argument("--repetitions", type=count, default=9)
    add_placement_options(parser)
    add_output_options(parser, plot=False)
    arguments = parser.parse_args()
    options = Options(**{name: getattr(arguments, name) for name in Options.__dataclass_fields__})
    to = console(arguments)
    rates = run(options, to)
    show(rates, options, to)
    if arguments.json:
        against = {kind: asdict(ratios(values, rates[STREAM])) for kind, values in rates.items()}
        print_json(asdict(options), rates=rates, against_stream=against)


if __name__ == "__main__":
    main()
