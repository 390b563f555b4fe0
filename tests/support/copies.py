"""Copies as the switch makes them, without a switch: an all-reduce's tagged streams, cut into packets."""

import itertools
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from checkmate import wire
from checkmate.config import DSCP_TAG

MSS = 1448
_ETHERNET = b"\x02\x00\x00\x00\x00\x99" + b"\x02\x00\x00\x00\x00\x01" + b"\x08\x00"


def packet(
    data: bytes, seq: int, src_ip: str = "10.0.0.1", src_port: int = 40000, dst_port: int = 50000, dscp: int = DSCP_TAG
) -> bytes:
    """Ethernet frame of a TCP segment with sequence number ``seq`` (mod 2**32); checksums are left 0."""
    tcp = struct.pack(">HHIIBBHHH", src_port, dst_port, seq % 2**32, 0, 5 << 4, 0x18, 512, 0, 0)
    address = bytes(int(part) for part in src_ip.split("."))
    ip = struct.pack(">BBHHHBBH", 0x45, dscp << 2, 40 + len(data), 0, 0x4000, 64, 6, 0) + address + b"\x0a\x00\x00\x63"
    return _ETHERNET + ip + tcp + data


@dataclass(frozen=True)
class AllReduce:
    """Shape of one ring all-reduce; ``elements_per_slice`` bounds a slice, so it decides the number of loops.

    ``host_ranks``: ranks on rank 0's host, of which a ring passes ``before`` before rank 0.
    """

    count: int
    nranks: int = 4
    nchannels: int = 1
    slices_per_chunk: int = 2
    datatype: int = 7
    elements_per_slice: int = 256
    host_ranks: int = 1
    before: int = 0

    @property
    def nbytes(self) -> int:
        return self.count * wire.DATATYPES[self.datatype].nbytes

    def slices(self) -> Iterator[tuple[int, wire.Place, int, int]]:
        """(channel, place, first element, elements) of every slice in bucket order; late ones may be empty."""
        begin = 0
        per_channel = -(-self.count // self.nchannels)
        for channel in range(self.nchannels):
            end = min(begin + per_channel, self.count)
            for loop in itertools.count():
                slices = self.nranks * self.slices_per_chunk
                size = min(self.elements_per_slice, max(1, -(-(end - begin) // slices)))
                for chunk, part in itertools.product(range(self.nranks), range(self.slices_per_chunk)):
                    n = min(size, end - begin)
                    yield channel, wire.Place(loop, chunk, part, True, 0), begin, n
                    begin += n
                if begin >= end:
                    break

    def streams(self, content: bytes, **fields: int) -> dict[tuple[int, int], bytes]:
        """Bytes that each tagged flow, by (channel, ring position), carries for this all-reduce of ``content``."""
        streams: dict[tuple[int, int], list[tuple[int, bytes]]] = {}
        size = wire.DATATYPES[self.datatype].nbytes
        for channel, place, first, n in self.slices():
            # First tags the chunk of its host's entry, when it has passed the host; last tags all others.
            is_first = place.chunk == (self.nranks - self.before) % self.nranks
            ring_pos = (self.host_ranks if is_first else self.nranks) - 1 - self.before
            round_ = (ring_pos - place.chunk) % self.nranks
            sends = 2 * (self.nranks - 1)
            step = (place.loop * sends + self.nranks - 1 + round_) * self.slices_per_chunk + place.slice
            header = {
                "datatype": self.datatype, "op_count": self.count, "step": step, "channel": channel,
                "nchannels": self.nchannels, "ring_pos": ring_pos, "nranks": self.nranks,
                "slices_per_chunk": self.slices_per_chunk, "host_ranks": self.host_ranks,
                "flags": wire.FLAG_TAGGED | wire.FLAG_PAYLOAD_CRC | is_first * wire.FLAG_FIRST,
                "incarnation": 1, "iteration": 1, "comm_id": 77,
            }  # fmt: skip
            data = wire.frame(content[first * size : (first + n) * size], **header | fields)
            streams.setdefault((channel, ring_pos), []).append((step, data))
        return {flow: b"".join(data for _, data in sorted(frames)) for flow, frames in streams.items()}


class Sender:
    """The tagged flows of one job: keeps each flow's counter over its all-reduces.

    ``port``: of the first channel's flows, the next ones' follow.
    """

    def __init__(self, start: int = 0, port: int = 40000) -> None:
        self.start = start
        self.port = port
        self.sent: dict[tuple[int, int], int] = {}

    def address(self, flow: tuple[int, int]) -> dict[str, int | str]:
        """Packet fields that tell the flow apart."""
        channel, ring_pos = flow
        return {"src_ip": f"10.0.0.{1 + ring_pos}", "src_port": self.port + channel}

    def packets(
        self, op: AllReduce, content: bytes, mss: int = MSS, **fields: int
    ) -> dict[tuple[int, int], list[bytes]]:
        """Copies of one all-reduce, by flow, in order."""
        result = {}
        for flow, stream in op.streams(content, **fields).items():
            at = self.sent.get(flow, self.start)
            result[flow] = [
                packet(stream[i : i + mss], at + i, **self.address(flow))  # type: ignore[arg-type]
                for i in range(0, len(stream), mss)
            ]
            self.sent[flow] = at + len(stream)
        return result


def interleave(flows: dict[tuple[int, int], list[bytes]], seed: int = 0) -> list[bytes]:
    """All packets, each flow in order, the flows mixed at random."""
    rng = random.Random(seed)
    order = [flow for flow, packets in flows.items() for _ in packets]
    rng.shuffle(order)
    sources = {flow: iter(packets) for flow, packets in flows.items()}
    return [next(sources[flow]) for flow in order]


def gradients(op: AllReduce, seed: int) -> bytes:
    """Random content of an all-reduce."""
    return random.Random(seed).randbytes(op.nbytes)
