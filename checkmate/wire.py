"""The frame header of the tagged flow as Python sees it: mirrors nccl_plugin/include/checkmate/wire.h."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from checkmate.crc32c import crc32c

MAGIC = 0x464D4B43
VERSION = 3
FLAG_TAGGED = 0x01
FLAG_PAYLOAD_CRC = 0x02
FLAG_FIRST = 0x04
MAX_PAYLOAD = 64 << 20
PROTOCOL_SIMPLE = 2

TCPOPT_KIND = 253
TCPOPT_LEN = 8
TCPOPT_EXID = 0x434B

FRAME: np.dtype[np.void] = np.dtype(
    [
        ("magic", "<u4"),
        ("version", "u1"),
        ("flags", "u1"),
        ("protocol", "u1"),
        ("datatype", "u1"),
        ("message", "<u8"),
        ("comm_id", "<u8"),
        ("iteration", "<u8"),
        ("coll_seq", "<u8"),
        ("op_count", "<u8"),
        ("incarnation", "<u4"),
        ("bucket", "<u4"),
        ("step", "<u4"),
        ("payload_len", "<u4"),
        ("tag", "<u4"),
        ("channel", "<u2"),
        ("nchannels", "<u2"),
        ("ring_pos", "<u2"),
        ("nranks", "<u2"),
        ("slices_per_chunk", "u1"),
        ("host_ranks", "u1"),
        ("group", "<u2"),
        ("payload_crc", "<u4"),
        ("header_crc", "<u4"),
    ]
)
HEADER_BYTES = FRAME.itemsize
_HEADER_CRC_OFFSET = HEADER_BYTES - 4


class DataType(NamedTuple):
    """An element type of NCCL: its name in torch and its bytes."""

    name: str
    nbytes: int


DATATYPES = {
    0: DataType("int8", 1),
    1: DataType("uint8", 1),
    2: DataType("int32", 4),
    3: DataType("uint32", 4),
    4: DataType("int64", 8),
    5: DataType("uint64", 8),
    6: DataType("float16", 2),
    7: DataType("float32", 4),
    8: DataType("float64", 8),
    9: DataType("bfloat16", 2),
    10: DataType("float8_e4m3fn", 1),
    11: DataType("float8_e5m2", 1),
}
"""By ncclDataType_t."""


class Place(NamedTuple):
    """Where a slice stands in a ring all-reduce; ``final``: in the all-gather half, ``round``: within its half."""

    loop: int
    chunk: int
    slice: int
    final: bool
    round: int


def place(step: int, slices_per_chunk: int, ring_pos: int, nranks: int) -> Place:
    """Place of slice ``step`` that ring position ``ring_pos`` of ``nranks`` sends (``ckm_place`` in wire.h)."""
    sends = 2 * (nranks - 1)
    loop, k = divmod(step // slices_per_chunk, sends)
    final = k >= nranks - 1
    round_ = k - (nranks - 1) if final else k
    chunk = (ring_pos - round_) % nranks if final else (ring_pos - 1 - round_) % nranks
    return Place(loop, chunk, step % slices_per_chunk, final, round_)


def frame(payload: bytes, **fields: int) -> bytes:
    """A tagged frame: header, both CRCs filled in, and payload. ``fields`` are the header's; those left out are 0.

    Magic, version, flags (without FLAG_FIRST), protocol, host_ranks and payload_len have the values of a valid frame
    unless given.
    """
    header: npt.NDArray[Any] = np.zeros(1, FRAME)
    given = {
        "magic": MAGIC,
        "version": VERSION,
        "flags": FLAG_TAGGED | FLAG_PAYLOAD_CRC,
        "protocol": PROTOCOL_SIMPLE,
        "host_ranks": 1,
        "payload_len": len(payload),
        "payload_crc": crc32c(payload) if payload else 0,
    } | fields
    for name, value in given.items():
        header[name] = value
    if "header_crc" not in fields:
        header["header_crc"] = crc32c(header.tobytes()[:_HEADER_CRC_OFFSET])
    return header.tobytes() + payload
