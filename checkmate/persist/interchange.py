"""States in the formats of others: safetensors (no code in it, any reader) and torch.distributed.checkpoint.

A safetensors file is a little-endian 64-bit length, that many bytes of JSON (name → dtype, shape, data_offsets) and the
tensors' bytes without gaps (https://huggingface.co/docs/safetensors). Names are the keys on the way to a tensor, joined
by dots. What is no tensor, and which tensor belongs where, is in the metadata entry "checkmate": a file that we wrote
comes back as the same nested state, without its strides and without memory shared by different tensors.
"""

import base64
import json
import shutil
import struct
from collections.abc import Iterable
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import msgpack
import numpy as np
import torch
from torch import Tensor

from checkmate import plain
from checkmate.persist.state import StateError

_OURS = "checkmate"
_MAX_HEADER = 100_000_000
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def write(path: Path, state: Any, into: str) -> None:
    """Write a nested state as "torch", "safetensors" or "dcp"; ``path`` appears whole or not at all.

    A file of that name is replaced, a folder is not. Raises StateError, OSError.
    """
    new = path.with_name(f".{path.name}.new")
    try:
        {"torch": write_torch, "safetensors": write_safetensors, "dcp": write_dcp}[into](new, state)
        new.replace(path)
    except BaseException:
        if new.is_dir():
            shutil.rmtree(new)
        new.unlink(missing_ok=True)
        raise


def write_torch(path: Path, state: Any) -> None:
    """Write a nested state for ``torch.load``."""
    torch.save(state, path)


def read_torch(path: Path) -> Any:
    """The state of a file that torch.save wrote; no code of it is run. Raises what torch.load does."""
    reconstruct: Any = np._core.multiarray._reconstruct  # type: ignore[attr-defined]
    arrays = [(reconstruct, "numpy.core.multiarray._reconstruct"), reconstruct, np.ndarray, np.dtype]
    kinds = [type(np.dtype(code)) for code in np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?"]
    with torch.serialization.safe_globals([*arrays, *kinds]):
        return torch.load(path, map_location="cpu", weights_only=True)


def write_safetensors(path: Path, state: Any) -> None:
    """Write a nested state. Raises StateError for a data type that the format has not; the file is then not there."""
    tensors: dict[str, Tensor] = {}
    names: dict[int, str] = {}

    def name_of(tensor: Tensor, where: str) -> dict[str, Any]:
        if tensor.dtype not in _NAMES:
            raise StateError(f"{where} is of {tensor.dtype}, which safetensors has not; use another format")
        if id(tensor) not in names:
            names[id(tensor)] = _free(where.removeprefix("state").lstrip(".") or "state", tensors)
            tensors[names[id(tensor)]] = tensor
        return {"name": names[id(tensor)]}

    tree = plain.encode(state, tensor=name_of)
    ours = base64.b64encode(msgpack.packb(tree)).decode()
    with path.open("wb") as file:
        _write(file, tensors, {_OURS: ours})


def read_safetensors(path: Path) -> Any:
    """The nested state of a file that we wrote; of any other, a map of its tensors. Raises StateError."""
    with path.open("rb") as file:
        try:
            header, start = _header(file)
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            tensors = {name: _read(file, start, entry) for name, entry in entries.items()}
            ours = header.get("__metadata__", {}).get(_OURS)
            if ours is None:
                return tensors
            tree = msgpack.unpackb(base64.b64decode(ours), strict_map_key=False)
            return plain.decode(tree, lambda fields: tensors[fields["name"]])
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            RuntimeError,
            struct.error,
            msgpack.UnpackException,
        ) as error:
            raise StateError(f"{path} is not a safetensors file, or a damaged one: {error!r}") from None


def write_dcp(path: Path, state: Any) -> None:
    """Write a map of nested states as a torch.distributed.checkpoint folder, from this process alone.

    That format makes text of all keys, and forgets empty maps.
    """
    from torch.distributed.checkpoint.state_dict_saver import save  # noqa: PLC0415 - slow to import

    save(state, checkpoint_id=path, no_dist=True)


def read_dcp(path: Path) -> Any:
    """The whole state of a torch.distributed.checkpoint folder. Raises StateError.

    It holds pickles, which run code when they are read: only from a source that you trust.
    """
    from torch.distributed.checkpoint.api import CheckpointException  # noqa: PLC0415
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner  # noqa: PLC0415
    from torch.distributed.checkpoint.filesystem import FileSystemReader  # noqa: PLC0415
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict  # noqa: PLC0415

    state: dict[str, Any] = {}
    everything = _EmptyStateDictLoadPlanner()  # type: ignore[no-untyped-call]
    try:
        _load_state_dict(state, storage_reader=FileSystemReader(path), planner=everything, no_dist=True)
    except CheckpointException as error:  # no Exception
        reason, _ = next(iter(error.failures.values()))
        raise StateError(f"{path} is not a checkpoint folder, or a damaged one: {reason}") from None
    return state


def _free(name: str, taken: Iterable[str]) -> str:
    """Keys may hold dots themselves: "a.b" can be two tensors."""
    number, free = 1, name
    while free in taken or free == "__metadata__":
        number += 1
        free = f"{name}#{number}"
    return free


def _write(file: BinaryIO, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for tensor in tensors.values():
        flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        if flat.numel():
            file.write(flat.view(torch.uint8).numpy().data)


def _header(file: BufferedReader) -> tuple[dict[str, Any], int]:
    (length,) = struct.unpack("<Q", file.read(8))
    if length > _MAX_HEADER:
        raise ValueError(f"a header of {length} bytes")
    header: dict[str, Any] = json.loads(file.read(length))
    return header, 8 + length


def _read(file: BufferedReader, start: int, entry: dict[str, Any]) -> Tensor:
    dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
    first, last = entry["data_offsets"]
    tensor = torch.empty(shape, dtype=dtype)
    if not 0 <= first <= last or last - first != tensor.numel() * dtype.itemsize:
        raise ValueError(f"data_offsets {first}, {last} for a tensor of shape {shape}")
    file.seek(start + first)
    if tensor.numel() and file.readinto(tensor.reshape(-1).view(torch.uint8).numpy().data) != last - first:
        raise ValueError("it ends too early")
    return tensor
