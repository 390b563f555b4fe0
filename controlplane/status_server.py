"""Serves a status as one line of JSON to whoever connects to a Unix socket."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkmate.controlplane.loop import LoopThread

from checkmate.config import CheckmateError

_SEND_TIMEOUT_S = 2.0
_MODE = 0o600


class StatusServer:
    """Answers with ``status()`` from ``start`` to ``close``; only the socket's owner may ask."""

    def __init__(self, path: Path, status: Callable[[], dict[str, Any]], loop: LoopThread) -> None:
        self._path = path
        self._status = status
        self._loop = loop
        self._server: asyncio.Server | None = None

    def start(self) -> None:
        """Listen, in the place of a socket that a dead process left; raises CheckmateError."""
        try:
            self._server = self._loop.call(asyncio.start_unix_server(self._serve, self._path))
            self._path.chmod(_MODE)
        except OSError as error:
            raise CheckmateError(
                f"status socket {self._path}: {error.strerror or error}; give a path in a folder that exists"
            ) from None

    def close(self) -> None:
        """Stop and remove the socket; can be called again."""
        if self._server is not None:
            self._loop.call(_close(self._server))
            self._server = None
            self._path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(json.dumps(self._status()).encode() + b"\n")
            async with asyncio.timeout(_SEND_TIMEOUT_S):
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, ConnectionError):
            writer.transport.abort()


async def _close(server: asyncio.Server) -> None:
    server.close()
