"""Blocks of tensors and their digests: how a trainer and a shadow compare state while both go on.

A block is the bytes of a tensor, in memory order, from a multiple of BLOCK_BYTES on, at most so many. Its digest is
their CRC32C: differences here are accidents, of which it misses one in 2³², and hardware computes it.
"""

from torch import Tensor

from checkmate.crc32c import crc32c
from checkmate.tensors import memory

BLOCK_BYTES = 1 << 20
"""Small enough for a training thread to digest between two steps, about 0.1 ms."""

Digest = tuple[int, int]
"""Bytes of a block and their CRC32C."""


def firsts(nbytes: int) -> range:
    """Where the blocks of a tensor of so many bytes begin."""
    return range(0, nbytes, BLOCK_BYTES)


def digest(tensor: Tensor, first: int) -> Digest | None:
    """Of the block that begins at byte ``first``; None where there is none, or the tensor isn't dense on the CPU."""
    data = memory(tensor)
    if data is None or first >= len(data):
        return None
    block = data[first : first + BLOCK_BYTES]
    return len(block), crc32c(block)
