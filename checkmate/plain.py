"""Python state as plain msgpack-able values and back, without pickle: what arrives can never run code.

Plain are None, bool, int, float, str, bytes, lists and maps with text keys. All else is a map with the key "~" that
names what it is: tuple, tensor, array, numpy number, long integer, map with other keys. Who keeps tensors elsewhere
gives functions for them, and gets back the map that his own made.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from checkmate.config import CheckmateError
from checkmate.tensors import dtype_name, dtype_of

_TAG = "~"
_SCALARS = (type(None), bool, float, str, bytes)
_INT_RANGE = range(-(1 << 63), 1 << 64)


EncodeTensor = Callable[[torch.Tensor, str], dict[str, Any]]
DecodeTensor = Callable[[dict[str, Any]], torch.Tensor]


def encode(value: Any, where: str = "state", tensor: EncodeTensor | None = None) -> Any:  # noqa: PLR0911
    """Plain form of a value; raises CheckmateError naming the place of anything that has none.

    ``tensor(value, where)`` gives what stands for a tensor; by default its data does.
    """
    if type(value) in _SCALARS and not (type(value) is str and _has_surrogates(value)):
        return value
    if type(value) is int:
        return value if value in _INT_RANGE else {_TAG: "int", "text": hex(value)}
    if isinstance(value, list):
        return [encode(item, f"{where}[{index}]", tensor) for index, item in enumerate(value)]
    if isinstance(value, tuple):
        return {_TAG: "tuple", "items": encode(list(value), where, tensor)}
    if isinstance(value, dict):
        return _encode_map(value, where, tensor)
    if isinstance(value, torch.Tensor):
        return {**(tensor or _encode_tensor)(value, where), _TAG: "tensor"}
    if type(value) is np.ndarray and value.dtype.kind in "biufc":
        return {_TAG: "array", "dtype": value.dtype.str, "shape": list(value.shape), "data": value.tobytes()}
    if isinstance(value, np.generic) and type(value.item()) in (bool, int, float):
        return {**encode(np.asarray(value)), _TAG: "scalar"}  # as it is: float32 has an arithmetic of its own
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, np.ndarray | np.generic):
        kind = f"{kind} of dtype {value.dtype}"
    elif type(value) is str:
        kind = "text with characters that Unicode does not have"
    raise CheckmateError(
        f"{where} is a {kind}, which cannot be stored: only numbers, text, bytes, tensors, arrays, lists, tuples and "
        f"maps of these can; leave it out of state_dict()"
    )


def decode(value: Any, tensor: DecodeTensor | None = None) -> Any:  # noqa: PLR0911 - one for each kind
    """The value that ``encode`` was given (maps are dicts, whatever subclass they were)."""
    if isinstance(value, list):
        return [decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    match value.get(_TAG):
        case None:
            return {key: decode(item, tensor) for key, item in value.items()}
        case "int":
            return int(value["text"], 0)  # earlier files hold decimals
        case "tuple":
            return tuple(decode(item, tensor) for item in value["items"])
        case "map":
            return {decode(key): decode(item, tensor) for key, item in value["items"]}
        case "tensor":
            return (tensor or _decode_tensor)(value)
        case "array":
            return np.frombuffer(value["data"], dtype=np.dtype(value["dtype"])).reshape(value["shape"]).copy()
        case "scalar":
            return np.frombuffer(value["data"], dtype=np.dtype(value["dtype"]))[0]
        case unknown:
            raise CheckmateError(f"stored state holds an unknown kind of value: {unknown!r}")


def _encode_map(value: dict[Any, Any], where: str, tensor: EncodeTensor | None) -> dict[str, Any]:
    place = f"{where} key"
    keys = [encode(key, place) for key in value]
    if all(type(key) is str for key in keys) and _TAG not in value:
        return {key: encode(item, f"{where}.{key}", tensor) for key, item in value.items()}
    items = [encode(item, f"{where}[{key!r}]", tensor) for key, item in value.items()]
    return {_TAG: "map", "items": [list(pair) for pair in zip(keys, items, strict=True)]}


def _has_surrogates(text: str) -> bool:
    if text.isascii():
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _encode_tensor(tensor: torch.Tensor, where: str) -> dict[str, Any]:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise CheckmateError(f"{where} is a sparse or quantized tensor, which cannot be stored")
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), "data": data}


def _decode_tensor(fields: dict[str, Any]) -> torch.Tensor:
    data, dtype, shape = fields["data"], dtype_of(fields["dtype"]), fields["shape"]
    if not data:  # torch.frombuffer refuses an empty buffer
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
