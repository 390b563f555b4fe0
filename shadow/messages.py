"""Checks on what trainers send: after them the engine may rely on types, so that no message can bring it down."""

from typing import Any

from checkmate.protocol import Boundary, Layout, Message, ProtocolError, Seed, StepRecord
from checkmate.tensors import manifest_bytes


def check(message: Message) -> None:
    """Raise ProtocolError naming the field of a Layout, StepRecord, Boundary or Seed that has another type."""
    match message:
        case Layout():
            _expect(message, "digest", isinstance(message.digest, str))
            _expect(message, "buckets", _all(message.buckets, _is_bucket))
        case StepRecord():
            _expect(message, "step", _is_count(message.step, 1))
            _expect(message, "layout", isinstance(message.layout, str))
            _expect(message, "groups", _all(message.groups, _is_map))
            _expect(message, "skipped", isinstance(message.skipped, bool))
            _expect(message, "unfollowed", message.unfollowed is None or isinstance(message.unfollowed, str))
        case Boundary():
            _expect(message, "step", _is_count(message.step))
            _expect(message, "state", _is_map(message.state))
        case Seed():
            _expect(message, "step", _is_count(message.step))
            _expect(message, "optimizer", _is_optimizer(message.optimizer))
            manifest_bytes(message.manifest)


def _expect(message: Message, name: str, is_right: bool) -> None:
    if not is_right:
        raise ProtocolError(f"malformed {message.TYPE} message: {name} is {getattr(message, name)!r:.200}")


def _is_count(value: Any, least: int = 0) -> bool:
    return type(value) is int and least <= value < 1 << 63


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


def _is_optimizer(value: Any) -> bool:
    return (
        _is_map(value)
        and value.keys() == {"class", "groups", "scalars"}
        and isinstance(value["class"], str)
        and _all(value["groups"], lambda group: _is_map(group) and _all(group.get("params"), _is_text))
        and len(value["groups"]) > 0
        and _is_map(value["scalars"])
        and all(map(_is_map, value["scalars"].values()))
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str)
