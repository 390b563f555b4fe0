"""The rules that the packet tests begin with: three ranks, a registrar and two shadow ports."""

from collections.abc import Iterable, Mapping

from ptf import frames
from ptf.frames import REGISTRAR, REGISTRAR_TCP
from ptf.target import PORTS, SHADOW_PORTS, TRAINER_PORTS, fence_address

from checkmate import config
from checkmate.plan import (
    CLASSIFY,
    FLOOD,
    GROUP_IS_LIVE,
    HEARTBEAT,
    L2_FORWARD,
    LIVE_GROUP,
    PORT_ROLE,
    REPLICATE,
    REWRITE,
    Entry,
    Multicast,
    Replica,
    Rules,
    Ternary,
)

FLOOD_GROUP = 1
COPY_MAC = 0x02434B000000
GROUPS = {
    10: (Replica(2, 0), Replica(5, config.SHADOW_RID)),
    11: (Replica(3, 0), Replica(6, config.SHADOW_RID)),
    12: (Replica(1, 0), Replica(5, config.SHADOW_RID), Replica(6, config.SHADOW_RID)),
}
HEARTBEATS = {(1, 2): 10, (2, 3): 11, (3, 1): 12}
"""(ingress port, port of the destination): multicast group."""


def address(port: int) -> int:
    """IPv4 address of the host at a port."""
    return 0x0A010000 | port


def rewrite(port: int) -> Entry:
    """What a copy for the shadow at ``port`` gets."""
    addresses = (("src_mac", COPY_MAC | port), ("dst_mac", frames.mac_number(port)), ("dst_ip", address(port)))
    match = (("egress_port", port), ("egress_rid", config.SHADOW_RID))
    return Entry(REWRITE, match, "CheckmateEgress.to_shadow", addresses)


def heartbeat(source: int, target: int, group: int) -> Entry:
    """Replication of tagged frames from one rank to another."""
    match = (("ingress_port", source), ("ethernet.dst_addr", frames.mac_number(target)))
    return Entry(HEARTBEAT, match, REPLICATE, (("group", group),))


def forward(destination: int, port: int) -> Entry:
    """Forwarding of an Ethernet address."""
    return Entry(L2_FORWARD, (("ethernet.dst_addr", destination),), "CheckmateIngress.forward", (("port", port),))


def rules(
    groups: Mapping[int, tuple[Replica, ...]] | None = None,
    heartbeats: Mapping[tuple[int, int], int] | None = None,
    rewrites: tuple[int, ...] = SHADOW_PORTS,
    flood_rid: int = 0,
    live: Iterable[int] | None = None,
) -> Rules:
    """All rules; groups, heartbeats, rewritten ports and the flood group's ids other than usual where given.

    ``live``: groups that are declared live, None: those with members.
    """
    groups = GROUPS if groups is None else groups
    heartbeats = HEARTBEATS if heartbeats is None else heartbeats
    live = [number for number, replicas in groups.items() if replicas] if live is None else live
    registrar = (("registrar_ip", address(REGISTRAR)), ("registrar_port", REGISTRAR_TCP))
    entries = [
        Entry(CLASSIFY, (("ipv4.dscp", Ternary(frames.TAG, frames.TAG)),), "CheckmateIngress.mark_tagged", priority=1),
        Entry(L2_FORWARD, (), FLOOD, (("group", FLOOD_GROUP),)),
        *(forward(frames.mac_number(port), port) for port in PORTS),
        *(forward(fence_address(port), port) for port in PORTS),
        *(
            Entry(PORT_ROLE, (("ingress_port", port),), "CheckmateIngress.shadow_port", registrar)
            for port in SHADOW_PORTS
        ),
        *(rewrite(port) for port in rewrites),
        *(heartbeat(source, target, group) for (source, target), group in heartbeats.items()),
        *(Entry(LIVE_GROUP, (("group", number),), GROUP_IS_LIVE) for number in live),
    ]
    flood = Multicast(FLOOD_GROUP, tuple(Replica(port, flood_rid) for port in TRAINER_PORTS))
    return Rules.of(entries, [flood, *(Multicast(number, replicas) for number, replicas in groups.items())])
