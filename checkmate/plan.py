"""The plan: which entries and multicast groups the switch must hold for a topology and the shadows that are alive.

``make_plan`` is pure: the same topology and the same live shadows give the same plan, group numbers included, on every
machine. Group numbers depend on the destination's port alone, so that a shadow that comes or goes changes members of
groups but never what a number means.
"""

import ipaddress
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from checkmate import config, limits
from checkmate.config import CheckmateError
from checkmate.limits import Usage
from checkmate.queues import Queue, make_queues
from checkmate.topology import Group, Nic, Topology, TopologyError, mac_to_int

CLASSIFY = "CheckmateIngress.classify"
PORT_ROLE = "CheckmateIngress.port_role"
HEARTBEAT = "CheckmateIngress.heartbeat"
LIVE_GROUP = "CheckmateIngress.live_group"
L2_FORWARD = "CheckmateIngress.l2_forward"
REWRITE = "CheckmateEgress.rewrite"

REPLICATE = "CheckmateIngress.replicate"
"""Its one parameter, ``group``, names a multicast group, as that of FLOOD does."""
FLOOD = "CheckmateIngress.flood"
GROUP_IS_LIVE = "CheckmateIngress.group_is_live"
"""Of a multicast group: it is there. Without such an entry, heartbeat entries that name the group only forward."""

FLOOD_GROUP = 1
SCHEMA = 1
"""Version of what ``Plan.to_dict`` gives."""

_COPY_SOURCE_MAC = 0x02_43_4B_00_00_00
"""Source address of copies, the shadow's port number in its low 16 bits: a capture tells them from originals."""


class Ternary(NamedTuple):
    """A value of which only the bits of ``mask`` are compared."""

    value: int
    mask: int


Key = tuple[str, tuple[tuple[str, "int | Ternary"], ...], int]
"""What tells two entries apart: table, match and priority."""


@dataclass(frozen=True)
class Entry:
    """A table entry; without ``match`` it is the table's default action.

    ``match`` and ``params`` are in the order of the P4Info; all values are plain integers (MAC 48 bits, IPv4 32).
    ``owner``: the job that wrote what was read from a switch, empty where nobody said so.
    """

    table: str
    match: tuple[tuple[str, int | Ternary], ...]
    action: str
    params: tuple[tuple[str, int], ...] = ()
    priority: int = 0
    owner: str = field(default="", compare=False)

    @property
    def key(self) -> Key:
        """Entries with equal keys replace each other."""
        return self.table, self.match, self.priority

    @property
    def group(self) -> int | None:
        """The multicast group that the entry refers to, if it does."""
        fields: dict[str, int | Ternary] = dict(self.match if self.table == LIVE_GROUP else self.params)
        group = fields.get("group")
        return group if isinstance(group, int) else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, addresses as text."""
        return {
            "table": self.table,
            "match": {name: show(name, value) for name, value in self.match},
            "action": self.action,
            "params": {name: show(name, value) for name, value in self.params},
            "priority": self.priority,
        }

    def __str__(self) -> str:
        match = " ".join(f"{name}={show(name, value)}" for name, value in self.match) or "default"
        params = ", ".join(f"{name}={show(name, value)}" for name, value in self.params)
        return f"{_short(self.table)}: {match} → {_short(self.action)}({params})"


class Replica(NamedTuple):
    """One copy that a multicast group makes."""

    port: int
    rid: int


@dataclass(frozen=True, order=True)
class Multicast:
    """A group of the packet replication engine; ``replicas`` are sorted."""

    id: int
    replicas: tuple[Replica, ...]

    @property
    def key(self) -> int:
        """Groups with equal keys replace each other."""
        return self.id

    @property
    def forwarding(self) -> tuple[int, ...]:
        """Ports that get the original, unchanged."""
        return tuple(replica.port for replica in self.replicas if replica.rid != config.SHADOW_RID)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"id": self.id, "replicas": [replica._asdict() for replica in self.replicas]}

    def __str__(self) -> str:
        members = ", ".join(f"port {port} rid {rid}" for port, rid in self.replicas)
        return f"group {self.id}: {members or 'empty'}"


Item = Entry | Multicast


@dataclass(frozen=True)
class Rules:
    """What a switch holds or must hold. Build with ``Rules.of``: sorted, one of a key."""

    entries: tuple[Entry, ...] = ()
    groups: tuple[Multicast, ...] = ()

    @classmethod
    def of(cls, entries: Iterable[Entry], groups: Iterable[Multicast]) -> "Rules":
        """Sort; raises CheckmateError when two entries or two groups have the same key."""
        rules = cls(tuple(sorted(entries, key=_order)), tuple(sorted(groups)))
        pairs: list[tuple[Item, Item]] = [*pairwise(rules.entries), *pairwise(rules.groups)]
        for before, after in pairs:
            if before.key == after.key:
                raise CheckmateError(f"two rules for the same traffic: {before} and {after}; change the topology")
        return rules

    @property
    def items(self) -> tuple[Item, ...]:
        """Groups, then entries."""
        return (*self.groups, *self.entries)

    def dangling(self) -> tuple[Entry, ...]:
        """Entries that refer to a multicast group that does not exist."""
        known = {group.id for group in self.groups}
        return tuple(entry for entry in self.entries if entry.group is not None and entry.group not in known)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "entries": [entry.to_dict() for entry in self.entries],
            "groups": [group.to_dict() for group in self.groups],
        }


@dataclass(frozen=True)
class Difference:
    """What must be done to get from one set of rules to another."""

    added: tuple[Item, ...]
    changed: tuple[tuple[Item, Item], ...]
    removed: tuple[Item, ...]

    def __bool__(self) -> bool:
        return bool(self.added or self.changed or self.removed)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "equal": not self,
            "removed": [item.to_dict() for item in self.removed],
            "changed": [{"before": before.to_dict(), "after": after.to_dict()} for before, after in self.changed],
            "added": [item.to_dict() for item in self.added],
        }

    def __str__(self) -> str:
        lines = [f"- {item}" for item in self.removed]
        lines += [line for before, after in self.changed for line in (f"- {before}", f"+ {after}")]
        return "\n".join(lines + [f"+ {item}" for item in self.added])


def diff(old: Rules, new: Rules) -> Difference:
    """The difference; everything in the order of the rules."""
    before, after = ({item.key: item for item in rules.items} for rules in (old, new))
    return Difference(
        added=tuple(item for key, item in after.items() if key not in before),
        changed=tuple((before[key], item) for key, item in after.items() if before.get(key, item) != item),
        removed=tuple(item for key, item in before.items() if key not in after),
    )


@dataclass(frozen=True)
class Plan:
    """The rules for a topology and its live shadows, what their numbers mean, and the queues of a hardware switch."""

    job: str
    target: str
    policy: str
    live: tuple[str, ...]
    rules: Rules
    ports: Mapping[int, str]
    group_names: Mapping[int, str]
    queues: tuple[Queue, ...]

    @property
    def usage(self) -> tuple[Usage, ...]:
        """What the rules take of each resource of the switch."""
        return limits.usage(self.target, self.rules.entries, self.rules.groups)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: keys stay, and mean what they mean, as long as ``schema`` is the same."""
        return {
            "schema": SCHEMA,
            "job": self.job,
            "target": self.target,
            "policy": self.policy,
            "live_shadows": list(self.live),
            "ports": {str(port): name for port, name in self.ports.items()},
            "group_names": {str(number): name for number, name in self.group_names.items()},
            **self.rules.to_dict(),
            "queues": [queue.to_dict() for queue in self.queues],
            "usage": {use.what: {"used": use.used, "limit": use.limit} for use in self.usage},
        }


def make_plan(topology: Topology, live_shadows: AbstractSet[str]) -> Plan:
    """The plan; shadows that are not alive have no part in it, and a group without a live one is only forwarded.

    Raises CheckmateError for an unknown shadow, TopologyError with all of the switch's limits that are exceeded.
    """
    for name in live_shadows:
        topology.shadow(name)
    groups, heartbeats = _replication(topology, live_shadows)
    hosts = [(host.name, nic) for host in topology.hosts for nic in host.nics]
    shadows = [(shadow.name, nic) for shadow in topology.shadows for nic in shadow.nics]
    flood = Multicast(FLOOD_GROUP, tuple(sorted(Replica(nic.port, 0) for _, nic in hosts)))
    names = {FLOOD_GROUP: "broadcast and unknown addresses"}
    names |= dict(_numbers(topology).values())
    live = (Entry(LIVE_GROUP, (("group", group.id),), GROUP_IS_LIVE) for group in groups)
    rules = Rules.of(
        [*_forwarding(topology, [nic for _, nic in hosts]), *_shadow_ports(topology), *heartbeats, *live],
        [flood, *groups],
    )
    plan = Plan(
        job=topology.job,
        target=topology.switch.target,
        policy=topology.policy,
        live=tuple(sorted(live_shadows)),
        rules=rules,
        ports=dict(sorted((nic.port, f"{name}/{nic.name}") for name, nic in hosts + shadows)),
        group_names={group.id: names[group.id] for group in rules.groups},
        queues=make_queues(topology),
    )
    if problems := limits.exceeded(plan.target, plan.usage):
        raise TopologyError(f"job {topology.job}", problems)
    return plan


def receivers(topology: Topology, rules: Rules) -> frozenset[str]:
    """Names of the shadows for which a switch with these rules makes copies."""
    ports = {port for group in rules.groups for port, rid in group.replicas if rid == config.SHADOW_RID}
    return frozenset(shadow.name for shadow in topology.shadows if any(nic.port in ports for nic in shadow.nics))


def _numbers(topology: Topology) -> dict[tuple[int, int], tuple[int, str]]:
    """Number and meaning of each possible multicast group, by (destination port, NIC index of the shadow).

    The destination port alone gives the number, so that jobs on one switch, which share no port, share none either.
    Groups of one host share its numbers: they have the same shadows.
    """
    names: dict[str, list[str]] = {}
    for group in topology.groups:
        for host in group.hosts:
            names.setdefault(host, []).append(group.name)
    return {
        (nic.port, side): (
            FLOOD_GROUP + 1 + 2 * nic.port + side,
            f"{_some(names[host])}: {'rank 0' if side == 0 else 'other ranks'} to {host}/{nic.name}",
        )
        for host in names
        for nic in topology.host(host).nics
        for side in (0, 1)
    }


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _replication(topology: Topology, live: AbstractSet[str]) -> tuple[list[Multicast], list[Entry]]:
    numbers = _numbers(topology)
    groups: dict[int, Multicast] = {}
    entries: dict[Key, Entry] = {}
    for group in topology.groups:
        shadows = [topology.shadow(name) for name in group.shadows if name in live]
        if not shadows:
            continue
        for side, source, target in _flows(topology, group):
            copies = [Replica(shadow.nics[side].port, config.SHADOW_RID) for shadow in shadows]
            number, _ = numbers[target.port, side]
            groups[number] = Multicast(number, tuple(sorted([Replica(target.port, 0), *copies])))
            match = (("ingress_port", source.port), ("ethernet.dst_addr", mac_to_int(target.mac)))
            entry = Entry(HEARTBEAT, match, REPLICATE, (("group", number),))
            entries[entry.key] = entry
    return list(groups.values()), list(entries.values())


def _flows(topology: Topology, group: Group) -> Iterator[tuple[int, Nic, Nic]]:
    """(shadow NIC index, source, destination) of every ordered pair of hosts, over all of their NICs.

    All pairs, because the rings of a communicator's channels may order the ranks differently. What leaves the host of
    rank 0 is the first rank's, whatever rank of the host that is; all else is a last rank's.
    """
    hosts = [topology.host(name) for name in group.hosts]
    for index, source in enumerate(hosts):
        for target in hosts:
            if target is not source:
                yield from ((min(index, 1), s, t) for s in source.nics for t in target.nics)


def _forwarding(topology: Topology, hosts: list[Nic]) -> Iterator[Entry]:
    tag = Ternary(topology.dscp_tag, topology.dscp_tag)
    yield Entry(CLASSIFY, (("ipv4.dscp", tag),), "CheckmateIngress.mark_tagged", priority=1)
    yield Entry(L2_FORWARD, (), FLOOD, (("group", FLOOD_GROUP),))
    for nic in hosts:
        destination = (("ethernet.dst_addr", mac_to_int(nic.mac)),)
        yield Entry(L2_FORWARD, destination, "CheckmateIngress.forward", (("port", nic.port),))
        yield Entry(PORT_ROLE, (("ingress_port", nic.port),), "CheckmateIngress.trainer_port")


def _shadow_ports(topology: Topology) -> Iterator[Entry]:
    """Roles and rewriting of shadow ports. They depend on no shadow being alive: harmless, and always there first."""
    registrar = (("registrar_ip", _ip(topology.registrar.host)), ("registrar_port", topology.registrar.port))
    for shadow in topology.shadows:
        for nic in shadow.nics:
            yield Entry(PORT_ROLE, (("ingress_port", nic.port),), "CheckmateIngress.shadow_port", registrar)
            addresses = (
                ("src_mac", _COPY_SOURCE_MAC | nic.port),
                ("dst_mac", mac_to_int(nic.mac)),
                ("dst_ip", _ip(nic.ip)),
            )
            replica = (("egress_port", nic.port), ("egress_rid", config.SHADOW_RID))
            yield Entry(REWRITE, replica, "CheckmateEgress.to_shadow", addresses)


def show(name: str, value: int | Ternary) -> str | int:
    """A value of the field or parameter ``name`` as people write it: addresses as text, others unchanged."""
    if isinstance(value, Ternary):
        return f"0x{value.value:02x}&&&0x{value.mask:02x}"
    return next((text(value) for suffix, text in _TEXT.items() if name.endswith(suffix)), value)


def _mac_text(value: int) -> str:
    return value.to_bytes(6, "big").hex(":")


def _ip_text(value: int) -> str:
    return str(ipaddress.IPv4Address(value))


_TEXT: dict[str, Callable[[int], str]] = {"_addr": _mac_text, "_mac": _mac_text, "_ip": _ip_text}


def _ip(text: str) -> int:
    return int(ipaddress.IPv4Address(text))


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def _order(entry: Entry) -> tuple[Any, ...]:
    """Entries of a table have the same fields, so that these tuples can be compared."""
    return entry.table, bool(entry.match), [value for _, value in entry.match], entry.priority
