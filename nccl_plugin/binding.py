"""The training side of the plugin's library in Python: which buffers are buckets, which iteration it is, counters.

``python -m checkmate.nccl_plugin.binding --params`` prints the table of environment variables.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cffi import FFI

from checkmate import native
from checkmate.config import CheckmateError

NET_PLUGIN = "NCCL_NET_PLUGIN"
"""NCCL's own variable: the library that it loads."""


_HEADERS = [native.header("checkmate.nccl_plugin", "include/checkmate/api.h")]
_ffi: Any = FFI()
_ffi.cdef(native.declarations(_HEADERS))


def plugin_path() -> Path:
    """The library that NCCL or our back end loads in this process: a path in NCCL_NET_PLUGIN, else the one built here.

    Both must be the same file, because buckets are registered in the library's own memory.
    """
    chosen = os.environ.get(NET_PLUGIN, "")
    return Path(chosen) if "/" in chosen else native.library("libcheckmate_net.so")


@dataclass(frozen=True)
class Counters:
    """Since the library was loaded; bytes are payload bytes. ``untagged``: by reason, those that occurred."""

    tagged_frames: int
    tagged_bytes: int
    plain_frames: int
    plain_bytes: int
    received_frames: int
    received_bytes: int
    tagged_ops: int
    tagged_connections: int
    plain_connections: int
    errors: int
    untagged: dict[str, int]


@dataclass(frozen=True)
class Parameter:
    """One environment variable: value in force, default and what it does."""

    name: str
    value: str
    default: str
    help: str


def _text(pointer: Any) -> str:
    return bytes(_ffi.string(pointer)).decode()


class Plugin:
    """The plugin's library in this process. Raises CheckmateError when it cannot be loaded."""

    def __init__(self, path: Path | None = None) -> None:
        self._lib = native.load(_ffi, path or plugin_path(), _HEADERS)

    def register_bucket(self, ptr: int, nbytes: int, bucket: int) -> None:
        """All-reduces that send from exactly ``ptr``, ``nbytes`` long, are those of ``bucket`` from now on."""
        result = self._lib.checkmate_register_bucket(_ffi.cast("void *", ptr), nbytes, bucket)
        if result < 0:
            raise CheckmateError(
                f"cannot register bucket {bucket} ({nbytes} bytes at {ptr:#x}): {os.strerror(-result)}"
            )

    def register_probe(self, ptr: int, nbytes: int) -> None:
        """The next all-reduce from there shows the ranks' places in their rings: see ``checkmate_register_probe``."""
        result = self._lib.checkmate_register_probe(_ffi.cast("void *", ptr), nbytes)
        if result < 0:
            raise CheckmateError(f"cannot register a probe of {nbytes} bytes at {ptr:#x}: {os.strerror(-result)}")

    def unregister_buckets(self) -> None:
        """Forget all buckets: nothing is tagged."""
        self._lib.checkmate_unregister_buckets()

    def set_iteration(self, iteration: int) -> None:
        """The optimizer step, from 1, that all-reduces enqueued from now on belong to."""
        self._lib.checkmate_set_iteration(iteration)

    def set_incarnation(self, incarnation: int) -> None:
        """The job's incarnation; 0: nothing is tagged."""
        self._lib.checkmate_set_incarnation(incarnation)

    def counters(self) -> Counters:
        """What was sent and received so far, and what was not tagged and why."""
        raw = _ffi.new("struct checkmate_counters *")
        self._lib.checkmate_get_counters(raw)
        names = [name for name in Counters.__dataclass_fields__ if name != "untagged"]
        untagged = {
            _text(self._lib.checkmate_reason_name(reason)): int(count)
            for reason, count in enumerate(raw.untagged)
            if count
        }
        return Counters(**{name: int(getattr(raw, name)) for name in names}, untagged=untagged)

    def parameters(self) -> list[Parameter]:
        """The environment variables that the plugin reads."""
        raw = _ffi.new("struct checkmate_param *")
        found: list[Parameter] = []
        while self._lib.checkmate_get_param(len(found), raw) == 0:
            found.append(Parameter(_text(raw.name), _text(raw.value), _text(raw.fallback), _text(raw.help)))
        return found


def parameter_table() -> str:
    """The environment variables as a Markdown table."""
    rows = [f"| `{p.name}` | {f'`{p.default}`' if p.default else ''} | {p.help} |" for p in Plugin().parameters()]
    return "\n".join(["| variable | default | meaning |", "|---|---|---|", *rows])


def main(argv: list[str]) -> int:
    """Print the table of environment variables."""
    if argv != ["--params"]:
        print("usage: python -m checkmate.nccl_plugin.binding --params", file=sys.stderr)
        return 2
    print(parameter_table())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
