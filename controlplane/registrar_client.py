"""The shadow's side of registration: registers, stays alive, registers again when the connection breaks."""

import asyncio
import contextlib
import hmac
import logging
import random
import threading
from collections.abc import Sequence
from typing import TypeVar

from checkmate.controlplane import messages
from checkmate.controlplane.loop import LoopThread
from checkmate.controlplane.messages import Alive, Challenge, Placed, Refused, Register, Registered
from checkmate.protocol import ProtocolError
from checkmate.topology import Endpoint

_log = logging.getLogger("checkmate.registration")

_Answer = TypeVar("_Answer", Challenge, Registered, Placed)

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_IMPATIENT_S = 0.2
"""Time between heartbeats until the switch copies to us: training may be waiting for that."""


class RegistrarClient:
    """Works in a thread of its own from construction to ``close``.

    ``macs``: the receiving ports in the topology's order. All methods may be called from any thread.
    """

    def __init__(self, registrar: Endpoint, job: str, shadow: str, macs: Sequence[str], token: bytes) -> None:
        self._registrar = registrar
        self._job = job
        self._shadow = shadow
        self._macs = list(macs)
        self._token = token
        self._seeded = False
        self._last_said = ""
        self._pause_s = _FIRST_PAUSE_S
        self._mirrored = threading.Event()
        self._loop = LoopThread("registrar-client")
        self._hurry = self._loop.call(_new_event())
        self._loop.start(self._run())

    @property
    def mirrored(self) -> bool:
        """Whether we are registered and the switch copies the traffic of our groups to us."""
        return self._mirrored.is_set()

    def wait_mirrored(self, timeout_s: float) -> bool:
        """Wait until ``mirrored``; False when it is not within ``timeout_s``."""
        return self._mirrored.wait(timeout_s)

    def set_seeded(self, seeded: bool) -> None:
        """Tell the control plane whether we hold a complete state."""
        if seeded != self._seeded:
            self._seeded = seeded
            self._loop.start(_set(self._hurry))

    def close(self) -> None:
        """Leave; can be called again."""
        self._loop.close()
        self._mirrored.clear()

    async def _run(self) -> None:
        while True:
            try:
                await self._attend()
            except TimeoutError:
                self._say(f"no answer for {messages.DEAD_AFTER_S:g} s")
            except asyncio.IncompleteReadError:
                self._say("it closed the connection")
            except OSError as error:
                self._say(error.strerror or str(error))
            except ProtocolError as error:
                self._say(str(error))
            finally:
                self._mirrored.clear()
            await asyncio.sleep(self._pause_s * random.uniform(0.5, 1.0))
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    async def _attend(self) -> None:
        """One connection, from its opening until it breaks."""
        async with asyncio.timeout(messages.DEAD_AFTER_S):
            reader, writer = await asyncio.open_connection(*self._registrar, limit=messages.MAX_MESSAGE)
        try:
            async with asyncio.timeout(messages.DEAD_AFTER_S):
                await self._register(reader, writer)
            self._pause_s = _FIRST_PAUSE_S
            while True:
                async with asyncio.timeout(messages.DEAD_AFTER_S):
                    await self._beat(reader, writer)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(messages.HEARTBEAT_S if self.mirrored else _IMPATIENT_S):
                        await self._hurry.wait()
        finally:
            writer.transport.abort()

    async def _register(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        challenge = _granted(await messages.receive(reader, Challenge)).nonce
        nonce = messages.new_nonce()
        proof = messages.shadow_proof(self._token, challenge, self._job, self._shadow, self._macs, nonce)
        await messages.send(writer, Register(self._job, self._shadow, self._macs, nonce, proof))
        answer = _granted(await messages.receive(reader, Registered))
        if not hmac.compare_digest(answer.proof, messages.server_proof(self._token, challenge, nonce)):
            raise ProtocolError("it does not hold the job token; give both sides the same token file")
        self._last_said = ""
        _log.info("%s: registered at %s", self._shadow, self._registrar)

    async def _beat(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._hurry.clear()
        await messages.send(writer, Alive(self._seeded))
        if _granted(await messages.receive(reader, Placed)).mirrored:
            self._mirrored.set()
        else:
            self._mirrored.clear()

    def _say(self, why: str) -> None:
        """Log why we are not registered, once."""
        if why != self._last_said:
            _log.warning("%s: registrar %s: %s; trying again", self._shadow, self._registrar, why)
            self._last_said = why


def _granted(message: _Answer | Refused) -> _Answer:
    if isinstance(message, Refused):
        raise ProtocolError(f"registration refused: {message.reason}")
    return message


async def _new_event() -> asyncio.Event:
    return asyncio.Event()


async def _set(event: asyncio.Event) -> None:
    event.set()
