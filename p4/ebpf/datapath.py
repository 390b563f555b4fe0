"""What the P4Runtime server asks of a data path: small typed calls, so that tests can put a recording in its place."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class Counter(Enum):
    """The counters that exist once per port, by their P4 names."""

    TAGGED_IN = "CheckmateIngress.tagged_in"
    UNTAGGED = "CheckmateIngress.untagged"
    TAGGED_WITHOUT_OPTION = "CheckmateIngress.tagged_without_option"
    GROUP_MISSING = "CheckmateIngress.group_missing"
    SHADOW_DROPPED = "CheckmateIngress.shadow_dropped"
    MALFORMED = "CheckmateIngress.malformed"
    DROPPED = "CheckmateIngress.dropped"
    COPIES_OUT = "CheckmateEgress.copies_out"
    REWRITE_MISSING = "CheckmateEgress.rewrite_missing"


@dataclass(frozen=True)
class Count:
    """Frames and bytes, both as on the wire (without FCS)."""

    packets: int = 0
    bytes: int = 0

    def __add__(self, other: "Count") -> "Count":
        return Count(self.packets + other.packets, self.bytes + other.bytes)


@dataclass(frozen=True)
class Registrar:
    """Where a shadow's registration may go: IPv4 address as an integer, TCP port."""

    ip: int
    port: int


@dataclass(frozen=True)
class Replica:
    """A member of a multicast group."""

    port: int
    rid: int


@dataclass(frozen=True)
class Forward:
    """Send to one port."""

    port: int


@dataclass(frozen=True)
class Flood:
    """Send to every port of a multicast group but the one the frame came from."""

    group: int


@dataclass(frozen=True)
class Drop:
    """Send nowhere."""


L2Action = Forward | Flood | Drop


@dataclass(frozen=True)
class Rewrite:
    """Addresses of a copy: Ethernet addresses of 6 bytes, IPv4 address as an integer."""

    src_mac: bytes
    dst_mac: bytes
    dst_ip: int


class DatapathFull(Exception):
    """A table of the data path has no room for another entry."""


class Datapath(Protocol):
    """The switch below the server. Setting None removes an entry; setting twice replaces.

    Raises DatapathFull, CheckmateError for what a user can fix, OSError for the rest; then nothing has changed.
    """

    @property
    def ports(self) -> frozenset[int]:
        """Port numbers that have an interface."""

    def set_tagged_dscps(self, dscps: frozenset[int]) -> None:
        """DSCP values that mark the tagged flow."""

    def set_shadow_port(self, port: int, registrar: Registrar | None) -> None:
        """A port towards a shadow, from which only registration traffic passes; None: an ordinary port."""

    def set_heartbeat(self, port: int, dst_mac: bytes, group: int | None) -> None:
        """Multicast group for tagged frames from a port to an address; replacing keeps the entry's counter."""

    def set_l2(self, dst_mac: bytes, action: L2Action | None) -> None:
        """Where frames to an address go."""

    def set_l2_default(self, action: L2Action) -> None:
        """Where frames to any other address go."""

    def set_live_group(self, group: int, live: bool) -> None:
        """Whether copies may be made with a multicast group; without, or without the group, frames are forwarded."""

    def set_group(self, group: int, replicas: tuple[Replica, ...] | None) -> None:
        """Members of a multicast group, at most ``max_replicas``."""

    def set_rewrite(self, port: int, rid: int, rewrite: Rewrite | None) -> None:
        """What a copy on its way out looks like."""

    def read_counter(self, counter: Counter, ports: range) -> list[Count]:
        """A counter of each port of the range."""

    def write_counter(self, counter: Counter, ports: Iterable[int], value: Count) -> None:
        """Set a counter."""

    def read_heartbeat(self, port: int, dst_mac: bytes) -> Count:
        """Counter of a heartbeat entry."""

    def write_heartbeat(self, port: int, dst_mac: bytes, value: Count) -> None:
        """Set the counter of a heartbeat entry."""
