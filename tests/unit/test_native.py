"""Compiled parts that don't fit the Python side are refused before the first call."""

import subprocess
from pathlib import Path

import pytest
from cffi import FFI

from checkmate import native
from checkmate.config import CheckmateError
from checkmate.nccl_plugin.binding import Plugin
from checkmate.persist import engine

HEADER = native.header("checkmate.persist", "src/api.h")


def built(path: Path, *sources: str) -> Path:
    (path / "part.c").write_text("\n".join(sources))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path / "part.so", path / "part.c"], check=True)
    return path / "part.so"


def test_library_of_other_headers_is_refused(tmp_path: Path) -> None:
    stale = built(tmp_path, "#include <stdint.h>", "const uint64_t checkmate_abi = 1;")
    with pytest.raises(CheckmateError, match=r"part\.so was built from another version of api\.h; run `make`"):
        native.load(FFI(), stale, [HEADER])
    with pytest.raises(CheckmateError, match=r"part\.so was built from another version of api\.h"):
        Plugin(stale)


def test_library_that_does_not_say_its_headers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckmateError, match=r"cannot load .*part\.so: .*checkmate_abi.*run `make`"):
        native.load(FFI(), built(tmp_path, "int other;"), [HEADER])


def test_changed_header_no_longer_fits_the_library(tmp_path: Path) -> None:
    changed = tmp_path / "api.h"
    changed.write_bytes(HEADER.read_bytes() + b"int more;\n")
    path = native.library(engine._LIBRARY)
    assert native.load(FFI(), path, [HEADER]).checkmate_abi
    with pytest.raises(CheckmateError, match="another version"):
        native.load(FFI(), path, [changed])


def test_missing_part_says_how_to_build_it() -> None:
    with pytest.raises(CheckmateError, match=r"libnothing\.so is not built: expected .*; run `make`"):
        native.library("libnothing.so")
