"""Brings a switch from whatever it holds to what the plan says, writing only the difference.

The order is make before break: a group, then the entry that declares it live, then what copies by it; removal the other
way round. In every state on the way, after any prefix of the batches and any part of a batch, an entry refers only to a
group that exists, and training traffic is forwarded. So a controller may die at any point: the next one reads what is
there and carries on.
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from checkmate.controlplane.ownership import scope
from checkmate.controlplane.target import Kind, Target, TargetError, Update
from checkmate.plan import HEARTBEAT, L2_FORWARD, LIVE_GROUP, Entry, Item, Multicast, Rules, diff

BATCH = 256
"""Updates in one request at most."""

_log = logging.getLogger("checkmate.reconcile")


@dataclass(frozen=True)
class Outcome:
    """``written``: updates made, 0 when all was as it must be; ``dangling``: entries found that led to no group."""

    written: int
    dangling: tuple[Entry, ...]


def reconcile(target: Target, wanted: Rules, job: str = "") -> Outcome:
    """Make the switch hold exactly ``wanted``, and what is another job's than ``job``.

    Raises TargetError when the switch refuses an update or does not hold what it accepted.
    """
    current, goal = scope(target.read(), wanted, job)
    dangling = current.dangling()
    for entry in dangling:
        _log.warning("the switch holds an entry for a multicast group that does not exist, repairing: %s", entry)
    written = 0
    for batch in batches(current, goal):
        target.apply(batch)
        written += len(batch)
    if written and (left := diff(*scope(target.read(), wanted, job))):
        raise TargetError(f"the switch accepted all updates but holds something else (- held, + wanted):\n{left}")
    return Outcome(written, dangling)


def batches(current: Rules, wanted: Rules) -> Iterator[list[Update]]:
    """The updates in batches: each may be applied in any order, and all of it before the next."""
    for step in _steps(current, wanted):
        for start in range(0, len(step), BATCH):
            yield step[start : start + BATCH]


def _steps(current: Rules, wanted: Rules) -> Iterator[list[Update]]:
    held: dict[object, Item] = {item.key: item for item in current.items}
    lost, misled = _lost(current), _misled(current, wanted)
    forwarding = [entry for entry in wanted.entries if entry.table == L2_FORWARD]
    copying = [entry for entry in wanted.entries if entry.table != L2_FORWARD]
    flooded = {entry.group for entry in forwarding}

    yield [_remove(held, entry) for entry in lost]
    # What training needs comes first: whatever the switch refuses later, its traffic flows.
    yield list(_writes(held, (entry for entry in forwarding if not _refers(entry))))
    yield [_remove(held, entry) for entry in misled]
    yield list(_writes(held, (group for group in wanted.groups if group.id in flooded)))
    yield list(_writes(held, (entry for entry in forwarding if _refers(entry))))
    # What makes copies right comes before what makes copies.
    yield list(_writes(held, (entry for entry in copying if not _refers(entry))))
    yield list(_writes(held, wanted.groups))
    yield list(_writes(held, filter(_declares, copying)))
    yield list(_writes(held, copying))
    # What the plan no longer holds goes last, users before what they use.
    keys = {item.key for item in wanted.items}
    stale = [item for item in held.values() if item.key not in keys]
    yield [_remove(held, item) for item in stale if _refers(item) and not _declares(item)]
    yield [_remove(held, item) for item in stale if _declares(item)]
    yield [_remove(held, item) for item in stale if not _refers(item)]


def _refers(item: Item) -> bool:
    return isinstance(item, Entry) and item.group is not None


def _declares(item: Item) -> bool:
    return isinstance(item, Entry) and item.table == LIVE_GROUP


def _copying(rules: Rules) -> list[tuple[Entry, tuple[int, ...]]]:
    """Entries that copy, with the ports that their groups forward to. Without them frames are forwarded by address."""
    forwarding = {group.id: group.forwarding for group in rules.groups}
    return [
        (entry, forwarding.get(entry.group, ()))
        for entry in rules.entries
        if entry.table in (HEARTBEAT, LIVE_GROUP) and entry.group is not None
    ]


def _lost(current: Rules) -> list[Entry]:
    """Copying entries whose group forwards to nobody, or does not exist: a switch may be losing frames by them."""
    return [entry for entry, ports in _copying(current) if not ports]


def _misled(current: Rules, wanted: Rules) -> list[Entry]:
    """Copying entries that refer to a group whose number means another destination in ``wanted``."""
    after: dict[int | None, tuple[int, ...]] = {group.id: group.forwarding for group in wanted.groups}
    return [entry for entry, ports in _copying(current) if ports and ports != after.get(entry.group, ports)]


def _writes(held: dict[object, Item], items: Iterable[Entry] | Iterable[Multicast]) -> Iterator[Update]:
    """Inserts and modifications that make ``held`` contain ``items``; notes them in ``held``."""
    for item in items:
        before = held.get(item.key)
        if before != item or _is_unclaimed(before, item):
            held[item.key] = item
            yield Update(Kind.INSERT if before is None else Kind.MODIFY, item)


def _is_unclaimed(held: Item, wanted: Item) -> bool:
    """Whether nobody's entry is to become a job's: the others would take it for something to be removed."""
    return isinstance(held, Entry) and isinstance(wanted, Entry) and not held.owner and bool(wanted.owner)


def _remove(held: dict[object, Item], item: Item) -> Update:
    del held[item.key]
    return Update(Kind.DELETE, item)
