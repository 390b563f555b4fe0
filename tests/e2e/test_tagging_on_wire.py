"""On the links of a lab while torch all-reduces: every final chunk is tagged exactly once, nothing else is.

The ranks' packets are captured where they enter the switch, the copies where they reach the shadow.
"""

import struct
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from support import link, wire_ranks
from support.link import DSCP_TAG, Capture, Packet
from support.training import Rack, needs_root, rack
from support.wire_ranks import BUCKETS, INCARNATION, ITERATIONS, result_file

from checkmate import wire
from checkmate.crc32c import crc32c
from checkmate.nccl_plugin.bpf.loader import CounterProgram

pytestmark = [*needs_root, pytest.mark.slow, pytest.mark.timeout(600)]

RANKS = (2, 3, 4, 8)
LOSSY_RANKS = (4,)
CHANNELS = (1, 2, 4)
RUN_S = 300.0


@dataclass(frozen=True)
class Shape:
    """A rack: MTU, of how many packets one gets lost at each place (0: of none), the jobs' numbers of ranks, and hosts.

    On lossy links nothing is left to the hardware: packets are seen as they are lost and sent again, check sums too.
    """

    mtu: int = 1500
    one_in: int = 0
    ranks: tuple[int, ...] = RANKS
    ranks_per_host: int = 1
    nics: int = 1


RACKS = {
    "1500": Shape(),
    "9000": Shape(9000),
    "1500 lossy": Shape(1500, 40, LOSSY_RANKS),
    "9000 lossy": Shape(9000, 25, LOSSY_RANKS),
    "2 on each host": Shape(ranks=(4,), ranks_per_host=2),
    "2 on each host with 2 NICs": Shape(ranks=(4,), ranks_per_host=2, nics=2),
    "3 on each host with 2 NICs": Shape(9000, ranks=(7,), ranks_per_host=3, nics=2),
}
CASES = [
    pytest.param(name, ranks, channels, id=f"{name}-{ranks}-ranks-{channels}-channels")
    for name, shape in RACKS.items()
    for ranks in shape.ranks
    for channels in CHANNELS
]


class Flow(NamedTuple):
    """One direction of a TCP connection; ``ports``: source and destination."""

    source: str
    ports: tuple[int, int]


@dataclass(frozen=True)
class Frame:
    """A frame of a tagged flow between two hosts, by their numbers."""

    source: int
    target: int
    header: np.void
    payload: bytes

    def __getitem__(self, name: str) -> int:
        return int(self.header[name])

    @property
    def place(self) -> wire.Place:
        """Where its slice stands."""
        return wire.place(self["step"], self["slices_per_chunk"], self["ring_pos"], self["nranks"])


@dataclass(frozen=True)
class Traffic:
    """All that was seen on a rack. ``sent``: packets of the ranks. ``copies``: frames at each port of the shadow.

    ``hosts``: numbers by address. ``frames``: those of the tagged flows, by (ranks, channels). ``counters``: of the
    switch.
    """

    results: Path
    hosts: dict[str, int]
    sent: list[Packet]
    copies: tuple[list[bytes], ...]
    streams: dict[Flow, bytes]
    frames: dict[tuple[int, int], list[Frame]]
    counters: dict[str, Any]
    receiver: dict[str, int]


@pytest.fixture(scope="module")
def racks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Traffic]:
    """What was seen on a rack, by its name; each is run once, when it is first asked for."""

    @cache
    def traffic(name: str) -> Traffic:
        shape = RACKS[name]
        with rack(
            max(RANKS if shape.ranks_per_host == 1 else shape.ranks),
            shape.mtu,
            ranks_per_host=shape.ranks_per_host,
            nics=shape.nics,
        ) as built:
            return _run(built, tmp_path_factory.mktemp("results"), shape)

    return traffic


def _run(rack: Rack, results: Path, shape: Shape) -> Traffic:
    topology = rack.lab.topology
    switch, (shadow,) = topology.switch, topology.shadows
    assert switch.netns is not None and shadow.netns is not None
    if shape.one_in:
        _make_lossy(rack, shape.one_in)
    with (
        CounterProgram.load(rack.lab.bpf) as program,
        Capture(switch.netns, None, incoming=True) as entering,
        Capture(shadow.netns, None, incoming=True) as copied,
    ):
        _all_reduce(rack, results, program.map_path, shape.ranks)
    ports = [switch.interfaces[nic.port] for host in topology.hosts for nic in host.nics]
    sent = [packet for port in ports for packet in entering.packets(port)]
    hosts = {nic.ip: number for number, host in enumerate(topology.hosts) for nic in host.nics}
    streams, frames = _parse(sent, hosts)
    controller = rack.services.controller_status()
    assert controller is not None
    return Traffic(
        results=results,
        hosts=hosts,
        sent=sent,
        copies=tuple([frame for name, frame in copied.frames if name == nic.name] for nic in shadow.nics),
        streams=streams,
        frames=frames,
        counters=controller["counters"],
        receiver=rack.status()["receiver"],
    )


def _make_lossy(rack: Rack, one_in: int) -> None:
    """Packets of ranks get lost before the switch handles them, and behind it: those the shadow gets twice."""
    topology = rack.lab.topology
    assert topology.switch.netns is not None
    for host in topology.hosts[: max(LOSSY_RANKS)]:
        (nic,) = host.nics
        assert host.netns is not None
        inside = ["nsenter", f"--net=/run/netns/{host.netns}", "ethtool", "-K", nic.name]
        link.run(*inside, "tx", "off", "tso", "off", "gso", "off", "gro", "off")
        link.run("tc", "-n", host.netns, "qdisc", "add", "dev", nic.name, "clsact")
        link.lose(host.netns, nic.name, one_in)
        link.lose(topology.switch.netns, topology.switch.interfaces[nic.port], one_in)


def _all_reduce(rack: Rack, results: Path, counter_map: Path, ranks: Sequence[int]) -> None:
    numbers = [",".join(map(str, values)) for values in (ranks, CHANNELS)]
    process = rack.lab.spawn(
        rack.lab.management,
        [sys.executable, wire_ranks.__file__, rack.services.topology_file, results, *numbers],
        "ranks.log",
        {"CHECKMATE_COUNTER_MAP": str(counter_map)},
    )
    try:
        assert process.wait(RUN_S) == 0, rack.lab.log_tail("ranks.log", 60)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"the all-reduces hang:\n{rack.lab.log_tail('ranks.log', 60)}") from None


def _parse(
    sent: Sequence[Packet], hosts: Mapping[str, int]
) -> tuple[dict[Flow, bytes], dict[tuple[int, int], list[Frame]]]:
    """Streams of all packets that have the mark and payload, and the frames that they are made of."""
    flows: dict[Flow, list[Packet]] = defaultdict(list)
    for packet in sent:
        if packet.dscp & DSCP_TAG and packet.payload:
            flows[Flow(packet.source, packet.ports)].append(packet)
    streams = {flow: link.stream(packets) for flow, packets in flows.items()}
    by_comm: dict[int, list[Frame]] = defaultdict(list)
    for flow, data in streams.items():
        source, target = hosts[flow.source], hosts[flows[flow][0].target]
        parsed = [Frame(source, target, header, payload) for header, payload in _frames(data)]
        (comm,) = {frame["comm_id"] for frame in parsed}
        by_comm[comm] += parsed
    # A small all-reduce uses fewer channels than its communicator has.
    frames = {(found[0]["nranks"], max(frame["nchannels"] for frame in found)): found for found in by_comm.values()}
    assert len(frames) == len(by_comm)
    return streams, frames


def _frames(data: bytes) -> Iterator[tuple[np.void, bytes]]:
    """Headers and payloads; the stream must be whole frames, each with the right check sums."""
    at = 0
    while at < len(data):
        header = np.frombuffer(data, wire.FRAME, 1, at)[0]
        assert (header["magic"], header["version"]) == (wire.MAGIC, wire.VERSION)
        assert int(header["flags"]) & ~wire.FLAG_FIRST == wire.FLAG_TAGGED | wire.FLAG_PAYLOAD_CRC
        assert crc32c(data[at : at + wire.HEADER_BYTES - 4]) == header["header_crc"]
        at += wire.HEADER_BYTES
        payload = data[at : at + int(header["payload_len"])]
        assert len(payload) == header["payload_len"]
        assert (crc32c(payload) if payload else 0) == header["payload_crc"]
        at += len(payload)
        yield header, payload


@pytest.mark.parametrize(("name", "ranks", "channels"), CASES)
def test_every_final_chunk_is_tagged_exactly_once(racks: Any, name: str, ranks: int, channels: int) -> None:
    """The tagged slices tile every registered bucket, and what they hold is the reduced result."""
    traffic: Traffic = racks(name)
    frames = traffic.frames[ranks, channels]
    by_bucket: dict[tuple[int, int], list[Frame]] = defaultdict(list)
    for frame in frames:
        by_bucket[frame["iteration"], frame["bucket"]].append(frame)
    assert by_bucket.keys() == {(i, b) for i in ITERATIONS for b in range(len(BUCKETS))}
    for (iteration, bucket), pieces in by_bucket.items():
        places = [(frame["channel"], *frame.place[:3]) for frame in pieces]
        assert len(set(places)) == len(places), "a slice is tagged twice"
        ordered = sorted(zip(places, pieces, strict=True), key=lambda item: item[0])
        expected = result_file(traffic.results, ranks, channels, iteration, bucket).read_bytes()
        assert b"".join(frame.payload for _, frame in ordered) == expected
        assert {(frame["op_count"], frame["datatype"]) for frame in pieces} == {(BUCKETS[bucket], 7)}
    assert {frame["incarnation"] for frame in frames} == {INCARNATION}


@pytest.mark.parametrize(("name", "ranks", "channels"), CASES)
def test_only_the_boundary_ranks_tag(racks: Any, name: str, ranks: int, channels: int) -> None:
    """First tags the chunk of its host's entry as it leaves the host, last all that it sends of the second half."""
    traffic: Traffic = racks(name)
    host_ranks = RACKS[name].ranks_per_host
    chunks: dict[tuple[int, bool], set[int]] = defaultdict(set)
    senders: dict[int, set[int]] = defaultdict(set)
    for frame in traffic.frames[ranks, channels]:
        place, is_first = frame.place, bool(frame["flags"] & wire.FLAG_FIRST)
        assert place.final and frame["host_ranks"] == host_ranks
        assert (frame.source == 0, frame.target == 0) == (is_first, not is_first)
        assert place.round == host_ranks - 1 or not is_first
        assert host_ranks > 1 or frame["ring_pos"] == (0 if is_first else ranks - 1)
        chunks[frame["channel"], is_first].add(place.chunk)
        senders[frame["channel"]].add(frame["ring_pos"])
    assert chunks.keys() == {(channel, is_first) for channel in range(channels) for is_first in (True, False)}
    assert all(len(found) == (1 if is_first else ranks - 1) for (_, is_first), found in chunks.items())
    assert all(len(found) == 2 for found in senders.values())
    if host_ranks > 1 and channels > 1:
        assert len({min(chunks[channel, True]) for channel in range(channels)}) > 1, "rings enter at different ranks"


@pytest.mark.parametrize("name", ["2 on each host with 2 NICs", "3 on each host with 2 NICs"])
def test_ranks_of_a_host_use_all_of_its_nics(racks: Any, name: str) -> None:
    """What a rank sends leaves through its own NIC."""
    traffic: Traffic = racks(name)
    assert {flow.source for flow in traffic.streams if traffic.hosts[flow.source] == 0} == {
        address for address, host in traffic.hosts.items() if host == 0
    }


@pytest.mark.parametrize("name", RACKS)
def test_mark_and_option_are_on_all_tagged_payload_and_nowhere_else(racks: Any, name: str) -> None:
    """Also on what is sent again: what a counter names is always the same byte (``link.stream``)."""
    traffic: Traffic = racks(name)
    mtu, one_in = RACKS[name].mtu, RACKS[name].one_in
    marked = [packet for packet in traffic.sent if packet.dscp & DSCP_TAG]
    tagged = [packet for packet in marked if packet.payload]
    assert all(packet.option is not None and packet.last and packet.dscp == DSCP_TAG for packet in tagged)
    assert sum(packet.option is not None for packet in traffic.sent) == len(tagged)
    connections = {(packet.source, packet.target, packet.ports) for packet in marked}
    for flow in traffic.streams:
        assert len({p.option for p in tagged if (p.source, p.ports) == flow}) == 1
    # Marked connections carry nothing but tagged frames, and nothing comes back on them but acknowledgements.
    back = {(target, source, ports[::-1]) for source, target, ports in connections}
    others = [p for p in traffic.sent if (p.source, p.target, p.ports) not in connections]
    assert not any(p.dscp & DSCP_TAG for p in others)
    assert not any(p.payload for p in others if (p.source, p.target, p.ports) in back)
    plain = sum(len(p.payload) for p in others)
    assert plain > sum(map(len, traffic.streams.values())), "the reduce-scatter half alone is as much"
    if one_in:
        assert max(len(p.payload) for p in tagged) <= mtu - 40 - 8
        assert sum(len(p.payload) for p in tagged) > sum(map(len, traffic.streams.values())), "nothing was sent again"
    assert not any(count["packets"] for count in traffic.counters["tagged_without_option"].values())
    assert not any(count["packets"] for count in traffic.counters["malformed"].values())


@pytest.mark.parametrize("name", RACKS)
def test_the_shadow_gets_every_tagged_byte_with_the_counter_as_sequence_number(racks: Any, name: str) -> None:
    """From rank 0's host on its first port, else on the second; valid check sums; at most the MTU; nothing else."""
    traffic: Traffic = racks(name)
    mtu = RACKS[name].mtu
    for port, frames in enumerate(traffic.copies):
        copies: dict[Flow, list[Packet]] = defaultdict(list)
        for frame in frames:
            copy = link.parse(frame)
            assert copy is not None, f"not a copy: {frame[:54].hex()}"
            assert copy.payload and copy.dscp & DSCP_TAG and copy.last
            assert len(frame) <= 14 + mtu
            assert _checksums_are_valid(frame)
            copies[Flow(copy.source, copy.ports)].append(copy)
        expected = {flow for flow in traffic.streams if (traffic.hosts[flow.source] > 0) == bool(port)}
        assert copies.keys() == expected
        for flow, packets in copies.items():
            assert link.copied_stream(packets) == traffic.streams[flow]
    assert traffic.receiver["packets"] == sum(map(len, traffic.copies))
    assert traffic.receiver["driver_drops"] == traffic.receiver["truncated"] == 0


def _checksums_are_valid(frame: bytes) -> bool:
    """Of IPv4 and TCP: the sums over what they cover are all ones."""
    ip_end = 14 + (frame[14] & 15) * 4
    end = 14 + int.from_bytes(frame[16:18], "big")
    pseudo = frame[26:34] + struct.pack(">HH", 6, end - ip_end)
    return _ones_sum(frame[14:ip_end]) == _ones_sum(pseudo + frame[ip_end:end]) == 0xFFFF


def _ones_sum(data: bytes) -> int:
    total = int(np.frombuffer(data + b"\0" * (len(data) % 2), ">u2").sum(dtype=np.uint64))
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return total
