"""The DDP communication hook: names each bucket's bytes, tags its all-reduce, and tells whether a step can be followed.

It divides and reduces exactly as DDP's own reducer does, so that a run is bit for bit the same without it.
"""

import hashlib
from collections.abc import Callable
from typing import Any, Protocol

import msgpack
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from checkmate.protocol import Layout
from checkmate.train.buckets import ReadyOrder


class Counters(Protocol):
    """``checkmate.nccl_plugin.binding.Counters``, as far as training looks at it."""

    @property
    def tagged_bytes(self) -> int:
        """Gradient payload bytes tagged since the process started."""


class TagPlugin(Protocol):
    """What the hook needs of ``checkmate.nccl_plugin.binding.Plugin``."""

    def register_bucket(self, ptr: int, nbytes: int, bucket: int) -> None:
        """All-reduces that send from exactly this address are those of this bucket."""

    def unregister_buckets(self) -> None:
        """Forget all buckets: nothing is tagged."""

    def set_iteration(self, iteration: int) -> None:
        """The optimizer step that all-reduces from now on belong to."""

    def set_incarnation(self, incarnation: int) -> None:
        """0: nothing is tagged."""

    def counters(self) -> Counters:
        """Totals since the process started."""


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


class GradientHook:
    """Communication hook of one DDP module.

    ``iteration`` tells the optimizer step that gradients are now for. ``guard`` runs what is not the reduction itself,
    so that no error of it reaches training.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        plugin: TagPlugin,
        iteration: Callable[[], int],
        guard: Callable[[Callable[[], None]], None],
    ) -> None:
        self._closed = False
        self._guard = guard
        self._plugin = plugin
        self._iteration = iteration
        self._group = ddp.process_group
        self._world = dist.get_world_size(self._group)
        self.ready_order = ReadyOrder(ddp)
        self._params = {id(p): (name, p) for name, p in ddp.module.named_parameters() if p.requires_grad}
        self._divide = _divider(ddp, self._world, [p for _, p in self._params.values()])
        self._keys: dict[int, tuple[Any, ...]] = {}
        self._buckets: dict[int, dict[str, Any]] = {}
        self._layout: Layout | None = None
        self._open = False
        self._reductions = 0
        self._sealed: dict[int, tuple[int, int]] = {}

    def register(self, ddp: DistributedDataParallel) -> None:
        """Become the module's communication hook; raises RuntimeError when it has one."""

        def checkmate_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
            return self._reduce(bucket)

        ddp.register_comm_hook(None, checkmate_hook)

    @property
    def layout(self) -> Layout | None:
        """What the bytes of the buckets of the newest reduction are; None before the first."""
        if self._layout is None and self._buckets:
            buckets = [self._buckets[index] for index in sorted(self._buckets)]
            digest = hashlib.sha256(msgpack.packb(buckets)).hexdigest()[:32]
            self._layout = Layout(digest, buckets)
        return self._layout

    def close(self) -> None:
        """From now on only divide and reduce: a communication hook cannot be taken back."""
        self._closed = True
        self._plugin.unregister_buckets()

    def unfollowed(self, optimizer: torch.optim.Optimizer) -> str | None:
        """Why what the optimizer is about to use is not exactly the gradients that were all-reduced; None: it is."""
        if self._open or self._reductions != 1:
            return self._count_reason()
        for index, group in enumerate(optimizer.param_groups):
            if any(id(param) not in self._params for param in group["params"]):
                return f"parameter group {index} holds a parameter that is not in the DDP module"
        for name, param in self._params.values():
            if param.grad is None:
                return f"parameter {name} got no gradient"
            if self._sealed.get(id(param)) != _fingerprint(param.grad):
                return f"the gradient of {name} was changed after its all-reduce (clipping, unscaling, …)"
        return None

    def _count_reason(self) -> str:
        if self._open:
            return "a backward pass did not finish"
        if not self._reductions:
            return "no all-reduce since the last step"
        return f"{self._reductions} all-reduces since the last step: accumulate under no_sync()"

    def next_step(self) -> None:
        """The optimizer stepped: reductions from now on are for the next step."""
        self._reductions = 0
        self._open = False

    def _reduce(self, bucket: Bucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        self._divide(bucket, buffer)
        if not self._closed:
            self._guard(lambda: self._announce(bucket, buffer))
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        future: torch.futures.Future[list[Tensor]] = work.get_future()
        return future.then(lambda done: done.value()[0])

    def _announce(self, bucket: Bucket, buffer: Tensor) -> None:
        index = bucket.index()
        if index == 0:
            self._reductions += self._open  # one that never finished
            self._open = True
            self._plugin.set_iteration(self._iteration())
        self._note_layout(bucket, index, buffer)
        if not self._reductions:  # a second one would be another gradient for the same step
            self._plugin.register_bucket(buffer.data_ptr(), buffer.nbytes, index)
        if bucket.is_last():
            self._buckets = {i: self._buckets[i] for i in range(index + 1)}
            _after_finalize(lambda: self._guard(self._seal))

    def _seal(self) -> None:
        """End of backward: gradients must stay as they are now."""
        self._plugin.unregister_buckets()  # a buffer's address may be another tensor's after a rebuild
        self.ready_order.seal()
        self._open = False
        self._reductions += 1
        self._sealed = {
            key: _fingerprint(param.grad) for key, (_, param) in self._params.items() if param.grad is not None
        }

    def _note_layout(self, bucket: Bucket, index: int, buffer: Tensor) -> None:
        params = bucket.parameters()
        key = (buffer.data_ptr(), buffer.numel(), *map(id, params))
        if self._keys.get(index) == key:
            return
        self._keys[index] = key
        self._layout = None
        start = buffer.data_ptr()
        self._buckets[index] = {
            "bucket": index,
            "bytes": buffer.nbytes,
            "dtype": str(buffer.dtype).removeprefix("torch."),
            "params": [
                [self._params[id(param)][0], (view.data_ptr() - start) // buffer.element_size(), view.numel()]
                for param, view in zip(params, bucket.gradients(), strict=True)
            ],
        }


def _fingerprint(grad: Tensor) -> tuple[int, int]:
    return grad.data_ptr(), grad._version


def _after_finalize(callback: Callable[[], None]) -> None:
    """Call at the end of this backward pass, after DDP's own callback, which it queues when the last hook returns."""
    queue = torch.autograd.Variable._execution_engine.queue_callback
    queue(lambda: queue(callback))


Divider = Callable[[Bucket, Tensor], None]


def _divider(ddp: DistributedDataParallel, world: int, params: list[Tensor]) -> Divider:
    """Divide a bucket by the number of ranks as the reducer does: it multiplies by 1/N while it copies a gradient into
    the bucket, but divides by N when the gradient is the bucket's own memory or copies are batched."""

    def divide(_bucket: Bucket, buffer: Tensor) -> None:
        buffer.div_(world)

    def multiply(_bucket: Bucket, buffer: Tensor) -> None:
        buffer.mul_(1.0 / world)

    if getattr(ddp, "batched_grad_copy", False):
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
