"""A data path in memory: the P4Runtime server runs on it without root, BPF or interfaces."""

from collections.abc import Iterable

from .datapath import Count, Counter, DatapathFull, Drop, L2Action, Registrar, Replica, Rewrite


class FakeDatapath:
    """Holds what was set, for tests to look at; ``max_groups`` makes it run full early."""

    def __init__(self, ports: Iterable[int] = range(1, 9), max_groups: int = 1024) -> None:
        self._ports = frozenset(ports)
        self._max_groups = max_groups
        self.calls = 0
        self.tagged_dscps: frozenset[int] = frozenset()
        self.shadow_ports: dict[int, Registrar] = {}
        self.heartbeats: dict[tuple[int, bytes], int] = {}
        self.l2: dict[bytes, L2Action] = {}
        self.l2_default: L2Action = Drop()
        self.groups: dict[int, tuple[Replica, ...]] = {}
        self.live_groups: set[int] = set()
        self.rewrites: dict[tuple[int, int], Rewrite] = {}
        self.counts: dict[tuple[Counter, int], Count] = {}
        self.heartbeat_counts: dict[tuple[int, bytes], Count] = {}

    @property
    def ports(self) -> frozenset[int]:
        return self._ports

    def set_tagged_dscps(self, dscps: frozenset[int]) -> None:
        self.calls += 1
        self.tagged_dscps = dscps

    def set_shadow_port(self, port: int, registrar: Registrar | None) -> None:
        self.calls += 1
        if registrar is None:
            self.shadow_ports.pop(port, None)
        else:
            self.shadow_ports[port] = registrar

    def set_heartbeat(self, port: int, dst_mac: bytes, group: int | None) -> None:
        self.calls += 1
        if group is None:
            del self.heartbeats[port, dst_mac], self.heartbeat_counts[port, dst_mac]
        else:
            self.heartbeats[port, dst_mac] = group
            self.heartbeat_counts.setdefault((port, dst_mac), Count())

    def set_l2(self, dst_mac: bytes, action: L2Action | None) -> None:
        self.calls += 1
        if action is None:
            del self.l2[dst_mac]
        else:
            self.l2[dst_mac] = action

    def set_l2_default(self, action: L2Action) -> None:
        self.calls += 1
        self.l2_default = action

    def set_live_group(self, group: int, live: bool) -> None:
        self.calls += 1
        (self.live_groups.add if live else self.live_groups.remove)(group)

    def set_group(self, group: int, replicas: tuple[Replica, ...] | None) -> None:
        self.calls += 1
        if replicas is None:
            del self.groups[group]
        elif group not in self.groups and len(self.groups) >= self._max_groups:
            raise DatapathFull(f"there are {self._max_groups} groups already")
        else:
            self.groups[group] = replicas

    def set_rewrite(self, port: int, rid: int, rewrite: Rewrite | None) -> None:
        self.calls += 1
        if rewrite is None:
            del self.rewrites[port, rid]
        else:
            self.rewrites[port, rid] = rewrite

    def read_counter(self, counter: Counter, ports: range) -> list[Count]:
        return [self.counts.get((counter, port), Count()) for port in ports]

    def write_counter(self, counter: Counter, ports: Iterable[int], value: Count) -> None:
        self.counts |= {(counter, port): value for port in ports}

    def read_heartbeat(self, port: int, dst_mac: bytes) -> Count:
        return self.heartbeat_counts[port, dst_mac]

    def write_heartbeat(self, port: int, dst_mac: bytes, value: Count) -> None:
        self.heartbeat_counts[port, dst_mac] = value
