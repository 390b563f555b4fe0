"""Several jobs on one switch: each has a controller that changes what is its own, and leaves the others' alone.

An entry says itself whose it is. A multicast group belongs to the job that set the role of its ports; that role is
written before the group and removed after it. The flood group is everybody's: each job answers for its own ports.
"""

from dataclasses import replace

from checkmate.plan import FLOOD_GROUP, PORT_ROLE, Multicast, Rules


def scope(held: Rules, wanted: Rules, job: str) -> tuple[Rules, Rules]:
    """What of ``held`` is ``job``'s or nobody's, and what that must become for ``wanted`` to be there, owners included.

    What another job holds and ``wanted`` has in the same form is shared. In another form it is in the way: it is not
    in the first result, so that inserting it is refused by the switch.
    """
    others = _ports_of_others(held, job)
    shared = {entry.key: entry for entry in wanted.entries}
    entries = [entry for entry in held.entries if entry.owner in ("", job) or shared.get(entry.key) == entry]
    groups = [group for group in held.groups if group.id == FLOOD_GROUP or not others & _ports(group)]
    goal = Rules.of(
        [replace(entry, owner=job) for entry in wanted.entries],
        [_keeping(group, held, others) for group in wanted.groups],
    )
    return Rules.of(entries, groups), goal


def _ports_of_others(held: Rules, job: str) -> frozenset[int]:
    roles = [entry for entry in held.entries if entry.table == PORT_ROLE and entry.owner not in ("", job)]
    return frozenset(value for entry in roles for _, value in entry.match if isinstance(value, int))


def _ports(group: Multicast) -> set[int]:
    return {replica.port for replica in group.replicas}


def _keeping(group: Multicast, held: Rules, others: frozenset[int]) -> Multicast:
    """The flood group with the other jobs' ports in it; any other group as it is."""
    if group.id != FLOOD_GROUP:
        return group
    before = next((old.replicas for old in held.groups if old.id == FLOOD_GROUP), ())
    theirs = {replica for replica in before if replica.port in others}
    return Multicast(group.id, tuple(sorted({*group.replicas, *theirs})))
