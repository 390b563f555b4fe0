"""The queues that tagged frames wait in at a hardware switch, by the job's policy.

``lossless``: a queue that fills up pauses who sends into it (PFC, IEEE 802.1Qbb), so that no copy is lost, at the cost
of training when a shadow is slow. ``isolate``: nobody is ever paused, copies that find their shadow's queue full are
dropped, and repaired later.
"""

from dataclasses import asdict, dataclass
from typing import Any

from checkmate import config
from checkmate.rack import Host, Link, Nic, Shadow
from checkmate.topology import Topology

SHADOW_QUEUE_BYTES = 1310720
"""Most that waits for one shadow port: 1.25 MiB, 105 microseconds at 100 Gb/s."""

SHADOW_BUFFER_BYTES = 3 * SHADOW_QUEUE_BYTES
"""Most that waits for all shadow ports together: what is left belongs to training."""

CABLE_M = 100
"""Longest cable that the head room allows for."""

FRAME_OVERHEAD = 22
"""Ethernet header, one VLAN tag and check sequence around an IP packet."""

SENDER_SHARE_BYTES = 81920
"""What may wait of one sender's tagged frames before it is paused: 80 KiB, nine jumbo frames."""

_NS_PER_M = 5
_PAUSE_QUANTUM_BYTES = 64
_PAUSE_REACTION_QUANTA = 394
"""Time in which a 100 Gb/s sender must have stopped (IEEE 802.3, 31B.3.7); slower ones need fewer bytes."""


@dataclass(frozen=True)
class Queue:
    """How one port of the switch treats the class of tagged frames; ``port_of`` is ``node/interface``.

    ``sends_pause``: it pauses the sender when what came from it fills its share; ``obeys_pause``: it stops when the
    receiver asks. ``drops``: a frame that finds the queue full is dropped. ``limit_bytes``: most that may wait, None:
    no limit of its own. ``share_bytes``: what may wait of this port's frames, anywhere, before its sender is paused;
    ``headroom_bytes``: room for what still arrives after that; both 0 where nobody is paused.
    """

    port: int
    port_of: str
    traffic_class: int
    sends_pause: bool
    obeys_pause: bool
    drops: bool
    limit_bytes: int | None
    share_bytes: int
    headroom_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def make_queues(topology: Topology) -> tuple[Queue, ...]:
    """The queues of all ports in use, by port; none for software switches, which have one queue for everything."""
    if topology.switch.target != "tofino":
        return ()
    lossless = topology.policy == "lossless"
    ports = max(1, sum(len(shadow.nics) for shadow in topology.shadows))
    limit = None if lossless else min(SHADOW_QUEUE_BYTES, SHADOW_BUFFER_BYTES // ports)
    hosts = [_queue(topology, host, nic, lossless, None) for host in topology.hosts for nic in host.nics]
    shadows = [_queue(topology, shadow, nic, False, limit) for shadow in topology.shadows for nic in shadow.nics]
    return tuple(sorted(hosts + shadows, key=lambda queue: queue.port))


def _queue(topology: Topology, node: Host | Shadow, nic: Nic, sends_pause: bool, limit: int | None) -> Queue:
    lossless = topology.policy == "lossless"
    return Queue(
        port=nic.port,
        port_of=f"{node.name}/{nic.name}",
        traffic_class=config.TAGGED_CLASS,
        sends_pause=sends_pause,
        obeys_pause=lossless,
        drops=not lossless,
        limit_bytes=limit,
        share_bytes=SENDER_SHARE_BYTES if sends_pause else 0,
        headroom_bytes=_headroom(topology.switch.link_of(nic), topology.mtu) if sends_pause else 0,
    )


def _headroom(link: Link, mtu: int) -> int:
    """Bytes that arrive after a pause: a frame just begun at each end, the sender's reaction, the cable both ways."""
    cable = 2 * CABLE_M * _NS_PER_M * link.bits_per_second // 8 // 10**9
    return 2 * (mtu + FRAME_OVERHEAD) + _PAUSE_REACTION_QUANTA * _PAUSE_QUANTUM_BYTES + cable
