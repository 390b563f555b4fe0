"""The registration server: shadows connect to it before training and stay connected while they are alive."""

import asyncio
import hmac
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from checkmate.config import CheckmateError
from checkmate.controlplane import messages
from checkmate.controlplane.loop import LoopThread
from checkmate.controlplane.messages import Alive, Challenge, Placed, Refused, Register, Registered
from checkmate.protocol import ProtocolError
from checkmate.strangers import Strangers
from checkmate.topology import Topology

_log = logging.getLogger("checkmate.registration")

MAX_PENDING = 64
"""Connections at most that have not proved yet who they are."""

_COMPLAINTS = 60
_MINUTE_S = 60.0


class _Denied(Exception):
    """The peer may not register; the text is for it and for the log."""


@dataclass
class _Session:
    """A shadow's connection, from its registration on."""

    writer: asyncio.StreamWriter
    peer: str
    since: float = field(default_factory=time.time)
    heard: float = field(default_factory=time.monotonic)
    seeded: bool = False


class RegistrationServer:
    """Listens on ``topology.registrar`` from ``start`` to ``close``.

    ``on_change`` is called, on the loop's thread, whenever the set of live shadows changes; it must not block.
    """

    def __init__(self, topology: Topology, token: bytes, loop: LoopThread, on_change: Callable[[], None]) -> None:
        self._topology = topology
        self._token = token
        self._loop = loop
        self._on_change = on_change
        self._lock = threading.Lock()
        self._sessions: dict[str, _Session] = {}
        self._mirrored: frozenset[str] = frozenset()
        self._pending = Strangers[asyncio.StreamWriter](MAX_PENDING, lambda writer: writer.transport.abort(), _log)
        self._complaints: deque[float] = deque(maxlen=_COMPLAINTS)
        self._server: asyncio.Server | None = None

    def start(self) -> None:
        """Listen, unless that is so; raises CheckmateError when the address cannot be used."""
        if self._server is not None:
            return
        host, port = self._topology.registrar
        try:
            self._server = self._loop.call(asyncio.start_server(self._serve, host, port, limit=messages.MAX_MESSAGE))
        except OSError as error:
            raise CheckmateError(
                f"registrar {self._topology.registrar}: {os.strerror(error.errno or 0)}; "
                "it must be an address of this machine, and the port free"
            ) from None

    def close(self) -> None:
        """Stop listening and drop all shadows; can be called again."""
        if self._server is not None:
            self._loop.call(self._stop(self._server))
            self._server = None

    def live(self) -> frozenset[str]:
        """Names of the shadows that are connected and heard of."""
        with self._lock:
            return frozenset(self._sessions)

    def set_mirrored(self, shadows: frozenset[str]) -> None:
        """Note to which shadows the switch makes copies; they are told with their next heartbeat."""
        with self._lock:
            self._mirrored = shadows

    def status(self) -> dict[str, dict[str, object]]:
        """For each shadow: live, seeded, mirrored and, when live, peer, since (Unix time) and silence_s."""
        with self._lock:
            sessions = dict(self._sessions)
        return {
            shadow.name: self._describe(shadow.name, sessions.get(shadow.name)) for shadow in self._topology.shadows
        }

    def _describe(self, name: str, session: _Session | None) -> dict[str, object]:
        if session is None:
            return {"live": False, "seeded": False, "mirrored": False}
        return {
            "live": True,
            "seeded": session.seeded,
            "mirrored": name in self._mirrored,
            "peer": session.peer,
            "since": session.since,
            "silence_s": round(time.monotonic() - session.heard, 3),
        }

    async def _stop(self, server: asyncio.Server) -> None:
        server.close()
        for writer in [*self._pending, *(session.writer for session in self._sessions.values())]:
            writer.transport.abort()
        with self._lock:
            self._sessions.clear()
            self._mirrored = frozenset()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = (writer.get_extra_info("peername") or ("a peer that left at once", 0))[:2]
        peer = f"{host}:{port}"
        self._pending.enter(writer, host)
        try:
            await self._converse(reader, writer, peer)
        except TimeoutError:
            self._complain(peer, f"silent for {messages.DEAD_AFTER_S:g} s, closed")
        except ProtocolError as error:
            self._complain(peer, f"{error}, closed")
        except (asyncio.IncompleteReadError, ConnectionError):
            _log.debug("%s: the connection ended", peer)
        finally:
            self._pending.leave(writer)
            writer.transport.abort()

    def _complain(self, peer: str, text: str) -> None:
        """Log it, but no more than ``_COMPLAINTS`` in a minute: strangers must not be able to fill a disk."""
        now = time.monotonic()
        if len(self._complaints) < _COMPLAINTS or now - self._complaints[0] > _MINUTE_S:
            self._complaints.append(now)
            _log.warning("%s: %s", peer, text)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str) -> None:
        try:
            async with asyncio.timeout(messages.DEAD_AFTER_S):
                name = await self._register(reader, writer)
        except _Denied as denied:
            self._complain(peer, f"registration refused: {denied}")
            async with asyncio.timeout(messages.DEAD_AFTER_S):
                await messages.send(writer, Refused(str(denied)))
                writer.close()
                await writer.wait_closed()
            return
        if not self._pending.leave(writer):
            raise ConnectionAbortedError("it had to make room")
        session = _Session(writer, peer)
        self._enter(name, session)
        try:
            await self._follow(name, session, reader)
        finally:
            self._leave(name, session)

    async def _register(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        challenge = messages.new_nonce()
        await messages.send(writer, Challenge(challenge))
        said = await messages.receive(reader, Register)
        if isinstance(said, Refused):
            raise ProtocolError(f"the shadow refused: {said.reason}")
        proof = messages.shadow_proof(self._token, challenge, said.job, said.shadow, said.macs, said.nonce)
        if not hmac.compare_digest(proof, said.proof):
            raise _Denied("wrong job token; give the shadow the token file of the job")
        self._check(said)
        await messages.send(writer, Registered(messages.server_proof(self._token, challenge, said.nonce)))
        return said.shadow

    def _check(self, said: Register) -> None:
        if said.job != self._topology.job:
            raise _Denied(f"job {said.job!r} is not run here, {self._topology.job!r} is; correct the topology file")
        try:
            shadow = self._topology.shadow(said.shadow)
        except CheckmateError as error:
            raise _Denied(str(error)) from None
        macs = [nic.mac for nic in shadow.nics]
        if said.macs != macs:
            raise _Denied(
                f"{said.shadow} has the ports {', '.join(said.macs)}, the topology says {', '.join(macs)}; correct it"
            )

    async def _follow(self, name: str, session: _Session, reader: asyncio.StreamReader) -> None:
        while True:
            async with asyncio.timeout(messages.DEAD_AFTER_S):
                said = await messages.receive(reader, Alive)
                if isinstance(said, Refused):
                    return
                session.heard, session.seeded = time.monotonic(), said.seeded
                await messages.send(session.writer, Placed(name in self._mirrored))

    def _enter(self, name: str, session: _Session) -> None:
        """The newest connection of a shadow counts; an older one, perhaps of a dead process, is dropped."""
        with self._lock:
            before = self._sessions.get(name)
            self._sessions[name] = session
        if before is not None:
            before.writer.transport.abort()
        _log.info("%s registered from %s", name, session.peer)
        self._on_change()

    def _leave(self, name: str, session: _Session) -> None:
        with self._lock:
            if self._sessions.get(name) is not session:
                return
            del self._sessions[name]
            self._mirrored -= {name}
        _log.warning("%s at %s is gone", name, session.peer)
        self._on_change()
