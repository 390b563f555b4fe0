"""The topology file: which hosts, shadows and switch a job runs on, and who is in which data-parallel group.

``load_topology`` reads the YAML file, ``Topology.from_dict`` its content; both check everything and report all that is
wrong at once. The dataclasses are plain values: every other part of Checkmate only reads them.
"""

import stat
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import yaml

from checkmate import checked, config
from checkmate.checked import Endpoint, mac_to_int
from checkmate.config import CheckmateError

__all__ = [
    "Endpoint", "Group", "Host", "Nic", "Shadow", "Switch", "Topology", "TopologyError",
    "load_topology", "mac_to_int", "read_token",
]  # fmt: skip

TARGETS = ("ebpf", "bmv2", "tofino")
MAX_PORT = 510
"""Largest switch port number: ports are 9 bits wide and 511 is the drop port of v1model."""

SHADOW_NICS = 2
"""A shadow needs two: first's flow arrives on one, last's on the other (both are tagged in the same round)."""

MIN_TOKEN_BYTES = 16
MAX_TOKEN_BYTES = 4096
MAX_FILE_BYTES = 1 << 20
_Node = TypeVar("_Node", "Host", "Shadow")


class TopologyError(CheckmateError):
    """The topology is wrong; ``problems`` holds one line for each thing to fix."""

    def __init__(self, source: str, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join([f"{source}: {len(problems)} to fix", *(f"  {line}" for line in problems)]))


@dataclass(frozen=True)
class Nic:
    """A network interface and the switch port that it is cabled to."""

    name: str
    mac: str
    ip: str
    port: int


@dataclass(frozen=True)
class Host:
    """A training node; ``netns`` is the network namespace that it lives in, None: the machine's own."""

    name: str
    management_ip: str
    nics: tuple[Nic, ...]
    netns: str | None = None


@dataclass(frozen=True)
class Shadow:
    """A shadow node; ``nics[0]`` receives rank 0's tagged flows, ``nics[1]`` those of all other ranks."""

    name: str
    management_ip: str
    nics: tuple[Nic, ...]
    netns: str | None = None
    control_port: int = config.CONTROL_PORT

    @property
    def control(self) -> Endpoint:
        """Address of the shadow's control server."""
        return Endpoint(self.management_ip, self.control_port)


@dataclass(frozen=True)
class Group:
    """A data-parallel group: rank r runs on host ``ranks[r]``; its gradients go to every shadow in ``shadows``."""

    name: str
    ranks: tuple[str, ...]
    shadows: tuple[str, ...]


@dataclass(frozen=True)
class Switch:
    """The switch; ``interfaces`` (port → network interface) is for software switches only."""

    target: str
    p4runtime: Endpoint
    device_id: int = 1
    interfaces: Mapping[int, str] = field(default_factory=dict, hash=False)
    netns: str | None = None


@dataclass(frozen=True)
class Topology:
    """All that is known before a job starts."""

    job: str
    mtu: int
    token_file: Path
    registrar: Endpoint
    switch: Switch
    hosts: tuple[Host, ...]
    shadows: tuple[Shadow, ...]
    groups: tuple[Group, ...]
    dscp_tag: int = config.DSCP_TAG

    def host(self, name: str) -> Host:
        """Host of that name; raises CheckmateError when there is none."""
        return _named(self.hosts, name, "host")

    def shadow(self, name: str) -> Shadow:
        """Shadow of that name; raises CheckmateError when there is none."""
        return _named(self.shadows, name, "shadow")

    def read_token(self) -> bytes:
        """The shared job token; raises CheckmateError when the file is missing, too short or readable by all."""
        return read_token(self.token_file)

    @classmethod
    def from_dict(cls, data: Any, source: str = "topology") -> Self:
        """Check and build; raises TopologyError with everything that is wrong. ``source`` begins its text."""
        problems: list[str] = []
        topology: Self = _read_topology(cls, checked.Map(problems, "", data))
        problems += _cross_check(topology)
        if problems:
            raise TopologyError(source, problems)
        return topology

    def to_dict(self) -> dict[str, Any]:
        """The inverse of ``from_dict``: plain values only, keys that are not set left out."""
        return {
            "job": self.job,
            "mtu": self.mtu,
            "dscp_tag": self.dscp_tag,
            "token_file": str(self.token_file),
            "registrar": str(self.registrar),
            "switch": _without_none(
                target=self.switch.target,
                p4runtime=str(self.switch.p4runtime),
                device_id=self.switch.device_id,
                interfaces=dict(self.switch.interfaces) or None,
                netns=self.switch.netns,
            ),
            "hosts": [_node_dict(host) for host in self.hosts],
            "shadows": [_node_dict(shadow) | {"control_port": shadow.control_port} for shadow in self.shadows],
            "groups": [
                {"name": group.name, "ranks": list(group.ranks), "shadows": list(group.shadows)}
                for group in self.groups
            ],
        }

    def dump(self, path: Path) -> None:
        """Write the topology as a YAML file that ``load_topology`` reads."""
        path.write_text(yaml.safe_dump(self.to_dict(), sort_keys=False))


def load_topology(path: str | Path) -> Topology:
    """Read and check a topology file; raises CheckmateError (TopologyError for its content)."""
    try:
        with Path(path).open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise CheckmateError(f"topology file {path}: {error.strerror}; give the path of a YAML file") from None
    if len(text) > MAX_FILE_BYTES:
        raise CheckmateError(f"topology file {path}: more than {MAX_FILE_BYTES} bytes; give the path of a YAML file")
    try:
        data = yaml.load(text.decode(), Loader=checked.UniqueKeys)
    except RecursionError:
        raise CheckmateError(f"topology file {path} is not valid YAML: nested too deeply; it needs 5 levels") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: undecodable bytes, a date that does not exist
        raise CheckmateError(f"topology file {path} is not valid YAML: {error}") from None
    return Topology.from_dict(data, str(path))


def read_token(path: Path) -> bytes:
    """The shared job token without surrounding white space.

    Raises CheckmateError when the file is missing, accessible to everybody or not of MIN_ to MAX_TOKEN_BYTES.
    """
    try:
        mode = path.stat().st_mode
        with path.open("rb") as file:
            token = file.read(MAX_TOKEN_BYTES + 1).strip()
    except OSError as error:
        raise CheckmateError(
            f"token_file {path}: {error.strerror}; create it: umask 077; openssl rand -hex 32 > {path}"
        ) from None
    if mode & stat.S_IRWXO:
        raise CheckmateError(
            f"token_file {path} has mode {stat.S_IMODE(mode):04o}: others may access it; chmod 0600 {path}"
        )
    if not MIN_TOKEN_BYTES <= len(token) <= MAX_TOKEN_BYTES:
        raise CheckmateError(
            f"token_file {path} holds {len(token)} bytes, {MIN_TOKEN_BYTES} to {MAX_TOKEN_BYTES} are allowed; "
            f"create it anew: openssl rand -hex 32 > {path}"
        )
    return token


def _named(nodes: tuple[_Node, ...], name: str, kind: str) -> _Node:
    for node in nodes:
        if node.name == name:
            return node
    raise CheckmateError(f"no {kind} is named {name!r}; {checked.choices(name, [node.name for node in nodes])}")


def _node_dict(node: Host | Shadow) -> dict[str, Any]:
    nics = [{"name": n.name, "mac": n.mac, "ip": n.ip, "port": n.port} for n in node.nics]
    return _without_none(name=node.name, management_ip=node.management_ip, netns=node.netns, nics=nics)


def _without_none(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _read_topology(cls: type[Topology], m: checked.Map) -> Any:
    topology = cls(
        job=m.take("job", checked.name),
        mtu=m.take("mtu", _mtu),
        dscp_tag=m.take("dscp_tag", _dscp, config.DSCP_TAG),
        token_file=m.take("token_file", checked.path),
        registrar=m.take("registrar", checked.address),
        switch=m.take_map("switch", _read_switch),
        hosts=m.take_maps("hosts", _read_host),
        shadows=m.take_maps("shadows", _read_shadow, allow_empty=True),
        groups=m.take_maps("groups", _read_group),
    )
    m.finish()
    return topology


def _read_switch(m: checked.Map) -> Switch:
    target = m.take("target", _target)
    interfaces = m.take("interfaces", _interfaces, {})
    if target == "ebpf" and interfaces == {}:
        m.problems.append(f"{m.path}.interfaces: missing; the target ebpf needs a map of port: interface name")
    elif target == "tofino" and interfaces:
        m.complain("interfaces", interfaces, "allowed: for software switches (ebpf, bmv2) only; remove the key")
    switch = Switch(
        target=target,
        p4runtime=m.take("p4runtime", checked.endpoint),
        device_id=m.take("device_id", _device_id, 1),
        interfaces=interfaces or {},
        netns=m.take("netns", checked.name, None),
    )
    m.finish()
    return switch


def _read_host(m: checked.Map) -> Host:
    host = Host(
        name=m.take("name", checked.name),
        management_ip=m.take("management_ip", checked.ipv4),
        nics=m.take_maps("nics", _read_nic),
        netns=m.take("netns", checked.name, None),
    )
    m.finish()
    return host


def _read_shadow(m: checked.Map) -> Shadow:
    shadow = Shadow(
        name=m.take("name", checked.name),
        management_ip=m.take("management_ip", checked.ipv4),
        nics=m.take_maps("nics", _read_nic),
        netns=m.take("netns", checked.name, None),
        control_port=m.take("control_port", checked.tcp_port, config.CONTROL_PORT),
    )
    m.finish()
    return shadow


def _read_nic(m: checked.Map) -> Nic:
    nic = Nic(
        name=m.take("name", checked.interface),
        mac=m.take("mac", checked.mac),
        ip=m.take("ip", checked.ipv4),
        port=m.take("port", _switch_port),
    )
    m.finish()
    return nic


def _read_group(m: checked.Map) -> Group:
    ranks, shadows = m.take("ranks", checked.names), m.take("shadows", checked.names, ())
    group = Group(name=m.take("name", checked.name), ranks=ranks or (), shadows=shadows or ())
    if ranks is not None and len(ranks) < config.MIN_RANKS:
        m.complain("ranks", list(ranks), f"allowed: {config.MIN_RANKS} host names or more; add hosts")
    m.finish()
    return group


def _switch_port(value: Any) -> int:
    """allowed: a switch port number, 0 to 510"""
    return checked.integer(value, 0, MAX_PORT, _switch_port.__doc__)


def _device_id(value: Any) -> int:
    """allowed: a P4Runtime device id, 1 to 2^63 - 1"""
    return checked.integer(value, 1, (1 << 63) - 1, _device_id.__doc__)


def _mtu(value: Any) -> int:
    """allowed: 1500 or 9000"""
    if value not in config.MTU_CHOICES or isinstance(value, bool):
        choices = " or ".join(map(str, config.MTU_CHOICES))
        raise checked.Wrong(f"allowed: {choices}; write the MTU that every link of the job has")
    return int(value)


def _dscp(value: Any) -> int:
    """allowed: one bit of the 6-bit DSCP field"""
    if value not in [1 << bit for bit in range(6)] or isinstance(value, bool):
        raise checked.Wrong(
            f"{_dscp.__doc__}: 0x01, 0x02, 0x04, 0x08, 0x10 or 0x20; write one that the network does not use"
        )
    return int(value)


def _target(value: Any) -> str:
    """allowed: ebpf, bmv2 or tofino"""
    if value not in TARGETS:
        raise checked.Wrong(checked.choices(str(value), TARGETS))
    return str(value)


def _interfaces(value: Any) -> dict[int, str]:
    """allowed: a map of switch port: network interface name"""
    if not isinstance(value, Mapping):
        raise checked.Wrong(f"{_interfaces.__doc__}; write for example {{1: s1, 2: s2}}")
    return {_switch_port(port): checked.interface(name) for port, name in value.items()}


# Checks that need more than one value. What could not be read is None and is left out.


def _cross_check(topology: Topology) -> list[str]:
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
        *_check_interfaces(topology.switch, nics),
        *_check_shadow_nics(topology.shadows),
        *_check_members(topology, groups),
    ]


def _at(key: str, items: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"{key}[{i}]", item) for i, item in enumerate(items))


def _named_nics(path: str, node: Host | Shadow) -> list[tuple[str, Hashable]]:
    return [(f"{path}.nics[{i}].name", nic.name) for i, nic in enumerate(node.nics)]


def _duplicates(what: str, values: list[tuple[str, Hashable]]) -> Iterator[str]:
    first: dict[Hashable, str] = {}
    for path, value in values:
        if value is not None and first.setdefault(value, path) != path:
            yield f"{path}: {value!r} is used twice, first at {first[value]}; each {what} is allowed once; change one"


def _check_interfaces(switch: Switch | None, nics: list[tuple[str, Nic]]) -> Iterator[str]:
    if switch is None or not switch.interfaces:
        return
    at = "switch.interfaces"
    yield from _duplicates("interface", [(f"{at}[{port}]", name) for port, name in switch.interfaces.items()])
    for path, nic in nics:
        if nic.port is not None and nic.port not in switch.interfaces:
            ports = ", ".join(map(str, sorted(switch.interfaces)))
            yield f"{path}.port: {nic.port} is no port of the switch; allowed: {ports}; add it to {at}"


def _check_shadow_nics(shadows: tuple[Shadow, ...]) -> Iterator[str]:
    for path, shadow in _at("shadows", shadows):
        if len(shadow.nics) != SHADOW_NICS:
            yield (
                f"{path}.nics: {len(shadow.nics)} given, exactly {SHADOW_NICS} are needed: the first and the last "
                f"rank of a ring send at the same time; give {shadow.name!r} {SHADOW_NICS} ports"
            )


def _check_members(topology: Topology, groups: list[tuple[str, Group]]) -> Iterator[str]:
    hosts = [host.name for host in topology.hosts if host.name]
    shadows = [shadow.name for shadow in topology.shadows if shadow.name]
    for path, group in groups:
        yield from _unknown(f"{path}.ranks", group.ranks, hosts, "host")
        yield from _unknown(f"{path}.shadows", group.shadows, shadows, "shadow")
        yield from _duplicates("shadow of a group", [(f"{path}.shadows[{i}]", s) for i, s in enumerate(group.shadows)])
    ranks = [(f"{path}.ranks[{i}]", name) for path, group in groups for i, name in enumerate(group.ranks)]
    yield from _duplicates("host (it runs one rank of one group)", list(ranks))


def _unknown(path: str, names: tuple[str, ...], known: list[str], kind: str) -> Iterator[str]:
    for i, name in enumerate(names):
        if name not in known:
            yield f"{path}[{i}]: no {kind} is named {name!r}; {checked.choices(name, known)}"
