"""Checks of a topology that need more than one of its values: each gives one line for a thing to fix.

What could not be read is None and is left out.
"""

from collections.abc import Hashable, Iterable, Iterator
from itertools import permutations
from typing import TYPE_CHECKING, Any

from checkmate import checked
from checkmate.rack import SHADOW_NICS, Group, Host, Nic, Shadow, Switch, group_number

if TYPE_CHECKING:
    from checkmate.topology import Topology

PIPE_PORTS = 128
"""Tofino numbers its ports by pipe: pipe 0 from 0, pipe 1 from 128, and so on."""
FRONT_PORTS = 64
"""The first of each pipe's numbers are lanes of front-panel ports; what follows recirculates or leads to the CPU."""

_MAX_PORT = 65535
"""Of TCP."""

_At = tuple[str, Any]
"""A value and its path."""


def cross_check(topology: "Topology") -> list[str]:
    """All that is wrong between the values of ``topology``."""
    nodes = [*_at("hosts", topology.hosts), *_at("shadows", topology.shadows)]
    nics = [(f"{path}.nics[{i}]", nic) for path, node in nodes for i, nic in enumerate(node.nics)]
    groups = list(_at("groups", topology.groups))
    return [
        *(line for path, node in nodes for line in _duplicates("interface of a node", _named_nics(path, node))),
        *_duplicates("name", [(f"{path}.name", node.name) for path, node in nodes]),
        *_duplicates("management address", [(f"{p}.management_ip", node.management_ip) for p, node in nodes]),
        *_duplicates("MAC address", [(f"{path}.mac", nic.mac) for path, nic in nics]),
        *_duplicates("IP address", [(f"{path}.ip", nic.ip) for path, nic in nics]),
        *_duplicates("switch port", [(f"{path}.port", nic.port) for path, nic in nics]),
        *_duplicates("group name", [(f"{path}.name", group.name) for path, group in groups]),
        *_check_mtu(topology.mtu, nics),
        *_check_ports(topology.switch, nics),
        *_check_policy(topology),
        *_check_shadow_nics(topology.shadows),
        *_check_members(topology, groups),
        *_check_host_ranks(topology),
        *_check_told_apart(groups),
        *_check_followed(topology),
        *_check_control_ports(topology),
    ]


def _at(key: str, items: Iterable[Any]) -> Iterator[_At]:
    return ((f"{key}[{i}]", item) for i, item in enumerate(items))


def _named_nics(path: str, node: Host | Shadow) -> list[_At]:
    return [(f"{path}.nics[{i}].name", nic.name) for i, nic in enumerate(node.nics)]


def _duplicates(what: str, values: Iterable[_At]) -> Iterator[str]:
    first: dict[Hashable, str] = {}
    for path, value in values:
        if value is not None and first.setdefault(value, path) != path:
            yield f"{path}: {value!r} is used twice, first at {first[value]}; each {what} is allowed once; change one"


def _check_mtu(mtu: int | None, nics: list[tuple[str, Nic]]) -> Iterator[str]:
    for path, nic in nics:
        if mtu is not None and nic.mtu not in (None, mtu):
            yield (
                f"{path}.mtu: {nic.mtu} is not the job's {mtu}; every link of a job has one MTU; "
                f"set the interface to {mtu} (ip link set {nic.name} mtu {mtu}) or change mtu"
            )


def _check_policy(topology: "Topology") -> Iterator[str]:
    if topology.switch and topology.policy == "lossless" and topology.switch.target in ("ebpf", "bmv2"):
        yield (
            f"policy: 'lossless' cannot be used; the target {topology.switch.target} has no PFC to pause senders with; "
            "allowed: isolate; remove the key"
        )


def _check_ports(switch: Switch | None, nics: list[tuple[str, Nic]]) -> Iterator[str]:
    """Whether the switch has the ports that the NICs are cabled to."""
    known = [(path, nic) for path, nic in nics if nic.port is not None]
    if switch is not None and switch.target == "tofino":
        yield from _check_tofino_ports(switch, known)
    if switch is None or not switch.interfaces:
        return
    at = "switch.interfaces"
    yield from _duplicates("interface", [(f"{at}[{port}]", name) for port, name in switch.interfaces.items()])
    for path, nic in known:
        if nic.port not in switch.interfaces:
            ports = ", ".join(map(str, sorted(switch.interfaces)))
            yield f"{path}.port: {nic.port} is no port of the switch; allowed: {ports}; add it to {at}"


def _check_tofino_ports(switch: Switch, nics: list[tuple[str, Nic]]) -> Iterator[str]:
    owners: dict[int, tuple[str, int]] = {}
    """Lane → path and number of the port that has it."""
    for path, nic in nics:
        link = switch.link_of(nic)
        lanes = range(nic.port, nic.port + link.lanes)
        taken = next((owners[lane] for lane in lanes if lane in owners and owners[lane][1] != nic.port), None)
        pipe, local = divmod(nic.port, PIPE_PORTS)
        if pipe >= switch.pipes or local >= FRONT_PORTS:
            ranges = ", ".join(f"{p * PIPE_PORTS} to {p * PIPE_PORTS + FRONT_PORTS - 1}" for p in range(switch.pipes))
            yield (
                f"{path}.port: {nic.port} is no front-panel port of {switch.pipes} pipes; allowed: {ranges}; "
                "correct it or switch.pipes"
            )
        elif nic.port % link.lanes:
            yield (
                f"{path}.port: {nic.port} cannot run at {link.speed}, which takes {link.lanes} lanes; "
                f"allowed: multiples of {link.lanes}; take {nic.port - nic.port % link.lanes} or a lower speed"
            )
        elif taken is not None:
            yield (
                f"{path}.port: {nic.port} at {link.speed} takes {link.lanes} lanes, of which {taken[0]} ({taken[1]}) "
                "has one; move one of the two"
            )
        else:
            owners |= dict.fromkeys(lanes, (f"{path}.port", nic.port))


def _check_shadow_nics(shadows: tuple[Shadow, ...]) -> Iterator[str]:
    for path, shadow in _at("shadows", shadows):
        if len(shadow.nics) != SHADOW_NICS:
            yield (
                f"{path}.nics: {len(shadow.nics)} given, exactly {SHADOW_NICS} are needed: the first and the last "
                f"rank of a ring send at the same time; give {shadow.name!r} {SHADOW_NICS} ports"
            )


def _check_members(topology: "Topology", groups: list[tuple[str, Group]]) -> Iterator[str]:
    hosts = [host.name for host in topology.hosts if host.name]
    shadows = [shadow.name for shadow in topology.shadows if shadow.name]
    for path, group in groups:
        yield from _unknown(f"{path}.ranks", group.ranks, hosts, "host")
        yield from _unknown(f"{path}.shadows", group.shadows, shadows, "shadow")
        yield from _duplicates("shadow of a group", [(f"{path}.shadows[{i}]", s) for i, s in enumerate(group.shadows)])
        yield from _scattered(f"{path}.ranks", group.ranks)
        if len(group.ranks) > 1 and len(set(group.ranks)) == 1 and group.shadows:
            yield (
                f"{path}.ranks: all on {group.ranks[0]!r}: their gradients cross no switch; add ranks on another host, "
                "or remove the group's shadows"
            )


def _scattered(path: str, hosts: tuple[str, ...]) -> Iterator[str]:
    for i, host in enumerate(hosts):
        if host in hosts[:i] and host != hosts[i - 1]:
            yield f"{path}[{i}]: {host!r} again, after {hosts[i - 1]!r}; a host's ranks follow each other; move it"


def _unknown(path: str, names: tuple[str, ...], known: list[str], kind: str) -> Iterator[str]:
    for i, name in enumerate(names):
        if name is not None and name not in known:
            yield f"{path}[{i}]: no {kind} is named {name!r}; {checked.choices(name, known)}"


def _check_host_ranks(topology: "Topology") -> Iterator[str]:
    known = {host.name for host in topology.hosts}
    if any(name not in known for group in topology.groups for name in group.ranks):
        return  # a name to be corrected first: it may be the one that is missed here
    for path, host in _at("hosts", topology.hosts):
        groups = [group.name for group in topology.groups for name in group.ranks if name == host.name]
        if host.name is None or host.ranks is None or len(groups) == host.ranks:
            continue
        found = f"has {len(groups)} places in groups ({', '.join(map(str, groups))})" if groups else "is in no group"
        yield (
            f"{path}.ranks: {host.name!r} runs {host.ranks} (default 1) but {found}; each rank of a host has one "
            f"place in one group; change the groups, or set ranks to {len(groups)}"
        )


def _check_told_apart(groups: list[tuple[str, Group]]) -> Iterator[str]:
    """A switch knows a group by ports and addresses alone: what goes between two hosts is copied in one way."""
    shadows: dict[str, tuple[str, Group]] = {}
    sides: dict[tuple[str, str], tuple[str, bool]] = {}
    for path, group in groups:
        for host in group.hosts:
            other_path, other = shadows.setdefault(host, (path, group))
            if group.shadows != other.shadows:
                yield (
                    f"{path}.shadows: {', '.join(group.shadows) or 'none'}, but {other_path} has "
                    f"{', '.join(other.shadows) or 'none'} and shares {host!r} with it; the switch cannot tell the two "
                    "apart; give both the same shadows, or other hosts"
                )
                break
        for pair in permutations(group.hosts, 2):
            first = pair[0] == group.hosts[0]
            other_path, other_first = sides.setdefault(pair, (path, first))
            if first != other_first:
                yield (
                    f"{path}.ranks: {pair[0]!r} sends to {pair[1]!r} here and in {other_path}, but is rank 0 of only "
                    "one; the switch cannot tell the two apart; put the same host first"
                )
                break


def _check_followed(topology: "Topology") -> Iterator[str]:
    """A shadow tells its groups apart by numbers made of their names."""
    for path, shadow in _at("shadows", topology.shadows):
        numbers: dict[int, str] = {}
        followed = [group.name for group in topology.followed(shadow) if group.name]
        for name in followed:
            other = numbers.setdefault(group_number(name), name)
            if other != name:
                yield (
                    f"groups: {path} follows {other!r} and {name!r}, whose frames look alike (a hash of the name of 16 "
                    "bits); rename one"
                )


def _check_control_ports(topology: "Topology") -> Iterator[str]:
    """A shadow has one for each of its groups, from its own on; other servers may be on the same machine."""
    p4runtime = topology.switch.p4runtime if topology.switch else None
    servers = {"registrar": topology.registrar, "switch.p4runtime": p4runtime}
    for path, shadow in _at("shadows", topology.shadows):
        first = shadow.control_port or 0
        ports = range(first, first + max(1, len(topology.followed(shadow))))
        what = f"{path}.control_port: {shadow.control_port} is the first of {len(ports)}, one for each of its groups"
        if ports[-1] > _MAX_PORT:
            yield f"{what}; allowed: 1 to {_MAX_PORT + 1 - len(ports)}"
        for at, server in servers.items():
            if server and server.host == shadow.management_ip and server.port in ports:
                yield f"{what}; {at} has {server.port} at the same address; move one of the two"
