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
from checkmate.tensors import is_same
from checkmate.train.buckets import ReadyOrder
from checkmate.train.compression import Compression
from checkmate.train.gradients import Change, GradientTrail
from checkmate.train.masters import Masters


class Counters(Protocol):
    """``checkmate.nccl_plugin.binding.Counters``, as far as training looks at it."""

    @property
    def tagged_bytes(self) -> int:
        """Gradient payload bytes tagged since the process started."""


class TagPlugin(Protocol):
    """What the hook needs of ``checkmate.nccl_plugin.binding.Plugin``."""

    def register_bucket(self, ptr: int, nbytes: int, bucket: int) -> None:
        """All-reduces that send from exactly this address are those of this bucket."""

    def register_probe(self, ptr: int, nbytes: int) -> None:
        """An all-reduce from there shows the plugin where this rank stands in the rings."""

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

    ``iteration`` tells the iteration that gradients are now for. ``guard`` runs what is not the reduction itself, so
    that no error of it reaches training. ``superseded`` is called when a reduction begins although none of the
    gradients of the one before was used in a step. ``compression``: of a hook of the user's that this one replaces.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        plugin: TagPlugin,
        iteration: Callable[[], int],
        guard: Callable[[Callable[[], None]], None],
        superseded: Callable[[], None] = lambda: None,
        compression: Compression = Compression.NONE,
        masters: Masters | None = None,
    ) -> None:
        self._closed = False
        self._superseded = superseded
        self._guard = guard
        self._plugin = plugin
        self._iteration = iteration
        self._group = ddp.process_group
        self._world = dist.get_world_size(self._group)
        self.ready_order = ReadyOrder(ddp)
        self._params = {id(p): (name, p) for name, p in ddp.module.named_parameters() if p.requires_grad}
        self._frozen = {id(p): name for name, p in ddp.module.named_parameters() if not p.requires_grad}
        self._trail = GradientTrail(self._params)
        self._masters = masters or Masters(ddp.module, {})
        self._compression = compression
        self._divide = _divider(ddp, self._world, [p for _, p in self._params.values()], compression)
        self._may_be_unused = (ddp.find_unused_parameters or ddp.static_graph) and not ddp.gradient_as_bucket_view
        self._untouched: list[tuple[str, Tensor, int, Tensor]] = []
        self._stale: str | None = None
        self._keys: dict[int, tuple[Any, ...]] = {}
        self._buckets: dict[int, dict[str, Any]] = {}
        self._layout: Layout | None = None
        self._open = False
        self._reductions = 0

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
        self.next_step()

    def unfollowed(self, optimizer: torch.optim.Optimizer) -> str | None:
        """Why the shadow can't know the gradients that the optimizer is about to use; None: it can."""
        if self._open:
            return "a backward pass did not finish"
        if not self._reductions:
            return "no all-reduce since the last step"
        return self._unreduced(optimizer) or self._changed()

    def _changed(self) -> str | None:
        """Gradients that are not what the all-reduce made, changed by nothing but what is known."""
        if self._stale is not None:
            return f"parameter {self._stale} was used on no rank and keeps an older gradient: zero it before backward"
        if (name := self._trail.unexplained()) is not None:
            return (
                f"the gradient of {name} was changed after its all-reduce, and not by torch's clip_grad_norm_, "
                "clip_grad_value_ or GradScaler"
            )
        if (name := self._masters.trail.unexplained()) is not None:
            return f"the gradient of {name} is not that of its parameter, changed by torch's own functions alone"
        return None

    def absent(self) -> list[str]:
        """Parameters that the optimizer passes over for want of a gradient."""
        copied = self._masters.sources
        names = {name for key, (name, _) in self._params.items() if key not in copied}
        return [*(name for name in self._trail.absent() if name in names), *self._masters.trail.absent()]

    def changes(self) -> list[Change]:
        """What was done to the gradients, and then to the master weights' gradients."""
        return self._trail.changes() + self._masters.trail.changes()

    def _unreduced(self, optimizer: torch.optim.Optimizer) -> str | None:
        """A parameter of the optimizer with a gradient that no all-reduce made."""
        for index, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                if id(param) in self._params or param.grad is None or param in self._masters:
                    continue
                name = self._frozen.get(id(param))
                what = f"{name}, which was frozen when DDP was made" if name else "one that is not in the DDP module"
                return f"parameter group {index} holds {what}: its gradient is not all-reduced"
        return None

    def next_step(self) -> None:
        """The iteration is over: reductions from now on are for the next one."""
        self._reductions = 0
        self._open = False
        self._trail.end()
        self._masters.trail.end()

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
            if self._open or self._reductions:
                self._superseded()
                self.next_step()
            self._open = True
            self._untouched = []
            self._plugin.set_iteration(self._iteration())
        self._note_layout(bucket, index, buffer, sent)
        self._plugin.register_bucket(sent.data_ptr(), sent.nbytes, index)
        if self._may_be_unused:
            self._note_gradients(bucket)
        if bucket.is_last():
            self._buckets = {i: self._buckets[i] for i in range(index + 1)}
            _after_finalize(lambda: self._guard(self._seal))

    def _note_gradients(self, bucket: Bucket) -> None:
        """DDP leaves gradients as they are that no rank used: they are not always what the bucket holds."""
        for param, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if param.grad is not None:
                self._untouched.append((self._params[id(param)][0], param, param.grad._version, view))

    def _seal(self) -> None:
        """End of backward: gradients must stay as they are now, or change in a way that is known."""
        self._plugin.unregister_buckets()  # a buffer's address may be another tensor's after a rebuild
        self.ready_order.seal()
        self._open = False
        self._reductions += 1
        untouched, self._untouched = self._untouched, []
        self._stale = next(
            (
                name
                for name, param, version, view in untouched
                if param.grad is not None and param.grad._version == version and not is_same(param.grad, view)
            ),
            None,
        )
        self._trail.seal()

    def _note_layout(self, bucket: Bucket, index: int, buffer: Tensor, sent: Tensor) -> None:
        params = bucket.parameters()
        key = (buffer.data_ptr(), buffer.numel(), *map(id, params))
        if self._keys.get(index) == key:
            return
        self._keys[index] = key
        self._layout = None
        start = buffer.data_ptr()
        self._buckets[index] = {
            "bucket": index,
            "bytes": sent.nbytes,
            "dtype": str(sent.dtype).removeprefix("torch."),
            "params": [
                [self._params[id(param)][0], (view.data_ptr() - start) // buffer.element_size(), view.numel()]
                for param, view in zip(params, bucket.gradients(), strict=True)
            ],
        }


def _after_finalize(callback: Callable[[], None]) -> None:
    """Call at the end of this backward pass, after DDP's own callback, which it queues when the last hook returns."""
    queue = torch.autograd.Variable._execution_engine.queue_callback
    queue(lambda: queue(callback))


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
