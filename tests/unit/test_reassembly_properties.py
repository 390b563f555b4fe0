"""Whatever the network does to the copies: gradients come out exactly, or damage is reported; never wrong bytes."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.copies import AllReduce, Sender, gradients, interleave, packet

from checkmate import wire
from checkmate.shadow.rx.receiver import Damage, Event, OpComplete, Receiver, RxConfig

ITERATIONS = 4
_TIMEOUT_S = 0.5


@dataclass
class Run:
    """A fed receiver, what came out of it, and a clock that only moves when told to."""

    receiver: Receiver
    now_s: float = 1.0
    complete: dict[tuple[int, int], bytes] = field(default_factory=dict)
    damages: list[Damage] = field(default_factory=list)

    def feed(self, packets: list[bytes]) -> None:
        for data in packets:
            self.receiver.feed(data, self.now_s)

    def settle(self) -> None:
        """Lets all that waits time out, and takes the events."""
        for _ in range(4):
            self.now_s += 2 * _TIMEOUT_S
            self.receiver.tick(self.now_s)
        while events := self.receiver.poll(0):
            for event in events:
                self.take(event)

    def take(self, event: Event) -> None:
        if isinstance(event, Damage):
            self.damages.append(event)
            return
        key = (event.iteration, event.bucket)
        assert key not in self.complete
        self.complete[key] = bytes(self.receiver.buffer(event))
        self.receiver.release(event)


def new_run() -> Run:
    receiver = Receiver(RxConfig(gap_timeout_s=_TIMEOUT_S, pool_bytes=64 << 20, max_op_bytes=16 << 20))
    receiver.set_incarnation(1)
    return Run(receiver)


def operation(host_ranks: int, before: int, nranks: int, **shape: Any) -> AllReduce:
    host_ranks = 1 + host_ranks % (nranks - 1)
    return AllReduce(nranks=nranks, host_ranks=host_ranks, before=before % host_ranks, **shape)


operations = st.builds(
    operation,
    host_ranks=st.integers(0, 6),
    before=st.integers(0, 6),
    count=st.integers(1, 3000),
    nranks=st.sampled_from([2, 3, 4, 8]),
    nchannels=st.integers(1, 4),
    slices_per_chunk=st.integers(1, 2),
    datatype=st.sampled_from([6, 7, 8, 9]),
    elements_per_slice=st.integers(1, 300),
)


def displaced(packets: list[bytes], by: list[int]) -> list[bytes]:
    """Each packet moved back by up to so many places; what was sent twice with it arrives again there."""
    order = sorted(range(len(packets)), key=lambda i: i + by[i % len(by)])
    return [packets[i] for i in order]


@settings(max_examples=40)
@given(op=operations, mss=st.integers(1, 1448), by=st.lists(st.integers(0, 50), min_size=1), data=st.data())
def test_reordered_and_repeated_copies_are_exact(op: AllReduce, mss: int, by: list[int], data: st.DataObject) -> None:
    mss = max(mss, op.nbytes // 200)
    run, sender = new_run(), Sender()
    for iteration in range(1, ITERATIONS + 1):
        content = gradients(op, iteration)
        packets = interleave(sender.packets(op, content, mss, iteration=iteration), iteration)
        again = data.draw(st.lists(st.sampled_from(packets), max_size=10))
        run.feed(displaced(packets + again, by))
        run.settle()
        assert run.damages == []
        assert run.complete[iteration, 0] == content
    counters = run.receiver.counters()
    assert counters["gaps"] == counters["crc_errors"] == counters["held_bytes"] == counters["pool_used"] == 0


@settings(max_examples=40)
@given(op=operations, mss=st.integers(20, 1448), data=st.data())
def test_faults_are_reported_and_later_iterations_complete(op: AllReduce, mss: int, data: st.DataObject) -> None:
    mss = max(mss, op.nbytes // 200)
    run, sender = new_run(), Sender()
    contents = {i: gradients(op, i) for i in range(1, ITERATIONS + 1)}
    for iteration, content in contents.items():
        packets = interleave(sender.packets(op, content, mss, iteration=iteration), iteration)
        if iteration < ITERATIONS - 1:
            packets = damaged(packets, data)
        run.feed(packets)
        run.settle()
        if (iteration, 0) not in run.complete:
            assert iteration < ITERATIONS - 1
            assert run.damages or run.receiver.incomplete(1, iteration)
    for (iteration, _), received in run.complete.items():
        assert received == contents[iteration]


def damaged(packets: list[bytes], data: st.DataObject) -> list[bytes]:
    """Some packets lost, cut short, or with a byte of their TCP payload changed."""
    faults = data.draw(st.lists(st.sampled_from(range(len(packets))), max_size=6, unique=True))
    result = list(packets)
    for i in faults:
        kind = data.draw(st.sampled_from(["lost", "cut", "changed"]))
        if kind == "changed":
            at = data.draw(st.integers(54, len(packets[i]) - 1))
            value = (packets[i][at] + data.draw(st.integers(1, 255))) % 256
            result[i] = packets[i][:at] + bytes([value]) + packets[i][at + 1 :]
        else:
            result[i] = b"" if kind == "lost" else packets[i][: data.draw(st.integers(0, len(packets[i]) - 1))]
    return [p for p in result if p]


@settings(max_examples=30)
@given(before_wrap=st.integers(1, 4000), mss=st.integers(40, 700), by=st.lists(st.integers(0, 20), min_size=1))
def test_sequence_wrap_with_reordering_and_repeats_is_exact(before_wrap: int, mss: int, by: list[int]) -> None:
    """The shadow comes late, in the middle of flows just before 2**32: from the next frame on all is exact."""
    op = AllReduce(count=1500, nranks=3)
    run, sender = new_run(), Sender(start=2**32 - before_wrap)
    for iteration in range(1, 5):
        content = gradients(op, iteration)
        packets = interleave(sender.packets(op, content, mss, iteration=iteration), iteration)
        run.feed(displaced(packets + packets[:: 1 + by[0]], by) if iteration > 1 else packets)
        run.settle()
        assert iteration == 1 or run.complete[iteration, 0] == content
    assert all(damage.iteration == 1 for damage in run.damages)
    assert min(sender.sent.values()) > 2**32


@pytest.mark.parametrize("content", [b"", b"\0", b"CKMF" * 40, bytes(range(256)) * 5])
def test_anything_in_place_of_a_header_is_damage(content: bytes) -> None:
    run = new_run()
    run.feed([packet(content.ljust(wire.HEADER_BYTES, b"x"), 0)])
    run.settle()
    assert [damage.reason for damage in run.damages] == ["no valid frame header where one must be"]
    assert not run.complete


@given(content=st.binary(max_size=200))
def test_any_bytes_as_a_packet_are_survived(content: bytes) -> None:
    run = new_run()
    run.feed([content, packet(content, 0), packet(b"x", 0)[: len(content)]])
    run.settle()
    assert not run.complete
    op = AllReduce(count=10)
    run.feed(interleave(other_flows(op)))
    run.settle()
    assert run.complete[1, 0] == gradients(op, 1)


def other_flows(op: AllReduce) -> dict[tuple[int, int], list[bytes]]:
    """A whole all-reduce on flows that no other packet of the test belongs to."""
    return {
        flow: [packet(stream, 0, src_ip="10.9.9.9", src_port=1000 + flow[1])]
        for flow, stream in op.streams(gradients(op, 1)).items()
    }


def test_completed_operation_tells_what_it_is() -> None:
    op = AllReduce(count=100, datatype=9)
    run = new_run()
    run.feed(interleave(Sender().packets(op, gradients(op, 1), bucket=4, coll_seq=11, iteration=3)))
    (event,) = run.receiver.poll(0)
    assert isinstance(event, OpComplete)
    assert (event.incarnation, event.iteration, event.bucket, event.datatype) == (1, 3, 4, 9)
    assert (event.count, event.nbytes, event.comm_id, event.coll_seq) == (100, 200, 77, 11)
