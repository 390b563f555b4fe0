"""The topology file: which hosts, shadows and switch a job runs on, and who is in which data-parallel group.

``load_topology`` reads the YAML file, ``Topology.from_dict`` its content; both check everything and report all that is
wrong at once. The dataclasses are plain values: every other part of Checkmate only reads them.
"""

import difflib
import ipaddress
import re
import stat
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import yaml

from checkmate import config
from checkmate.config import CheckmateError

TARGETS = ("ebpf", "bmv2", "tofino")
MAX_PORT = 510
"""Largest switch port number: ports are 9 bits wide and 511 is the drop port of v1model."""

SHADOW_NICS = 2
"""A shadow needs two: first's flow arrives on one, last's on the other (both are tagged in the same round)."""

MIN_TOKEN_BYTES = 16
_MAX_INTERFACE_NAME = 15
_Node = TypeVar("_Node", "Host", "Shadow")


class TopologyError(CheckmateError):
    """The topology is wrong; ``problems`` holds one line for each thing to fix."""

    def __init__(self, source: str, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join([f"{source}: {len(problems)} to fix", *(f"  {line}" for line in problems)]))


class Endpoint(NamedTuple):
    """A TCP address, usable wherever ``socket`` takes one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


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
    """The switch; ``interfaces`` (port → network interface) is given for the target ``ebpf`` only."""

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
        topology: Self = _read_topology(cls, _Map(problems, "", data))
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
        data = yaml.load(Path(path).read_text(), Loader=_UniqueKeys)
    except OSError as error:
        raise CheckmateError(f"topology file {path}: {error.strerror}; give the path of a YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise CheckmateError(f"topology file {path} is not valid YAML: {error}") from None
    return Topology.from_dict(data, str(path))


def read_token(path: Path) -> bytes:
    """The shared job token without surrounding white space.

    Raises CheckmateError when the file is missing, shorter than MIN_TOKEN_BYTES or accessible to everybody.
    """
    try:
        mode = path.stat().st_mode
        token = path.read_bytes().strip()
    except OSError as error:
        raise CheckmateError(
            f"token_file {path}: {error.strerror}; create it: umask 077; openssl rand -hex 32 > {path}"
        ) from None
    if mode & stat.S_IRWXO:
        raise CheckmateError(
            f"token_file {path} has mode {stat.S_IMODE(mode):04o}: others may access it; chmod 0600 {path}"
        )
    if len(token) < MIN_TOKEN_BYTES:
        raise CheckmateError(
            f"token_file {path} holds {len(token)} bytes, at least {MIN_TOKEN_BYTES} are needed; "
            f"create it anew: openssl rand -hex 32 > {path}"
        )
    return token


def mac_to_int(mac: str) -> int:
    """48-bit value of a MAC address in colon notation."""
    return int(mac.replace(":", ""), 16)


def _named(nodes: tuple[_Node, ...], name: str, kind: str) -> _Node:
    for node in nodes:
        if node.name == name:
            return node
    raise CheckmateError(f"no {kind} is named {name!r}; {_choices(name, [node.name for node in nodes])}")


def _node_dict(node: Host | Shadow) -> dict[str, Any]:
    nics = [{"name": n.name, "mac": n.mac, "ip": n.ip, "port": n.port} for n in node.nics]
    return _without_none(name=node.name, management_ip=node.management_ip, netns=node.netns, nics=nics)


def _without_none(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


# Reading: every value is taken out of its map by name and parsed; what is wrong is noted, and reading goes on.


class _Wrong(Exception):
    """A value that cannot be accepted: the text says what is allowed and what to do."""


_REQUIRED = object()


class _Map:
    """A mapping of the file at ``path``; ``take`` removes keys, ``finish`` complains about what is left."""

    def __init__(self, problems: list[str], path: str, value: Any) -> None:
        self.problems = problems
        self.path = path
        self._known: list[str] = []
        self._left: dict[Any, Any] = {}
        self.usable = isinstance(value, Mapping)
        if isinstance(value, Mapping):
            self._left = dict(value)
        else:
            self.complain("", value, "allowed: a map of keys and values")

    def complain(self, key: str, value: Any, advice: str) -> None:
        self.problems.append(f"{self._at(key) or 'the file'}: {value!r} cannot be used; {advice}")

    def take(self, key: str, parse: Callable[[Any], Any], default: Any = _REQUIRED) -> Any:
        """The parsed value, ``default`` when the key is absent, None when the value is wrong."""
        self._known.append(key)
        value = self._left.pop(key, None)
        if value is None:
            if default is _REQUIRED and self.usable:
                self.problems.append(f"{self._at(key)}: missing; {parse.__doc__}")
            return None if default is _REQUIRED else default
        try:
            return parse(value)
        except _Wrong as wrong:
            self.complain(key, value, str(wrong))
            return None

    def take_maps(self, key: str, read: Callable[["_Map"], Any], allow_empty: bool = False) -> tuple[Any, ...]:
        """The list of maps under ``key``, each read by ``read``."""
        items = self.take(key, _list, default=[] if allow_empty else _REQUIRED)
        if items == [] and not allow_empty:
            self.complain(key, items, "allowed: a list with at least one entry; add one")
        path = self._at(key)
        return tuple(read(_Map(self.problems, f"{path}[{i}]", item)) for i, item in enumerate(items or ()))

    def take_map(self, key: str, read: Callable[["_Map"], Any]) -> Any:
        """The map under ``key``, read by ``read``; None when there is none."""
        value = self.take(key, _any)
        return None if value is None else read(_Map(self.problems, self._at(key), value))

    def finish(self) -> None:
        for key in self._left:
            self.problems.append(f"{self._at(key)}: unknown key; {_choices(str(key), self._known)}")

    def _at(self, key: Any) -> str:
        return f"{self.path}.{key}" if self.path and key != "" else self.path or str(key)


def _read_topology(cls: type[Topology], m: _Map) -> Any:
    topology = cls(
        job=m.take("job", _name),
        mtu=m.take("mtu", _mtu),
        dscp_tag=m.take("dscp_tag", _dscp, config.DSCP_TAG),
        token_file=m.take("token_file", _path),
        registrar=m.take("registrar", _address),
        switch=m.take_map("switch", _read_switch),
        hosts=m.take_maps("hosts", _read_host),
        shadows=m.take_maps("shadows", _read_shadow, allow_empty=True),
        groups=m.take_maps("groups", _read_group),
    )
    m.finish()
    return topology


def _read_switch(m: _Map) -> Switch:
    target = m.take("target", _target)
    interfaces = m.take("interfaces", _interfaces, {})
    if target == "ebpf" and interfaces == {}:
        m.problems.append(f"{m.path}.interfaces: missing; the target ebpf needs a map of port: interface name")
    elif target not in (None, "ebpf") and interfaces:
        m.complain("interfaces", interfaces, "allowed: for the target ebpf only; remove the key")
    switch = Switch(
        target=target,
        p4runtime=m.take("p4runtime", _endpoint),
        device_id=m.take("device_id", _device_id, 1),
        interfaces=interfaces or {},
        netns=m.take("netns", _name, None),
    )
    m.finish()
    return switch


def _read_host(m: _Map) -> Host:
    host = Host(
        name=m.take("name", _name),
        management_ip=m.take("management_ip", _ipv4),
        nics=m.take_maps("nics", _read_nic),
        netns=m.take("netns", _name, None),
    )
    m.finish()
    return host


def _read_shadow(m: _Map) -> Shadow:
    shadow = Shadow(
        name=m.take("name", _name),
        management_ip=m.take("management_ip", _ipv4),
        nics=m.take_maps("nics", _read_nic),
        netns=m.take("netns", _name, None),
        control_port=m.take("control_port", _tcp_port, config.CONTROL_PORT),
    )
    m.finish()
    return shadow


def _read_nic(m: _Map) -> Nic:
    nic = Nic(
        name=m.take("name", _interface),
        mac=m.take("mac", _mac),
        ip=m.take("ip", _ipv4),
        port=m.take("port", _switch_port),
    )
    m.finish()
    return nic


def _read_group(m: _Map) -> Group:
    ranks, shadows = m.take("ranks", _names), m.take("shadows", _names, ())
    group = Group(name=m.take("name", _name), ranks=ranks or (), shadows=shadows or ())
    if ranks is not None and len(ranks) < config.MIN_RANKS:
        m.complain("ranks", list(ranks), f"allowed: {config.MIN_RANKS} host names or more; add hosts")
    m.finish()
    return group


# Parsers: the docstring is what the user is told is allowed.


def _any(value: Any) -> Any:
    """allowed: a map of keys and values"""
    return value


def _list(value: Any) -> list[Any]:
    """allowed: a list"""
    if not isinstance(value, list):
        raise _Wrong(f"{_list.__doc__}; write its entries with a leading dash")
    return value


def _name(value: Any) -> str:
    """allowed: a name of letters, digits, '.', '_' and '-'"""
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value):
        raise _Wrong(f'{_name.__doc__}; write for example "node0"')
    return value


def _names(value: Any) -> tuple[str, ...]:
    """allowed: a list of names"""
    return tuple(_name(item) for item in _list(value))


def _interface(value: Any) -> str:
    """allowed: a network interface name of at most 15 characters"""
    if not isinstance(value, str) or not re.fullmatch(rf"[^\s/:]{{1,{_MAX_INTERFACE_NAME}}}", value):
        raise _Wrong(f'{_interface.__doc__}; write for example "eth0"')
    return value


def _mac(value: Any) -> str:
    """allowed: a unicast MAC address, six hexadecimal pairs"""
    if not isinstance(value, str) or not re.fullmatch(r"([0-9A-Fa-f]{2}:){5}[0-9A-Fa-f]{2}", value):
        raise _Wrong(f'{_mac.__doc__}; write for example "02:00:00:00:01:01", with the quotes')
    number = mac_to_int(value)
    if number == 0 or number >> 40 & 1:
        raise _Wrong(f"{_mac.__doc__}; this one is multicast or zero: make the first byte even, for example 02")
    return value.lower()


def _ipv4(value: Any) -> str:
    """allowed: an IPv4 address of one machine"""
    try:
        address = ipaddress.IPv4Address(value if isinstance(value, str) else "")
    except ValueError:
        raise _Wrong(f"{_ipv4.__doc__}; write for example 10.1.0.1") from None
    if address.is_multicast or address.is_unspecified or int(address) == 0xFFFFFFFF:
        raise _Wrong(f"{_ipv4.__doc__}, neither multicast nor broadcast nor 0.0.0.0; take another")
    return str(address)


def _integer(value: Any, low: int, high: int, allowed: str | None) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise _Wrong(f"{allowed}; write a number in that range")
    return value


def _switch_port(value: Any) -> int:
    """allowed: a switch port number, 0 to 510"""
    return _integer(value, 0, MAX_PORT, _switch_port.__doc__)


def _tcp_port(value: Any) -> int:
    """allowed: a TCP port, 1 to 65535"""
    return _integer(value, 1, 0xFFFF, _tcp_port.__doc__)


def _device_id(value: Any) -> int:
    """allowed: a P4Runtime device id, 1 to 2^63 - 1"""
    return _integer(value, 1, (1 << 63) - 1, _device_id.__doc__)


def _mtu(value: Any) -> int:
    """allowed: 1500 or 9000"""
    if value not in config.MTU_CHOICES or isinstance(value, bool):
        choices = " or ".join(map(str, config.MTU_CHOICES))
        raise _Wrong(f"allowed: {choices}; write the MTU that every link of the job has")
    return int(value)


def _dscp(value: Any) -> int:
    """allowed: one bit of the 6-bit DSCP field"""
    if value not in [1 << bit for bit in range(6)] or isinstance(value, bool):
        raise _Wrong(f"{_dscp.__doc__}: 0x01, 0x02, 0x04, 0x08, 0x10 or 0x20; write one that the network does not use")
    return int(value)


def _path(value: Any) -> Path:
    """allowed: an absolute path"""
    if not isinstance(value, str) or not value.startswith("/"):
        raise _Wrong(f"{_path.__doc__}; write for example /etc/checkmate/token")
    return Path(value)


def _target(value: Any) -> str:
    """allowed: ebpf, bmv2 or tofino"""
    if value not in TARGETS:
        raise _Wrong(_choices(str(value), TARGETS))
    return str(value)


def _endpoint(value: Any) -> Endpoint:
    """allowed: host:port"""
    host, _, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*", host) or not re.fullmatch(r"[0-9]{1,5}", port):
        raise _Wrong(f'{_endpoint.__doc__}; write for example "10.255.0.1:{config.REGISTRATION_PORT}"')
    return Endpoint(host, _tcp_port(int(port)))


def _address(value: Any) -> Endpoint:
    """allowed: IPv4 address:port"""
    endpoint = _endpoint(value)
    _ipv4(endpoint.host)
    return endpoint


def _interfaces(value: Any) -> dict[int, str]:
    """allowed: a map of switch port: network interface name"""
    if not isinstance(value, Mapping):
        raise _Wrong(f"{_interfaces.__doc__}; write for example {{1: s1, 2: s2}}")
    return {_switch_port(port): _interface(name) for port, name in value.items()}


def _choices(given: str, known: Iterable[str]) -> str:
    """What is allowed instead of ``given``, the nearest one first in words."""
    names = list(known)
    near = difflib.get_close_matches(given, names, n=1)
    guess = f"did you mean {near[0]!r}? " if near else ""
    return f"{guess}allowed: {', '.join(names) or 'nothing'}; write one of these"


# Checks that need more than one value. What could not be read is None and is left out.


def _cross_check(topology: Topology) -> list[str]:
    nodes = [*_at("hosts", topology.hosts), *_at("shadows", topology.shadows)]
    nics = [(f"{path}.nics[{i}]", nic) for path, node in nodes for i, nic in enumerate(node.nics)]
    groups = list(_at("groups", topology.groups))
    return [
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


def _duplicates(what: str, values: list[tuple[str, Hashable]]) -> Iterator[str]:
    first: dict[Hashable, str] = {}
    for path, value in values:
        if value is not None and first.setdefault(value, path) != path:
            yield f"{path}: {value!r} is used twice, first at {first[value]}; each {what} once: change one"


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
    yield from _duplicates("host, which runs one rank of one group in this version,", list(ranks))


def _unknown(path: str, names: tuple[str, ...], known: list[str], kind: str) -> Iterator[str]:
    for i, name in enumerate(names):
        if name not in known:
            yield f"{path}[{i}]: no {kind} is named {name!r}; {_choices(name, known)}"


class _UniqueKeys(yaml.SafeLoader):
    """YAML silently keeps the last of two equal keys: that would hide a port given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice; remove one", node.start_mark
                )
        return super().construct_mapping(node, deep)
