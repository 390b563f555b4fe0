"""Does every multicast group copy exactly once to exactly its members? Probes show it, and counters.

With taps on the members' interfaces (a lab) every probe must arrive once at each member, byte for byte as the rules
say, and nowhere else. Where only the switch can be reached, its counters tell: a shadow's port sends as many copies as
its groups were given tagged frames.
"""

import contextlib
import select
import time
from collections import Counter as Tally
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkmate.controlplane.inspection import Inspection, copying, ingress_port, shadow_ports
from checkmate.controlplane.probes import Probe, Tap
from checkmate.controlplane.target import Counters, Target
from checkmate.plan import REWRITE, Entry, Multicast, Rules
from checkmate.topology import Host, Nic, Shadow, Topology

ARRIVAL_S = 3.0
"""How long the last probe may take."""

LINGER_S = 0.3
"""How long a second copy is waited for once all have arrived."""

IN_FLIGHT = 1024
"""Frames that a switch under load may hold between two of its counters."""

COPIES = "CheckmateEgress.copies_out"


@dataclass
class Verdict:
    """Of one multicast group. ``probes``: sent into it; ``tagged``: frames that the switch gave it meanwhile."""

    group: Multicast
    meaning: str
    probes: int = 0
    tagged: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def outcome(self) -> str:
        """``ok``, ``wrong`` or, for want of traffic, ``not seen``."""
        return "wrong" if self.problems else "ok" if self.tagged else "not seen"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "group": self.group.id,
            "for": self.meaning,
            "probes": self.probes,
            "tagged": self.tagged,
            "outcome": self.outcome,
            "problems": self.problems,
        }


class Verification:
    """Collects verdicts about the planned groups of a switch, in the order ``start``, ``probe``, ``finish``.

    ``problems``: those of the inspection, and those that are no single group's.
    """

    def __init__(self, inspection: Inspection, target: Target) -> None:
        self._inspection = inspection
        self._target = target
        rules = inspection.plan.rules
        self._users = copying(rules)
        self.verdicts = {
            group.id: Verdict(group, inspection.meaning(group)) for group in rules.groups if group.id in self._users
        }
        self._nics = {nic.port: nic for host in inspection.topology.hosts for nic in host.nics}
        self._macs = {nic.mac: nic for nic in self._nics.values()}
        self._tapped: frozenset[int] = frozenset()
        self._before: tuple[Counters, Counters] | None = None
        self.problems = list(inspection.problems)

    def start(self) -> None:
        """Note the counters."""
        self._before = self._read(), self._read()

    def probe(self, taps: Mapping[int, Tap], sources: Sequence[int]) -> None:
        """Send a probe for each entry of the ports ``sources``, all of which have taps, as other ports may have.

        What arrives is looked at on all taps.
        """
        self._tapped = frozenset(taps)
        probes: dict[Probe, Multicast] = {}
        for number, entries in self._users.items():
            for entry in entries:
                if ingress_port(entry) in sources and (target := self._destination(entry)):
                    probe = Probe.new(self._nics[ingress_port(entry)], target, self._inspection.topology.dscp_tag)
                    probes[probe] = self.verdicts[number].group
                    self.verdicts[number].probes += 1
        expected = {
            (probe.nonce, port): frame
            for probe, group in probes.items()
            for port, frame in _expected(probe, group, self._inspection.plan.rules).items()
            if port in taps
        }
        for probe in probes:
            taps[probe.source.port].send(probe.sent())
        arrived = _collect(taps, {probe.nonce for probe in probes}, set(expected))
        for probe, group in probes.items():
            self.verdicts[group.id].problems += self._judge(probe, expected, arrived, taps)

    def finish(self) -> list[Verdict]:
        """Compare the counters, and return all verdicts."""
        assert self._before is not None
        start, settled = self._before
        almost, end = self._read(), self._read()
        at_least, at_most = (_by_group(self._users, *span) for span in ((settled, almost), (start, end)))
        for number, verdict in self.verdicts.items():
            verdict.tagged = at_most[number]
            if verdict.tagged < verdict.probes:
                verdict.problems.append(f"{verdict.probes} probes were sent, the switch counted {verdict.tagged}")
        for port in sorted({port for verdict in self.verdicts.values() for port in shadow_ports(verdict.group)}):
            users = [verdict for verdict in self.verdicts.values() if port in shadow_ports(verdict.group)]
            copies = _copies(end, port) - _copies(settled, port)
            low, high = (sum(tagged[verdict.group.id] for verdict in users) for tagged in (at_least, at_most))
            slack = 0 if low == high else IN_FLIGHT
            if not low - slack <= copies <= high + slack:
                self._note(port, users, f"sent {copies} copies of {high} tagged frames")
        return list(self.verdicts.values())

    def _note(self, port: int, users: Sequence[Verdict], text: str) -> None:
        """Counters disagree: whose fault that is the taps tell, without one every group of the port is in doubt."""
        problem = f"port {port} ({self._inspection.name(port)}) {text}"
        self.problems.append(problem)
        if port not in self._tapped:
            for verdict in users:
                verdict.problems.append(problem)

    def _read(self) -> Counters:
        return self._target.counters(list(self._inspection.plan.ports))

    def _destination(self, entry: Entry) -> Nic | None:
        address = dict(entry.match)["ethernet.dst_addr"]
        assert isinstance(address, int)
        return self._macs.get(address.to_bytes(6, "big").hex(":"))

    def _judge(
        self,
        probe: Probe,
        expected: Mapping[tuple[bytes, int], bytes],
        arrived: Mapping[tuple[bytes, int], list[bytes]],
        taps: Mapping[int, Tap],
    ) -> list[str]:
        """What is wrong with the arrival of one probe."""
        flow = f"{self._inspection.name(probe.source.port)} to {self._inspection.name(probe.target.port)}"
        problems = []
        for port in taps:
            wanted, frames = expected.get((probe.nonce, port)), arrived.get((probe.nonce, port), [])
            where = f"{self._inspection.name(port)} (port {port})"
            if len(frames) != (wanted is not None):
                problems.append(f"{flow}: {len(frames)} frames at {where}, not {int(wanted is not None)}")
            elif wanted is not None and frames != [wanted]:
                problems.append(f"{flow}: the frame at {where} is {frames[0].hex()}, not {wanted.hex()}")
        return problems


def _expected(probe: Probe, group: Multicast, rules: Rules) -> dict[int, bytes]:
    """The frame that each member of the group must get."""
    rewriting = {entry.match: dict(entry.params) for entry in rules.entries if entry.table == REWRITE}
    frames = {}
    for port, rid in group.replicas:
        if rid == 0:
            frames[port] = probe.sent()
        else:
            addresses = rewriting[("egress_port", port), ("egress_rid", rid)]
            frames[port] = probe.copied(addresses["src_mac"], addresses["dst_mac"], addresses["dst_ip"])
    return frames


def _collect(
    taps: Mapping[int, Tap], nonces: set[bytes], expected: set[tuple[bytes, int]]
) -> dict[tuple[bytes, int], list[bytes]]:
    """Probes by nonce and port, until all are there and ``LINGER_S`` later, or ``ARRIVAL_S`` have passed."""
    arrived: dict[tuple[bytes, int], list[bytes]] = {}
    lingering, end = not expected, time.monotonic() + (ARRIVAL_S if expected else LINGER_S)
    left = 1.0
    while left > 0:
        left = end - time.monotonic()  # what came in time is read, however late we are
        select.select(list(taps.values()), [], [], max(left, 0))
        for port, tap in taps.items():
            for frame in iter(tap.receive, None):
                for nonce in (nonce for nonce in nonces if nonce in frame):
                    arrived.setdefault((nonce, port), []).append(frame)
        if not lingering and expected <= arrived.keys():
            lingering, end = True, time.monotonic() + LINGER_S
    return arrived


def _by_group(users: Mapping[int, Sequence[Entry]], before: Counters, after: Counters) -> Tally[int]:
    """Tagged frames that each group was given between two readings."""
    return Tally(
        {
            number: sum(_entry(after, entry) - _entry(before, entry) for entry in entries)
            for number, entries in users.items()
        }
    )


def _entry(counters: Counters, entry: Entry) -> int:
    return counters.entries[entry.key].packets if entry.key in counters.entries else 0


def _copies(counters: Counters, port: int) -> int:
    cells = counters.ports.get(COPIES, {})
    return cells[port].packets if port in cells else 0


@contextlib.contextmanager
def taps(topology: Topology, node: str | None) -> Iterator[tuple[dict[int, Tap], list[int]]]:
    """Taps by switch port, and those ports that may send: of the host ``node``, None: of all namespaces that are here.

    Both are empty where the topology's nodes are other machines.
    """
    places: dict[int, tuple[str | None, str]]
    if node is not None:
        host = topology.host(node)
        places = {nic.port: (host.netns if _is_here(host.netns) else None, nic.name) for nic in host.nics}
    else:
        nodes: list[Host | Shadow] = [*topology.hosts, *topology.shadows]
        places = {nic.port: (node.netns, nic.name) for node in nodes if _is_here(node.netns) for nic in node.nics}
    with contextlib.ExitStack() as stack:
        opened = {port: stack.enter_context(contextlib.closing(Tap(*place))) for port, place in places.items()}
        yield opened, [nic.port for host in topology.hosts for nic in host.nics if nic.port in opened]


def _is_here(netns: str | None) -> bool:
    return netns is not None and Path("/run/netns", netns).exists()
