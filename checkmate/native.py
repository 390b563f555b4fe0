"""Compiled parts: where they are, what their headers declare to cffi, and that both are of one version."""

import hashlib
from collections.abc import Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from cffi import FFI

from checkmate import _lib
from checkmate.config import CheckmateError

_REBUILD = "run `make` in the source tree and reinstall"


def library(name: str) -> Path:
    """Path of a compiled part, for example ``libcheckmate_net.so`` or ``switch.bpf.o``.

    Raises CheckmateError when it was not built.
    """
    path = Path(_lib.__path__[0]) / name
    if not path.is_file():
        raise CheckmateError(f"{name} is not built: expected {path}; {_REBUILD}")
    return path


def header(package: str, name: str) -> Traversable:
    """A C header that the package brings: of nothing but plain declarations and preprocessor lines."""
    return resources.files(package) / name


def declarations(headers: Sequence[Traversable]) -> str:
    """What C declares, without the lines that only a preprocessor understands."""
    lines = "".join(each.read_text(encoding="utf-8") for each in headers).splitlines()
    return "\n".join(line for line in lines if not line.startswith("#"))


def bind(path: Path, headers: Sequence[Traversable]) -> tuple[FFI, Any]:
    """The library at ``path`` and what its headers declare; see ``load``."""
    ffi = FFI()
    ffi.cdef(declarations(headers))
    return ffi, load(ffi, path, headers)


def load(ffi: FFI, path: Path, headers: Sequence[Traversable]) -> Any:
    """The library at ``path``, if it was built from these headers: with others, a call would write where it must not.

    Raises CheckmateError when it can't be loaded or was built from others (``nccl_plugin/abi.mk``).
    """
    ffi.cdef("extern uint64_t checkmate_abi;", override=True)
    try:
        lib: Any = ffi.dlopen(str(path))
        built = int(lib.checkmate_abi)
    except (OSError, KeyError) as error:  # cffi: no such file, no such variable
        raise CheckmateError(f"cannot load {path}: {error}; {_REBUILD}") from None
    digest = hashlib.sha256(b"".join(each.read_bytes() for each in headers)).hexdigest()
    if built != int(digest[:16], 16):
        raise CheckmateError(
            f"{path} was built from another version of {', '.join(h.name for h in headers)}; {_REBUILD}"
        )
    return lib
