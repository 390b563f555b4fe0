"""What a rack is made of: hosts, shadows, their interfaces, the switch, data-parallel groups, and how each is read.

The dataclasses are plain values. ``read_*`` take one from a map of the topology file and note what is wrong in it;
what cannot be read is None. Checks that need more than one value are in ``rack_checks``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from checkmate import checked, config
from checkmate.checked import Endpoint, Map
from checkmate.config import CheckmateError

TARGETS = ("ebpf", "bmv2", "tofino")
MAX_PORT = 510
"""Largest switch port number: ports are 9 bits wide and 511 is the drop port of v1model."""

SHADOW_NICS = 2
"""A shadow needs two: first's flow arrives on one, last's on the other (both are tagged at the same time)."""

MAX_HOST_RANKS = 64

SPEED_LANES = {"10G": 1, "25G": 1, "40G": 4, "50G": 2, "100G": 4}
"""Serial lanes of a port; a Tofino port takes as many consecutive port numbers."""

FEC_BY_SPEED = {
    "10G": ("none", "fc"),
    "25G": ("rs", "fc", "none"),
    "40G": ("none", "fc"),
    "50G": ("rs", "fc", "none"),
    "100G": ("rs", "none"),
}
"""Forward error correction that each speed allows (IEEE 802.3 clauses 74 and 91/108), the usual one first."""


@dataclass(frozen=True)
class Link:
    """How a hardware switch runs a port; ``autoneg`` None: as the plugged-in medium wants it."""

    speed: str = "100G"
    fec: str = "rs"
    autoneg: bool | None = None

    @property
    def lanes(self) -> int:
        """Serial lanes, and so consecutive port numbers."""
        return SPEED_LANES[self.speed]

    @property
    def bits_per_second(self) -> int:
        """Nominal rate."""
        return int(self.speed.removesuffix("G")) * 10**9


@dataclass(frozen=True)
class Nic:
    """A network interface and the switch port that it is cabled to.

    ``mtu`` in bytes, if the file says what the interface has; ``link`` None: as the switch's.
    """

    name: str
    mac: str
    ip: str
    port: int
    mtu: int | None = None
    link: Link | None = None


@dataclass(frozen=True)
class Host:
    """A training node; ``netns`` is the network namespace that it lives in, None: the machine's own.

    ``ranks``: how many ranks run on it, in one group or several; 0: it is only forwarded to.
    """

    name: str
    management_ip: str
    nics: tuple[Nic, ...]
    netns: str | None = None
    ranks: int = 1

    def nics_of(self, local_rank: int) -> tuple[Nic, ...]:
        """The NICs that one of the host's ranks uses: its share, or, where ranks are more than NICs, one."""
        return self.nics[local_rank % len(self.nics) :: self.ranks]


@dataclass(frozen=True)
class Shadow:
    """A shadow node; ``nics[0]`` receives tagged flows from the host of rank 0, ``nics[1]`` those from all others."""

    name: str
    management_ip: str
    nics: tuple[Nic, ...]
    netns: str | None = None
    control_port: int = config.CONTROL_PORT

    @property
    def control(self) -> Endpoint:
        """Address of the shadow's control server."""
        return Endpoint(self.management_ip, self.control_port)


def group_number(name: str) -> int:
    """What frames of the data-parallel group of this name carry (16 bits, ``ckm_group_number`` in wire.h)."""
    number = 2166136261
    for byte in name.encode():
        number = (number ^ byte) * 16777619 & 0xFFFFFFFF
    return (number >> 16 ^ number) & 0xFFFF


@dataclass(frozen=True)
class Group:
    """A data-parallel group: rank r runs on host ``ranks[r]``; its gradients go to every shadow in ``shadows``.

    Ranks of one host follow each other.
    """

    name: str
    ranks: tuple[str, ...]
    shadows: tuple[str, ...]

    @property
    def hosts(self) -> tuple[str, ...]:
        """Its hosts in the order of their ranks; the first is that of rank 0."""
        return tuple(dict.fromkeys(self.ranks))

    @property
    def host_ranks(self) -> tuple[int, ...]:
        """Of each of these hosts: how many of the group's ranks run on it."""
        return tuple(self.ranks.count(host) for host in self.hosts)


@dataclass(frozen=True)
class Switch:
    """The switch; ``interfaces`` (port → network interface) is for software switches only.

    ``pipes`` and ``link``, what every port runs at whose NIC says nothing else, are for Tofino only.
    """

    target: str
    p4runtime: Endpoint
    device_id: int = 1
    interfaces: Mapping[int, str] = field(default_factory=dict, hash=False)
    netns: str | None = None
    pipes: int = 2
    link: Link = Link()

    def link_of(self, nic: Nic) -> Link:
        """How the port of ``nic`` runs."""
        return nic.link or self.link


def named(nodes: tuple[Any, ...], name: str, kind: str) -> Any:
    """The one of that name; raises CheckmateError when there is none."""
    for node in nodes:
        if node.name == name:
            return node
    raise CheckmateError(f"no {kind} is named {name!r}; {checked.choices(name, [node.name for node in nodes])}")


# Into plain values: keys that are not set are left out.


def switch_dict(switch: Switch) -> dict[str, Any]:
    """The inverse of ``read_switch``."""
    tofino = {"pipes": switch.pipes, "link": link_dict(switch.link)} if switch.target == "tofino" else {}
    return tofino | without_none(
        target=switch.target,
        p4runtime=str(switch.p4runtime),
        device_id=switch.device_id,
        interfaces=dict(switch.interfaces) or None,
        netns=switch.netns,
    )


def host_dict(host: Host) -> dict[str, Any]:
    """The inverse of ``read_host``."""
    return _node_dict(host) | ({} if host.ranks == 1 else {"ranks": host.ranks})


def shadow_dict(shadow: Shadow) -> dict[str, Any]:
    """The inverse of ``read_shadow``."""
    return _node_dict(shadow) | {"control_port": shadow.control_port}


def group_dict(group: Group) -> dict[str, Any]:
    """The inverse of ``read_group``."""
    return {"name": group.name, "ranks": list(group.ranks), "shadows": list(group.shadows)}


def link_dict(link: Link) -> dict[str, Any]:
    """The inverse of ``read_link``."""
    return without_none(speed=link.speed, fec=link.fec, autoneg=link.autoneg)


def without_none(**values: Any) -> dict[str, Any]:
    """The values that are not None."""
    return {key: value for key, value in values.items() if value is not None}


def _node_dict(node: Host | Shadow) -> dict[str, Any]:
    nics = [_nic_dict(nic) for nic in node.nics]
    return without_none(name=node.name, management_ip=node.management_ip, netns=node.netns, nics=nics)


def _nic_dict(nic: Nic) -> dict[str, Any]:
    link = link_dict(nic.link) if nic.link else None
    return without_none(name=nic.name, mac=nic.mac, ip=nic.ip, port=nic.port, mtu=nic.mtu, link=link)


# Out of the file.


def read_switch(m: Map) -> Switch:
    """The map under ``switch``."""
    target = m.take("target", _target)
    interfaces = m.take("interfaces", _interfaces, {})
    pipes, link = m.take("pipes", _pipes, None), m.take_map("link", read_link, None)
    if target == "ebpf" and interfaces == {}:
        m.problems.append(f"{m.at('interfaces')}: missing; the target ebpf needs a map of port: interface name")
    elif target == "tofino" and interfaces:
        m.complain("interfaces", interfaces, "allowed: for software switches (ebpf, bmv2) only; remove the key")
    if target in ("ebpf", "bmv2"):
        for key, value in (("pipes", pipes), ("link", link)):
            if value is not None:
                m.complain(key, value, "allowed: for the target tofino only; remove the key")
    switch = Switch(
        target=target,
        p4runtime=m.take("p4runtime", checked.endpoint),
        device_id=m.take("device_id", _device_id, 1),
        interfaces=interfaces or {},
        netns=m.take("netns", checked.name, None),
        pipes=pipes or Switch.pipes,
        link=link or Switch.link,
    )
    m.finish()
    return switch


def read_host(m: Map) -> Host:
    """One of ``hosts``."""
    host = Host(
        name=m.take("name", checked.name),
        management_ip=m.take("management_ip", checked.ipv4),
        nics=m.take_maps("nics", read_nic),
        netns=m.take("netns", checked.name, None),
        ranks=m.take("ranks", _host_ranks, 1),
    )
    m.finish()
    return host


def read_shadow(m: Map) -> Shadow:
    """One of ``shadows``."""
    shadow = Shadow(
        name=m.take("name", checked.name),
        management_ip=m.take("management_ip", checked.ipv4),
        nics=m.take_maps("nics", read_nic),
        netns=m.take("netns", checked.name, None),
        control_port=m.take("control_port", checked.tcp_port, config.CONTROL_PORT),
    )
    m.finish()
    return shadow


def read_nic(m: Map) -> Nic:
    """One of the ``nics`` of a host or shadow."""
    nic = Nic(
        name=m.take("name", checked.interface),
        mac=m.take("mac", checked.mac),
        ip=m.take("ip", checked.ipv4),
        port=m.take("port", switch_port),
        mtu=m.take("mtu", mtu, None),
        link=m.take_map("link", read_link, None),
    )
    m.finish()
    return nic


def read_link(m: Map) -> Link:
    """The map under ``link``; FEC is the speed's usual one when it is not given."""
    speed = m.take("speed", _speed, Link.speed)
    allowed = FEC_BY_SPEED[speed or Link.speed]
    fec = m.take("fec", _fec, allowed[0])
    if speed and fec and fec not in allowed:
        m.complain("fec", fec, f"allowed at {speed}: {', '.join(allowed)}; write one of these")
    link = Link(speed or Link.speed, fec, m.take("autoneg", checked.boolean, None))
    m.finish()
    return link


def read_group(m: Map) -> Group:
    """One of ``groups``."""
    ranks, shadows = m.take("ranks", checked.names), m.take("shadows", checked.names, ())
    group = Group(name=m.take("name", checked.name), ranks=ranks or (), shadows=shadows or ())
    if ranks is not None and len(ranks) < config.MIN_RANKS:
        m.complain("ranks", list(ranks), f"allowed: {config.MIN_RANKS} host names or more; add hosts")
    m.finish()
    return group


# Parsers, as those of ``checked``.


def switch_port(value: Any) -> int:
    """allowed: a switch port number, 0 to 510"""
    return checked.integer(value, 0, MAX_PORT, switch_port.__doc__)


def mtu(value: Any) -> int:
    """allowed: 1500 or 9000"""
    if value not in config.MTU_CHOICES or isinstance(value, bool):
        choices = " or ".join(map(str, config.MTU_CHOICES))
        raise checked.Wrong(f"allowed: {choices}; write the MTU that every link of the job has")
    return int(value)


def dscp(value: Any) -> int:
    """allowed: one bit of the 6-bit DSCP field"""
    if value not in [1 << bit for bit in range(6)] or isinstance(value, bool):
        raise checked.Wrong(
            f"{dscp.__doc__}: 0x01, 0x02, 0x04, 0x08, 0x10 or 0x20; write one that the network does not use"
        )
    return int(value)


def policy(value: Any) -> str:
    """allowed: isolate or lossless"""
    return checked.one_of(value, config.POLICIES)


def _host_ranks(value: Any) -> int:
    """allowed: a number of ranks, 0 to 64"""
    return checked.integer(value, 0, MAX_HOST_RANKS, _host_ranks.__doc__)


def _device_id(value: Any) -> int:
    """allowed: a P4Runtime device id, 1 to 2^63 - 1"""
    return checked.integer(value, 1, (1 << 63) - 1, _device_id.__doc__)


def _pipes(value: Any) -> int:
    """allowed: the number of pipes of the Tofino, 2 (32 ports of 100G) or 4 (64 ports)"""
    if value not in (2, 4) or isinstance(value, bool):
        raise checked.Wrong(f"{_pipes.__doc__}; write 2 or 4")
    return int(value)


def _target(value: Any) -> str:
    """allowed: ebpf, bmv2 or tofino"""
    return checked.one_of(value, TARGETS)


def _speed(value: Any) -> str:
    """allowed: 10G, 25G, 40G, 50G or 100G"""
    return checked.one_of(value, SPEED_LANES)


def _fec(value: Any) -> str:
    """allowed: rs, fc or none"""
    return checked.one_of(value, ("rs", "fc", "none"))


def _interfaces(value: Any) -> dict[int, str]:
    """allowed: a map of switch port: network interface name"""
    if not isinstance(value, Mapping):
        raise checked.Wrong(f"{_interfaces.__doc__}; write for example {{1: s1, 2: s2}}")
    return {switch_port(port): checked.interface(name) for port, name in value.items()}
