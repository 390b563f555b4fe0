"""Fused Adam and AdamW in one pass over memory: a C kernel with the arithmetic of torch's own, bit for bit.

torch's kernel waits for memory, reads no bf16 gradients for fp32 parameters and writes no bf16 copies of them. Ours is
proved against torch when a process first wants it; where a single bit differs, torch makes all steps.
"""

import functools
import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from cffi import FFI
from torch import Tensor, nn

from checkmate import native
from checkmate.config import CheckmateError
from checkmate.tensors import dtype_name, memory

log = logging.getLogger(__name__)

_UNIT = 64
"""Elements: the kernel takes multiples. torch's own computes these in vectors, too, whatever comes after them."""
_PIECE = 1 << 18
"""Elements that a thread steps at a time."""
READABLE = {torch.float32: "float", torch.bfloat16: "uint16_t"}
"""Gradients that can be stepped with, and how C names them."""
_STATE = ("exp_avg", "exp_avg_sq")


Place = tuple[Any, Any, Any, Any]
"""Pointers to θ, m, v and the copy of θ, which may be NULL."""


class Adam:
    """Makes the steps of those of an optimizer's parameters that the kernel covers.

    ``copies``: of parameters that have one of fewer bits. A bf16 one is written in the same pass.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, copies: Mapping[nn.Parameter, Tensor]) -> None:
        self._optimizer = optimizer
        self._kernel = kernel() if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) else None
        self._copies = {param: copy.detach() for param, copy in copies.items() if _is_like(copy, param, torch.bfloat16)}
        self._places: dict[nn.Parameter, Place] = {}
        """Of those found fit: they stay where they are."""

    def covered(self) -> set[nn.Parameter]:
        """Parameters that can be stepped here with the hyperparameters and the state that the optimizer has now."""
        if self._kernel is None:
            return set()
        groups = [group for group in self._optimizer.param_groups if _is_plain(group)]
        return {param for group in groups for param in group["params"] if param in self._places or self._fits(param)}

    def step(self, group: Mapping[str, Any], params: Sequence[nn.Parameter]) -> set[nn.Parameter]:
        """Step covered parameters of a group, each with its gradient, of the parameter's strides.

        Returns those whose copies were written.
        """
        if self._kernel is None or not params:
            return set()
        steps = [self._optimizer.state[param]["step"] for param in params]
        torch._foreach_add_(steps, 1)
        by = {count: self._kernel.hyper(group, count) for count in set(map(float, steps))}
        works = [
            (param.grad, self._places[param], param.numel() // _UNIT * _UNIT, by[float(step)])
            for param, step in zip(params, steps, strict=True)
            if param.grad is not None
        ]
        self._kernel.run(works)
        if rests := [param for param in params if param.numel() % _UNIT]:
            self._step_rests(group, rests)
        return {param for param in params if param in self._copies}

    def _step_rests(self, group: Mapping[str, Any], params: Sequence[nn.Parameter]) -> None:
        """Elements after the last whole unit: for those torch has other arithmetic."""
        states = [self._optimizer.state[param] for param in params]
        grads = [_rest(param.grad).to(param.dtype) for param in params if param.grad is not None]
        rests = [[_rest(state[key]) for state in states] for key in _STATE]
        _torch_step(group, [_rest(param) for param in params], grads, *rests, [state["step"] for state in states])
        for param in params:
            if param in self._copies:
                _rest(self._copies[param]).copy_(_rest(param))

    def _fits(self, param: nn.Parameter) -> bool:
        state = self._optimizer.state.get(param, {})
        fits = state.keys() == {"step", *_STATE} and all(
            _is_like(tensor, param, torch.float32) for tensor in (param, *(state[key] for key in _STATE))
        )
        if fits and self._kernel is not None:
            m, v = (state[key] for key in _STATE)
            self._places[param] = self._kernel.place(param, m, v, self._copies.get(param))
        return fits


class Kernel:
    """The C function. Several threads may use it."""

    def __init__(self, ffi: FFI, lib: Any) -> None:
        self._ffi = ffi
        self._functions = {dtype: getattr(lib, f"ckm_adam_{dtype_name(dtype)}") for dtype in READABLE}

    def place(self, theta: Tensor, m: Tensor, v: Tensor, copy: Tensor | None) -> Place:
        """Keeps nothing alive."""
        low = self._ffi.NULL if copy is None else self._pointer(copy)
        return self._pointer(theta), self._pointer(m), self._pointer(v), low

    def hyper(self, group: Mapping[str, Any], step: float) -> Any:
        """``struct ckm_adam`` of a group in this step."""
        lr, (beta1, beta2), decay = group["lr"], group["betas"], group["weight_decay"]
        decoupled = group["decoupled_weight_decay"]
        return self._ffi.new(
            "struct ckm_adam *",
            {
                "decay": 0.0 if decoupled else decay,
                "keep": 1 - lr * decay if decoupled else 1.0,
                "lerp": 1 - beta1,
                "beta2": beta2,
                "beta2_left": 1 - beta2,
                "root": math.sqrt(1 - beta2**step),
                "eps": group["eps"],
                "size": -lr / (1 - beta1**step),
            },
        )

    def run(self, works: Sequence[tuple[Tensor, Place, int, Any]]) -> None:
        """Gradient, place, elements and hyperparameters of each parameter, in as many threads as torch would take."""
        pieces = [
            (self._functions[grad.dtype], self._pointer(grad), *place, start, min(_PIECE, elements - start), by)
            for grad, place, elements, by in works
            for start in range(0, elements, _PIECE)
        ]
        threads = min(torch.get_num_threads(), sum(elements for _, _, elements, _ in works) // _PIECE)
        if threads <= 1:
            _run(pieces)
            return
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(_run, [pieces[first::threads] for first in range(threads)]))

    def _pointer(self, tensor: Tensor) -> Any:
        return self._ffi.cast(f"{READABLE[tensor.dtype]} *", tensor.data_ptr())


@functools.cache
def kernel() -> Kernel | None:
    """The kernel, proved; None, and a warning in the log, where it isn't built or isn't torch's to the bit."""
    try:
        library = native.library("libcheckmate_optim.so")
        found = Kernel(*native.bind(library, [native.header("checkmate.shadow.optim", "api.h")]))
        prove(found)
    except CheckmateError as error:
        log.warning("fused Adam is stepped by torch alone, which is slower: %s", error)
        return None
    return found


def prove(kernel: Kernel) -> None:
    """Some steps by the kernel and by torch: CheckmateError when any bit differs.

    A contraction or rounding that differs shows in thousands of these elements, which hold every kind of number.
    """
    cases = itertools.product(READABLE, (True, False), (0.0, 0.1), (((0.9, 0.999), 1e-8), ((0.3, 0.8), 1e-3)))
    for dtype, decoupled, decay, (betas, eps) in cases:
        group = {"decoupled_weight_decay": decoupled, "weight_decay": decay, "betas": betas, "eps": eps, "lr": 0.01}
        ours, step = _numbers(3), torch.tensor(0.0)
        ours.append(ours[0].bfloat16())
        theirs = [tensor.clone() for tensor in ours]
        for seed in range(2):
            grad = _numbers(1, seed + 1)[0].to(dtype)
            step += 1
            place = kernel.place(ours[0], ours[1], ours[2], ours[3])
            kernel.run([(grad, place, grad.numel(), kernel.hyper(group, float(step)))])
            _torch_step(group, theirs[:1], [grad.float()], theirs[1:2], theirs[2:3], [step])
            theirs[3].copy_(theirs[0])
        for what, mine, its in zip(("θ", *_STATE, "the copy of θ"), ours, theirs, strict=True):
            bits = torch.int32 if mine.dtype.itemsize == 4 else torch.int16
            if wrong := int((mine.view(bits) != its.view(bits)).sum()):
                raise CheckmateError(
                    f"the kernel differs from this torch (CPU capability {torch.backends.cpu.get_cpu_capability()}) in "
                    f"{wrong} of {mine.numel()} elements of {what} with {dtype_name(dtype)} gradients and {group}"
                )


def _numbers(tensors: int, seed: int = 0) -> list[Tensor]:
    """Ordinary ones, some of any size down to denormal ones, zeros, infinities, NaNs; the third row is not negative."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(tensors, 64 * _UNIT, generator=random)
    values[:, ::4] *= torch.pow(2.0, torch.randint(-148, 120, values[:, ::4].shape, generator=random))
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-39, 3e38])
    values[:, 1::32] = special[torch.randint(len(special), values[:, 1::32].shape, generator=random)]
    if tensors > 2:
        values[2].abs_()
    return list(values)


def _torch_step(group: Mapping[str, Any], *lists: Sequence[Tensor]) -> None:
    """By torch's kernel: θ, gradients, m, v and the number of this step."""
    params, grads, first, second, steps = map(list, lists)
    (beta1, beta2), step = group["betas"], torch._fused_adam_
    if group["decoupled_weight_decay"]:
        step = torch._fused_adamw_
    with torch.no_grad():
        step(
            params,
            grads,
            first,
            second,
            [],
            steps,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )


def _is_plain(group: Mapping[str, Any]) -> bool:
    numbers = (group["lr"], *group["betas"], group["weight_decay"], group["eps"])
    return bool(
        group["fused"]
        and not (group["amsgrad"] or group["maximize"])
        and all(isinstance(number, float | int) for number in numbers)
    )


def _is_like(tensor: Any, param: Tensor, dtype: torch.dtype) -> bool:
    """Dense, of the parameter's shape and strides and of this data type."""
    return (
        isinstance(tensor, Tensor)
        and (tensor.dtype, tensor.shape, tensor.stride()) == (dtype, param.shape, param.stride())
        and memory(tensor) is not None
    )


def _rest(tensor: Tensor) -> Tensor:
    count = tensor.numel() % _UNIT
    return tensor.detach().as_strided((count,), (1,), tensor.storage_offset() + tensor.numel() - count)


def _run(pieces: Sequence[Any]) -> None:
    for function, grad, theta, m, v, copy, start, elements, by in pieces:
        function(theta + start, m + start, v + start, copy + start if copy else copy, grad + start, elements, by)
