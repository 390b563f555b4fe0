"""The local socket of a long-running part: status as JSON and other commands, one request for each connection.

Request and answer are one line of JSON each; an answer is ``{"ok": ...}`` or ``{"error": text}``.
"""

import contextlib
import json
import logging
import os
import select
import socket
import stat
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from checkmate.config import CheckmateError

log = logging.getLogger("checkmate.status")

_REQUEST_BYTES = 8192
_ANSWER_BYTES = 1 << 20
_BLOCKS_BYTES = 1 << 30
"""A line for each MiB of state: of many TB."""
_STALL_S = 5.0
_EXPORT_S = 600.0
_POLL_MS = 1000

Handler = Callable[[Mapping[str, Any]], Any]


def status_sockets(path: Path, groups: Sequence[str]) -> list[Path]:
    """Where a shadow of these groups that was given this path answers for each: ``shadow.sock``, or of several groups
    ``shadow.GROUP.sock``. Raises CheckmateError for a folder."""
    if path.is_dir():
        raise CheckmateError(f"status socket {path}: that is a folder; name a socket in it, {path / 'shadow.sock'}")
    return [path] if len(groups) == 1 else [path.with_name(f"{path.stem}.{name}{path.suffix}") for name in groups]


def query(path: Path | str) -> dict[str, Any]:
    """Status of the shadow or controller that listens on this socket; CheckmateError when none answers."""
    return _ask(Path(path), {"command": "status"}, _STALL_S)


def blocks(path: Path | str) -> dict[str, Any]:
    """Every block of a shadow's state and when it was last proved equal; CheckmateError when no shadow answers."""
    return _ask(Path(path), {"command": "blocks"}, _STALL_S, _BLOCKS_BYTES)


def export(path: Path | str, out: Path | str, timeout_s: float = _EXPORT_S) -> int:
    """Let the shadow write its committed state to the file ``out``; returns the step. CheckmateError on failure."""
    return int(_ask(Path(path), {"command": "export", "path": str(Path(out).absolute())}, timeout_s)["step"])


def _ask(path: Path, request: Mapping[str, Any], timeout_s: float, answer_bytes: int = _ANSWER_BYTES) -> dict[str, Any]:
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(timeout_s)
            sock.connect(str(path))
            sock.sendall(json.dumps(request).encode() + b"\n")
            answer = json.loads(_read_line(sock, answer_bytes))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise CheckmateError(
            f"no status from {path}: {reason}; name the socket of a shadow or controller that runs"
        ) from None
    match answer:
        case {"error": str(text)}:
            raise CheckmateError(text)
        case {"ok": dict(content)}:
            return content
    raise CheckmateError(f"{path} gave an answer that is none of ours; name the socket of a shadow or controller")


def _read_line(sock: socket.socket, limit: int) -> bytes:
    line = bytearray()
    while not line.endswith(b"\n"):
        part = sock.recv(65536)
        if not part or len(line) + len(part) > limit:
            raise ValueError("an incomplete answer" if not part else f"more than {limit} bytes")
        line += part
    return bytes(line)


class StatusServer:
    """Answers on a unix socket that only this user may connect to, from ``start`` to ``close``.

    ``commands``: what to do for each ``command``; a CheckmateError or OSError that it raises is the answer. Requests
    are served one after another. CheckmateError when another process listens there.
    """

    def __init__(self, path: Path, commands: Mapping[str, Handler]) -> None:
        self._path = path
        self._commands = commands
        self._stopping = threading.Event()
        self._listener = _listen(path)
        self._thread = threading.Thread(target=self._run, name="status")

    def start(self) -> None:
        """Answer from now on."""
        self._thread.start()

    def close(self) -> None:
        """Stop and remove the socket."""
        self._stopping.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        if self._thread.ident is not None:
            self._thread.join()
        self._listener.close()
        self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        while not self._stopping.is_set():
            if not poll.poll(_POLL_MS) or self._stopping.is_set():
                continue
            try:
                with self._listener.accept()[0] as sock:
                    self._serve(sock)
            except OSError as error:
                log.debug("status: %s", error)

    def _serve(self, sock: socket.socket) -> None:
        sock.settimeout(_STALL_S)
        try:
            request = json.loads(_read_line(sock, _REQUEST_BYTES))
            command = self._commands.get(str(request.get("command"))) if isinstance(request, dict) else None
            if command is None:
                raise CheckmateError(f"unknown request; commands are {', '.join(self._commands)}")
            answer = {"ok": command(request)}
        except (CheckmateError, OSError, ValueError, RecursionError) as error:
            answer = {"error": str(error)}
        sock.sendall(json.dumps(answer).encode() + b"\n")


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        _remove_stale(path)
        old = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(old)
        listener.listen(8)
    except OSError as error:
        listener.close()
        raise CheckmateError(
            f"status socket {path}: {error.strerror or error}; choose a path in a folder of yours"
        ) from None
    except BaseException:
        listener.close()
        raise
    return listener


def _remove_stale(path: Path) -> None:
    """Remove what a killed process left."""
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise CheckmateError(f"status socket {path}: there is a file of that name; choose another path")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_STALL_S)
        if probe.connect_ex(str(path)) == 0:
            raise CheckmateError(f"status socket {path}: another process listens there; stop it or choose another path")
    path.unlink()
