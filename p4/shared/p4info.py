"""The P4Info that every target shares, and how integers travel in P4Runtime messages."""

from functools import cache
from importlib import resources

from google.protobuf import text_format

from .messages import p4info_pb2


@cache
def load() -> p4info_pb2.P4Info:
    """The P4Info of the switch; not to be changed by its users."""
    text = resources.files(__package__).joinpath("checkmate.p4info.txtpb").read_text()
    return text_format.Parse(text, p4info_pb2.P4Info())


def encode(value: int) -> bytes:
    """The canonical byte string of an unsigned integer: big-endian, the shortest, at least one byte."""
    return value.to_bytes(max(1, (value.bit_length() + 7) // 8), "big")


def decode(data: bytes, width: int) -> int:
    """The unsigned integer in a byte string; ValueError when it is empty or does not fit into ``width`` bits."""
    if not data:
        raise ValueError("the byte string is empty")
    value = int.from_bytes(data, "big")
    if value.bit_length() > width:
        raise ValueError(f"{value:#x} does not fit into {width} bits")
    return value
