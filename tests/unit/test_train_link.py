"""The records connection never holds up the sender, whatever the shadow does."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from checkmate.protocol import Ack, Boundary, Layout, Message, Refused, SeedRequest, StepRecord, receive
from checkmate.train import link as link_module
from checkmate.train.link import RecordsLink


class Peer:
    """The far end: hands out socket pairs as connections."""

    def __init__(self) -> None:
        self.ends: list[socket.socket] = []
        self.allowed = threading.Event()
        self.allowed.set()

    def records(self, incarnation: int) -> socket.socket:
        if not self.allowed.is_set():
            raise ConnectionRefusedError("not there")
        near, far = socket.socketpair()
        far.settimeout(5)
        self.ends.append(far)
        return near


@pytest.fixture
def peer() -> Peer:
    return Peer()


@pytest.fixture
def make(peer: Peer, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(link_module, "BACK_OFF_S", (0.01, 0.05))
    links: list[RecordsLink] = []

    def build(
        greeting: Callable[[], list[Message]] = list, on_seed_request: Callable[..., None] = lambda *_: None
    ) -> RecordsLink:
        link = RecordsLink(peer, greeting, on_seed_request)
        links.append(link)
        return link

    yield build
    for end in peer.ends:
        end.close()
    for link in links:
        link.close(0.2)


def connected(link: RecordsLink) -> RecordsLink:
    link.open(1)
    assert link.wait(lambda: link.connected, 5)
    return link


def record(step: int) -> StepRecord:
    return StepRecord(step, "digest", [{"lr": 0.1}])


def test_messages_arrive_in_order_behind_the_greeting(peer: Peer, make) -> None:  # type: ignore[no-untyped-def]
    layout = Layout("digest", [])
    link = connected(make(lambda: [layout]))
    sent = [record(step) for step in range(1, 50)]
    assert all(link.send(message) for message in sent)
    assert [receive(peer.ends[0]) for _ in range(50)] == [layout, *sent]


def test_a_peer_that_does_not_read_costs_messages_but_no_time(peer: Peer, make) -> None:  # type: ignore[no-untyped-def]
    link = connected(make())
    big = Boundary(1, {"x": b"\0" * (1 << 20)})
    started = time.monotonic()
    results = [link.send(big) for _ in range(40)]
    assert time.monotonic() - started < 5
    assert results[0] and not results[-1]
    assert link.dropped == results.count(False) > 0
    assert [receive(peer.ends[0]) for _ in range(results.count(True))] == [big] * results.count(True)
    assert link.wait(lambda: link.send(big), 5)  # it goes on where it stopped


def test_nothing_is_sent_while_there_is_no_connection(peer: Peer, make) -> None:  # type: ignore[no-untyped-def]
    peer.allowed.clear()
    link = make()
    link.open(1)
    assert not link.send(record(1))
    assert link.dropped == 1
    peer.allowed.set()
    assert link.wait(lambda: link.connected, 5)
    assert link.send(record(2))
    assert receive(peer.ends[0]) == record(2)


def test_it_reconnects_with_a_new_greeting(peer: Peer, make) -> None:  # type: ignore[no-untyped-def]
    link = connected(make(lambda: [Layout(f"layout {len(peer.ends)}", [])]))
    peer.ends[0].close()
    assert link.wait(lambda: len(peer.ends) > 1 and link.connected, 5)
    assert receive(peer.ends[1]) == Layout("layout 2", [])


def test_acks_and_seed_requests_are_heard(peer: Peer, make) -> None:  # type: ignore[no-untyped-def]
    asked: list[tuple[str, int | None]] = []
    link = connected(make(on_seed_request=lambda reason, at: asked.append((reason, at))))
    data = Ack(6, 1).encode() + SeedRequest("gap").encode() + SeedRequest("far", 9).encode() + Ack(7, 2).encode()
    for byte in data:  # split everywhere
        peer.ends[0].sendall(bytes([byte]))
    assert link.wait(lambda: link.committed == (2, 7), 5)
    assert asked == [("gap", None), ("far", 9)]


@pytest.mark.parametrize("noise", [b"\xff\xff\xff\xff", b"\0\0\0\1x", record(1).encode()])
def test_nonsense_ends_the_connection_only(peer: Peer, make, noise: bytes) -> None:  # type: ignore[no-untyped-def]
    link = connected(make())
    peer.ends[0].sendall(noise)
    assert link.wait(lambda: len(peer.ends) > 1 and link.connected, 5)
    assert link.send(record(1))


def test_a_refusal_is_kept_and_slows_down_reconnecting(peer: Peer, make) -> None:  # type: ignore[no-untyped-def]
    link = connected(make())
    peer.ends[0].sendall(Refused("stale").encode())
    peer.ends[0].close()
    assert link.wait(lambda: not link.connected, 5)
    assert link.refused == "stale"
    time.sleep(0.2)
    assert len(peer.ends) == 1


def test_close_delivers_what_was_sent_even_with_unread_input(peer: Peer, make) -> None:  # type: ignore[no-untyped-def]
    link = connected(make())
    big = Boundary(1, {"x": b"\1" * (2 << 20)})
    assert link.send(big)
    got: list[Message | None] = []

    def read() -> None:
        time.sleep(0.2)
        peer.ends[0].sendall(Ack(1).encode())
        got.extend([receive(peer.ends[0]), receive(peer.ends[0])])
        peer.ends[0].close()

    reader = threading.Thread(target=read)
    reader.start()
    started = time.monotonic()
    link.close(5)
    reader.join()
    assert got == [big, None]
    assert time.monotonic() - started < 5
    assert not [thread for thread in threading.enumerate() if thread.name == "checkmate-records"]


KILLED = """
import os, signal, socket, sys
from checkmate.protocol import Boundary
from checkmate.train.link import RecordsLink
class Connector:
    def records(self, incarnation):
        return socket.create_connection(("127.0.0.1", int(sys.argv[1])))
link = RecordsLink(Connector(), list, lambda reason, at: None)
link.open(1)
assert link.wait(lambda: link.connected, 10)
link.send(Boundary(1, {"x": b"x" * 40000}))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_was_sent_survives_sigkill() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(20)
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", KILLED, str(server.getsockname()[1])], env=dict(os.environ)
        )
        sock, _ = server.accept()
        with sock:
            sock.settimeout(20)
            assert receive(sock) == Boundary(1, {"x": b"x" * 40000})
            assert receive(sock) is None
        assert process.wait(20) == -signal.SIGKILL
