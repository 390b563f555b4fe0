"""The DDP communication hook: names each bucket's bytes, tags its all-reduce, and tells whether a step can be followed.

It divides and reduces exactly as DDP's own reducer does, so that a run is bit for bit the same without it.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from checkmate.config import CheckmateError
from checkmate.tensors import is_same
from checkmate.train.buckets import ReadyOrder, broadcast_order, drop_hook
from checkmate.train.compression import Compression
from checkmate.train.reductions import Owner, Reductions, after_finalize, line


class Bucket(Protocol):
    """``torch.distributed.GradBucket``."""

    def index(self) -> int:
        """Its place among the buckets of a backward pass."""

    def is_last(self) -> bool:
        """True for the last of a backward pass."""

    def buffer(self) -> Tensor:
        """The flat gradients."""

    def gradients(self) -> list[Tensor]:
        """Views of ``buffer``, one for each parameter."""

    def parameters(self) -> list[Tensor]:
        """The parameters."""


class GradientHook(Reductions):
    """Communication hook of one DDP module; stands in for a hook of the user's that compresses."""

    def __init__(self, ddp: DistributedDataParallel, owner: Owner) -> None:
        super().__init__(ddp.module, owner)
        self._ddp = ddp
        self._group = ddp.process_group
        self._world = dist.get_world_size(self._group)
        self._compression = Compression.of(ddp) or Compression.NONE
        if self._compression is not Compression.NONE:
            drop_hook(ddp)
        self._ready_order = ReadyOrder(ddp)
        self._divide = _divider(ddp, self._world, [p for _, p in self._params.values()], self._compression)
        self._may_be_unused = (ddp.find_unused_parameters or ddp.static_graph) and not ddp.gradient_as_bucket_view
        self._untouched: list[tuple[str, Tensor, int, Tensor]] = []
        self._keys: dict[int, tuple[Any, ...]] = {}
        self._register()

    def _register(self) -> None:
        def checkmate_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
            return self._reduce(bucket)

        self._ddp.register_comm_hook(None, checkmate_hook)
        self._ddp._comm_hooks.pop()  # a list of torch's for messages; copies and files of the module would hold us

    @property
    def order(self) -> list[int] | None:
        return self._ready_order.indices

    def restore_order(self, order: Sequence[int] | None) -> None:
        if self._ready_order.restore(broadcast_order(self._ddp, order)):
            self._register()

    def before_forward(self) -> None:
        if self._ddp._join_config.enable and not self._ddp._divide_by_initial_world_size:
            raise CheckmateError(
                "join(divide_by_initial_world_size=False) divides gradients by a number of ranks that a communication "
                "hook is not told: leave it True, or do not attach"
            )

    def _reduce(self, bucket: Bucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        sent = self._compression.compress(buffer)
        self._divide(bucket, sent)
        if not self._closed:
            self._guard(lambda: self._announce(bucket, buffer, sent))
        work = dist.all_reduce(sent, group=self._group, async_op=True)
        future: torch.futures.Future[list[Tensor]] = work.get_future()
        if sent is buffer:
            return future.then(lambda done: done.value()[0])
        return future.then(lambda done: buffer.copy_(done.value()[0]))

    def _announce(self, bucket: Bucket, buffer: Tensor, sent: Tensor) -> None:
        index = bucket.index()
        if index == 0:
            self._begin()
            self._untouched = []
        self._note_layout(bucket, index, buffer, sent)
        self._plugin.register_bucket(sent.data_ptr(), sent.nbytes, index)
        if self._may_be_unused:
            self._note_gradients(bucket)
        if bucket.is_last():
            self._buckets = {i: self._buckets[i] for i in range(index + 1)}
            after_finalize(lambda: self._guard(self._seal))

    def _note_gradients(self, bucket: Bucket) -> None:
        """DDP leaves gradients as they are that no rank used: they are not always what the bucket holds."""
        for param, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if param.grad is not None:
                self._untouched.append((self._params[id(param)][0], param, param.grad._version, view))

    def _seal(self) -> None:
        self._ready_order.seal()
        untouched, self._untouched = self._untouched, []
        stale = next(
            (
                name
                for name, param, version, view in untouched
                if param.grad is not None and param.grad._version == version and not is_same(param.grad, view)
            ),
            None,
        )
        self._end(
            stale and f"parameter {stale} was used on no rank and keeps an older gradient: zero it before backward"
        )

    def _note_layout(self, bucket: Bucket, index: int, buffer: Tensor, sent: Tensor) -> None:
        params = bucket.parameters()
        key = (buffer.data_ptr(), buffer.numel(), *map(id, params))
        if self._keys.get(index) == key:
            return
        self._keys[index] = key
        self._layout = None
        start = buffer.storage_offset()  # no addresses: an empty tensor's is 0
        places = [
            [self._params[id(param)][0], int(view.storage_offset() - start), view.numel()]
            for param, view in zip(params, bucket.gradients(), strict=True)
        ]
        self._buckets[index] = line(index, sent, places)


Divider = Callable[[Bucket, Tensor], None]


def _divider(ddp: DistributedDataParallel, world: int, params: list[Tensor], compression: Compression) -> Divider:
    """Divide a bucket by the number of ranks as the reducer does: it multiplies by 1/N while it copies a gradient into
    the bucket, but divides by N when the gradient is the bucket's own memory or copies are batched. torch's own hooks
    divide."""

    def divide(_bucket: Bucket, buffer: Tensor) -> None:
        buffer.div_(world)

    def multiply(_bucket: Bucket, buffer: Tensor) -> None:
        buffer.mul_(1.0 / world)

    if compression is not Compression.NONE or getattr(ddp, "batched_grad_copy", False):
        return divide
    is_exact = world & (world - 1) == 0  # 1/N has no rounding error: both ways agree
    return _ViewDivider(world, params) if ddp.gradient_as_bucket_view and not is_exact else multiply


class _ViewDivider:
    """For ``gradient_as_bucket_view``: looks where each gradient was before this backward pass added to it."""

    def __init__(self, world: int, params: list[Tensor]) -> None:
        self._world = world
        self._before: dict[int, int] = {}
        for param in params:
            # for the module's life, like the communication hook
            param.register_hook(self._noter(param))  # type: ignore[no-untyped-call]

    def __call__(self, bucket: Bucket, buffer: Tensor) -> None:
        for param, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if self._before.pop(id(param), 0) == view.data_ptr():
                view.div_(self._world)
            else:
                view.mul_(1.0 / self._world)

    def _noter(self, param: Tensor) -> Callable[[Tensor], None]:
        def note(_grad: Tensor) -> None:
            self._before[id(param)] = 0 if param.grad is None else param.grad.data_ptr()

        return note
