"""Messages between a trainer rank and a shadow on the management network: the one definition.

Transport: one TCP connection to the shadow's control server for each purpose. Every message is a 4-byte big-endian
length and a msgpack map with the keys ``type`` and the message's fields; a message is at most MAX_MESSAGE bytes.
State (seed, restore) follows its manifest as raw tensor bytes in manifest order, each tensor's bytes followed by a
4-byte little-endian CRC32C.

A connection starts with the HMAC handshake (``Challenge`` from the shadow, ``Hello`` from the trainer), then carries

* ``Hello.purpose == "records"``: Layout, StepRecord, Digests, Boundary from the rank; Ack and SeedRequest from the
  shadow.
* ``"begin"``: Begin from rank 0 and Begun from the shadow: opens a new incarnation.
* ``"commit"``: Ready from the shadow, Release from the job's coordinator; only where a job has several shadows.
* ``"seed"``: Seed and its tensors from rank 0; Ack from the shadow.
* ``"restore"``: Restore from the rank; State and its tensors from the shadow.

The order of one iteration t, on every rank: StepRecord(t) when the optimizer step starts, then Boundary(t) at the first
forward after it (or at close). A shadow commits t when all gradients of t, one StepRecord(t) and the Boundary(t) of all
ranks are there: so whatever is restored, model, optimizer, schedule, random numbers and data position are of the
same moment. Where a job has several shadows, each a *shard* of the parameters, none commits t before all could.
"""

import dataclasses
import hashlib
import hmac
import socket
import struct
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import msgpack

from checkmate.config import CheckmateError

MAX_MESSAGE = 64 << 20
MAX_THREADS = 1024
VERSION = 3
SETTLE_S = 120.0
"""How long a shadow of several may take to make the steps that it held back, before it serves a restore."""


class ProtocolError(CheckmateError):
    """The peer sent something that this version does not understand, or closed in mid-message."""


@dataclass(frozen=True)
class Message:
    """Base of all messages; ``TYPE`` is the wire name."""

    TYPE: ClassVar[str] = ""

    def encode(self) -> bytes:
        """Length prefix and msgpack body."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        body: bytes = msgpack.packb({"type": self.TYPE, **fields}, default=_plain)
        if len(body) > MAX_MESSAGE:
            raise ProtocolError(f"{self.TYPE} message of {len(body)} bytes exceeds {MAX_MESSAGE}")
        return struct.pack(">I", len(body)) + body

    @classmethod
    def from_map(cls, fields: dict[str, Any]) -> Self:
        """Build from a decoded map; raises ProtocolError when a field is missing or unknown."""
        try:
            return cls(**fields)
        except TypeError as error:
            raise ProtocolError(f"malformed {cls.TYPE} message: {error}") from None


@dataclass(frozen=True)
class Challenge(Message):
    """First message on every connection, from the shadow."""

    TYPE: ClassVar[str] = "challenge"
    nonce: bytes
    version: int = VERSION


@dataclass(frozen=True)
class Hello(Message):
    """Answer to Challenge; ``proof`` is HMAC-SHA256(token, nonce ‖ purpose).

    ``shadows``: number of those of the job, which commit together. ``arithmetic``: what the rank's optimizer makes of
    known numbers (``checkmate.arithmetic``): {"of": text, "cases": [[class, hyperparameters, dtype], …], "digest":
    CRC32C of parameters and state after them}; None: nobody knows, because they are on a GPU. ``group``: name of the
    rank's data-parallel group; empty where it has none.
    """

    TYPE: ClassVar[str] = "hello"
    job: str
    proof: bytes
    purpose: str
    rank: int
    world: int
    incarnation: int
    version: int = VERSION
    shadows: int = 1
    arithmetic: dict[str, Any] | None = None
    group: str = ""


@dataclass(frozen=True)
class Refused(Message):
    """From the shadow, before it closes: why.

    ``for_good``: this job, as it is, can never be followed; ``holds``: a step of an earlier one that is held then, and
    that a job which begins anew would give up.
    """

    TYPE: ClassVar[str] = "refused"
    reason: str
    for_good: bool = False
    holds: int | None = None


@dataclass(frozen=True)
class Begin(Message):
    """Rank 0 opens a new incarnation of at least ``proposed``; everything older becomes stale."""

    TYPE: ClassVar[str] = "begin"
    proposed: int = 0


@dataclass(frozen=True)
class Begun(Message):
    """The incarnation that is open now, the committed step (None: no state held) and what can be restored.

    ``spans``: [history, first, last], oldest first: the steps that the shadow can be at without anything more. A
    history is named by the incarnation in which it began; steps of different histories have nothing in common.
    """

    TYPE: ClassVar[str] = "begun"
    incarnation: int
    committed: int | None
    spans: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class Layout(Message):
    """What the bytes of each bucket are; sent before the first StepRecord that names ``digest``.

    ``buckets``: list of {"bucket": int, "bytes": int, "dtype": str, "params": [[name, first element, elements], …]};
    "dtype" is that of the bytes, which a compressing hook makes another than the parameters'. ``elsewhere``: buckets of
    which all parameters belong to other shadows.
    """

    TYPE: ClassVar[str] = "layout"
    digest: str
    buckets: list[dict[str, Any]]
    elsewhere: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class StepRecord(Message):
    """What optimizer step ``step`` (from 1) needs beside gradients, the same on every rank.

    ``groups``: one map per parameter group with all its hyperparameters except ``params``.
    ``skipped``: the trainer does not apply this step. ``unfollowed``: reason why the shadow can't follow this step
    (for example gradients changed in an unknown way after the all-reduce); the shadow then asks for a seed.
    ``absent``: parameters whose gradient is None in this step, so that the optimizer passes them over.
    ``changes``: what was done to the reduced gradients before the step, in order, each a map with ``op``

    * ``clip_norm``: ``max_norm``, ``total_norm``, ``foreach`` as torch's ``clip_grads_with_norm_`` was given them
    * ``clip_value``: ``clip_value``, ``foreach`` as torch's ``clip_grad_value_`` was given them
    * ``unscale``: ``inv_scale`` that a GradScaler multiplied them by

    and ``params``, names (None: all that have a gradient), and ``masters``: it was done to the gradients of master
    copies, after they were converted from their parameters'. ``scaler``: ``grad_scale`` and ``found_inf`` that a
    GradScaler handed to a fused optimizer. Tensors in ``changes`` and ``scaler`` are as ``checkmate.plain`` makes
    them. ``threads``: of torch, that the step is cut into, where that shows in the bits; 0: it does not.
    """

    TYPE: ClassVar[str] = "step"
    step: int
    layout: str
    groups: list[dict[str, Any]]
    skipped: bool = False
    unfollowed: str | None = None
    absent: list[str] = field(default_factory=list)
    changes: list[dict[str, Any]] = field(default_factory=list)
    scaler: dict[str, Any] | None = None
    threads: int = 0


@dataclass(frozen=True)
class Boundary(Message):
    """State of one rank after step ``step`` that gradients do not carry; opaque to the shadow.

    ``state``: msgpack-able map (random number states, schedulers, data positions). ``unfollowed``: parameters or
    optimizer state were changed since the step by something else, so that only a seed of this step is its state.
    """

    TYPE: ClassVar[str] = "boundary"
    step: int
    state: dict[str, Any]
    unfollowed: str | None = None


@dataclass(frozen=True)
class Digests(Message):
    """What some blocks of rank 0's state are right after step ``step``, before anything else can change it.

    Sent between StepRecord and Boundary of the step, or not at all. ``blocks``: list of [name, kind, first byte, bytes,
    CRC32C]; name and kind are those of a manifest ("param", "state.KEY"), the block is as ``checkmate.blocks`` cuts it.
    A shadow that made the step itself must hold the same bytes.
    """

    TYPE: ClassVar[str] = "digests"
    step: int
    blocks: list[list[Any]]


@dataclass(frozen=True)
class SeedRequest(Message):
    """The shadow asks rank 0 for a Seed at the next step boundary, and says why.

    ``at``: not before the boundary of this step, at which all groups of the job are asked for one.
    """

    TYPE: ClassVar[str] = "seed_request"
    reason: str
    at: int | None = None


@dataclass(frozen=True)
class Ack(Message):
    """Newest committed step of the shadow (None: none) and its history, see Begun; sent when it changes."""

    TYPE: ClassVar[str] = "ack"
    committed: int | None
    history: int = 0


@dataclass(frozen=True)
class Ready(Message):
    """Steps that a shadow can be at without anything more, as [first, last], oldest first; ``number`` counts reports.

    A promise: it holds until the shadow is further, or until a Release with the number of a later report, without
    them, arrives. ``needs_seed``: it can't go further without one.
    """

    TYPE: ClassVar[str] = "ready"
    number: int
    spans: list[list[int]]
    needs_seed: bool = False


@dataclass(frozen=True)
class Release(Message):
    """The newest step that all shadows of the job were ready for (None: none): each may commit it.

    ``number``: the newest report of this shadow that was heard before. ``waits_for``: addresses of the shadows that
    hold up the others. ``seed_at``: ask rank 0 for a seed of this step, as all others do of theirs.
    """

    TYPE: ClassVar[str] = "release"
    step: int | None
    number: int
    waits_for: list[str] = field(default_factory=list)
    seed_at: int | None = None


@dataclass(frozen=True)
class Seed(Message):
    """Full state after step ``step``; the tensors follow as ``manifest`` lists them (``checkmate.tensors``).

    ``manifest``: one [name, kind, dtype, shape, stride] for each tensor, whose bytes follow in memory order; kind is
    "param", "buffer" or "state.KEY" for the optimizer state KEY of parameter ``name`` ("state.exp_avg", "state.step").
    ``optimizer``: {"class": "AdamW", "groups": [hyperparameters with "params": [names in order]], "scalars": {name:
    {KEY: number}}}; the hyperparameters hold fused, foreach, capturable, … as torch names them; "scalars" holds
    optimizer state that is no tensor. Of a shard, "order" beside "params" names all of the job's in order.
    ``history``: that of the run, see Begun. ``agreed``: history and step that the job could have gone on from, but it
    began anew: what shadows hold else of earlier incarnations is of no use.
    """

    TYPE: ClassVar[str] = "seed"
    step: int
    optimizer: dict[str, Any]
    manifest: list[list[Any]]
    history: int = 0
    agreed: list[int] | None = None


@dataclass(frozen=True)
class Restore(Message):
    """A rank asks for the state of this step of this history, for its incarnation to go on from.

    ``step`` None: the committed state, whatever it is.
    """

    TYPE: ClassVar[str] = "restore"
    step: int | None = None
    history: int = 0


@dataclass(frozen=True)
class State(Message):
    """Answer to Restore: as Seed, and the Boundary state of the asking rank. ``step`` None: nothing to restore."""

    TYPE: ClassVar[str] = "state"
    step: int | None
    optimizer: dict[str, Any] = field(default_factory=dict)
    manifest: list[list[Any]] = field(default_factory=list)
    boundary: dict[str, Any] = field(default_factory=dict)


_TYPES: dict[str, type[Message]] = {
    cls.TYPE: cls
    for cls in (
        Challenge, Hello, Refused, Begin, Begun, Layout, StepRecord, Digests, Boundary, SeedRequest, Ack, Ready,
        Release, Seed, Restore, State,
    )
}  # fmt: skip


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | set | frozenset):
        return list(value)
    raise ProtocolError(f"a {type(value).__name__} cannot be sent: only plain Python values and bytes are")


def prove(token: bytes, nonce: bytes, purpose: str) -> bytes:
    """HMAC-SHA256 proof that the sender holds the job token."""
    return hmac.new(token, nonce + purpose.encode(), hashlib.sha256).digest()


def decode(body: bytes) -> Message:
    """Decode one msgpack body; raises ProtocolError on anything malformed."""
    try:
        fields = msgpack.unpackb(body, strict_map_key=False)
        cls = _TYPES[fields.pop("type")]
    except Exception as error:
        raise ProtocolError(f"undecodable message: {error!r}") from None
    return cls.from_map(fields)


def receive(sock: socket.socket, limit: int = MAX_MESSAGE) -> Message | None:
    """Next message, of at most ``limit`` bytes, of a blocking socket; None at a clean end. The socket's time-out bounds
    each read."""
    head = _receive_exactly(sock, 4)
    if head is None:
        return None
    (length,) = struct.unpack(">I", head)
    if length > limit:
        raise ProtocolError(f"message of {length} bytes announced, at most {limit} allowed")
    body = _receive_exactly(sock, length)
    if body is None:
        raise ProtocolError("connection closed in mid-message")
    return decode(body)


def take(inbox: bytearray, limit: int) -> Message | None:
    """Next message, of at most ``limit`` bytes, taken out of what arrived so far; None: it is not whole yet."""
    if len(inbox) < 4:
        return None
    (length,) = struct.unpack_from(">I", inbox)
    if length > limit:
        raise ProtocolError(f"message of {length} bytes announced, at most {limit} allowed")
    if len(inbox) < 4 + length:
        return None
    message = decode(bytes(inbox[4 : 4 + length]))
    del inbox[: 4 + length]
    return message


def _receive_exactly(sock: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            if data:
                raise ProtocolError("connection closed in mid-message")
            return None
        data += part
    return bytes(data)
