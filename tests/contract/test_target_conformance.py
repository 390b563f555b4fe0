"""What every target must do: one suite, run on each."""

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from checkmate import config
from checkmate.controlplane.reconcile import reconcile
from checkmate.controlplane.target import Kind, Target, TargetError, UnreachableError, Update
from checkmate.controlplane.targets.fake import FakeTarget
from checkmate.controlplane.targets.p4runtime import P4RuntimeTarget
from checkmate.p4.ebpf.datapath import Datapath
from checkmate.p4.ebpf.fake import FakeDatapath
from checkmate.p4.ebpf.loader import Switch
from checkmate.p4.ebpf.p4runtime_server import Server
from checkmate.plan import L2_FORWARD, Entry, Multicast, Plan, Replica, Rules, make_plan
from checkmate.topology import Endpoint, Topology


@dataclass
class Rig:
    """A target, and the power switch of the machine behind it."""

    target: Target = field(init=False)

    def start(self) -> None:
        """Make the switch run, with empty tables."""

    def stop(self) -> None:
        """Switch it off."""

    def close(self) -> None:
        """Remove everything."""
        self.stop()


class FakeRig(Rig):
    def __init__(self) -> None:
        self.target = self._fake = FakeTarget()

    def stop(self) -> None:
        self._fake.restart()


class ServerRig(Rig):
    """The real P4Runtime server of the eBPF switch, on a data path in memory."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.endpoint = Endpoint("127.0.0.1", probe.getsockname()[1])
        self._running = contextlib.ExitStack()
        self.start()
        self.target = P4RuntimeTarget(self.endpoint, device_id=1, timeout_s=2)

    def start(self) -> None:
        self._running.enter_context(Server(self.datapath(), str(self.endpoint), device_id=1))

    def datapath(self) -> Datapath:
        return FakeDatapath(range(1, 120))

    def stop(self) -> None:
        self._running.close()


class EbpfRig(ServerRig):
    """The same server on the real data path: veths in a network namespace of its own."""

    PORTS = (1, 2, 3, 4, 5, 100, 101, 102, 103)

    def __init__(self) -> None:
        if os.geteuid() != 0:
            pytest.skip("needs root: makes a network namespace")
        try:
            config.library("switch.bpf.o")
        except config.CheckmateError as error:
            pytest.skip(str(error))
        self.netns = f"ckm-target-{os.getpid()}"
        ip("netns", "add", self.netns)
        for port in self.PORTS:
            ip("-n", self.netns, "link", "add", f"s{port}", "type", "veth", "peer", "name", f"h{port}")
            ip("netns", "exec", self.netns, "ethtool", "-K", f"s{port}", "tx", "off", "tso", "off", "gso", "off")
        try:
            super().__init__()
        except BaseException:
            self.close()
            raise

    def datapath(self) -> Datapath:
        return self._running.enter_context(Switch({port: f"s{port}" for port in self.PORTS}, self.netns))

    def close(self) -> None:
        super().close()
        ip("netns", "delete", self.netns)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=10, stdout=subprocess.DEVNULL)


@pytest.fixture(
    params=[
        pytest.param(FakeRig, id="fake"),
        pytest.param(ServerRig, id="p4runtime"),
        pytest.param(EbpfRig, id="ebpf", marks=pytest.mark.root),
    ]
)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = request.param()
    try:
        rig.target.connect()
        yield rig
        rig.target.close()
    finally:
        rig.close()


@pytest.fixture
def target(rig: Rig) -> Target:
    return rig.target


def plan(*live: str, ranks: int = 3) -> Plan:
    def nic(name: str, port: int) -> dict[str, object]:
        return {"name": name, "mac": f"02:00:00:00:00:{port:02x}", "ip": f"10.1.0.{port}", "port": port}

    return make_plan(
        Topology.from_dict(
            {
                "job": "test",
                "mtu": 1500,
                "token_file": "/nowhere/token",
                "registrar": "10.255.0.1:7702",
                "switch": {"target": "bmv2", "p4runtime": "127.0.0.1:9559"},
                "hosts": [
                    {"name": f"node{i}", "management_ip": f"10.255.0.{i}", "nics": [nic("eth0", i)]}
                    for i in range(1, ranks + 1)
                ],
                "shadows": [
                    {"name": "a", "management_ip": "10.255.1.1", "nics": [nic("eth0", 100), nic("eth1", 101)]},
                    {"name": "b", "management_ip": "10.255.1.2", "nics": [nic("eth0", 102), nic("eth1", 103)]},
                ],
                "groups": [{"name": "dp", "ranks": [f"node{i + 1}" for i in range(ranks)], "shadows": ["a", "b"]}],
            }
        ),
        set(live),
    )


FORWARD = Entry(L2_FORWARD, (("ethernet.dst_addr", 0x02_00_00_00_00_01),), "CheckmateIngress.forward", (("port", 1),))
GROUP = Multicast(7, (Replica(1, 0), Replica(100, config.SHADOW_RID)))
FLOOD = Entry(L2_FORWARD, (), "CheckmateIngress.flood", (("group", 7),))


def insert(*items: Entry | Multicast) -> list[Update]:
    return [Update(Kind.INSERT, item) for item in items]


def test_a_new_switch_holds_nothing(target: Target) -> None:
    assert target.read() == Rules()


def test_what_was_written_is_read_back(target: Target) -> None:
    wanted = plan("a", "b").rules
    reconcile(target, wanted)
    assert target.read() == wanted


def test_inserted_modified_deleted(target: Target) -> None:
    target.apply(insert(GROUP))
    target.apply(insert(FORWARD, FLOOD))
    assert target.read() == Rules.of([FORWARD, FLOOD], [GROUP])
    moved, smaller = Entry(*FORWARD.key[:2], FORWARD.action, (("port", 2),)), Multicast(7, (Replica(1, 0),))
    target.apply([Update(Kind.MODIFY, moved), Update(Kind.MODIFY, smaller)])
    assert target.read() == Rules.of([moved, FLOOD], [smaller])
    target.apply([Update(Kind.DELETE, moved), Update(Kind.DELETE, FLOOD)])
    target.apply([Update(Kind.DELETE, smaller)])
    assert target.read() == Rules()


def test_a_refused_update_is_named_and_the_others_are_made(target: Target) -> None:
    target.apply(insert(GROUP))
    with pytest.raises(TargetError) as caught:
        target.apply([*insert(GROUP, FORWARD), Update(Kind.MODIFY, Multicast(9, (Replica(1, 0),)))])
    text = str(caught.value)
    assert "insert group 7: port 1 rid 0, port 100 rid 1: ALREADY_EXISTS" in text
    assert "modify group 9" in text and "NOT_FOUND" in text and "forward" not in text
    assert not isinstance(caught.value, UnreachableError)
    assert target.read() == Rules.of([FORWARD], [GROUP])


def test_reconciling_twice_writes_nothing_the_second_time(target: Target) -> None:
    wanted = plan("a").rules
    assert reconcile(target, wanted).written == len(wanted.items)
    assert reconcile(target, wanted).written == 0


def test_shadows_come_and_go(target: Target) -> None:
    for live in ((), ("a",), ("a", "b"), ("b",), ()):
        reconcile(target, plan(*live).rules)
        assert target.read() == plan(*live).rules


def test_another_topology_replaces_the_first(target: Target) -> None:
    reconcile(target, plan("a", ranks=5).rules)
    reconcile(target, plan("b", ranks=2).rules)
    assert target.read() == plan("b", ranks=2).rules


def test_a_restarted_switch_gets_everything_back(rig: Rig) -> None:
    wanted = plan("a").rules
    reconcile(rig.target, wanted)
    rig.stop()
    with contextlib.suppress(UnreachableError):
        rig.target.read()
    rig.start()
    rig.target.connect()
    assert reconcile(rig.target, wanted).written == len(wanted.items)
    assert rig.target.read() == wanted


def test_counters_are_read(target: Target) -> None:
    wanted = plan("a").rules
    reconcile(target, wanted)
    counters = target.counters([1, 2, 100])
    assert all(count.packets for cells in counters.ports.values() for count in cells.values())
    assert counters.entries.keys() <= {entry.key for entry in wanted.entries}


def test_closing_twice_is_fine_and_what_was_written_stays(target: Target) -> None:
    target.apply(insert(GROUP))
    target.close()
    target.close()
    target.connect()
    assert target.read() == Rules.of([], [GROUP])
