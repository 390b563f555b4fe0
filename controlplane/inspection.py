"""What a switch holds, next to what it must hold: for people who look at it, never written to."""

from dataclasses import dataclass
from typing import Any

from checkmate import config, limits
from checkmate.controlplane.ownership import scope
from checkmate.controlplane.targets.p4runtime import P4RuntimeTarget
from checkmate.plan import HEARTBEAT, PORT_ROLE, Entry, Multicast, Plan, Rules, diff, make_plan, receivers
from checkmate.topology import Topology

_SHOWN_DIFFERENCES = 8


@dataclass(frozen=True)
class Inspection:
    """``plan``: for the shadows that the switch copies to. ``primary``: None when the switch does not tell.

    ``problems``: a line for each thing that is not as it must be.
    """

    topology: Topology
    plan: Plan
    rules: Rules
    pipeline: str
    primary: bool | None
    problems: tuple[str, ...]

    @property
    def usage(self) -> tuple[limits.Usage, ...]:
        """Of all jobs together."""
        return limits.usage(self.topology.switch.target, self.rules.entries, self.rules.groups)

    def roles(self) -> dict[int, str]:
        """Role of each port that has one: ``trainer`` or ``shadow``."""
        roles = [entry for entry in self.rules.entries if entry.table == PORT_ROLE]
        return {ingress_port(entry): entry.action.rpartition(".")[2].removesuffix("_port") for entry in roles}

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        switch = self.topology.switch
        return {
            "job": self.topology.job,
            "target": switch.target,
            "address": str(switch.p4runtime),
            "pipeline": self.pipeline,
            "primary": self.primary,
            "shadows": list(self.plan.live),
            "ports": {str(port): {"name": self.name(port), "role": role} for port, role in self.roles().items()},
            "groups": [
                {
                    "id": group.id,
                    "for": self.meaning(group),
                    "members": [{**replica._asdict(), "name": self.name(replica.port)} for replica in group.replicas],
                }
                for group in self.rules.groups
            ],
            "usage": {use.what: {"used": use.used, "limit": use.limit} for use in self.usage},
            "problems": list(self.problems),
        }

    def name(self, port: int) -> str:
        """Who is cabled to a port; empty for one that is not this job's."""
        return self.plan.ports.get(port, "")

    def meaning(self, group: Multicast) -> str:
        """What a group is for; empty for one that is not this job's."""
        return self.plan.group_names.get(group.id, "")


def ingress_port(entry: Entry) -> int:
    """Of an entry that matches one."""
    port = dict(entry.match)["ingress_port"]
    assert isinstance(port, int)
    return port


def inspect(topology: Topology, target: P4RuntimeTarget) -> Inspection:
    """Read the switch; raises TargetError, UnreachableError."""
    primary = target.has_primary()
    pipeline = target.pipeline()
    rules = target.read() if pipeline == "ours" else Rules()
    plan = make_plan(topology, receivers(topology, rules))
    problems = _problems(topology, plan, rules, pipeline, primary)
    return Inspection(topology, plan, rules, pipeline, primary, tuple(problems))


def _problems(topology: Topology, plan: Plan, rules: Rules, pipeline: str, primary: bool | None) -> list[str]:
    if pipeline != "ours":
        return [f"pipeline: {pipeline}; `checkmate controller` loads ours"]
    problems = [] if primary is not False else ["no controller is connected; start `checkmate controller`"]
    problems += [f"an entry refers to a missing multicast group: {entry}" for entry in rules.dangling()]
    lines = str(diff(*scope(rules, plan.rules, topology.job))).splitlines()
    if len(lines) > _SHOWN_DIFFERENCES:
        lines[_SHOWN_DIFFERENCES:] = [f"and {len(lines) - _SHOWN_DIFFERENCES} more differences"]
    return problems + [f"not as planned (- held, + wanted): {line}" for line in lines]


def copying(rules: Rules) -> dict[int, list[Entry]]:
    """Heartbeat entries by the multicast group that they use."""
    found: dict[int, list[Entry]] = {}
    for entry in rules.entries:
        if entry.table == HEARTBEAT and entry.group is not None:
            found.setdefault(entry.group, []).append(entry)
    return found


def shadow_ports(group: Multicast) -> list[int]:
    """Ports that get copies from a group."""
    return [port for port, rid in group.replicas if rid == config.SHADOW_RID]
