"""CRC32C (RFC 3720) of any contiguous buffer, computed in C by the plugin's library."""

import functools
import re
from typing import Any

from cffi import FFI

from checkmate import native

_DECLARATION = re.compile(r"uint32_t checkmate_crc32c\([^)]*\);")


@functools.cache
def _load() -> tuple[FFI, Any]:
    header = native.header("checkmate.nccl_plugin", "include/checkmate/api.h")
    declaration = _DECLARATION.search(header.read_text(encoding="utf-8"))
    assert declaration, "api.h declares checkmate_crc32c"
    ffi = FFI()
    ffi.cdef(declaration.group())
    return ffi, native.load(ffi, native.library("libcheckmate_net.so"), [header])


def crc32c(data: memoryview | bytes | bytearray, crc: int = 0) -> int:
    """CRC32C of ``data``, continued from ``crc``. Releases the GIL. CheckmateError when the library isn't built."""
    ffi, lib = _load()
    return int(lib.checkmate_crc32c(crc, ffi.from_buffer(data), len(data)))
