"""The topology file: which hosts, shadows and switch a job runs on, and who is in which data-parallel group.

``load_topology`` reads the YAML file, ``Topology.from_dict`` its content; both check everything and report all that is
wrong at once. The dataclasses are plain values: every other part of Checkmate only reads them.
"""

import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml

from checkmate import checked, config, rack
from checkmate.checked import Endpoint, mac_to_int
from checkmate.config import CheckmateError
from checkmate.rack import Group, Host, Link, Nic, Shadow, Switch
from checkmate.rack_checks import cross_check

__all__ = [
    "Endpoint", "Group", "Host", "Link", "Nic", "Place", "Shadow", "Switch", "Topology", "TopologyError",
    "load_topology", "mac_to_int", "read_token",
]  # fmt: skip

MIN_TOKEN_BYTES = 16
MAX_TOKEN_BYTES = 4096
MAX_FILE_BYTES = 1 << 20


class TopologyError(CheckmateError):
    """The topology is wrong; ``problems`` holds one line for each thing to fix."""

    def __init__(self, source: str, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join([f"{source}: {len(problems)} to fix", *(f"  {line}" for line in problems)]))


@dataclass(frozen=True)
class Place:
    """Where a rank of the job runs: its host, its data-parallel group, and its rank in that group."""

    host: Host
    group: Group
    index: int


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
    policy: str = config.POLICIES[0]

    @property
    def nodes(self) -> tuple[Host | Shadow, ...]:
        """Hosts, then shadows."""
        return (*self.hosts, *self.shadows)

    @property
    def places(self) -> tuple[Place, ...]:
        """Of every rank of the job, by its number: host by host, on each its groups, both in the order of the file.

        That is torchrun's numbering (node rank x ranks per node + local rank).
        """
        return tuple(
            Place(host, group, index)
            for host in self.hosts
            for group in self.groups
            for index, name in enumerate(group.ranks)
            if name == host.name
        )

    @property
    def rank_hosts(self) -> tuple[Host, ...]:
        """Hosts that run ranks, in the order of their ranks."""
        return tuple({place.host.name: place.host for place in self.places}.values())

    def members(self, group: Group) -> list[int]:
        """Numbers of the group's ranks, by their rank in the group."""
        numbers = {place.index: rank for rank, place in enumerate(self.places) if place.group is group}
        return [numbers[index] for index in range(len(group.ranks))]

    def host(self, name: str) -> Host:
        """Host of that name; raises CheckmateError when there is none."""
        found: Host = rack.named(self.hosts, name, "host")
        return found

    def shadow(self, name: str) -> Shadow:
        """Shadow of that name; raises CheckmateError when there is none."""
        found: Shadow = rack.named(self.shadows, name, "shadow")
        return found

    def followed(self, shadow: Shadow) -> tuple[Group, ...]:
        """Groups that the shadow follows, in the order of the file."""
        return tuple(group for group in self.groups if shadow.name in group.shadows)

    def control(self, shadow: Shadow, group: Group) -> Endpoint:
        """Where the shadow talks to this group's ranks: each of its groups has a port, from the shadow's own on."""
        return Endpoint(shadow.control.host, shadow.control.port + self.followed(shadow).index(group))

    def controls(self, *groups: Group) -> str:
        """Control addresses of these groups' shadows, as the environment of a rank lists them."""
        return ",".join(str(self.control(self.shadow(name), group)) for group in groups for name in group.shadows)

    def read_token(self) -> bytes:
        """The shared job token; raises CheckmateError when the file is missing, too short or readable by all."""
        return read_token(self.token_file)

    @classmethod
    def from_dict(cls, data: Any, source: str = "topology") -> Self:
        """Check and build; raises TopologyError with everything that is wrong. ``source`` begins its text."""
        problems: list[str] = []
        topology: Self = _read_topology(cls, checked.Map(problems, "", data))
        problems += cross_check(topology)
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
            "policy": self.policy,
            "switch": rack.switch_dict(self.switch),
            "hosts": [rack.host_dict(host) for host in self.hosts],
            "shadows": [rack.shadow_dict(shadow) for shadow in self.shadows],
            "groups": [rack.group_dict(group) for group in self.groups],
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
        root, data = checked.read_yaml(text.decode())
    except RecursionError:
        raise CheckmateError(f"topology file {path} is not valid YAML: nested too deeply; it needs 5 levels") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: undecodable bytes, a date that does not exist
        raise CheckmateError(f"topology file {path} is not valid YAML: {error}") from None
    try:
        return Topology.from_dict(data, str(path))
    except TopologyError as error:
        raise TopologyError(str(path), _with_lines(error.problems, root)) from None


def _with_lines(problems: list[str], root: yaml.Node | None) -> list[str]:
    """The problems in the order of the file, each with its line."""
    if root is None:
        return problems
    found = sorted(((checked.line_of(root, line.partition(": ")[0]), line) for line in problems), key=lambda f: f[0])
    return [f"line {number}: {line}" for number, line in found]


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


def _read_topology(cls: type[Topology], m: checked.Map) -> Any:
    topology = cls(
        job=m.take("job", checked.name),
        mtu=m.take("mtu", rack.mtu),
        dscp_tag=m.take("dscp_tag", rack.dscp, config.DSCP_TAG),
        token_file=m.take("token_file", checked.path),
        registrar=m.take("registrar", checked.address),
        policy=m.take("policy", rack.policy, config.POLICIES[0]),
        switch=m.take_map("switch", rack.read_switch),
        hosts=m.take_maps("hosts", rack.read_host),
        shadows=m.take_maps("shadows", rack.read_shadow, allow_empty=True),
        groups=m.take_maps("groups", rack.read_group),
    )
    m.finish()
    return topology
