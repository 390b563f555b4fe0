"""All-reduces on the nodes of a lab, for captures: ``python wire_ranks.py TOPOLOGY RESULTS RANKS,… CHANNELS,…``.

For each number of ranks, that many processes are forked, each into a node's network namespace. They all-reduce
registered buckets over groups with each number of channels, and between those do all that must never be tagged. What
rank 0 has in the end is saved in the folder RESULTS, see ``result_file``. Exit status 0: all ranks are through.
"""

import ctypes
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

import checkmate.nccl_plugin.ring.backend  # noqa: F401
from checkmate.nccl_plugin.binding import Plugin
from checkmate.rank import rank_environment
from checkmate.topology import Topology, load_topology
from checkmate.train.rings import probe_rings

BUCKETS = (60_001, 5, 12_288)
"""Elements (float32) of each bucket: several loops and a ragged end, empty slices, whole slices."""
ITERATIONS = (1, 2)
INCARNATION = 3
UNREGISTERED = 20_000
SLICE_BYTES = 4096
_CLONE_NEWNET = 0x40000000  # linux/sched.h


def result_file(results: Path, ranks: int, channels: int, iteration: int, bucket: int) -> Path:
    """The bytes of a reduced bucket."""
    return results / f"{ranks}-{channels}-{iteration}-{bucket}"


def _work(rank: int, size: int, channels: Sequence[int], results: Path) -> None:
    plugin = Plugin()
    plugin.set_incarnation(INCARNATION)
    for number in channels:
        os.environ.update(CHECKMATE_CHANNELS=str(number), CHECKMATE_SLICE_BYTES=str(SLICE_BYTES))
        group = dist.new_group()
        probe_rings(SimpleNamespace(process_group=group, device="cpu"), plugin)  # type: ignore[arg-type]
        for iteration in ITERATIONS:
            torch.manual_seed(1000 * iteration + rank)
            buckets = [torch.randn(count) for count in BUCKETS]
            _reduce(plugin, group, iteration, buckets)
            _stay_plain(plugin, group, buckets)
            if rank == 0:
                for index, bucket in enumerate(buckets):
                    path = result_file(results, size, number, iteration, index)
                    path.write_bytes(bucket.numpy().tobytes())


def _reduce(plugin: Plugin, group: dist.ProcessGroup, iteration: int, buckets: Sequence[torch.Tensor]) -> None:
    """As DDP does it: all buckets under way at once."""
    plugin.set_iteration(iteration)
    for index, bucket in enumerate(buckets):
        plugin.register_bucket(bucket.data_ptr(), bucket.nbytes, index)
    for work in [dist.all_reduce(bucket, group=group, async_op=True) for bucket in buckets]:
        work.wait()


def _stay_plain(plugin: Plugin, group: dist.ProcessGroup, buckets: Sequence[torch.Tensor]) -> None:
    """Nothing of this is a gradient, though some of it comes from a registered buffer."""
    dist.all_reduce(torch.randn(UNREGISTERED), group=group)
    dist.broadcast(buckets[0], 0, group=group)
    dist.all_reduce(buckets[0][: BUCKETS[0] // 2].clone(), group=group)
    dist.barrier(group=group)
    plugin.unregister_buckets()
    dist.all_reduce(buckets[2].clone(), group=group)
    dist.all_gather([torch.empty(BUCKETS[2]) for _ in range(group.size())], buckets[2], group=group)


def _rank_main(topology: Topology, rank: int, size: int, channels: Sequence[int], results: Path, store: Path) -> None:
    status = 1
    try:
        environment = rank_environment(topology, rank)
        host = topology.host(topology.groups[0].ranks[rank])
        with Path(f"/run/netns/{host.netns}").open() as netns:
            if ctypes.CDLL(None, use_errno=True).setns(netns.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"setns {host.netns}")
        os.environ.update(environment)
        torch.set_num_threads(1)
        dist.init_process_group(
            "checkmate",
            store=dist.FileStore(str(store), size),  # type: ignore[attr-defined]
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=60),
        )
        _work(rank, size, channels, results)
        dist.destroy_process_group()
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)


def main() -> int:
    """Run; stops at the first number of ranks that fails."""
    topology, results = load_topology(Path(sys.argv[1])), Path(sys.argv[2])
    sizes, channels = ([int(number) for number in text.split(",")] for text in sys.argv[3:5])
    with tempfile.TemporaryDirectory() as folder:
        for size in sizes:
            pids = []
            for rank in range(size):
                pid = os.fork()
                if pid == 0:
                    _rank_main(topology, rank, size, channels, results, Path(folder, f"store{size}"))
                pids.append(pid)
            statuses = [os.waitpid(pid, 0)[1] for pid in pids]
            if any(statuses):
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
