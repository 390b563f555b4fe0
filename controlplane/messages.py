"""What a shadow and the registration server say to each other, and how it is framed.

A message is a 4-byte big-endian length and a msgpack map. Server: Challenge. Shadow: Register. Server: Registered or
Refused. Then, every HEARTBEAT_S and at each change, Alive from the shadow, answered with Placed. Both sides prove that
they hold the job token by HMAC-SHA256 over both nonces; the token itself is never sent.
"""

import asyncio
import secrets
import struct
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar, get_origin

import msgpack

from checkmate.protocol import ProtocolError, prove

MAX_MESSAGE = 4096
NONCE_BYTES = 32
HEARTBEAT_S = 1.0
DEAD_AFTER_S = 3.0
"""Silence after which the other side counts as gone; also the time for the whole registration."""


@dataclass(frozen=True)
class Challenge:
    """From the server, first."""

    nonce: bytes


@dataclass(frozen=True)
class Register:
    """From the shadow: who it is, and the MAC addresses of its receiving ports in order."""

    job: str
    shadow: str
    macs: list[str]
    nonce: bytes
    proof: bytes


@dataclass(frozen=True)
class Registered:
    """From the server: accepted; ``proof`` shows that it is the job's."""

    proof: bytes


@dataclass(frozen=True)
class Refused:
    """From the server, before it closes."""

    reason: str


@dataclass(frozen=True)
class Alive:
    """From the shadow. ``seeded``: it holds a complete state that it keeps up to date."""

    seeded: bool


@dataclass(frozen=True)
class Placed:
    """From the server. ``mirrored``: the switch copies the tagged traffic of the shadow's groups to it."""

    mirrored: bool


Message = Challenge | Register | Registered | Refused | Alive | Placed
_Kind = TypeVar("_Kind", Challenge, Register, Registered, Alive, Placed)
_TYPES = {cls.__name__: cls for cls in (Challenge, Register, Registered, Refused, Alive, Placed)}


def new_nonce() -> bytes:
    """Fresh random bytes for a challenge."""
    return secrets.token_bytes(NONCE_BYTES)


def shadow_proof(token: bytes, challenge: bytes, job: str, shadow: str, macs: list[str], nonce: bytes) -> bytes:
    """The shadow's proof; it covers all that the shadow says of itself."""
    return prove(token, challenge + nonce, msgpack.packb(["register", job, shadow, macs]).hex())


def server_proof(token: bytes, challenge: bytes, nonce: bytes) -> bytes:
    """The server's proof; another text than the shadow's, so that neither can be sent back."""
    return prove(token, nonce + challenge, "registered")


async def send(writer: asyncio.StreamWriter, message: Message) -> None:
    """Send one message; the caller bounds the time."""
    body = msgpack.packb({"type": type(message).__name__, **asdict(message)})
    writer.write(struct.pack(">I", len(body)) + body)
    await writer.drain()


async def receive(reader: asyncio.StreamReader, kind: type[_Kind]) -> _Kind | Refused:
    """The next message, of type ``kind`` or Refused; the caller bounds the time.

    Raises ProtocolError for anything else, asyncio.IncompleteReadError when the peer closed.
    """
    (length,) = struct.unpack(">I", await reader.readexactly(4))
    if length > MAX_MESSAGE:
        raise ProtocolError(f"message of {length} bytes announced, at most {MAX_MESSAGE} allowed")
    message = _decode(await reader.readexactly(length))
    if not isinstance(message, kind | Refused):
        raise ProtocolError(f"{type(message).__name__} received where {kind.__name__} was expected")
    return message


def _decode(body: bytes) -> Any:
    try:
        content = msgpack.unpackb(body)
        cls = _TYPES[content.pop("type")]
        message = cls(**content)
    except Exception as error:
        raise ProtocolError(f"undecodable message: {error!r}") from None
    for field in fields(message):
        value = getattr(message, field.name)
        odd = isinstance(value, list) and not all(isinstance(item, str) for item in value)
        if odd or type(value) is not (get_origin(field.type) or field.type):
            raise ProtocolError(f"{cls.__name__}.{field.name} is a {type(value).__name__}")
    return message
