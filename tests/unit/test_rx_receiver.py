"""The receiver as Python sees it, fed by hand: buffers and their lifetime, configuration, threads."""

import gc
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from support.copies import AllReduce, Sender, gradients, interleave, packet

from checkmate.config import CheckmateError
from checkmate.rack import group_number
from checkmate.shadow.rx.receiver import Damage, OpComplete, Receiver, RxConfig, open_receivers

OP = AllReduce(count=5000, nchannels=2)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver(RxConfig(pool_bytes=1 << 20, max_op_bytes=1 << 20)) as made:
        made.set_incarnation(1)
        yield made


def receive(receiver: Receiver, sender: Sender, iteration: int, bucket: int = 0) -> OpComplete:
    """Feeds one all-reduce whose content is gradients(OP, iteration); the event that it completes with."""
    for data in interleave(sender.packets(OP, gradients(OP, iteration), iteration=iteration, bucket=bucket)):
        receiver.feed(data)
    (event,) = receiver.poll(0)
    assert isinstance(event, OpComplete)
    return event


def test_buffer_is_the_memory_itself_aligned_and_writable(receiver: Receiver) -> None:
    event = receive(receiver, Sender(), 1)
    first, second = (np.frombuffer(receiver.buffer(event), np.float32) for _ in range(2))
    assert first.tobytes() == gradients(OP, 1)
    assert first.ctypes.data == second.ctypes.data
    assert first.ctypes.data % 64 == 0
    first[3] = 42
    assert second[3] == 42


def test_an_event_tells_when_its_last_packet_was_taken_in(receiver: Receiver) -> None:
    before = time.monotonic()
    event = receive(receiver, Sender(), 1)
    assert before - 1e-5 < event.at < time.monotonic()


def test_buffers_are_used_again_after_release_only(receiver: Receiver) -> None:
    sender = Sender()
    first, second = receive(receiver, sender, 1), receive(receiver, sender, 2)
    kept = receiver.buffer(first)
    assert receiver.counters()["pool_used"] >= 2 * OP.nbytes
    receiver.release(second)
    third = receive(receiver, sender, 3)
    assert kept == gradients(OP, 1)
    assert receiver.buffer(third) == gradients(OP, 3)
    receiver.release(first)
    receiver.release(third)
    assert receiver.counters()["pool_used"] == 0


def test_second_release_is_an_error(receiver: Receiver) -> None:
    event = receive(receiver, Sender(), 1)
    receiver.release(event)
    with pytest.raises(CheckmateError, match=r"iteration 1, bucket 0.* released before"):
        receiver.release(event)


def test_view_outlives_the_receiver() -> None:
    receiver = Receiver(RxConfig())
    receiver.set_incarnation(1)
    view = receiver.buffer(receive(receiver, Sender(), 1))
    receiver.close()
    del receiver
    gc.collect()
    assert view == gradients(OP, 1)


def test_closed_receiver_refuses() -> None:
    receiver = Receiver(RxConfig())
    receiver.close()
    receiver.close()
    with pytest.raises(CheckmateError, match="closed"):
        receiver.poll(0)
    with pytest.raises(CheckmateError, match="closed"):
        receiver.counters()


def test_nothing_is_taken_before_an_incarnation_is_set() -> None:
    with Receiver(RxConfig()) as receiver:
        for data in interleave(Sender().packets(OP, gradients(OP, 1))):
            receiver.feed(data)
        assert receiver.poll(0) == []
        counters = receiver.counters()
        assert counters["stale"] > 0
        assert counters["frames"] == 0


def test_complete_buffers_survive_a_new_incarnation(receiver: Receiver) -> None:
    event = receive(receiver, Sender(), 1)
    receiver.set_incarnation(2)
    assert receiver.buffer(event) == gradients(OP, 1)
    receiver.release(event)
    assert receiver.counters()["pool_used"] == 0


def test_damage_tells_reason_and_place(receiver: Receiver) -> None:
    receiver.feed(packet(b"\xff" * 200, 0, src_ip="10.1.2.3", src_port=1234, dst_port=4321))
    (event,) = receiver.poll(0)
    assert event == Damage(
        incarnation=1,
        iteration=None,
        bucket=None,
        reason="no valid frame header where one must be",
        where="flow 10.1.2.3:1234 to port 4321: bytes 0..88",
    )


def test_incomplete_text_grows_with_what_is_missing(receiver: Receiver) -> None:
    sender = Sender()
    receiver.release(receive(receiver, sender, 1))
    assert receiver.incomplete(1, 1) == ""
    assert receiver.incomplete(1, 2) == "iteration 2: nothing has arrived"
    for bucket in range(30):
        (first, *_) = sender.packets(OP, gradients(OP, 2), iteration=2, bucket=bucket).values()
        for data in first:
            receiver.feed(data)
    lines = receiver.incomplete(1, 2).splitlines()
    assert [line.split(":")[0] for line in lines] == [f"iteration 2 bucket {bucket}" for bucket in range(30)]
    assert all("bytes missing: channel 0 loop 0 chunk 1 slice 0 at" in line for line in lines)


def test_poll_waits_without_the_interpreter_lock(receiver: Receiver) -> None:
    packets = interleave(Sender().packets(OP, gradients(OP, 1)))
    events: list[object] = []
    waiter = threading.Thread(target=lambda: events.extend(receiver.poll(20)))
    waiter.start()
    for data in packets:
        receiver.feed(data)
    waiter.join(20)
    assert len(events) == 1


def test_poll_returns_at_its_timeout(receiver: Receiver) -> None:
    begin = time.monotonic()
    assert receiver.poll(0.3) == []
    assert time.monotonic() - begin >= 0.3


def test_packets_that_are_no_copies_are_counted_apart(receiver: Receiver) -> None:
    receiver.feed(packet(b"x" * 100, 0, dscp=0))
    receiver.feed(b"")
    receiver.feed(packet(b"x" * 100, 0)[:80])
    counters = receiver.counters()
    assert (counters["other"], counters["truncated"], counters["packets"]) == (2, 1, 0)


@pytest.mark.parametrize(
    ("field", "value"),
    [("sets", 0), ("pool_bytes", 0), ("dscp", 0), ("dscp", 64), ("gap_timeout_s", 0.0), ("mtu", 100), ("mtu", 70000)],
)
def test_impossible_configuration_is_refused(field: str, value: float) -> None:
    with pytest.raises(CheckmateError, match=f"{field} is {value}"):
        replace(RxConfig(), **{field: value})


def test_receivers_of_several_groups_share_ports_and_keep_apart() -> None:
    names = ["part0", "part1"]
    receivers = open_receivers(RxConfig(pool_bytes=1 << 20, max_op_bytes=1 << 20), names)
    for receiver in receivers:
        receiver.set_incarnation(1)
    for index, name in enumerate(names):
        content = gradients(OP, 10 + index)
        for data in interleave(Sender(port=40000 + 100 * index).packets(OP, content, group=group_number(name))):
            receivers[0].feed(data)
    events = [receiver.poll(0) for receiver in receivers]
    assert [[event.bucket for event in each if isinstance(event, OpComplete)] for each in events] == [[0], [0]]
    for index, (receiver, (event,)) in enumerate(zip(receivers, events, strict=True)):
        assert isinstance(event, OpComplete)
        assert receiver.buffer(event) == gradients(OP, 10 + index)
    receivers[0].close()
    receivers[0].close()
    with pytest.raises(CheckmateError, match="closed"):
        receivers[0].counters()
    (event,) = events[1]
    assert isinstance(event, OpComplete)
    receivers[1].release(event)  # goes on when the other group's is closed
    assert receivers[1].counters()["foreign"] == 0
    receivers[1].close()
