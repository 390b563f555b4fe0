"""The ``torch.distributed`` backend ``checkmate``: importing this module registers it, for CPU tensors.

::

    import checkmate.nccl_plugin.ring.backend
    torch.distributed.init_process_group("checkmate")  # or "cpu:checkmate"
"""

import os
import secrets
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, Store

from checkmate.config import CheckmateError
from checkmate.nccl_plugin.binding import plugin_path
from checkmate.nccl_plugin.ring.engine import Operation, Ring, RingConfig, RingError, Task, lib
from checkmate.nccl_plugin.ring.work import Completer, RingWork

CHANNELS = "CHECKMATE_CHANNELS"
SLICE_BYTES = "CHECKMATE_SLICE_BYTES"
HOST_RANKS = "CHECKMATE_HOST_RANKS"
DEFAULT_CHANNELS = 2
DEFAULT_SLICE_BYTES = 60 << 10  # with its header in one segmentation-offload packet of at most 64 KiB
MAX_CHANNELS = 32
MAX_SLICE_BYTES = 64 << 20

# ncclDataType_t
_DTYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.uint32: 3,
    torch.int64: 4,
    torch.uint64: 5,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
_BYTES = _DTYPES[torch.uint8]
# ncclRedOp_t
_REDUCTIONS = {
    dist.ReduceOp.SUM: 0,
    dist.ReduceOp.PRODUCT: 1,
    dist.ReduceOp.MAX: 2,
    dist.ReduceOp.MIN: 3,
    dist.ReduceOp.AVG: 4,
}
_SUPPORTED = (
    "allreduce, broadcast, reduce, allgather, all_gather_into_tensor, reduce_scatter, reduce_scatter_tensor, "
    "gather, scatter, barrier, send and recv"
)


def _number(name: str, default: int, least: int, most: int, multiple: int = 1) -> int:
    text = os.environ.get(name, str(default))
    try:
        value = int(text, 0)
    except ValueError:
        value = -1
    if not least <= value <= most or value % multiple:
        rule = f"{least} to {most}" + (f", a multiple of {multiple}" if multiple > 1 else "")
        raise CheckmateError(f"{name}={text}: allowed is {rule}")
    return value


def _host_ranks(size: int) -> list[int]:
    """Ranks on each host; where another group's are given, every rank counts as a host of its own."""
    text = os.environ.get(HOST_RANKS, "")
    ranks = [int(part) if part.isdecimal() else 0 for part in text.split(",")] if text else []
    if not all(ranks):
        raise CheckmateError(f"{HOST_RANKS}={text}: give the number of ranks on each host, such as 4,4, or nothing")
    return ranks if sum(ranks) == size else [1] * size


def _reduction(op: Any, collective: str) -> int:
    kind = getattr(op, "op", op)
    if kind not in _REDUCTIONS:
        raise CheckmateError(
            f"{collective}: the checkmate backend does not support {kind}; supported are SUM, AVG, PRODUCT, MIN and MAX"
        )
    return _REDUCTIONS[kind]


def _dtype(tensor: torch.Tensor, collective: str) -> int:
    if tensor.dtype not in _DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in _DTYPES)
        raise CheckmateError(
            f"{collective}: the checkmate backend does not reduce {tensor.dtype}; supported are {names}"
        )
    return _DTYPES[tensor.dtype]


def _is_dense(tensor: torch.Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.is_contiguous() or (
        tensor.dim() in formats and tensor.is_contiguous(memory_format=formats[tensor.dim()])
    )


def _check(tensors: Sequence[torch.Tensor], collective: str) -> None:
    """All tensors must be on the CPU, dense, of one type."""
    for tensor in tensors:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            raise CheckmateError(
                f"{collective}: the checkmate backend takes dense CPU tensors, not {tensor.layout} on {tensor.device}"
            )
        if not _is_dense(tensor):
            raise CheckmateError(f"{collective}: the tensor must be contiguous; call .contiguous() first")
        if tensor.dtype != tensors[0].dtype:
            raise CheckmateError(f"{collective}: tensors of {tensor.dtype} and {tensors[0].dtype} in one call")


def _single(tensors: Sequence[Any], collective: str) -> Any:
    if len(tensors) != 1:
        raise CheckmateError(f"{collective}: one tensor per process is supported, not {len(tensors)}")
    return tensors[0]


def _same_sizes(tensors: Sequence[torch.Tensor], count: int, expected: int, collective: str) -> None:
    sizes = [t.numel() for t in tensors]
    if sizes != [count] * expected:
        raise CheckmateError(f"{collective}: expected {expected} tensors of {count} elements each, got {sizes}")


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _views(tensor: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """``parts`` equal, contiguous pieces of a tensor."""
    return list(tensor.view(-1).chunk(parts)) if tensor.numel() else [tensor] * parts


def _seconds(timeout: timedelta | None, default: timedelta) -> float:
    """A collective's time-out; torch's unset one is negative."""
    return (default if timeout is None or timeout <= timedelta(0) else timeout).total_seconds()


class ProcessGroupCheckmate(dist.ProcessGroup):
    """Collectives over rings of TCP connections, driven through the net plugin.

    ``store``: where ranks leave their handles; ``timeout``: of connecting and of each operation. Raises
    CheckmateError for what the caller can fix, DistBackendError when communication fails.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._rank, self._size = rank, size
        self._timeout = timeout
        self._name = self._description = ""
        self._pending: list[RingWork] = []
        self._lock = threading.Lock()
        try:
            self._ring = self._rendezvous(store)
        except (RingError, dist.DistError) as error:
            raise dist.DistBackendError(f"checkmate backend, rank {rank} of {size}: {error}") from error
        self._completer = Completer(self._ring)
        self._finalizer = weakref.finalize(self, self._ring.close)

    def _rendezvous(self, store: Store) -> Ring:
        # A group that is made again in the same store must not read the handles of the one before.
        generation = store.add(f"generation/{self._rank}", 1)
        if self._rank == 0:
            store.set(f"{generation}/comm_id", str(secrets.randbits(64)))
        store.wait([f"{generation}/comm_id"], self._timeout)
        setup = RingConfig(
            plugin=plugin_path() if self._size > 1 else "",
            name="checkmate",
            comm_id=int(store.get(f"{generation}/comm_id")),
            rank=self._rank,
            nranks=self._size,
            nchannels=_number(CHANNELS, DEFAULT_CHANNELS, 1, MAX_CHANNELS),
            slice_bytes=_number(SLICE_BYTES, DEFAULT_SLICE_BYTES, 4096, MAX_SLICE_BYTES, 4096),
            host_ranks=_host_ranks(self._size),
        )
        ring = Ring(setup)
        store.set(f"{generation}/handles/{self._rank}", ring.handles())  # type: ignore[arg-type]
        keys = [f"{generation}/handles/{r}" for r in range(self._size)]
        store.wait(keys, self._timeout)
        ring.connect([store.get(key) for key in keys], self._timeout.total_seconds())
        return ring

    # ---- what torch asks of a process group ----

    def getBackendName(self) -> str:
        """Name of the backend."""
        return "checkmate"

    # torch keeps a group's name in the group's back ends, and a process group of our own has none: device meshes and
    # functional collectives look it up.

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """As torch named the group."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        """What torch says that the group is for."""
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def set_timeout(self, timeout: timedelta) -> None:
        """Time-out of operations from now on."""
        self._timeout = timeout

    def abort(self) -> None:
        """Fail all operations; the other ranks notice as soon as they communicate."""
        self._ring.abort("the process group was aborted")

    def shutdown(self) -> None:
        """Close the connections and end the threads. Never waits for a peer."""
        self._finalizer()
        self._completer.join()
        self._pending.clear()

    # ---- collectives ----

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> RingWork:  # type: ignore[override]
        """Reduce a tensor over all ranks, in place."""
        name = "allreduce"
        tensor = _single(tensors, name)
        opts = opts or dist.AllreduceOptions()
        return self._start(name, tensors, [self._reduce_task(name, tensor, tensor, opts)], keep=tensor)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> RingWork:
        """Reduce each of several tensors over all ranks, in place."""
        name = "allreduce_coalesced"
        opts = opts or dist.AllreduceCoalescedOptions()
        tasks = [self._reduce_task(name, tensor, tensor, opts) for tensor in tensors]
        return self._start(name, tensors, tasks, keep=tensors)

    def reduce(self, tensors: list[torch.Tensor], opts: Any = None) -> RingWork:  # type: ignore[override]
        """Reduce a tensor to the root, in place; other ranks' tensors are left as they are."""
        name = "reduce"
        tensor = _single(tensors, name)
        opts = opts or dist.ReduceOptions()
        task = self._reduce_task(name, tensor, tensor, opts, lib().CKM_RING_REDUCE, opts.rootRank)
        return self._start(name, tensors, [task], keep=tensor)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> RingWork:  # type: ignore[override]
        """Copy the root's tensor to all ranks."""
        name = "broadcast"
        tensor = _single(tensors, name)
        opts = opts or dist.BroadcastOptions()
        _check([tensor], name)
        pointer = [tensor.data_ptr()]
        task = self._byte_task(lib().CKM_RING_BROADCAST, _bytes(tensor), pointer, pointer, opts, opts.rootRank)
        return self._start(name, tensors, [task], keep=tensor)

    def allgather(  # type: ignore[override]
        self, output_tensors: list[list[torch.Tensor]], input_tensors: list[torch.Tensor], opts: Any = None
    ) -> RingWork:
        """Collect every rank's tensor on all ranks, one output tensor for each rank."""
        name = "allgather"
        outputs, tensor = _single(output_tensors, name), _single(input_tensors, name)
        task = self._gather_task(name, outputs, tensor, opts or AllgatherOptions())
        return self._start(name, outputs, [task], keep=(outputs, tensor))

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> RingWork:
        """Collect every rank's tensor on all ranks in one output tensor."""
        return self.all_gather_single_coalesced([output], [input], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> RingWork:
        """``all_gather_single`` of each of several tensors."""
        name, opts = "all_gather_into_tensor", opts or AllgatherOptions()
        parts = [self._parts(name, output, input) for output, input in zip(outputs, inputs, strict=True)]
        tasks = [self._gather_task(name, p, input, opts) for p, input in zip(parts, inputs, strict=True)]
        return self._start(name, outputs, tasks, keep=(outputs, inputs, parts))

    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]

    def reduce_scatter(  # type: ignore[override]
        self, output_tensors: list[torch.Tensor], input_tensors: list[list[torch.Tensor]], opts: Any = None
    ) -> RingWork:
        """Reduce one input tensor for each rank over all ranks; each rank gets its own."""
        name = "reduce_scatter"
        output, inputs = _single(output_tensors, name), _single(input_tensors, name)
        task = self._scatter_task(name, output, inputs, opts or dist.ReduceScatterOptions())
        return self._start(name, [output], [task], keep=(inputs, output))

    def reduce_scatter_single(
        self, outputTensor: torch.Tensor, inputTensor: torch.Tensor, opts: Any = None
    ) -> RingWork:
        """Reduce one tensor over all ranks; each rank gets its part."""
        return self.reduce_scatter_single_coalesced([outputTensor], [inputTensor], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> RingWork:
        """``reduce_scatter_single`` of each of several tensors."""
        name, opts = "reduce_scatter_tensor", opts or dist.ReduceScatterOptions()
        parts = [self._parts(name, input, output) for output, input in zip(outputs, inputs, strict=True)]
        tasks = [self._scatter_task(name, output, p, opts) for output, p in zip(outputs, parts, strict=True)]
        return self._start(name, outputs, tasks, keep=(outputs, inputs, parts))

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    def barrier(self, opts: Any = None) -> RingWork:
        """Wait until all ranks have come here."""
        # Nobody has every rank's byte before every rank has sent its own.
        mine, all_of_us = torch.zeros(1, dtype=torch.uint8), torch.zeros(self._size, dtype=torch.uint8)
        parts = _views(all_of_us, self._size)
        task = self._gather_task("barrier", parts, mine, opts or dist.BarrierOptions())
        return self._start("barrier", [], [task], keep=(parts, mine))

    def gather(  # type: ignore[override]
        self, output_tensors: list[list[torch.Tensor]], input_tensors: list[torch.Tensor], opts: Any = None
    ) -> RingWork:
        """Collect every rank's tensor on the root."""
        name, root = "gather", opts.rootRank
        tensor = _single(input_tensors, name)
        if self._rank != root:
            return self._exchange(name, [], sends={root: tensor}, opts=opts)
        outputs = _single(output_tensors, name)
        _same_sizes(outputs, tensor.numel(), self._size, name)
        outputs[root].copy_(tensor.view_as(outputs[root]))
        others = {r: t for r, t in enumerate(outputs) if r != root}
        return self._exchange(name, outputs, receives=others, opts=opts)

    def scatter(  # type: ignore[override]
        self, output_tensors: list[torch.Tensor], input_tensors: list[list[torch.Tensor]], opts: Any = None
    ) -> RingWork:
        """Give each rank its tensor from the root."""
        name, root = "scatter", opts.rootRank
        output = _single(output_tensors, name)
        if self._rank != root:
            return self._exchange(name, [output], receives={root: output}, opts=opts)
        inputs = _single(input_tensors, name)
        _same_sizes(inputs, output.numel(), self._size, name)
        output.copy_(inputs[root].view_as(output))
        others = {r: t for r, t in enumerate(inputs) if r != root}
        return self._exchange(name, [output], sends=others, opts=opts)

    def send(self, tensors: list[torch.Tensor], dstRank: int, tag: int) -> RingWork:
        """Send a tensor to a rank; messages of a pair of ranks keep their order."""
        self._check_tag("send", tag)
        return self._exchange("send", [], sends={dstRank: _single(tensors, "send")})

    def recv(self, tensors: list[torch.Tensor], srcRank: int, tag: int) -> RingWork:
        """Receive a tensor of the same size from a rank."""
        self._check_tag("recv", tag)
        return self._exchange("recv", tensors, receives={srcRank: _single(tensors, "recv")})

    # ---- parts ----

    @staticmethod
    def _check_tag(name: str, tag: int) -> None:
        if tag != 0:
            raise CheckmateError(f"{name}: the checkmate backend has no tags, use tag 0 (got {tag})")

    def _reduce_task(
        self, name: str, source: torch.Tensor, target: torch.Tensor, opts: Any, func: int | None = None, root: int = 0
    ) -> Task:
        _check([source, target], name)
        return Task(
            func=lib().CKM_RING_ALLREDUCE if func is None else func,
            dtype=_dtype(source, name),
            count=source.numel(),
            inputs=[source.data_ptr()],
            outputs=[target.data_ptr()],
            redop=_reduction(opts.reduceOp, name),
            root=root,
            timeout_s=_seconds(opts.timeout, self._timeout),
        )

    def _byte_task(
        self, func: int, count: int, inputs: Sequence[int], outputs: Sequence[int], opts: Any, root: int = 0
    ) -> Task:
        """A task that only moves bytes, whatever they are."""
        timeout_s = _seconds(getattr(opts, "timeout", None), self._timeout)
        return Task(func, _BYTES, count, inputs, outputs, root=root, timeout_s=timeout_s)

    def _parts(self, name: str, whole: torch.Tensor, part: torch.Tensor) -> list[torch.Tensor]:
        """The pieces of ``whole``, one of each rank and of the size of ``part``."""
        if whole.numel() != part.numel() * self._size:
            raise CheckmateError(
                f"{name}: the larger tensor has {whole.numel()} elements, not {self._size} x {part.numel()}"
            )
        _check([whole, part], name)
        return _views(whole, self._size)

    def _gather_task(self, name: str, parts: list[torch.Tensor], tensor: torch.Tensor, opts: Any) -> Task:
        _check([*parts, tensor], name)
        _same_sizes(parts, tensor.numel(), self._size, name)
        pointers = [part.data_ptr() for part in parts]
        return self._byte_task(lib().CKM_RING_ALLGATHER, _bytes(tensor), [tensor.data_ptr()], pointers, opts)

    def _scatter_task(self, name: str, output: torch.Tensor, parts: list[torch.Tensor], opts: Any) -> Task:
        _check([*parts, output], name)
        _same_sizes(parts, output.numel(), self._size, name)
        return Task(
            func=lib().CKM_RING_REDUCESCATTER,
            dtype=_dtype(output, name),
            count=output.numel(),
            inputs=[part.data_ptr() for part in parts],
            outputs=[output.data_ptr()],
            redop=_reduction(opts.reduceOp, name),
            timeout_s=_seconds(opts.timeout, self._timeout),
        )

    def _exchange(
        self,
        name: str,
        outputs: list[torch.Tensor],
        sends: dict[int, torch.Tensor] | None = None,
        receives: dict[int, torch.Tensor] | None = None,
        opts: Any = None,
    ) -> RingWork:
        """Point-to-point operations, all at once: tensors by peer."""
        sends, receives = sends or {}, receives or {}
        _check([*sends.values(), *receives.values()], name)
        tasks = [
            self._byte_task(lib().CKM_RING_SEND, _bytes(t), [t.data_ptr()], [], opts, peer) for peer, t in sends.items()
        ]
        tasks += [
            self._byte_task(lib().CKM_RING_RECV, _bytes(t), [], [t.data_ptr()], opts, peer)
            for peer, t in receives.items()
        ]
        return self._start(name, outputs, tasks, keep=(sends, receives))

    def _start(self, name: str, outputs: list[torch.Tensor], tasks: Sequence[Task], keep: object) -> RingWork:
        with self._lock:
            try:
                operations: list[Operation] = [self._ring.submit(task) for task in tasks]
            except RingError as error:
                raise dist.DistBackendError(f"{name}: {error}") from error
            work = RingWork(name, operations, outputs, keep, self._completer)
            self._pending = [w for w in self._pending if not w.is_completed()]
            self._pending.append(work)
        return work


def _refuse(name: str) -> Callable[..., NoReturn]:
    def method(self: ProcessGroupCheckmate, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"the checkmate backend does not support {name}; supported are {_SUPPORTED}")

    method.__name__ = name
    method.__doc__ = "Not supported: raises NotImplementedError."
    return method


for _name in (
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "recv_anysource",
    "allgather_coalesced",
    "split_group",
    "merge_remote_group",
):
    setattr(ProcessGroupCheckmate, _name, _refuse(_name))


def create(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroupCheckmate:
    """What ``torch.distributed`` calls to make a group."""
    return ProcessGroupCheckmate(store, rank, size, timeout)


if "checkmate" not in dist.Backend.backend_list:
    dist.Backend.register_backend("checkmate", create, devices=["cpu"])
