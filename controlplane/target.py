"""What the control plane needs of a switch: the one interface that every target implements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from checkmate.config import CheckmateError
from checkmate.plan import Item, Key, Rules


class TargetError(CheckmateError):
    """The switch refused something; the text says what."""


class UnreachableError(TargetError):
    """The switch does not answer, or went away: worth trying again."""


class NotPrimaryError(TargetError):
    """Another controller is the switch's primary: nothing was written. Its end makes us the primary."""


class Kind(Enum):
    """What an update does. A table always has a default action: inserting one sets it, deleting it resets it."""

    INSERT = "insert"
    MODIFY = "modify"
    DELETE = "delete"


@dataclass(frozen=True)
class Update:
    """One change of one table entry or multicast group."""

    kind: Kind
    item: Item

    def __str__(self) -> str:
        return f"{self.kind.value} {self.item}"


class Count(NamedTuple):
    """A counter's value."""

    packets: int
    bytes: int


@dataclass(frozen=True)
class Counters:
    """``ports``: counter → switch port → value, zeros left out; ``entries``: value of each counted entry by key."""

    ports: Mapping[str, Mapping[int, Count]] = field(default_factory=dict)
    entries: Mapping[Key, Count] = field(default_factory=dict)


class Target(Protocol):
    """A switch. Calls come from one thread at a time, and each ends within a bounded time.

    All raise UnreachableError when the switch does not answer and TargetError when it refuses.
    """

    def connect(self) -> None:
        """Become the switch's controller and make sure that it runs our pipeline; does nothing when that is so.

        Raises NotPrimaryError while another controller is: call again, the switch is ours soon after that one's end.
        """

    def read(self) -> Rules:
        """All that the switch holds; a table's default action only where it is not the program's own."""

    def apply(self, updates: Sequence[Update]) -> None:
        """Make the changes, in any order; those that can be made are made even when others are refused."""

    def counters(self, ports: Sequence[int]) -> Counters:
        """Values of the counters of ``ports`` and of all counted entries."""

    def close(self) -> None:
        """Let go of the switch; what it holds stays."""
