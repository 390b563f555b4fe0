"""What is known of gradients from their all-reduce to the optimizer's step, however they are all-reduced."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgpack
import torch
from torch import Tensor, nn

from checkmate.protocol import Layout
from checkmate.tensors import dtype_name
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


class Owner(NamedTuple):
    """Whom reductions serve.

    ``iteration`` tells the iteration that gradients are now for. ``guard`` runs what is not the reduction itself, so
    that no error of it reaches training. ``superseded`` is called when a reduction begins although none of the
    gradients of the one before was used in a step. ``masters`` None: there are none.
    """

    plugin: TagPlugin
    iteration: Callable[[], int]
    guard: Callable[[Callable[[], None]], None]
    superseded: Callable[[], None] = lambda: None
    masters: Masters | None = None


class Reductions:
    """Names each bucket's bytes, tags its all-reduce, and tells whether a step can be followed; how gradients come into
    buckets is a subclass's affair.
    """

    def __init__(self, module: nn.Module, owner: Owner) -> None:
        self._closed = False
        self._plugin, self._iteration, self._guard, self._superseded, masters = owner
        self._params = {id(p): (name, p) for name, p in module.named_parameters() if p.requires_grad}
        self._frozen = {id(p): name for name, p in module.named_parameters() if not p.requires_grad}
        self._trail = GradientTrail(self._params)
        self._masters = masters or Masters(module, {})
        self._buckets: dict[int, dict[str, Any]] = {}
        self._layout: Layout | None = None
        self._unusable: str | None = None
        self._open = False
        self._reductions = 0

    @property
    def order(self) -> list[int] | None:
        """In which gradients became ready, where a restart must know; rank 0's decides."""
        return None

    def restore_order(self, order: Sequence[int] | None) -> None:
        """``order`` as it was before a restart. Collective; before the first forward."""

    def before_forward(self) -> None:
        """At every forward; raises CheckmateError where what comes can't be reduced as it should."""

    @property
    def layout(self) -> Layout | None:
        """What the bytes of the buckets of the newest reduction are; None before the first."""
        if self._layout is None and self._buckets:
            buckets = [self._buckets[index] for index in sorted(self._buckets)]
            digest = hashlib.sha256(msgpack.packb(buckets)).hexdigest()[:32]
            self._layout = Layout(digest, buckets)
        return self._layout

    def close(self) -> None:
        """From now on only reduce."""
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
        if self._unusable is not None:
            return self._unusable
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
                what = f"{name}, which was frozen when it was attached" if name else "one that is not in the module"
                return f"parameter group {index} holds {what}: its gradient is not all-reduced"
        return None

    def next_step(self) -> None:
        """The iteration is over: reductions from now on are for the next one."""
        self._reductions = 0
        self._open = False
        self._trail.end()
        self._masters.trail.end()

    def _begin(self) -> None:
        """The first bucket of a backward pass."""
        if self._open or self._reductions:
            self._superseded()
            self.next_step()
        self._open = True
        self._plugin.set_iteration(self._iteration())

    def _end(self, unusable: str | None) -> None:
        """End of backward: gradients must stay as they are now, or change in a way that is known.

        ``unusable``: why they are not what was all-reduced.
        """
        self._plugin.unregister_buckets()  # a buffer's address may be another tensor's soon
        self._open = False
        self._reductions += 1
        self._unusable = unusable
        self._trail.seal()


def line(index: int, sent: Tensor, places: list[list[Any]]) -> dict[str, Any]:
    """Of a layout: a bucket of which ``sent`` is all-reduced; ``places``: name, first element and number of elements
    of each gradient."""
    dtype = dtype_name(sent.dtype)
    return {"bucket": index, "bytes": sent.nbytes, "dtype": dtype, "params": places}


def after_finalize(callback: Callable[[], None]) -> None:
    """Call at the end of this backward pass, after the reducer's own callback, which it may queue later than this."""
    queue = torch.autograd.Variable._execution_engine.queue_callback
    queue(lambda: queue(callback))
