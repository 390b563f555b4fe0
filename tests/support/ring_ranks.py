"""Jobs of the ring tests: ``python tests/support/ring_ranks.py JOB RANKS`` runs a job on processes over loopback.

Ranks are forked from one process that has imported torch. Exit status 0: every rank's assertions held.
"""

import faulthandler
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import checkmate.nccl_plugin.ring.backend  # noqa: F401
from checkmate.config import CheckmateError
from checkmate.nccl_plugin.binding import Plugin
from checkmate.train.rings import probe_rings

sys.path.append(str(Path(__file__).parents[1]))
from support.threads import thread_names

Job = Callable[[int, int], None]
CHANNELS = (1, 2, 4)
SMALL = (0, 1, 5, 3001)
LARGE = 1_000_003
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
)
OPS = (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.AVG)
FAILS_WITHIN = 5.0
"""Seconds in which the survivors must notice that a peer is gone."""


def groups(channels: tuple[int, ...] = CHANNELS, slice_bytes: int = 65536) -> dict[int, dist.ProcessGroup]:
    """A group of all ranks for each number of channels; small slices, so that there are several loops."""
    made = {}
    for number in channels:
        os.environ.update(CHECKMATE_CHANNELS=str(number), CHECKMATE_SLICE_BYTES=str(slice_bytes))
        made[number] = dist.new_group()
    return made


# ---- references ----


def data(rank: int, count: int, seed: int = 0) -> np.ndarray:
    """Values 1 to 3: sums and products of five are exact in every type."""
    return np.random.default_rng([seed, rank]).integers(1, 4, count)


def reference(size: int, count: int, op: object, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """The reduction of all ranks' data in NumPy."""
    stack = np.stack([data(rank, count, seed) for rank in range(size)])
    functions = {dist.ReduceOp.PRODUCT: np.prod, dist.ReduceOp.MIN: np.min, dist.ReduceOp.MAX: np.max}
    values = functions.get(op, np.sum)(stack, axis=0)
    if op == dist.ReduceOp.AVG:
        values = np.float32(values) / np.float32(size) if dtype.is_floating_point else values // size
        if dtype == torch.float64:
            values = np.sum(stack, axis=0) / size
    return torch.from_numpy(np.asarray(values)).to(dtype)


def tensor(rank: int, count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(data(rank, count, seed)).to(dtype)


def check(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    assert torch.equal(got, want), f"{what}: {got[:8].tolist()} instead of {want[:8].tolist()}"


# ---- jobs ----


def collectives(rank: int, size: int) -> None:
    """Every collective, type, operator and number of channels against NumPy."""
    for number, group in groups().items():
        for dtype in DTYPES:
            for count in SMALL:
                _reductions(rank, size, group, dtype, count, f"{number} channels, {dtype}, {count} elements")
            _copies(rank, size, group, dtype, f"{number} channels, {dtype}")
        big = tensor(rank, LARGE, torch.float32)
        dist.all_reduce(big, group=group)
        check(big, reference(size, LARGE, dist.ReduceOp.SUM, torch.float32), "large all_reduce")


def _reductions(rank: int, size: int, group: dist.ProcessGroup, dtype: torch.dtype, count: int, what: str) -> None:
    for op in OPS:
        mine = tensor(rank, count, dtype)
        dist.all_reduce(mine, op, group=group)
        want = reference(size, count, op, dtype)
        check(mine, want, f"all_reduce {op} {what}")
        root = count % size
        mine = tensor(rank, count, dtype)
        dist.reduce(mine, root, op, group=group)
        check(mine, want if rank == root else tensor(rank, count, dtype), f"reduce {op} {what}")
        parts = [tensor(rank, count, dtype, seed) for seed in range(size)]
        out = torch.empty(count, dtype=dtype)
        dist.reduce_scatter(out, parts, op, group=group)
        check(out, reference(size, count, op, dtype, rank), f"reduce_scatter {op} {what}")
    out = torch.empty(count, dtype=dtype)
    dist.reduce_scatter_single(out, torch.cat(parts), group=group)
    check(out, reference(size, count, dist.ReduceOp.SUM, dtype, rank), f"reduce_scatter_tensor {what}")


def _copies(rank: int, size: int, group: dist.ProcessGroup, dtype: torch.dtype, what: str) -> None:
    for count in SMALL:
        everybody = [tensor(r, count, dtype) for r in range(size)]
        for root in range(size):
            mine = tensor(rank, count, dtype)
            dist.broadcast(mine, root, group=group)
            check(mine, everybody[root], f"broadcast {what}")
        outputs = [torch.empty(count, dtype=dtype) for _ in range(size)]
        dist.all_gather(outputs, everybody[rank], group=group)
        check(torch.cat(outputs), torch.cat(everybody), f"all_gather {what}")
        output = torch.empty(count * size, dtype=dtype)
        dist.all_gather_single(output, everybody[rank], group=group)
        check(output, torch.cat(everybody), f"all_gather_into_tensor {what}")
        root = count % size
        outputs = [torch.empty(count, dtype=dtype) for _ in range(size)]
        dist.gather(everybody[rank], outputs if rank == root else None, root, group=group)
        if rank == root:
            check(torch.cat(outputs), torch.cat(everybody), f"gather {what}")
        mine = torch.empty(count, dtype=dtype)
        dist.scatter(mine, everybody if rank == root else None, root, group=group)
        check(mine, everybody[rank], f"scatter {what}")
        received = torch.empty(count, dtype=dtype)
        request = dist.isend(everybody[rank], (rank + 1) % size, group=group)
        dist.recv(received, (rank - 1) % size, group=group)
        request.wait()
        check(received, everybody[rank - 1], f"send and recv {what}")
    dist.barrier(group=group)


def group_life(rank: int, size: int) -> None:
    """Subgroups, groups of one, coalesced calls, objects, several operations at once, futures, groups made again."""
    evens = dist.new_group(list(range(0, size, 2)))
    alone = [dist.new_group([r]) for r in range(size)][rank]
    if rank % 2 == 0:
        mine = torch.ones(3)
        dist.all_reduce(mine, group=evens)
        assert mine.tolist() == [(size + 1) // 2] * 3
    mine = torch.full((4,), 7.0)
    dist.all_reduce(mine, dist.ReduceOp.AVG, group=alone)
    assert mine.tolist() == [7.0] * 4
    works = []
    tensors = [torch.full((1000 * (k + 1),), float(k)) for k in range(8)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    futures = [work.get_future() for work in works]
    for k, future in enumerate(futures):
        assert future.wait()[0][0].item() == k * size
    assert all(work.is_completed() and work.is_success() and work.exception() is None for work in works)
    chained = dist.all_reduce(torch.ones(1), async_op=True).get_future().then(lambda f: f.value()[0] * 2)
    assert chained.wait().item() == 2 * size
    objects: list[object] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(size)]
    image = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)
    dist.all_reduce(image)
    assert image.sum().item() == image.numel() * size
    for _ in range(2):
        dist.destroy_process_group()
        _assert_no_proxies()
        init(rank, size)
        dist.barrier()


def meshes(rank: int, size: int) -> None:
    """Device meshes: collectives of each dimension, tensors spread over them, messages between two ranks."""
    width = size // 2
    mesh = init_device_mesh("cpu", (2, width), mesh_dim_names=("rows", "columns"))
    row, column = mesh.get_local_rank("rows"), mesh.get_local_rank("columns")
    down, across = mesh.get_group("rows"), mesh.get_group("columns")
    assert dist.get_process_group_ranks(down) == [column, column + width] and down.group_name != across.group_name
    mine = torch.full((3,), float(rank))
    assert functional.all_reduce(mine, "sum", (mesh, 0)).tolist() == [2.0 * column + width] * 3
    assert functional.all_gather_single(mine[:1], 0, (mesh, 1)).tolist() == [row * width + c for c in range(width)]
    scattered = functional.reduce_scatter_single(torch.full((width,), float(rank)), "sum", 0, (mesh, 1))
    assert scattered.tolist() == [float(sum(row * width + c for c in range(width)))]
    pairs = [torch.zeros(2), torch.zeros(4)]
    parts = [torch.full((2 // width,), float(rank)), torch.full((4 // width,), float(rank))]
    across.allgather_into_tensor_coalesced(pairs, parts).wait()
    assert all(pair.view(width, -1)[c].eq(row * width + c).all() for pair in pairs for c in range(width))
    whole = torch.arange(8.0).view(4, 2)
    assert torch.equal(distribute_tensor(whole, mesh, [Replicate(), Shard(0)]).full_tensor(), whole)
    received = torch.zeros(3)
    operations = [
        dist.P2POp(dist.isend, mine, group=down, group_peer=1 - row),
        dist.P2POp(dist.irecv, received, group=down, group_peer=1 - row),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert received.tolist() == [float((rank + width) % size)] * 3


def refusals(rank: int, size: int) -> None:
    """What is not supported says so, names itself, and leaves the group usable."""
    cases: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (NotImplementedError, "all_to_all", lambda: dist.all_to_all_single(torch.ones(size), torch.ones(size))),
        (CheckmateError, "int16", lambda: dist.all_reduce(torch.ones(2, dtype=torch.int16))),
        (CheckmateError, "BAND", lambda: dist.all_reduce(torch.ones(2, dtype=torch.int32), dist.ReduceOp.BAND)),
        (CheckmateError, "contiguous", lambda: dist.all_reduce(torch.ones(4, 4)[:, 1])),
        (CheckmateError, "sparse", lambda: dist.all_reduce(torch.ones(2, 2).to_sparse())),
        (CheckmateError, "tag", lambda: dist.send(torch.ones(1), (rank + 1) % size, tag=3)),
        (NotImplementedError, "recv_anysource", lambda: dist.recv(torch.ones(1))),
        (CheckmateError, "elements", lambda: dist.all_gather_single(torch.ones(3), torch.ones(2))),
    ]
    for kind, word, call in cases:
        try:
            call()
        except kind as error:
            assert word in str(error), f"{word} is not named: {error}"
        else:
            raise AssertionError(f"{word}: accepted")
    dist.barrier()


def empty_messages(rank: int, size: int) -> None:
    """5 floats over 4 ranks: every slice is a message, the empty ones too."""
    group = groups((1,))[1]
    dist.barrier()
    plugin = Plugin()
    before = plugin.counters()
    mine = torch.arange(5.0) + rank
    dist.all_reduce(mine, group=group)
    after = plugin.counters()
    check(mine, torch.arange(5.0) * size + sum(range(size)), "5 floats")
    assert after.plain_frames - before.plain_frames == 2 * 2 * (size - 1)
    sent = torch.tensor([float(after.plain_bytes - before.plain_bytes)])
    dist.all_reduce(sent)
    assert sent.item() == 2 * (size - 1) * 5 * 4


def determinism(rank: int, size: int) -> None:
    """Real numbers: the same bits on all ranks, from run to run, and near the true sum."""
    values = torch.from_numpy(np.random.default_rng(rank).standard_normal(200_003).astype(np.float32))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        results = [values.to(dtype, copy=True) for _ in range(4)]
        for number, mine in enumerate(results):
            if number % 2 == 0:
                group = groups((2,))[2]
            dist.all_reduce(mine, group=group)
        rows = [torch.empty_like(results[0]) for _ in range(size)]
        dist.all_gather(rows, results[0])
        assert all(torch.equal(x, results[0]) for x in [*rows, *results])
        truth = sum(np.random.default_rng(r).standard_normal(200_003) for r in range(size))
        error = np.abs(results[0].double().numpy() - truth).max()
        assert error < {torch.float32: 1e-5, torch.bfloat16: 0.2, torch.float16: 0.02}[dtype], error


def ddp(rank: int, size: int) -> None:
    """DDP with several buckets: averaged gradients, bit-equal parameters; an identical second run."""
    digests = [_train(rank, size) for _ in range(2)]
    assert torch.equal(digests[0], digests[1]), "the second run differs"
    rows = [torch.empty_like(digests[0]) for _ in range(size)]
    dist.all_gather(rows, digests[0])
    assert all(torch.equal(row, digests[0]) for row in rows), "ranks differ"


def _train(rank: int, size: int) -> torch.Tensor:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(200, 200) for _ in range(6)]
    model = torch.nn.Sequential(*[m for layer in layers for m in (layer, torch.nn.BatchNorm1d(200))])
    model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        torch.manual_seed(1000 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(16, 200)).square().mean().backward()
        mine = next(model.parameters()).grad
        assert mine is not None
        rows = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(rows, mine)
        assert all(torch.equal(row, mine) for row in rows), "gradients differ"
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def killed(rank: int, size: int) -> None:
    """A rank killed in the middle of an all-reduce: the others raise in seconds, then end cleanly."""
    files = len(list(Path("/proc/self/fd").iterdir()))
    big = torch.ones(8 << 20)
    dist.all_reduce(big)
    dist.barrier()
    if rank == 1:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
    start = time.monotonic()
    try:
        future = None
        while time.monotonic() < start + FAILS_WITHIN:
            work = dist.all_reduce(big, async_op=True)
            future = work.get_future()
            work.wait()
        raise AssertionError("nothing was noticed")
    except dist.DistBackendError as error:
        assert "failed" in str(error) or "rank" in str(error), error
    assert time.monotonic() < start + FAILS_WITHIN
    assert future is not None
    try:
        future.wait()
        raise AssertionError("the future has no error")
    except RuntimeError:
        pass
    try:
        dist.all_reduce(torch.ones(1))
        raise AssertionError("a broken group goes on")
    except dist.DistBackendError:
        pass
    start = time.monotonic()
    dist.destroy_process_group()
    assert time.monotonic() < start + 1.0, "destroying took long"
    _assert_no_proxies()
    assert len(list(Path("/proc/self/fd").iterdir())) <= files, "file descriptors are left"


def absent(rank: int, size: int) -> None:
    """A rank that does not come: the time-out of the group ends the wait; so does an abort."""
    short = dist.new_group(timeout=timedelta(seconds=1))
    other = dist.new_group()
    start = time.monotonic()
    if rank != 0:
        try:
            dist.all_reduce(torch.ones(10), group=short)
            raise AssertionError("an all-reduce without rank 0")
        except dist.DistBackendError as error:
            assert "time-out" in str(error) or "failed" in str(error), error
        assert time.monotonic() < start + 1.0 + FAILS_WITHIN
        work = dist.all_reduce(torch.ones(10), group=other, async_op=True)
        try:
            work.wait(timedelta(milliseconds=50))
            raise AssertionError("waited for an absent rank")
        except dist.DistBackendError as error:
            assert "not done" in str(error) or rank != 1, error  # rank 1 may have aborted by now
        if rank == 1:
            other.abort()
        try:
            work.wait()
            raise AssertionError("an aborted group goes on")
        except dist.DistBackendError:
            pass
    dist.barrier()


def shared_hosts(rank: int, size: int) -> None:
    """Two hosts: once the rings are probed, what the boundary ranks send of a bucket would be tagged, but for want of
    a tagged connection. Before, and in groups of other sizes, nothing would. Results agree as ever."""
    made = groups((3,))[3]
    plugin = Plugin()
    plugin.set_incarnation(1)

    def reduced(group: dist.ProcessGroup, ranks: int) -> dict[str, int]:
        bucket = torch.full((3001,), float(rank + 1))
        plugin.register_bucket(bucket.data_ptr(), bucket.nbytes, 0)
        before = plugin.counters().untagged
        dist.all_reduce(bucket, group=group)
        after = plugin.counters().untagged
        plugin.unregister_buckets()
        check(bucket, torch.full((3001,), ranks * (ranks + 1) / 2), "bucket")
        return {reason: count - before.get(reason, 0) for reason, count in after.items()}

    found = reduced(made, size)
    assert "no_option" not in found
    probe_rings(SimpleNamespace(process_group=made, device="cpu"), plugin)  # type: ignore[arg-type]
    assert not reduced(made, size).get("no_position")
    channels = 2  # so many are used for so few bytes
    frames = torch.tensor([reduced(made, size).get("no_option", 0), found.get("no_position", 0)])
    dist.all_reduce(frames)
    assert frames.tolist() == [channels * size * 2, channels * 2]
    fewer = dist.new_group(list(range(size - 1)))
    if rank < size - 1:
        assert reduced(fewer, size - 1)["other_hosts"] == 1
    dist.barrier()


def idle(rank: int, size: int) -> None:
    """Waiting for a late rank costs no processor time, and an open group none either."""
    dist.barrier()
    before = time.process_time()
    work = dist.all_reduce(torch.ones(10), async_op=True) if rank != 0 else None
    time.sleep(1.0)
    spent = time.process_time() - before
    assert spent < 0.05, f"{spent:.3f} s of processor time in an idle second"
    if work is None:
        dist.all_reduce(torch.ones(10))
    else:
        work.wait()
    dist.barrier()


def _assert_no_proxies(within_s: float = 5.0) -> None:
    """A thread that was joined may be listed a moment longer."""
    end = time.monotonic() + within_s
    while any(name.startswith("ckm-ring") for name in thread_names().values()):
        assert time.monotonic() < end, "a thread is left"
        time.sleep(0.01)


# ---- running them ----

JOBS: dict[str, Job] = {
    job.__name__: job
    for job in (
        collectives,
        group_life,
        meshes,
        refusals,
        empty_messages,
        determinism,
        ddp,
        killed,
        absent,
        idle,
        shared_hosts,
    )
}


def init(rank: int, size: int) -> None:
    """Join the default group, in a store of its own each time."""
    init.calls += 1  # type: ignore[attr-defined]
    store = dist.FileStore(f"{os.environ['RING_STORE']}.{init.calls}", size)  # type: ignore[attr-defined]
    name = "checkmate" if size % 2 == 0 else "cpu:checkmate"
    dist.init_process_group(name, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))


init.calls = 0  # type: ignore[attr-defined]


def _rank_main(job: Job, rank: int, size: int) -> None:
    status = 1
    try:
        torch.set_num_threads(1)
        init(rank, size)
        job(rank, size)
        if dist.is_initialized():
            dist.destroy_process_group()
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)


def main() -> int:
    """Run the job; a rank that ``killed`` means to lose is not a failure."""
    job, size = JOBS[sys.argv[1]], int(sys.argv[2])
    faulthandler.enable()
    faulthandler.dump_traceback_later(100, exit=True)
    os.environ["CHECKMATE_IFNAME"] = "=lo"
    if job is shared_hosts:
        os.environ["CHECKMATE_HOST_RANKS"] = f"{size // 2},{size - size // 2}"
    with tempfile.TemporaryDirectory() as directory:
        os.environ["RING_STORE"] = str(Path(directory, "store"))
        pids = {}
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                _rank_main(job, rank, size)
            pids[pid] = rank
        failed = []
        while pids:
            pid, status = os.wait()
            rank = pids.pop(pid)
            lost = job is killed and rank == 1 and os.WIFSIGNALED(status)
            if status != 0 and not lost:
                failed.append(f"{rank} ({status=})")
                for other in pids:
                    os.kill(other, signal.SIGKILL)
    print(f"failed ranks: {failed}" if failed else "ok", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
