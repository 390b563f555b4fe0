"""State of a model and its optimizer as messages and raw tensor bytes, and back: exact to the bit.

A *manifest* lists tensors, one ``[name, kind, dtype, shape, stride]`` each (``checkmate.protocol.Seed``). The tensors
follow it on the wire in its order: the bytes of each in memory order, then its CRC32C, 4 bytes, little-endian. Names
are those of the bare module: use ``ddp.module``, not its DistributedDataParallel. A second name of one tensor (tied
weights) is an entry of kind ``alias.FIRST_NAME`` without elements.
"""

import contextlib
import functools
import math
import mmap
import socket
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from checkmate.config import CheckmateError
from checkmate.crc32c import crc32c

Manifest = list[list[Any]]

MASTER = "master:"
"""Before the name of a parameter: the optimizer's copy of it, of more bits (no parameter's name has a colon)."""

_CHUNK = 1 << 20
"""Bytes between two looks at the CRC and the time-out: small enough to be summed while in cache."""
_MADV_POPULATE_WRITE = 23
"""madvise(2); Python's mmap doesn't name it."""


class TensorError(CheckmateError):
    """Tensors that can't be described, don't fit where they should go, or arrived damaged; names them."""


def describe(name: str, kind: str, tensor: Tensor) -> list[Any]:
    """Manifest entry of a tensor as ``send_tensors`` sends it: a dense one keeps its memory order."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise TensorError(f"{kind} {name!r} is sparse or quantized: only plain tensors can be sent")
    stride = tensor.stride() if _is_dense(tensor) else _contiguous_stride(tensor.shape)
    return [name, kind, dtype_name(tensor.dtype), list(tensor.shape), list(stride)]


def manifest_bytes(manifest: Manifest) -> int:
    """Bytes of all tensors of a manifest; TensorError when an entry makes no sense."""
    return sum(math.prod(shape) * dtype.itemsize for _, _, dtype, shape, _ in map(_entry, manifest))


def send_tensors(sock: socket.socket, tensors: Iterable[Tensor]) -> None:
    """Stream tensors; the socket's time-out bounds each chunk. Dense CPU tensors are not copied."""
    for tensor in tensors:
        crc = 0
        data = _bytes_of(tensor)
        for start in range(0, len(data), _CHUNK):
            part = data[start : start + _CHUNK]
            crc = crc32c(part, crc)
            sock.sendall(part)
        sock.sendall(struct.pack("<I", crc))


def receive_tensors(sock: socket.socket, manifest: Manifest) -> list[Tensor]:
    """New CPU tensors as the manifest lists them, read from a socket whose time-out bounds each read.

    Raises TensorError for a bad manifest, a damaged tensor or a peer that closed too early.
    """
    return [_receive_tensor(sock, *entry) for entry in [_entry(line) for line in manifest]]


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: its shard of a DTensor, sharing memory, all of any other."""
    held: Tensor = getattr(tensor, "_local_tensor", tensor)
    return held


def as_local_of(whole: Tensor, held: Tensor) -> Tensor:
    """``held`` as a tensor of the kind of ``whole``: this rank's shard of such a DTensor, or itself."""
    if local(whole) is whole or local(held) is not held:
        return held
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 - slow, and a shadow has none

    sharded: Any = whole
    made: Tensor = DTensor.from_local(
        held, sharded.device_mesh, sharded.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return made


def named_state(module: torch.nn.Module) -> tuple[list[tuple[str, Tensor]], list[tuple[str, Tensor]]]:
    """Parameters and buffers of a bare module as its ``state_dict`` has them: every name of a shared tensor, too."""
    saved = module.state_dict(keep_vars=True).keys()
    buffers = module.named_buffers(remove_duplicate=False)
    return (
        list(module.named_parameters(remove_duplicate=False)),
        [(name, tensor) for name, tensor in buffers if name in saved],
    )


def pack_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Hyperparameters of one ``optimizer.param_groups`` entry, without its parameters, as plain values.

    A tensor (``lr``) becomes ``{"tensor": value, "dtype": name}``, a numpy number of fewer bits than a float, by which
    arithmetic is less exact, ``{"numpy": value, "dtype": name}``. TensorError for anything that isn't plain.
    """
    return {key: _pack_value(key, value) for key, value in group.items() if key not in ("params", "param_names")}


def unpack_group(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What ``pack_group`` packed, with the sequences that msgpack made lists as tuples again."""
    return {key: _unpack_value(value) for key, value in fields.items() if key not in ("params", "order")}


def pack_state(
    named_params: Iterable[tuple[str, Tensor]],
    named_buffers: Iterable[tuple[str, Tensor]],
    optimizer: torch.optim.Optimizer,
) -> tuple[dict[str, Any], Manifest, list[Tensor]]:
    """Optimizer description, manifest and tensors of a ``Seed`` or ``State``; ``named_state`` gives the first two.

    The tensors are the live ones, not copies: nothing may change them until they are sent. Reading changes nothing.
    Of DTensors it is this rank's shards.
    """
    params, param_aliases = _split_aliases(named_params)
    buffers, buffer_aliases = _split_aliases(named_buffers)
    names = _names_by_identity(params, optimizer)
    entries = [(name, "param", local(tensor).detach()) for name, tensor in params.items()]
    entries += [(name, "buffer", local(tensor).detach()) for name, tensor in buffers.items()]
    entries += [(name, f"alias.{first}", torch.empty(0)) for name, first in (param_aliases | buffer_aliases).items()]
    scalars: dict[str, dict[str, Any]] = {}
    groups = []
    for group in optimizer.param_groups:
        members = [names[id(param)] for param in group["params"]]
        groups.append({**pack_group(group), "params": members})
        for name, param in zip(members, group["params"], strict=True):
            for key, value in optimizer.state.get(param, {}).items():
                if isinstance(value, Tensor):
                    entries.append((name, f"state.{key}", local(value).detach()))
                else:
                    scalars.setdefault(name, {})[key] = _pack_value(f"state.{key} of {name}", value)
    description = {"class": optimizer_class_name(optimizer), "groups": groups, "scalars": scalars}
    return description, [describe(*entry) for entry in entries], [tensor for _, _, tensor in entries]


def unpack_state(
    named_params: Iterable[tuple[str, Tensor]],
    named_buffers: Iterable[tuple[str, Tensor]],
    optimizer: torch.optim.Optimizer,
    description: Mapping[str, Any],
    manifest: Manifest,
    tensors: Sequence[Tensor],
) -> None:
    """Load what ``pack_state`` packed into a live model and optimizer, in place.

    Parameters, buffers, optimizer state and every group's hyperparameters become those packed; nothing is stepped.
    Groups that were added in mid-run are added, where they hold parameters of the model that no group has. All names,
    shapes, data types and groups are compared first: TensorError names what differs, and then nothing was changed.
    """
    params, param_aliases = _split_aliases(named_params)
    buffers, buffer_aliases = _split_aliases(named_buffers)
    live = {("param", name): local(tensor) for name, tensor in params.items()}
    live |= {("buffer", name): local(tensor) for name, tensor in buffers.items()}
    aliases = {(f"alias.{first}", name) for name, first in (param_aliases | buffer_aliases).items()}
    packed = {(line[1], line[0]): tensor for line, tensor in zip(manifest, tensors, strict=True)}
    state = _state_by_name(description, packed)
    _check_tensors(live, {key: t for key, t in packed.items() if key[0] in ("param", "buffer")})
    _check_aliases(aliases, {key for key in packed if key[0].startswith("alias.")})
    _check_groups(params, optimizer, description)
    _check_state(state, params)
    with torch.no_grad():
        for key, tensor in live.items():
            tensor.detach().copy_(packed[key])
    for fields in description["groups"][len(optimizer.param_groups) :]:
        optimizer.add_param_group({**unpack_group(fields), "params": [params[name] for name in fields["params"]]})
    for group, fields in zip(optimizer.param_groups, description["groups"], strict=True):
        set_group(group, fields)
        for name, param in zip(fields["params"], group["params"], strict=True):
            _load_param_state(optimizer, group, param, state.get(name, {}))


def set_group(group: dict[str, Any], fields: Mapping[str, Any]) -> None:
    """Give a param group the packed hyperparameters; a tensor ``lr`` stays the same tensor, a list stays a list."""
    for key, value in unpack_group(fields).items():
        present = group.get(key)
        if isinstance(present, Tensor) and isinstance(value, Tensor):
            present.detach().copy_(value)
        else:
            group[key] = list(value) if isinstance(present, list) else value


def optimizer_class_name(optimizer: torch.optim.Optimizer) -> str:
    """``AdamW`` for torch's own class, ``module.Class`` for any other: a subclass may compute something else."""
    cls = type(optimizer)
    return (
        cls.__qualname__
        if cls is getattr(torch.optim, cls.__qualname__, None)
        else f"{cls.__module__}.{cls.__qualname__}"
    )


def rounds_by_place(param: Tensor) -> bool:
    """Whether an element's place in a tensor shows in the bits of its steps: torch rounds those that fill no vector, at
    a tensor's end or at that of a thread's part of it, more often than others where they have 16 bits."""
    return param.dtype.itemsize < torch.float32.itemsize and param.device.type == "cpu"


def dtype_of(name: str) -> torch.dtype:
    """The data type with this name ("float32"); TensorError for an unknown one."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise TensorError(f"unknown data type {name!r}")
    return dtype


def is_same(left: Tensor, right: Tensor) -> bool:
    """Equal in shape, data type and every bit (NaNs and the sign of zero included)."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(_flat_bytes(_plain(left).contiguous()), _flat_bytes(_plain(right).contiguous()))


def memory(tensor: Tensor) -> memoryview | None:
    """The bytes of a dense CPU tensor in memory order, in place; None for any other."""
    dense = tensor.device.type == "cpu" and tensor.layout is torch.strided and _is_dense(tensor)
    return _flat_bytes(tensor.detach()).numpy().data if dense else None


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """``dtype_of``'s inverse: "float32"."""
    return str(dtype).removeprefix("torch.")


def _contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod([max(size, 1) for size in shape[index + 1 :]]) for index in range(len(shape)))


def _is_dense_stride(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """True when the elements fill a block of memory without holes or overlap, in any order of dimensions."""
    if 0 in shape:
        return tuple(stride) == _contiguous_stride(shape)
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size > 1):
        if step != expected:
            return False
        expected *= size
    return True


def _is_dense(tensor: Tensor) -> bool:
    return _is_dense_stride(tensor.shape, tensor.stride())


def _flat_bytes(dense: Tensor) -> Tensor:
    """The bytes of a dense tensor in memory order, sharing its memory."""
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().resolve_conj().resolve_neg()


def _bytes_of(tensor: Tensor) -> memoryview:
    plain = _plain(tensor)
    return _flat_bytes(plain if _is_dense(plain) else plain.contiguous()).numpy().data


def _entry(line: Sequence[Any]) -> tuple[str, str, torch.dtype, list[int], list[int]]:
    """A manifest entry, checked: it comes from the network."""
    try:
        name, kind, dtype_name, shape, stride = line
        dtype = dtype_of(dtype_name)
        sizes_ok = all(type(n) is int and n >= 0 for n in [*shape, *stride])
        if not (isinstance(name, str) and isinstance(kind, str) and sizes_ok and _is_dense_stride(shape, stride)):
            raise ValueError("names must be text, sizes whole numbers, strides those of a dense tensor")
    except (TypeError, ValueError) as error:
        raise TensorError(f"bad manifest entry {line!r}: {error}") from None
    return name, kind, dtype, shape, stride


def _receive_tensor(
    sock: socket.socket, name: str, kind: str, dtype: torch.dtype, shape: list[int], stride: list[int]
) -> Tensor:
    nbytes = math.prod(shape) * dtype.itemsize
    pages = _new_pages(nbytes) if nbytes >= _CHUNK else None
    tensor = (
        torch.empty_strided(shape, stride, dtype=dtype)
        if pages is None
        else torch.frombuffer(pages, dtype=dtype).as_strided(shape, stride)
    )
    view = _flat_bytes(tensor).numpy().data
    crc = 0
    for start in range(0, nbytes, _CHUNK):
        part = view[start : start + _CHUNK]
        if pages is not None:
            _populate(pages, start, len(part))
        _receive_into(sock, part, f"{kind} {name!r}")
        crc = crc32c(part, crc)
    trailer = bytearray(4)
    _receive_into(sock, memoryview(trailer), f"{kind} {name!r}")
    (sent,) = struct.unpack("<I", trailer)
    if sent != crc:
        raise TensorError(f"{kind} {name!r} is damaged: CRC32C {crc:08x} of what arrived, {sent:08x} of what was sent")
    return tensor


def _new_pages(nbytes: int) -> mmap.mmap:
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _populate(pages: mmap.mmap, start: int, nbytes: int) -> None:
    """All at once: a fault for every page, while a socket is read, costs more than the reading."""
    with contextlib.suppress(OSError):  # before Linux 5.14
        pages.madvise(_MADV_POPULATE_WRITE, start, nbytes)


def _receive_into(sock: socket.socket, view: memoryview, what: str) -> None:
    while view:
        count = sock.recv_into(view)
        if not count:
            raise TensorError(f"connection closed in the middle of {what}")
        view = view[count:]


def _pack_value(key: str, value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return {"tensor": value.item(), "dtype": dtype_name(value.dtype)}
    if isinstance(value, list | tuple):
        return tuple(_pack_value(key, item) for item in value)
    if isinstance(value, np.float32 | np.float16):
        return {"numpy": float(value), "dtype": value.dtype.name}
    if value is not None and not isinstance(value, bool | int | float | str) and hasattr(value, "item"):
        value = value.item()  # a numpy scalar
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if value is None:
        return None
    raise TensorError(
        f"the optimizer's {key!r} is a {type(value).__name__}: only numbers, text, one-element tensors and lists "
        "of these can be sent; keep anything else outside of the optimizer"
    )


def _unpack_value(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"tensor", "dtype"}:
            return torch.tensor(value["tensor"], dtype=dtype_of(value["dtype"]))
        if value.keys() == {"numpy", "dtype"} and value["dtype"] in ("float32", "float16"):
            return np.dtype(value["dtype"]).type(value["numpy"])
        raise TensorError(f"a hyperparameter is the map {value!r}: only a packed tensor or numpy number may be one")
    return tuple(_unpack_value(item) for item in value) if isinstance(value, list | tuple) else value


def _split_aliases(named: Iterable[tuple[str, Tensor]]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Each tensor by its first name, and the first name by each further one."""
    tensors: dict[str, Tensor] = {}
    first_names: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in named:
        first = first_names.setdefault(id(tensor), name)
        if first == name:
            tensors[name] = tensor
        else:
            aliases[name] = first
    return tensors, aliases


def _names_by_identity(params: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[int, str]:
    """``id`` of each parameter → name; TensorError when the optimizer has one that is not the model's."""
    names = {id(param): name for name, param in params.items()}
    for index, group in enumerate(optimizer.param_groups):
        strangers = [str(list(param.shape)) for param in group["params"] if id(param) not in names]
        if strangers:
            raise TensorError(
                f"parameter group {index} holds {len(strangers)} parameter(s) that are not the model's, of shape "
                f"{', '.join(strangers[:4])}; build the optimizer from the model's parameters"
            )
    return names


def _state_by_name(
    description: Mapping[str, Any], packed: Mapping[tuple[str, str], Tensor]
) -> dict[str, dict[str, Any]]:
    """Optimizer state by parameter name and key, tensors and scalars together."""
    state: dict[str, dict[str, Any]] = {}
    for (kind, name), tensor in packed.items():
        if kind.startswith("state."):
            state.setdefault(name, {})[kind.removeprefix("state.")] = tensor
    for name, scalars in description["scalars"].items():
        state.setdefault(name, {}).update(scalars)
    return state


def _check_tensors(live: Mapping[tuple[str, str], Tensor], packed: Mapping[tuple[str, str], Tensor]) -> None:
    problems = [f"{kind} {name!r} is missing in the checkpoint" for kind, name in live.keys() - packed.keys()]
    problems += [f"{kind} {name!r} is not in the model" for kind, name in packed.keys() - live.keys()]
    for kind, name in live.keys() & packed.keys():
        have, want = live[kind, name], packed[kind, name]
        if have.shape != want.shape or have.dtype != want.dtype:
            problems.append(
                f"{kind} {name!r} is {dtype_name(have.dtype)} {list(have.shape)} in the model, "
                f"{dtype_name(want.dtype)} {list(want.shape)} in the checkpoint"
            )
    _refuse(problems)


def _check_aliases(live: set[tuple[str, str]], packed: set[tuple[str, str]]) -> None:
    for where, extra in (("model", live - packed), ("checkpoint", packed - live)):
        _refuse(
            [f"{name!r} shares memory with {kind.removeprefix('alias.')!r} in the {where} only" for kind, name in extra]
        )


def _check_groups(
    params: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, description: Mapping[str, Any]
) -> None:
    names = _names_by_identity(params, optimizer)
    have, want = optimizer_class_name(optimizer), description["class"]
    if have != want:
        raise TensorError(f"the optimizer is {have}, the checkpoint is of {want}")
    live = [[names[id(param)] for param in group["params"]] for group in optimizer.param_groups]
    packed = [list(group["params"]) for group in description["groups"]]
    held = {name for group in live for name in group}
    strange = [name for group in packed[len(live) :] for name in group if name in held or name not in params]
    if len(live) > len(packed) or strange:
        raise TensorError(f"the optimizer has {len(live)} parameter groups, the checkpoint {len(packed)}")
    for index, (ours, theirs) in enumerate(zip(live, packed, strict=False)):
        differing = sorted(set(ours) ^ set(theirs)) or [
            name for name, other in zip(ours, theirs, strict=True) if name != other
        ]
        _refuse([f"parameter group {index} differs in {name!r} or in its order" for name in differing])


def _check_state(state: Mapping[str, Any], params: Mapping[str, Tensor]) -> None:
    _refuse([f"optimizer state of {name!r}, which is not in the model" for name in state.keys() - params.keys()])


def _refuse(problems: list[str]) -> None:
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise TensorError("the checkpoint doesn't fit: " + "; ".join(sorted(problems)[:8]) + more)


def _load_param_state(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], param: Tensor, state: Mapping[str, Any]
) -> None:
    present = optimizer.state.pop(param, {})
    if not state:
        return
    fresh: dict[str, Any] = {}
    for key, value in state.items():
        old = present.get(key)
        if not isinstance(value, Tensor):
            fresh[key] = value
        elif isinstance(old, Tensor) and local(old).shape == value.shape and old.dtype == value.dtype:
            local(old).detach().copy_(value)
            fresh[key] = old
        else:
            on_cpu = key == "step" and not (group.get("capturable") or group.get("fused"))
            copy = value.detach().to("cpu" if on_cpu else param.device, copy=True)
            fresh[key] = copy if key == "step" else as_local_of(param, copy)
    optimizer.state[param] = fresh
