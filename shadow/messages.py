"""Checks on what trainers send: after them the engine may rely on types, so that no message can bring it down."""

from typing import Any

from torch import Tensor

from checkmate import plain
from checkmate.protocol import (
    MAX_THREADS,
    Boundary,
    Digests,
    Layout,
    Message,
    ProtocolError,
    Release,
    Restore,
    Seed,
    StepRecord,
)
from checkmate.tensors import manifest_bytes


def check(message: Message) -> None:
    """Raise ProtocolError naming the field of a message that has another type than it must."""
    match message:
        case Layout():
            _expect(message, "digest", isinstance(message.digest, str))
            _expect(message, "buckets", _all(message.buckets, _is_bucket))
            _expect(message, "elsewhere", _all(message.elsewhere, _is_count))
        case StepRecord():
            _expect(message, "step", _is_count(message.step, 1))
            _expect(message, "layout", isinstance(message.layout, str))
            _expect(message, "groups", _all(message.groups, _is_map))
            _expect(message, "skipped", isinstance(message.skipped, bool))
            _expect(message, "unfollowed", _is_text_or_none(message.unfollowed))
            _expect(message, "absent", _all(message.absent, _is_text))
            _expect(message, "changes", _all(message.changes, _is_change))
            _expect(message, "scaler", message.scaler is None or _is_scaler(message.scaler))
            _expect(message, "threads", _is_count(message.threads) and message.threads <= MAX_THREADS)
        case Digests():
            _expect(message, "step", _is_count(message.step, 1))
            _expect(message, "blocks", _all(message.blocks, _is_block))
        case Boundary():
            _expect(message, "step", _is_count(message.step))
            _expect(message, "state", _is_map(message.state))
            _expect(message, "unfollowed", _is_text_or_none(message.unfollowed))
        case Seed():
            _expect(message, "step", _is_count(message.step))
            _expect(message, "optimizer", _is_optimizer(message.optimizer))
            _expect(message, "history", _is_count(message.history))
            _expect(message, "agreed", message.agreed is None or _is_position(message.agreed))
            manifest_bytes(message.manifest)
        case Release():
            _expect(message, "step", message.step is None or _is_count(message.step))
            _expect(message, "number", _is_count(message.number))
            _expect(message, "waits_for", _all(message.waits_for, _is_text))
            _expect(message, "seed_at", message.seed_at is None or _is_count(message.seed_at))
        case Restore():
            _expect(message, "step", message.step is None or _is_count(message.step))
            _expect(message, "history", _is_count(message.history))


def _expect(message: Message, name: str, is_right: bool) -> None:
    if not is_right:
        raise ProtocolError(f"malformed {message.TYPE} message: {name} is {getattr(message, name)!r:.200}")


def _is_count(value: Any, least: int = 0) -> bool:
    return type(value) is int and least <= value < 1 << 63


def _is_position(value: Any) -> bool:
    return _all(value, _is_count) and len(value) == 2


def _all(values: Any, is_right: Any) -> bool:
    return isinstance(values, list) and all(map(is_right, values))


def _is_map(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


def _is_bucket(value: Any) -> bool:
    return (
        _is_map(value)
        and value.keys() == {"bucket", "bytes", "dtype", "params"}
        and _is_count(value["bucket"])
        and _is_count(value["bytes"])
        and isinstance(value["dtype"], str)
        and _all(value["params"], _is_place)
    )


def _is_place(value: Any) -> bool:
    return isinstance(value, list) and [type(item) for item in value] == [str, int, int] and min(value[1:]) >= 0


def _is_block(value: Any) -> bool:
    return isinstance(value, list) and [type(item) for item in value] == [str, str, int, int, int]


def _is_optimizer(value: Any) -> bool:
    return (
        _is_map(value)
        and value.keys() == {"class", "groups", "scalars"}
        and isinstance(value["class"], str)
        and _all(value["groups"], _is_group)
        and len(value["groups"]) > 0
        and _is_map(value["scalars"])
        and all(map(_is_map, value["scalars"].values()))
    )


def _is_group(value: Any) -> bool:
    return _is_map(value) and _all(value.get("params"), _is_text) and _all(value.get("order", []), _is_text)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_text_or_none(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _is_change(value: Any) -> bool:
    if not (_is_map(value) and value.get("op") in _CHANGES):
        return False
    fields = _CHANGES[value["op"]]
    return (
        value.keys() == {"op", "params", "masters", "foreach", *fields}
        and isinstance(value["masters"], bool)
        and (value["params"] is None or _all(value["params"], _is_text))
        and value["foreach"] in (None, True, False)
        and all(is_right(value[name]) for name, is_right in fields.items())
    )


def _is_scaler(value: Any) -> bool:
    return (
        _is_map(value)
        and value.keys() == {"grad_scale", "found_inf"}
        and all(item is None or _is_scalar_tensor(item) for item in value.values())
    )


def _is_float(value: Any) -> bool:
    return type(value) is float


def _is_scalar_tensor(value: Any) -> bool:
    try:
        tensor = plain.decode(value)
    except Exception:  # whatever a hostile map makes of it
        return False
    return isinstance(tensor, Tensor) and tensor.numel() == 1 and tensor.is_floating_point()


_CHANGES: dict[str, dict[str, Any]] = {
    "clip_norm": {"max_norm": _is_float, "total_norm": _is_scalar_tensor},
    "clip_value": {"clip_value": _is_float},
    "unscale": {"inv_scale": _is_scalar_tensor},
}
"""Fields of each kind of change, and what they must be."""
