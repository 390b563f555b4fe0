"""checkmate/wire.py against the header that it mirrors."""

import re
import shutil
import subprocess
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from cffi import FFI

from checkmate import config, wire
from checkmate.rack import group_number

_HEADER = Path(str(resources.files("checkmate.nccl_plugin") / "include/checkmate/wire.h"))
_TEXT = _HEADER.read_text()


def _define(name: str) -> int:
    match = re.search(rf"#define {name}\s+(\(?)([0-9a-fx]+)u(?: << (\d+))?", _TEXT)
    assert match, name
    return int(match[2], 0) << int(match[3] or 0)


def test_every_field_has_the_offset_and_size_of_the_c_struct() -> None:
    struct = re.search(r"struct ckm_frame \{.*?\};", _TEXT, re.DOTALL)
    assert struct
    ffi = FFI()
    ffi.cdef(struct[0])
    c_fields = {name: (field.offset, ffi.sizeof(field.type)) for name, field in ffi.typeof("struct ckm_frame").fields}
    fields = {name: (offset, dtype.itemsize) for name, (dtype, offset, *_) in wire.FRAME.fields.items()}  # type: ignore[union-attr]
    assert fields == c_fields
    assert wire.HEADER_BYTES == ffi.sizeof("struct ckm_frame") == _define("CKM_HEADER_BYTES")


def test_constants_are_those_of_the_header() -> None:
    assert _define("CKM_WIRE_MAGIC") == wire.MAGIC == int.from_bytes(b"CKMF", "little")
    assert _define("CKM_WIRE_VERSION") == wire.VERSION
    assert _define("CKM_FLAG_TAGGED") == wire.FLAG_TAGGED
    assert _define("CKM_FLAG_PAYLOAD_CRC") == wire.FLAG_PAYLOAD_CRC
    assert _define("CKM_FLAG_FIRST") == wire.FLAG_FIRST
    assert _define("CKM_MAX_PAYLOAD") == wire.MAX_PAYLOAD
    assert _define("CKM_TCPOPT_KIND") == wire.TCPOPT_KIND
    assert _define("CKM_TCPOPT_LEN") == wire.TCPOPT_LEN
    assert _define("CKM_TCPOPT_EXID") == wire.TCPOPT_EXID
    assert _define("CKM_DSCP_TAG_DEFAULT") == config.DSCP_TAG


def test_place_is_the_c_function(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    cases = [
        (step, slices, pos, n)
        for n in (2, 3, 4, 8)
        for slices in (1, 2, 4)
        for pos in range(n)
        for step in range(4 * slices * 2 * (n - 1))
    ]
    source = tmp_path / "place.c"
    source.write_text(
        '#include <stdio.h>\n#include "checkmate/wire.h"\n'
        'int main(void) { unsigned a, b, c, d; while (scanf("%u %u %u %u", &a, &b, &c, &d) == 4) {'
        "struct ckm_place p = ckm_place(a, b, c, d);"
        'printf("%u %u %u %d %u\\n", p.loop, p.chunk, p.slice, p.final, p.round); } }'
    )
    program = tmp_path / "place"
    subprocess.run([compiler, f"-I{_HEADER.parents[1]}", "-o", program, source], check=True)
    lines = "\n".join(" ".join(map(str, case)) for case in cases)
    output = subprocess.run([program], input=lines, capture_output=True, text=True, check=True).stdout
    assert output.splitlines() == [" ".join(str(int(part)) for part in wire.place(*case)) for case in cases]


def test_group_number_is_the_c_function(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    names = ["", "a", "dp0", "dp1", "part.with-every_kind", "x" * 64]
    source = tmp_path / "number.c"
    source.write_text(
        '#include <stdio.h>\n#include "checkmate/wire.h"\n'
        'int main(int n, char **names) { for (int i = 1; i < n; i++) printf("%u\\n", ckm_group_number(names[i])); }'
    )
    program = tmp_path / "number"
    subprocess.run([compiler, f"-I{_HEADER.parents[1]}", "-o", program, source], check=True)
    printed = subprocess.run([program, *names], capture_output=True, text=True, check=True).stdout
    numbers = [group_number(name) for name in names]
    assert printed.split() == list(map(str, numbers)) and len(set(numbers)) == len(names)
    assert max(numbers) < 1 << 16


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_boundary_ranks_place_each_final_chunk_once(n: int) -> None:
    """One round of first's and all of last's (heartbeat tagging) are all chunks, once, wherever rank 0 stands."""
    for host_ranks, before in ((h, b) for h in range(1, n) for b in range(h)):
        chunks = []
        for is_first, ring_pos in ((True, host_ranks - 1 - before), (False, n - 1 - before)):
            for k in range(2 * (n - 1)):
                place = wire.place(k, 1, ring_pos, n)
                if place.final and (not is_first or place.round == host_ranks - 1):
                    chunks.append(place.chunk)
        assert sorted(chunks) == list(range(n))


def test_frame_has_valid_crcs() -> None:
    frame = wire.frame(b"123456789", iteration=7, bucket=3)
    header = np.frombuffer(frame[: wire.HEADER_BYTES], wire.FRAME)[0]
    assert header["payload_crc"] == 0xE3069283  # the check value of CRC32C
    assert header["header_crc"] == wire.crc32c(frame[: wire.HEADER_BYTES - 4])
    assert (header["iteration"], header["bucket"], header["payload_len"]) == (7, 3, 9)
    assert frame[wire.HEADER_BYTES :] == b"123456789"


def test_given_fields_win_over_computed_ones() -> None:
    frame = wire.frame(b"abcd", payload_len=3, payload_crc=1, header_crc=2, version=9)
    header = np.frombuffer(frame[: wire.HEADER_BYTES], wire.FRAME)[0]
    assert (header["payload_len"], header["payload_crc"], header["header_crc"], header["version"]) == (3, 1, 2, 9)
