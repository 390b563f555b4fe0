"""A switch that exists in memory alone: for tests and for looking at what a plan would do."""

from collections.abc import Sequence
from dataclasses import replace

from checkmate.controlplane.target import Counters, Kind, TargetError, Update
from checkmate.plan import Entry, Item, Rules


class FakeTarget:
    """Refuses what a real switch refuses, group references included.

    ``job``: the owner of what is written; ``switch``: another one, whose switch this is the controller of, too.
    """

    def __init__(self, job: str = "", switch: "FakeTarget | None" = None) -> None:
        self._job = job
        self._items: dict[object, Item] = {} if switch is None else switch._items

    def connect(self) -> None:
        """There is nothing to connect to."""

    def read(self) -> Rules:
        """What was written."""
        items = self._items.values()
        entries = [item for item in items if isinstance(item, Entry)]
        return Rules.of(entries, [item for item in items if not isinstance(item, Entry)])

    def apply(self, updates: Sequence[Update]) -> None:
        """One by one; the refused ones are reported together."""
        refused = [f"{update}: {reason}" for update in updates if (reason := self._apply_one(update))]
        if refused:
            raise TargetError("the switch refused:\n" + "\n".join(f"  {line}" for line in refused))

    def counters(self, ports: Sequence[int]) -> Counters:
        """Nothing passes, nothing is counted."""
        return Counters()

    def close(self) -> None:
        """Nothing to let go of."""

    def restart(self) -> None:
        """Forget everything, as a switch does that was switched off."""
        self._items.clear()

    def _apply_one(self, update: Update) -> str | None:
        item = update.item
        there = item.key in self._items or (isinstance(item, Entry) and not item.match)
        if update.kind is Kind.INSERT and item.key in self._items:
            return "ALREADY_EXISTS"
        if update.kind is not Kind.INSERT and not there:
            return "NOT_FOUND"
        if update.kind is Kind.DELETE:
            return self._delete(item)
        if isinstance(item, Entry) and item.group is not None and item.group not in self._items:
            return f"FAILED_PRECONDITION: there is no multicast group {item.group}"
        self._items[item.key] = replace(item, owner=self._job) if isinstance(item, Entry) else item
        return None

    def _delete(self, item: Item) -> str | None:
        users = [user for user in self._items.values() if isinstance(user, Entry) and user.group == item.key]
        if users:
            return f"FAILED_PRECONDITION: still in use by {users[0]}"
        self._items.pop(item.key, None)
        return None
