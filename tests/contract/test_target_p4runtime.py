"""What only a target behind a network can get wrong: connections, arbitration, pipeline, counters."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from importlib import resources

import pytest
from google.protobuf import text_format

from checkmate.controlplane.reconcile import reconcile
from checkmate.controlplane.tables import shape
from checkmate.controlplane.target import Count, Kind, NotPrimaryError, TargetError, UnreachableError, Update
from checkmate.controlplane.targets.p4runtime import P4RuntimeTarget
from checkmate.p4.ebpf import datapath
from checkmate.p4.ebpf.fake import FakeDatapath
from checkmate.p4.ebpf.p4runtime_server import Server
from checkmate.p4.shared import p4info
from checkmate.p4.shared.messages import p4info_pb2
from checkmate.plan import HEARTBEAT, REPLICATE, Entry, Multicast, Replica, Rules
from checkmate.topology import Endpoint

MATCH = (("ingress_port", 1), ("ethernet.dst_addr", 0x02_00_00_00_00_02))
RULES = Rules.of([Entry(HEARTBEAT, MATCH, REPLICATE, (("group", 2),))], [Multicast(2, (Replica(2, 0), Replica(3, 1)))])


@pytest.fixture
def path() -> FakeDatapath:
    return FakeDatapath(range(1, 5))


@pytest.fixture
def server(path: FakeDatapath) -> Iterator[Server]:
    with Server(path, "127.0.0.1:0", device_id=1) as server:
        yield server


def connect(server: Server, device_id: int = 1, election_id: int = 1) -> P4RuntimeTarget:
    endpoint = Endpoint("127.0.0.1", server.port)
    target = P4RuntimeTarget(endpoint, device_id, election_id=election_id, timeout_s=2)
    target.connect()
    return target


def test_nothing_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    target = P4RuntimeTarget(Endpoint("127.0.0.1", port), device_id=1, timeout_s=2)
    with pytest.raises(UnreachableError, match=f"127.0.0.1:{port}"):
        target.connect()
    target.close()


def test_a_peer_that_never_answers_is_given_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = P4RuntimeTarget(Endpoint(*silent.getsockname()), device_id=1, timeout_s=0.5)
        start = time.monotonic()
        with pytest.raises(UnreachableError):
            target.connect()
        assert time.monotonic() - start < 4
        target.close()


def test_another_primary_is_respected_until_it_goes(server: Server) -> None:
    first = connect(server, election_id=2)
    with pytest.raises(TargetError, match="another primary controller"):
        connect(server, election_id=1)
    first.close()
    second = connect(server, election_id=2)
    assert second.read() == Rules()
    second.close()


def test_a_higher_election_id_takes_over_and_the_other_cannot_write(server: Server) -> None:
    first, second = connect(server, election_id=1), connect(server, election_id=2)
    reconcile(second, RULES)
    with pytest.raises(NotPrimaryError, match="election id 2"):
        first.apply([Update(Kind.DELETE, RULES.entries[0])])
    with pytest.raises(NotPrimaryError):
        first.connect()
    assert second.read() == RULES
    first.close()
    second.close()


def test_of_several_standbys_one_takes_over(server: Server) -> None:
    first = connect(server)
    standbys = [P4RuntimeTarget(Endpoint("127.0.0.1", server.port), 1, timeout_s=5) for _ in range(4)]
    for standby in standbys:
        with pytest.raises(NotPrimaryError):
            standby.connect()
    first.close()
    primaries: set[int] = set()

    def take_over(number: int) -> None:
        with contextlib.suppress(NotPrimaryError):
            standbys[number].connect()
            primaries.add(number)

    end = time.monotonic() + 10
    while not primaries and time.monotonic() < end:
        threads = [threading.Thread(target=take_over, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(primaries) == 1
    reconcile(standbys[primaries.pop()], RULES)
    for standby in standbys:
        standby.close()


def test_a_pipeline_that_the_switchs_own_tools_load_is_never_pushed(server: Server) -> None:
    target = P4RuntimeTarget(Endpoint("127.0.0.1", server.port), 1, device_config=None, timeout_s=5)
    with pytest.raises(TargetError, match="load p4/tna with the switch's SDE"):
        target.connect()
    target.close()
    loader = connect(server)
    reconcile(loader, RULES)
    loader.close()
    target.connect()
    assert target.read() == RULES
    target.close()


def test_the_ids_of_the_program_that_a_tofino_runs_are_taken(
    path: FakeDatapath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its compiler gives the same rules other ids; here the eBPF switch's server stands for it."""
    text = resources.files("checkmate.p4").joinpath("tna/checkmate.p4info.txtpb").read_text()
    tofino = text_format.Parse(text, p4info_pb2.P4Info())
    assert shape(tofino) == shape(p4info.load()) != shape(p4info_pb2.P4Info())
    assert [each.preamble.id for each in tofino.counters] != [each.preamble.id for each in p4info.load().counters]
    with monkeypatch.context() as patch:
        patch.setattr(p4info, "load", lambda: tofino)
        server = Server(path, "127.0.0.1:0", device_id=1)
        loader = P4RuntimeTarget(Endpoint("127.0.0.1", server.port), 1, timeout_s=5)
    with server, contextlib.closing(loader):
        loader.connect()
        loader.close()
        target = P4RuntimeTarget(Endpoint("127.0.0.1", server.port), 1, device_config=None, timeout_s=5)
        target.connect()
        reconcile(target, RULES)
        assert target.read() == RULES
        assert target.pipeline() == "ours"
        assert set(target.counters([1, 2]).ports) == {counter.preamble.name for counter in tofino.counters}
        target.close()


def test_the_wrong_device_is_refused(server: Server) -> None:
    with pytest.raises(TargetError, match="there is no device 7"):
        connect(server, device_id=7)


def test_a_pipeline_that_runs_is_left_alone_and_another_one_is_replaced(server: Server) -> None:
    target = connect(server)
    reconcile(target, RULES)
    target.close()
    again = connect(server)
    assert again.read() == RULES
    again.close()
    other = P4RuntimeTarget(Endpoint("127.0.0.1", server.port), 1, device_config=b"another build", timeout_s=2)
    other.connect()
    assert other.read() == Rules()
    other.close()


def test_names_and_values_that_the_pipeline_does_not_have(server: Server) -> None:
    target = connect(server)
    for entry, text in (
        (Entry("CheckmateIngress.nothing", MATCH, REPLICATE), "no 'CheckmateIngress.nothing'"),
        (Entry(HEARTBEAT, (("colour", 1),), REPLICATE), "no 'colour'"),
        (Entry(HEARTBEAT, MATCH, REPLICATE, (("group", 1 << 16),)), "65536 does not fit in 16 bits"),
        (Entry(HEARTBEAT, (("ingress_port", 512),), REPLICATE), "512 does not fit in 9 bits"),
    ):
        with pytest.raises(TargetError, match=text):
            target.apply([Update(Kind.INSERT, entry)])
    target.close()


def test_counters_by_name_and_port_and_by_entry(server: Server, path: FakeDatapath) -> None:
    target = connect(server)
    reconcile(target, RULES)
    path.counts[datapath.Counter.COPIES_OUT, 3] = datapath.Count(5, 700)
    path.heartbeat_counts[1, bytes.fromhex("020000000002")] = datapath.Count(5, 720)
    counters = target.counters([1, 2, 3, 4])
    assert counters.ports["CheckmateEgress.copies_out"] == {3: Count(5, 700)}
    assert counters.ports["CheckmateIngress.tagged_in"] == {}
    assert counters.entries == {RULES.entries[0].key: Count(5, 720)}
    target.close()


def test_no_thread_and_no_connection_is_left(server: Server) -> None:
    for _ in range(3):
        connect(server).close()
    assert not [thread for thread in threading.enumerate() if thread.name == "p4runtime-stream"]
