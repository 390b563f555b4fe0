"""Which controller may write: P4Runtime's client arbitration, apart from gRPC.

For each role the controller with the highest election id that was ever seen is the primary, as long as its stream
lives. Streams are named by any hashable value; the answers say which stream gets which message.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from ..shared.messages import code_pb2, p4runtime_pb2
from .refusal import Refusal, invalid

Notes = list[tuple[Hashable, Any]]
"""(stream, p4.v1.StreamMessageResponse) pairs, in the order in which they are to be sent."""


@dataclass
class _Role:
    """``elections`` holds the election id of each live stream; None: a standby that is never primary."""

    elections: dict[Hashable, int | None] = field(default_factory=dict)
    highest: int | None = None


def election_number(message: Any) -> int | None:
    """The 128-bit election id of a message with such a field; None when it is not set."""
    if not message.HasField("election_id"):
        return None
    return int(message.election_id.high) << 64 | int(message.election_id.low)


class Arbitration:
    """Arbitration for one device. Not thread-safe."""

    def __init__(self, device_id: int) -> None:
        self._device_id = device_id
        self._roles: dict[str, _Role] = {}
        self._role_of: dict[Hashable, str] = {}

    def update(self, stream: Hashable, message: Any) -> Notes:
        """Handle a p4.v1.MasterArbitrationUpdate; a Refusal ends the stream."""
        name = self._check(stream, message)
        role = self._roles.setdefault(name, _Role())
        election = election_number(message)
        if election is not None and any(other == election for key, other in role.elections.items() if key != stream):
            invalid(f"the election id {election} is another live controller's")
        was_primary = self._primary(role)
        self._role_of[stream] = name
        role.elections[stream] = election
        if election is not None and (role.highest is None or election >= role.highest):
            role.highest = election
            others = [key for key in role.elections if key != stream]
            return self._notes(name, [*others, stream])
        return self._notes(name, list(role.elections) if was_primary == stream else [stream])

    def _check(self, stream: Hashable, message: Any) -> str:
        """The role's name; the order of the checks is the specification's."""
        known = stream in self._role_of
        if message.device_id != self._device_id:
            code = code_pb2.FAILED_PRECONDITION if known else code_pb2.NOT_FOUND
            raise Refusal(code, f"there is no device {message.device_id}; this one is {self._device_id}")
        name: str = message.role.name
        if known and self._role_of[stream] != name:
            raise Refusal(code_pb2.FAILED_PRECONDITION, "a stream cannot change its role: open another one")
        if message.role.HasField("config"):
            invalid("roles have no configuration here: each has the whole pipeline")
        return name

    def leave(self, stream: Hashable) -> Notes:
        """A stream has ended; says so to the others of its role if it was the primary."""
        name = self._role_of.pop(stream, None)
        if name is None:
            return []
        role = self._roles[name]
        was_primary = self._primary(role) == stream
        del role.elections[stream]
        return self._notes(name, list(role.elections)) if was_primary else []

    def check_primary(self, message: Any) -> None:
        """Refuse a request (with device_id, role, election_id) unless it comes from the primary of its role."""
        if message.device_id != self._device_id:
            raise Refusal(code_pb2.NOT_FOUND, f"there is no device {message.device_id}; this one is {self._device_id}")
        role = self._roles.get(message.role)
        if role is None:
            if message.role:
                raise Refusal(code_pb2.NOT_FOUND, f"there is no role {message.role}")
            raise Refusal(code_pb2.PERMISSION_DENIED, "there is no primary: open a StreamChannel first")
        election = election_number(message)
        if election is None or election != role.highest or self._primary(role) is None:
            raise Refusal(code_pb2.PERMISSION_DENIED, f"election id {election} is not the primary's")

    @staticmethod
    def _primary(role: _Role) -> Hashable | None:
        if role.highest is None:
            return None
        return next((stream for stream, election in role.elections.items() if election == role.highest), None)

    def _notes(self, name: str, streams: list[Hashable]) -> Notes:
        role = self._roles[name]
        primary = self._primary(role)
        notes: Notes = []
        for stream in streams:
            response = p4runtime_pb2.StreamMessageResponse()
            update = response.arbitration
            update.device_id = self._device_id
            if name:
                update.role.name = name
            if role.highest is not None:
                update.election_id.high, update.election_id.low = role.highest >> 64, role.highest & (1 << 64) - 1
            if stream == primary:
                update.status.code = code_pb2.OK
                update.status.message = "you are the primary"
            elif primary is not None:
                update.status.code = code_pb2.ALREADY_EXISTS
                update.status.message = "another controller is the primary"
            else:
                update.status.code = code_pb2.NOT_FOUND
                update.status.message = "there is no primary"
            notes.append((stream, response))
        return notes
