"""How much each target's switch holds, and how much of it a plan uses: the one place for both."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


@dataclass(frozen=True)
class Limits:
    """``tables``: entries by the table's last name, as in the P4Info; ``replicas``: members of one multicast group.

    ``nodes``: of the replication engine, which takes one for each replica id of each group.
    """

    tables: Mapping[str, int]
    groups: int
    replicas: int
    nodes: int


_TABLES = {
    "classify": 64,
    "port_role": 512,
    "heartbeat": 4096,
    "live_group": 1024,
    "l2_forward": 4096,
    "rewrite": 2048,
}

LIMITS = {
    # The data path's own maps: p4/ebpf/maps.h.
    "ebpf": Limits(_TABLES, groups=1024, replicas=64, nodes=2048),
    # The simple_switch's replication engine has 4096 groups and as many nodes; ports are 9 bits wide.
    "bmv2": Limits(_TABLES, groups=4096, replicas=511, nodes=4096),
    # Tofino 1: 72 ports in each of 4 pipes; its engine would take 65536 groups, of which the design uses 1024.
    "tofino": Limits(_TABLES, groups=1024, replicas=288, nodes=1 << 24),
}


class Usage(NamedTuple):
    """``used`` of ``limit``; ``field``: the key of the topology that it grows with."""

    what: str
    field: str
    used: int
    limit: int
    reason: str


class _Entry(Protocol):
    @property
    def table(self) -> str: ...
    @property
    def match(self) -> tuple[Any, ...]: ...


class _Group(Protocol):
    @property
    def replicas(self) -> tuple[Any, ...]: ...


_TABLE_REASONS = {
    "heartbeat": ("groups", "one for each ordered pair of NICs of two hosts of a group"),
    "live_group": ("groups", "two for each receiving NIC"),
    "l2_forward": ("hosts", "one for each NIC of a host"),
    "port_role": ("hosts", "one for each NIC of a host or shadow"),
    "rewrite": ("shadows", "one for each NIC of a shadow"),
    "classify": ("dscp_tag", "one for the tag"),
}


def usage(target: str, entries: Iterable[_Entry], groups: Iterable[_Group]) -> tuple[Usage, ...]:
    """What rules take of each resource of a target."""
    limits, groups = LIMITS[target], list(groups)
    tables = [entry.table.rpartition(".")[2] for entry in entries if entry.match]
    return (
        *(
            Usage(f"{table} entries", field, tables.count(table), limits.tables[table], reason)
            for table, (field, reason) in _TABLE_REASONS.items()
        ),
        Usage("multicast groups", "groups", len(groups), limits.groups, "two for each receiving NIC, and the flood"),
        Usage(
            "replicas of one group",
            "hosts",
            max((len(group.replicas) for group in groups), default=0),
            limits.replicas,
            "flooding goes to every NIC of a host, a copy to every shadow of a group",
        ),
        Usage(
            "replication nodes",
            "groups",
            sum(len({rid for _, rid in group.replicas}) for group in groups),
            limits.nodes,
            "one for each replica id of a multicast group",
        ),
    )


def exceeded(target: str, found: Iterable[Usage]) -> list[str]:
    """A line for each resource of which more is needed than there is."""
    return [
        f"{use.field}: {use.used} {use.what} are needed ({use.reason}), {target} holds {use.limit}; "
        f"use fewer {use.field} or another switch"
        for use in found
        if use.used > use.limit
    ]
