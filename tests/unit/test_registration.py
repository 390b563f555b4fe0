"""The registration server against honest, broken and hostile shadows."""

import contextlib
import logging
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import msgpack
import pytest

from checkmate.config import CheckmateError
from checkmate.controlplane import messages
from checkmate.controlplane.loop import LoopThread
from checkmate.controlplane.registrar_client import RegistrarClient
from checkmate.controlplane.registration import MAX_PENDING, RegistrationServer
from checkmate.topology import Topology

TOKEN = b"0123456789abcdef0123456789abcdef"
MACS = ["02:00:00:00:01:00", "02:00:00:00:01:01"]


def topology(port: int) -> Topology:
    def nic(name: str, number: int, mac: str) -> dict[str, object]:
        return {"name": name, "mac": mac, "ip": f"10.1.0.{number}", "port": number}

    return Topology.from_dict(
        {
            "job": "test",
            "mtu": 1500,
            "token_file": "/nowhere/token",
            "registrar": f"127.0.0.1:{port}",
            "switch": {"target": "bmv2", "p4runtime": "127.0.0.1:9559"},
            "hosts": [
                {"name": f"node{i}", "management_ip": f"10.255.0.{i}", "nics": [nic("eth0", i, f"02:00:00:00:00:0{i}")]}
                for i in (1, 2)
            ],
            "shadows": [
                {
                    "name": "shadow0",
                    "management_ip": "10.255.0.100",
                    "nics": [nic("eth0", 100, MACS[0]), nic("eth1", 101, MACS[1])],
                }
            ],
            "groups": [{"name": "dp0", "ranks": ["node1", "node2"], "shadows": ["shadow0"]}],
        }
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class Rig:
    """A running server, what it said changed, and clients that are closed at the end."""

    def __init__(self) -> None:
        self.topology = topology(free_port())
        self.changes = 0
        self.loop = LoopThread("test-loop")
        self.server = RegistrationServer(self.topology, TOKEN, self.loop, self._changed)
        self.server.start()
        self.clients: list[RegistrarClient] = []

    def client(self, token: bytes = TOKEN, **changed: object) -> RegistrarClient:
        said = {"job": "test", "shadow": "shadow0", "macs": MACS} | changed
        client = RegistrarClient(self.topology.registrar, token=token, **said)  # type: ignore[arg-type]
        self.clients.append(client)
        return client

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.server.close()
        self.loop.close()

    def _changed(self) -> None:
        self.changes += 1


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


def soon(condition: Callable[[], bool], within_s: float = 5.0) -> bool:
    end = time.monotonic() + within_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_a_shadow_registers_is_mirrored_is_seeded_and_leaves(rig: Rig) -> None:
    client = rig.client()
    assert soon(lambda: rig.server.live() == {"shadow0"}) and rig.changes == 1
    assert not client.wait_mirrored(0.3)
    rig.server.set_mirrored(frozenset({"shadow0"}))
    assert client.wait_mirrored(5)
    status = rig.server.status()["shadow0"]
    assert status["live"] and status["mirrored"] and not status["seeded"]
    client.set_seeded(True)
    assert soon(lambda: rig.server.status()["shadow0"]["seeded"] is True, 0.5)
    client.close()
    assert soon(lambda: rig.server.live() == frozenset()) and rig.changes == 2
    assert rig.server.status()["shadow0"] == {"live": False, "seeded": False, "mirrored": False}


def test_a_shadow_that_comes_back_is_neither_seeded_nor_mirrored(rig: Rig) -> None:
    first = rig.client()
    first.set_seeded(True)
    assert soon(lambda: rig.server.status()["shadow0"]["seeded"] is True)
    rig.server.set_mirrored(frozenset({"shadow0"}))
    first.close()
    assert soon(lambda: not rig.server.live())
    second = rig.client()
    assert soon(lambda: rig.server.live() == {"shadow0"})
    assert rig.server.status()["shadow0"]["seeded"] is False
    assert not second.wait_mirrored(0.3)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"token": b"another token, long enough"}, "wrong job token"),
        ({"job": "other"}, "job 'other' is not run here"),
        ({"shadow": "shadwo0"}, "did you mean 'shadow0'"),
        ({"macs": MACS[::-1]}, "the topology says"),
    ],
)
def test_refused_and_logged_with_the_peer_on_both_sides(
    rig: Rig, caplog: pytest.LogCaptureFixture, changed: dict[str, object], reason: str
) -> None:
    rig.client(**changed)  # type: ignore[arg-type]
    assert soon(lambda: "registration refused" in caplog.text and "trying again" in caplog.text)
    refusals = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert any(line.startswith("127.0.0.1:") and reason in line for line in refusals)
    assert any(line.startswith(str(changed.get("shadow", "shadow0"))) and reason in line for line in refusals)
    assert rig.server.live() == frozenset() and rig.changes == 0


def test_a_refusal_is_said_once_though_tried_again(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.client(job="other")
    assert soon(lambda: sum(record.getMessage().startswith("127.0.0.1:") for record in caplog.records) >= 3)
    assert sum("trying again" in record.getMessage() for record in caplog.records) == 1


def test_the_newest_connection_of_a_shadow_counts(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    old = connect(rig)
    register(old)
    assert soon(lambda: rig.server.live() == {"shadow0"})
    new = rig.client()
    assert soon(lambda: rig.changes == 2)
    rig.server.set_mirrored(frozenset({"shadow0"}))
    assert new.wait_mirrored(5)
    with pytest.raises(ConnectionResetError):
        take(old)
    assert rig.server.live() == {"shadow0"} and rig.changes == 2


def test_a_silent_shadow_is_dead_after_the_time(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "DEAD_AFTER_S", 0.4)
    peer = connect(rig)
    register(peer)
    assert soon(lambda: rig.server.live() == {"shadow0"})
    start = time.monotonic()
    assert soon(lambda: not rig.server.live()) and time.monotonic() - start < 2
    peer.close()


def test_a_client_registers_again_after_the_server_was_restarted(rig: Rig) -> None:
    client = rig.client()
    assert soon(lambda: rig.server.live() == {"shadow0"})
    rig.server.set_mirrored(frozenset({"shadow0"}))
    assert client.wait_mirrored(5)
    rig.server.close()
    assert soon(lambda: not client.mirrored)
    rig.server.start()
    assert soon(lambda: rig.server.live() == {"shadow0"})


def test_a_server_without_the_token_is_not_believed(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        where = topology(listener.getsockname()[1]).registrar
        client = RegistrarClient(where, "test", "shadow0", MACS, TOKEN)
        peer, _ = listener.accept()
        put(peer, {"type": "Challenge", "nonce": b"n" * 32})
        take(peer)
        put(peer, {"type": "Registered", "proof": b"?" * 32})
        assert soon(lambda: "does not hold the job token" in caplog.text)
        client.close()
        peer.close()


@pytest.mark.parametrize(
    "sent",
    [
        struct.pack(">I", messages.MAX_MESSAGE + 1),
        struct.pack(">I", 5) + b"\xc1\xc1\xc1\xc1\xc1",
        struct.pack(">I", 1) + msgpack.packb(7),
        struct.pack(">I", 20) + b"cut off",
        b"GET / HTTP/1.1\r\n\r\n",
        b"",
    ],
    ids=["too long", "no msgpack", "no map", "cut off", "another protocol", "nothing"],
)
def test_garbage_ends_the_connection_and_nothing_else(rig: Rig, sent: bytes) -> None:
    peer = connect(rig)
    take(peer)
    peer.sendall(sent)
    peer.shutdown(socket.SHUT_WR)
    with contextlib.suppress(ConnectionResetError):
        assert peer.recv(1) == b""
    rig.client()
    assert soon(lambda: rig.server.live() == {"shadow0"})


@pytest.mark.parametrize("field", ["nonce", "macs", "shadow", "proof"])
def test_fields_of_the_wrong_type_end_the_connection(rig: Rig, caplog: pytest.LogCaptureFixture, field: str) -> None:
    peer = connect(rig)
    take(peer)
    said = {"job": "test", "shadow": "shadow0", "macs": MACS, "nonce": b"x", "proof": b"y"} | {field: [1]}
    put(peer, {"type": "Register", **said})
    with pytest.raises(ConnectionResetError):
        take(peer)
    assert f"Register.{field} is a list" in caplog.text


def test_connections_that_do_not_register_are_bounded_and_the_oldest_make_room(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    peers = [connect(rig) for _ in range(2 * MAX_PENDING)]
    for peer in peers[MAX_PENDING:]:
        assert take(peer)["type"] == "Challenge"
    for peer in peers[:MAX_PENDING]:
        with pytest.raises(ConnectionResetError):
            take(peer), take(peer)
    assert sum("too many connections" in record.getMessage() for record in caplog.records) == 1
    for peer in peers:
        peer.close()


def test_a_flood_of_garbage_does_not_fill_the_log(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(100):
        with connect(rig) as peer, contextlib.suppress(OSError):
            take(peer)
            peer.sendall(b"GET / HTTP/1.1\r\n\r\n")
            peer.recv(1)
    rig.client()
    assert soon(lambda: rig.server.live() == {"shadow0"})
    said = [record for record in caplog.records if record.name == "checkmate.registration"]
    assert 0 < sum(record.levelno >= logging.WARNING for record in said) <= 60


def test_a_flood_of_connections_starves_no_shadow(rig: Rig) -> None:
    """Nor ends one that has registered."""
    stop, opened = threading.Event(), 0

    def flood() -> None:
        nonlocal opened
        peers: deque[socket.socket] = deque()
        while not stop.is_set():
            with contextlib.suppress(OSError):
                peers.append(connect(rig))
                opened += 1
            if len(peers) > 3 * MAX_PENDING:
                peers.popleft().close()
        for peer in peers:
            peer.close()

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        assert soon(lambda: opened > MAX_PENDING)
        client = rig.client()
        assert soon(lambda: rig.server.live() == {"shadow0"}, 20)
        rig.server.set_mirrored(frozenset({"shadow0"}))
        assert client.wait_mirrored(20)
        before = opened
        assert soon(lambda: opened > before + 4 * MAX_PENDING, 20)
        assert client.mirrored and rig.server.live() == {"shadow0"} and rig.changes == 1
    finally:
        stop.set()
        thread.join()


def test_who_opens_most_connections_loses_them(rig: Rig) -> None:
    patient = socket.create_connection(rig.topology.registrar, timeout=5, source_address=("127.0.0.2", 0))
    challenge = take(patient)
    peers = [connect(rig) for _ in range(2 * MAX_PENDING)]
    assert take(peers[-1])["type"] == "Challenge"
    register(patient, challenge)
    assert soon(lambda: rig.server.live() == {"shadow0"})
    for peer in (patient, *peers):
        peer.close()


def test_a_closed_server_lets_nobody_finish_a_registration(rig: Rig) -> None:
    peer = connect(rig)
    challenge = take(peer)
    rig.server.close()
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        register(peer, challenge)
    assert not soon(lambda: bool(rig.server.live()), 0.3)
    peer.close()


def test_a_replayed_registration_is_refused(rig: Rig) -> None:
    first = connect(rig)
    said = register(first)
    first.close()
    second = connect(rig)
    take(second)
    put(second, said)
    assert take(second)["type"] == "Refused"


def test_an_address_of_another_machine_is_refused_with_advice() -> None:
    loop = LoopThread("test-loop")
    data = topology(1).to_dict() | {"registrar": "192.0.2.1:7702"}
    server = RegistrationServer(Topology.from_dict(data), TOKEN, loop, lambda: None)
    with pytest.raises(CheckmateError, match=r"192\.0\.2\.1:7702.*address of this machine"):
        server.start()
    loop.close()


def connect(rig: Rig) -> socket.socket:
    return socket.create_connection(rig.topology.registrar, timeout=5)


def take(peer: socket.socket) -> dict[str, object]:
    head = peer.recv(4, socket.MSG_WAITALL)
    if len(head) < 4:
        raise ConnectionResetError
    message: dict[str, object] = msgpack.unpackb(peer.recv(struct.unpack(">I", head)[0], socket.MSG_WAITALL))
    return message


def put(peer: socket.socket, message: dict[str, object]) -> None:
    body = msgpack.packb(message)
    peer.sendall(struct.pack(">I", len(body)) + body)


def register(peer: socket.socket, challenged: dict[str, object] | None = None) -> dict[str, object]:
    """Register by hand and return the message that did it."""
    challenge = (challenged or take(peer))["nonce"]
    assert isinstance(challenge, bytes)
    proof = messages.shadow_proof(TOKEN, challenge, "test", "shadow0", MACS, b"n")
    said: dict[str, object] = {"type": "Register", "job": "test", "shadow": "shadow0", "macs": MACS, "nonce": b"n"}
    said["proof"] = proof
    put(peer, said)
    assert take(peer)["type"] == "Registered"
    return said
