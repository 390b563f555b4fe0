"""The trainer's parameters and optimizer on the shadow: torch's own optimizer, stepped with received gradients."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from checkmate import plain
from checkmate.config import CheckmateError
from checkmate.protocol import Layout, Seed, StepRecord
from checkmate.shadow.optim import adam
from checkmate.tensors import MASTER, Manifest, TensorError, dtype_of, is_same, pack_state, set_group, unpack_group

_CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "Adam": torch.optim.Adam,
    "SGD": torch.optim.SGD,
}


_BLOCK_BYTES = 4 << 20
"""Of converted gradients that are stepped together: few enough to be in cache still when the optimizer reads them."""

Place = tuple[Mapping[str, Any], str, int]
"""Of a gradient: its bucket's line of the layout, its parameter's name, its first element."""


def warm_up() -> None:
    """Let torch load what a process's first optimizer needs: seconds that gradients would otherwise have to wait."""
    adam.kernel()
    param = nn.Parameter(torch.zeros(1))
    param.grad = torch.zeros(1)
    torch.optim.AdamW([param], fused=True).step()


class Refusal(CheckmateError):
    """The shadow can't follow this optimizer, layout or step record; a new seed of the same kind wouldn't help."""


class Replica:
    """θ and optimizer state after ``step``; owns its tensors. Not thread-safe.

    Raises Refusal for an optimizer other than torch's AdamW, Adam and SGD, or hyperparameters that need a GPU's graph.
    """

    def __init__(self, seed: Seed, tensors: Sequence[Tensor]) -> None:
        self.step = seed.step
        self._params: dict[str, nn.Parameter] = {}
        self._buffers: dict[str, Tensor] = {}
        self._aliases: dict[str, str] = {}
        self._masters: dict[str, nn.Parameter] = {}
        self._checked: set[str] = set()
        self._scratch: dict[torch.dtype, Tensor] = {}
        self._scratch_used = 0
        states = self._sort(seed, tensors)
        self._capturable = [bool(group.get("capturable")) for group in seed.optimizer["groups"]]
        self._orders = [group.get("order") for group in seed.optimizer["groups"]]
        self._optimizer = self._build(seed.optimizer)
        copies = {master: self._params[name] for name, master in self._masters.items() if name in self._params}
        self._adam = adam.Adam(self._optimizer, copies)
        self._covered: set[nn.Parameter] = set()
        self._copied: set[nn.Parameter] = set()
        self._load(states)

    def apply(self, record: StepRecord, layout: Layout, buckets: Mapping[int, memoryview]) -> None:
        """Step ``record.step`` with gradients that stay where they are: ``buckets`` maps bucket → its bytes.

        A skipped step changes nothing but ``step``; a fused optimizer that skips it creates state all the same. Raises
        Refusal, with nothing changed, when layout or record don't fit the seed. Any other error leaves the state
        unusable.
        """
        self.check(record, layout)
        for bucket in () if record.skipped else layout.buckets:
            if (nbytes := buckets[bucket["bucket"]].nbytes) != bucket["bytes"]:
                raise Refusal(f"bucket {bucket['bucket']} has {nbytes} bytes, {bucket['bytes']} in the layout")
        scaler = {key: None if value is None else plain.decode(value) for key, value in (record.scaler or {}).items()}
        if not record.skipped or scaler.get("found_inf") is not None:
            for group, fields in zip(self._optimizer.param_groups, record.groups, strict=True):
                set_group(group, _steppable(fields))
            self._covered = set() if record.skipped or scaler else self._adam.covered()
            self._copied.clear()
            self._optimizer.__dict__.update(scaler)
            try:
                with _threads(record.threads):
                    for block in self._blocks(record, layout):
                        self._step(record, block, buckets)
                for name, master in self._masters.items():
                    if master not in self._copied:
                        self._params[name].detach().copy_(master.detach())
            finally:
                for key in scaler:
                    del self._optimizer.__dict__[key]
        self.step = record.step

    def check(self, record: StepRecord, layout: Layout) -> None:
        """Refusal when layout or record name other parameters, sizes or data types than the seed, or groups differ."""
        if len(record.groups) != len(self._optimizer.param_groups):
            raise Refusal(
                f"step {record.step} has {len(record.groups)} parameter groups, the seed "
                f"{len(self._optimizer.param_groups)}"
            )
        for fields in record.groups:
            _steppable(fields)
            if record.scaler is not None and not fields.get("fused"):
                raise Refusal(f"step {record.step} has a GradScaler's values for an optimizer that is not fused")
        named = [name for change in record.changes for name in change["params"] or ()]
        unknown = [name for name in (*record.absent, *named) if name not in self._params]
        unknown += [name for name in self._masters if name not in self._params]
        if unknown:
            raise Refusal(f"step {record.step} names {unknown[0]!r}, which the seed doesn't hold")
        if layout.digest not in self._checked:
            problems = [text for bucket in layout.buckets for text in self._bucket_problems(bucket)]
            names = [name for bucket in layout.buckets for name, _, _ in bucket["params"]]
            problems += [f"{name!r} is in it twice" for name in sorted({n for n in names if names.count(n) > 1})]
            if problems:
                raise Refusal("the layout doesn't fit the seed: " + "; ".join(problems[:8]))
            self._checked.add(layout.digest)

    def pack(self) -> tuple[dict[str, Any], Manifest, list[Tensor]]:
        """Optimizer description, manifest and the live tensors, as the trainer's own ``pack_state`` gives them."""
        description, manifest, tensors = pack_state(
            self._named(self._params), self._named(self._buffers), self._optimizer
        )
        for group, capturable in zip(description["groups"], self._capturable, strict=True):
            if "capturable" in group:
                group["capturable"] = capturable
        for group, order in zip(description["groups"], self._orders, strict=True):
            if order is not None:
                group["order"] = order
        return description, manifest, tensors

    def tensor(self, name: str, kind: str) -> Tensor | None:
        """The live tensor of a parameter that a manifest lists so, None: there is none."""
        param = self._params.get(name)
        if param is None or kind == "param":
            return param
        value = self._optimizer.state.get(param, {}).get(kind.removeprefix("state."))
        return value if isinstance(value, Tensor) else None

    def state_dicts(self) -> dict[str, Any]:
        """``{"model", "optimizer", "step"}``, live and for plain PyTorch's ``load_state_dict``.

        With ``"masters"``, by parameter, where the optimizer holds such copies.
        """
        optimizer = self._optimizer.state_dict()
        for group, capturable in zip(optimizer["param_groups"], self._capturable, strict=True):
            if "capturable" in group:
                group["capturable"] = capturable
        tensors = (*self._named(self._params), *self._named(self._buffers))
        model = {name: tensor.detach() for name, tensor in tensors if not name.startswith(MASTER)}
        masters = {name: master.detach() for name, master in self._masters.items()}
        state = {"model": model, "optimizer": optimizer, "step": self.step}
        return state | ({"masters": masters} if masters else {})

    @property
    def shard(self) -> dict[str, Any] | None:
        """Of a shadow that holds a part: names of its parameters in each group, and of all; None: it holds all."""
        if self._orders[0] is None:
            return None
        groups = self.pack()[0]["groups"]
        return {"params": [group["params"] for group in groups], "order": self._orders}

    def differences(self, seed: Seed, tensors: Sequence[Tensor]) -> list[str]:
        """Parameters and optimizer state that differ in any bit from a seed of the same step.

        Buffers and hyperparameters are not compared: they may change between the step and its boundary.
        """
        _, manifest, ours = self.pack()
        have = {(line[0], line[1]): tensor for line, tensor in zip(manifest, ours, strict=True)}
        want = {(line[0], line[1]): tensor for line, tensor in zip(seed.manifest, tensors, strict=True)}
        keys = [key for key in have.keys() | want.keys() if key[1] != "buffer"]
        return sorted(
            f"{kind} {name}"
            for name, kind in keys
            if (name, kind) not in have or (name, kind) not in want or not is_same(have[name, kind], want[name, kind])
        )

    @property
    def nbytes(self) -> int:
        """Bytes of parameters, buffers and optimizer state."""
        return sum(tensor.nbytes for tensor in self.pack()[2])

    def _sort(self, seed: Seed, tensors: Sequence[Tensor]) -> dict[str, dict[str, Any]]:
        """Takes parameters, buffers and aliases; returns the optimizer state by parameter name."""
        states: dict[str, dict[str, Any]] = {}
        for (name, kind, *_), tensor in zip(seed.manifest, tensors, strict=True):
            prefix, _, rest = kind.partition(".")
            if kind == "param":
                wants_grad = tensor.is_floating_point() or tensor.is_complex()
                self._params[name] = nn.Parameter(tensor, requires_grad=wants_grad)
                self._params[name].grad_dtype = None  # any: what reads gradients of 16 bits gets them as they are
                if name.startswith(MASTER):
                    self._masters[name.removeprefix(MASTER)] = self._params[name]
            elif kind == "buffer":
                self._buffers[name] = tensor
            elif prefix == "alias":
                self._aliases[name] = rest
            elif prefix == "state":
                states.setdefault(name, {})[rest] = tensor
            else:
                raise Refusal(f"the seed holds {name!r} of the unknown kind {kind!r}")
        for name, scalars in seed.optimizer["scalars"].items():
            states.setdefault(name, {}).update(scalars)
        return states

    def _build(self, description: Mapping[str, Any]) -> torch.optim.Optimizer:
        name = description["class"]
        cls = _CLASSES.get(name)
        if cls is None:
            raise Refusal(f"the optimizer {name} can't be followed: only torch's {', '.join(_CLASSES)} can")
        groups = []
        for index, fields in enumerate(description["groups"]):
            unknown = [param for param in fields["params"] if param not in self._params]
            if unknown:
                raise Refusal(f"parameter group {index} names {unknown[0]!r}, which the seed doesn't hold")
            hyper = unpack_group(_steppable(fields))
            groups.append({**hyper, "params": [self._params[param] for param in fields["params"]]})
        known = inspect.signature(cls.__init__).parameters
        defaults = {key: value for key, value in groups[0].items() if key in known and key != "params"}
        try:
            return cls(groups, **defaults)
        except (TypeError, ValueError, RuntimeError) as error:
            raise Refusal(f"torch refuses the seed's {name}: {error}") from None

    def _load(self, states: Mapping[str, dict[str, Any]]) -> None:
        for name, state in states.items():
            if name not in self._params:
                raise Refusal(f"the seed holds optimizer state of {name!r}, but not the parameter")
            self._optimizer.state[self._params[name]] = dict(state)

    def _named(self, tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
        shared = [(alias, tensors[first]) for alias, first in self._aliases.items() if first in tensors]
        return [*tensors.items(), *shared]

    def _bucket_problems(self, bucket: Mapping[str, Any]) -> list[str]:
        try:
            dtype = dtype_of(bucket["dtype"])
        except TensorError as error:
            return [f"bucket {bucket['bucket']}: {error}"]
        problems = []
        room = bucket["bytes"] // dtype.itemsize
        end = 0
        for name, first, count in sorted(bucket["params"], key=lambda entry: entry[1]):
            where = f"{name!r} in bucket {bucket['bucket']}"
            param = self._params.get(name)
            if param is None:
                problems.append(f"{where} is not a parameter of the seed")
            elif param.numel() != count:
                problems.append(f"{where} has {count} elements, in the seed {param.numel()}")
            elif not (param.dtype.is_floating_point and dtype.is_floating_point):
                problems.append(f"{where} has {bucket['dtype']} gradients, but is {param.dtype}")
            elif not end <= first <= first + count <= room:
                problems.append(f"{where} at elements {first} to {first + count} overlaps another or the bucket's end")
            end = first + count
        return problems

    def _blocks(self, record: StepRecord, layout: Layout) -> list[list[Place]]:
        """All gradients, in blocks of a few MiB where they are converted: so they go through memory once."""
        blocks: list[list[Place]] = [[]]
        filled = 0
        for bucket in layout.buckets:
            dtype = dtype_of(bucket["dtype"])
            for name, first, count in bucket["params"]:
                stepped = self._masters.get(name, self._params[name])
                if filled >= _BLOCK_BYTES:
                    blocks.append([])
                    filled = 0
                blocks[-1].append((bucket, name, first))
                filled += count * stepped.itemsize if self._is_converted(stepped, dtype, record) else 0
        return blocks

    def _step(self, record: StepRecord, block: Sequence[Place], buckets: Mapping[int, memoryview]) -> None:
        """The optimizer's step of these parameters: each is updated by its own gradient alone."""
        params = {name: self._params[name] for _, name, _ in block}
        masters = {MASTER + name: self._masters[name] for name in params if name in self._masters}
        stepped = {id(param) for param in (*params.values(), *masters.values())}
        groups = self._optimizer.param_groups
        everything = [group["params"] for group in groups]
        self._scratch_used = 0
        try:
            self._set_gradients(record, block, buckets)
            self._prepare(record, params, masters)
            for group, members in zip(groups, everything, strict=True):
                present = [param for param in members if id(param) in stepped and param.grad is not None]
                self._copied |= self._adam.step(group, [param for param in present if param in self._covered])
                group["params"] = [param for param in present if param not in self._covered]
            if any(group["params"] for group in groups):
                self._optimizer.step()
        finally:
            for group, members in zip(groups, everything, strict=True):
                group["params"] = members
            for param in (*params.values(), *masters.values()):
                param.grad = None

    def _set_gradients(self, record: StepRecord, block: Sequence[Place], buckets: Mapping[int, memoryview]) -> None:
        for bucket, name, first in block:
            param = self._params[name]
            if record.skipped:  # a fused optimizer looks at which gradients there are, not into them
                param.grad = torch.empty_like(param)
                continue
            data, dtype = buckets[bucket["bucket"]], dtype_of(bucket["dtype"])
            flat = torch.frombuffer(data, dtype=dtype) if data.nbytes else torch.empty(0, dtype=dtype)
            # DDP puts gradients into a bucket in the parameter's own memory order.
            param.grad = self._converted(param, flat.as_strided(param.shape, param.stride(), first), record)

    def _prepare(
        self, record: StepRecord, params: Mapping[str, nn.Parameter], masters: Mapping[str, nn.Parameter]
    ) -> None:
        """What the trainer did to these gradients before the step."""
        changes = [] if record.skipped else record.changes
        absent = [param for name, param in {**params, **masters}.items() if name in record.absent]
        _drop_gradients(absent)
        self._change([change for change in changes if not change["masters"]], params)
        for name, master in masters.items():
            grad = params[name.removeprefix(MASTER)].grad
            master.grad = None if grad is None else self._converted(master, grad, record)
        _drop_gradients(absent)
        self._change([change for change in changes if change["masters"]], masters)

    def _is_converted(self, param: nn.Parameter, dtype: torch.dtype, record: StepRecord) -> bool:
        """Whether a gradient of this data type must be made one of the parameter's for what comes now."""
        is_read = param in self._covered and dtype in adam.READABLE and not record.changes
        return dtype != param.dtype and not is_read

    def _converted(self, param: nn.Parameter, grad: Tensor, record: StepRecord) -> Tensor:
        """In memory that is used again, for new memory costs more than the conversion."""
        if not self._is_converted(param, grad.dtype, record):
            return grad
        start, self._scratch_used = self._scratch_used, self._scratch_used + param.numel()
        scratch = self._scratch.get(param.dtype)
        if scratch is None or scratch.numel() < self._scratch_used:
            scratch = self._scratch[param.dtype] = torch.empty(self._scratch_used, dtype=param.dtype)
        return scratch.as_strided(param.shape, param.stride(), start).copy_(grad)

    def _change(self, changes: Sequence[Mapping[str, Any]], of: Mapping[str, nn.Parameter]) -> None:
        """By the same functions of torch, which change each gradient by itself."""
        for change in changes:
            names = change["params"]
            params = [of[name] for name in (of if names is None else names) if name in of and of[name].grad is not None]
            if not params:
                continue
            match change["op"]:
                case "clip_norm":
                    total_norm = plain.decode(change["total_norm"])
                    nn.utils.clip_grads_with_norm_(params, change["max_norm"], total_norm, change["foreach"])
                case "clip_value":
                    nn.utils.clip_grad_value_(params, change["clip_value"], change["foreach"])
                case "unscale":
                    _unscale([p.grad for p in params if p.grad is not None], plain.decode(change["inv_scale"]))


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """As many for torch as the trainer has; 0: as there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _drop_gradients(params: Sequence[Tensor]) -> None:
    for param in params:
        param.grad = None


def _unscale(grads: Sequence[Tensor], inv_scale: Tensor) -> None:
    """As a GradScaler does it; what is not finite was found by the trainer."""
    for dtype in {grad.dtype for grad in grads}:
        same = [grad for grad in grads if grad.dtype == dtype]
        torch._amp_foreach_non_finite_check_and_unscale_(same, torch.zeros(()), inv_scale)


def _steppable(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Hyperparameters for a step on a CPU: the same arithmetic without a CUDA graph."""
    if fields.get("differentiable"):
        raise Refusal("an optimizer with differentiable=True can't be followed")
    return {**fields, "capturable": False} if "capturable" in fields else dict(fields)
