"""What every target must do: one suite, run on each."""

import contextlib
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence

import pytest

from checkmate import config, native
from checkmate.controlplane.reconcile import reconcile
from checkmate.controlplane.target import Kind, NotPrimaryError, Target, TargetError, UnreachableError, Update
from checkmate.controlplane.targets.fake import FakeTarget
from checkmate.controlplane.targets.p4runtime import P4RuntimeTarget
from checkmate.p4.ebpf.datapath import Datapath
from checkmate.p4.ebpf.fake import FakeDatapath
from checkmate.p4.ebpf.loader import Switch
from checkmate.p4.ebpf.p4runtime_server import Server
from checkmate.p4.v1model import bmv2
from checkmate.plan import (
    FLOOD_GROUP,
    HEARTBEAT,
    L2_FORWARD,
    LIVE_GROUP,
    REPLICATE,
    Entry,
    Multicast,
    Plan,
    Replica,
    Rules,
    make_plan,
)
from checkmate.topology import Endpoint, Topology


class Rig:
    """A target, and the power switch of the machine behind it. ``SHARED``: jobs may use the switch at the same time."""

    SHARED = True
    target: Target

    def another(self, job: str = "") -> Target:
        """A second controller of the same switch."""
        raise NotImplementedError

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

    def another(self, job: str = "") -> Target:
        return FakeTarget(job, self._fake)

    def stop(self) -> None:
        self._fake.restart()


class ServerRig(Rig):
    """The real P4Runtime server of the eBPF switch, on a data path in memory."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.endpoint = Endpoint("127.0.0.1", probe.getsockname()[1])
        self._running = contextlib.ExitStack()
        self.start()
        self.target = self.another()

    def another(self, job: str = "") -> Target:
        return P4RuntimeTarget(self.endpoint, device_id=1, job=job, timeout_s=5)

    def start(self) -> None:
        self._running.enter_context(Server(self.datapath(), str(self.endpoint), device_id=1))

    def datapath(self) -> Datapath:
        return FakeDatapath(range(1, 120))

    def stop(self) -> None:
        self._running.close()


class WiredRig(ServerRig):
    """A server in front of a data path on veths in a network namespace of its own."""

    PORTS = (1, 2, 3, 4, 5, 100, 101, 102, 103)

    def __init__(self) -> None:
        self.netns = f"ckm-target-{os.getpid()}"
        self.interfaces = {port: f"s{port}" for port in self.PORTS}
        ip("netns", "add", self.netns)
        ip("-n", self.netns, "link", "set", "lo", "up")
        for port, name in self.interfaces.items():
            ip("-n", self.netns, "link", "add", name, "type", "veth", "peer", "name", f"h{port}")
            ip("netns", "exec", self.netns, "ethtool", "-K", name, "tx", "off", "tso", "off", "gso", "off")
            ip("-n", self.netns, "link", "set", name, "up")
        try:
            super().__init__()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        super().close()
        ip("netns", "delete", self.netns)


class EbpfRig(WiredRig):
    """The same server on the kernel's data path."""

    def datapath(self) -> Datapath:
        return self._running.enter_context(Switch(self.interfaces, self.netns))


class Bmv2Rig(WiredRig):
    """``simple_switch_grpc``, whose server knows no roles: one job's controller at a time."""

    SHARED = False

    def __init__(self) -> None:
        self._program = bmv2.pipeline()
        self._folder = tempfile.TemporaryDirectory(prefix="ckm-target")
        self._address = f"unix:{self._folder.name}/p4runtime"
        super().__init__()

    def another(self, job: str = "") -> Target:
        return P4RuntimeTarget(self._address, 1, self._program, job, timeout_s=10)

    def start(self) -> None:
        self._running.enter_context(bmv2.Bmv2(self.interfaces, self._address, netns=self.netns))

    def close(self) -> None:
        super().close()
        self._folder.cleanup()


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=10, stdout=subprocess.DEVNULL)


RIGS: dict[str, type[Rig]] = {"fake": FakeRig, "p4runtime": ServerRig, "ebpf": EbpfRig, "bmv2": Bmv2Rig}
MARKS = {"ebpf": [pytest.mark.root], "bmv2": [pytest.mark.root, pytest.mark.bmv2]}


def missing(name: str) -> str | None:
    """Why a target can't be tested here, None if it can."""
    if name == "tofino":
        return "no Tofino and no model of one; its P4Runtime server is PI, as BMv2's is"
    if name not in ("ebpf", "bmv2"):
        return None
    if os.geteuid() != 0:
        return "needs root: makes a network namespace"
    try:
        native.library("switch.bpf.o") if name == "ebpf" else (bmv2.find_binary(), bmv2.pipeline())
    except config.CheckmateError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", [*RIGS, "tofino"])
def test_targets(name: str) -> None:
    """Says once what is not tested here."""
    if reason := missing(name):
        pytest.skip(reason)
    assert issubclass(RIGS[name], Rig)


@pytest.fixture(params=[pytest.param(name, marks=MARKS.get(name, ())) for name in RIGS if not missing(name)])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = RIGS[request.param]()
    try:
        rig.target.connect()
        yield rig
        rig.target.close()
    finally:
        rig.close()


@pytest.fixture
def target(rig: Rig) -> Target:
    return rig.target


def plan(*live: str, ranks: int = 3, job: str = "test", first: int = 1) -> Plan:
    """Of ``ranks`` hosts on ports from ``first`` on. Job "test" has the shadows a and b, any other has b alone."""

    def nic(name: str, port: int) -> dict[str, object]:
        return {"name": name, "mac": f"02:00:00:00:00:{port:02x}", "ip": f"10.1.0.{port}", "port": port}

    shadows = {"a": 100, "b": 102} if job == "test" else {"b": 102}
    return make_plan(
        Topology.from_dict(
            {
                "job": job,
                "mtu": 1500,
                "token_file": "/nowhere/token",
                "registrar": "10.255.0.1:7702",
                "switch": {"target": "bmv2", "p4runtime": "127.0.0.1:9559"},
                "hosts": [
                    {"name": f"node{i}", "management_ip": f"10.255.0.{first + i}", "nics": [nic("eth0", first + i)]}
                    for i in range(ranks)
                ],
                "shadows": [
                    {
                        "name": name,
                        "management_ip": f"10.255.1.{port}",
                        "nics": [nic("eth0", port), nic("eth1", port + 1)],
                    }
                    for name, port in shadows.items()
                ],
                "groups": [{"name": "dp", "ranks": [f"node{i}" for i in range(ranks)], "shadows": list(shadows)}],
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


class Tripping:
    """A target that fails after some updates, each applied by itself: its controller died in the middle of a batch."""

    def __init__(self, target: Target, updates: int) -> None:
        self._target = target
        self._left = updates

    def read(self) -> Rules:
        return self._target.read()

    def apply(self, updates: Sequence[Update]) -> None:
        self._target.apply(updates[: self._left])
        self._left -= len(updates)
        if self._left < 0:
            raise UnreachableError("died")


@pytest.mark.parametrize("updates", [1, 9, 14, 21])
def test_a_controller_that_died_in_the_middle_is_carried_on_for(rig: Rig, updates: int) -> None:
    with pytest.raises(UnreachableError, match="died"):
        reconcile(Tripping(rig.target, updates), plan("a").rules)  # type: ignore[arg-type]
    assert not rig.target.read().dangling()
    rig.target.close()
    successor = rig.another()
    try:
        successor.connect()
        reconcile(successor, plan("b").rules)
        assert successor.read() == plan("b").rules
    finally:
        successor.close()


def test_what_the_plan_does_not_hold_is_removed_whoever_wrote_it(target: Target) -> None:
    target.apply(insert(GROUP, Multicast(9, ())))
    target.apply(insert(FLOOD, Entry(L2_FORWARD, FORWARD.match, "CheckmateIngress.drop")))
    wanted = plan("a").rules
    reconcile(target, wanted)
    assert target.read() == wanted


def test_an_entry_for_a_missing_group_is_told_of_and_removed(target: Target, caplog: pytest.LogCaptureFixture) -> None:
    match = (("ingress_port", 1), ("ethernet.dst_addr", 0x02_00_00_00_00_03))
    try:
        target.apply(insert(Entry(HEARTBEAT, match, REPLICATE, (("group", 77),))))
    except TargetError as error:
        assert "no multicast group 77" in str(error)
    else:
        assert [entry.match for entry in reconcile(target, plan().rules).dangling] == [match]
        assert "multicast group that does not exist" in caplog.text
        assert target.read() == plan().rules


def test_two_jobs_leave_each_other_alone(rig: Rig) -> None:
    """Each comes, changes and goes while the other one's entries, groups and flooding stay."""
    if not rig.SHARED:
        pytest.skip(
            "its P4Runtime server has no roles: the second job's controller waits for the end of the first one's"
        )
    rig.target.close()
    one, two = rig.another("one"), rig.another("two")
    try:
        one.connect()
        two.connect()
        reconcile(one, plan("b", job="one", ranks=2).rules, "one")
        reconcile(two, Rules.of([], [flood(3, 4)]), "two")
        for live in (set(), {"a"}):
            second = job_two(live)
            before = held_by("one", one.read())
            assert reconcile(two, second, "two").written
            assert held_by("one", two.read()) == before
            assert reconcile(one, plan("b", job="one", ranks=2).rules, "one").written == 0
            assert reconcile(two, second, "two").written == 0
            assert flood(1, 2, 3, 4) in two.read().groups
        reconcile(one, plan(job="one", ranks=2).rules, "one")
        assert {item.key for item in job_two({"a"}).items} <= {item.key for item in one.read().items}
    finally:
        one.close()
        two.close()


def test_what_is_nobodys_becomes_the_jobs_that_wants_it(rig: Rig) -> None:
    rules = plan("b", job="one", ranks=2).rules
    reconcile(rig.target, rules)
    rig.target.close()
    one = rig.another("one")
    try:
        one.connect()
        assert reconcile(one, rules, "one").written == len(rules.entries)
        assert held_by("one", one.read()) == set(rules.entries)
        assert reconcile(one, rules, "one").written == 0
    finally:
        one.close()


def test_what_another_job_left_stays(rig: Rig) -> None:
    """Also where a second job's controller has to wait for the end of the first one's."""
    rig.target.close()
    one, two = rig.another("one"), rig.another("two")
    try:
        one.connect()
        reconcile(one, plan("b", job="one", ranks=2).rules, "one")
        if not rig.SHARED:
            with pytest.raises(NotPrimaryError):
                two.connect()
        one.close()
        assert connected(two, 5)
        before = two.read()
        reconcile(two, job_two({"a"}), "two")
        assert held_by("one", two.read()) == held_by("one", before) == set(before.entries)
        assert {group for group in before.groups if group.id != FLOOD_GROUP} <= set(two.read().groups)
        assert flood(1, 2, 3, 4) in two.read().groups
        reconcile(two, Rules.of([], [flood()]), "two")
        assert two.read() == before
    finally:
        one.close()
        two.close()


def job_two(live: set[str]) -> Rules:
    """Ports 3 and 4, and the shadow at 100 and 101."""
    both = plan(*live, ranks=4)
    mine = {3, 4, 100, 101}
    entries = [entry for entry in both.rules.entries if ports_of(entry) <= mine]
    groups = {entry.group for entry in entries if entry.table == HEARTBEAT}
    entries = [entry for entry in entries if entry.table != LIVE_GROUP or entry.group in groups]
    return Rules.of(entries, [flood(3, 4), *(group for group in both.rules.groups if group.id in groups)])


def ports_of(entry: Entry) -> set[int]:
    """Switch ports that an entry is about; an address says its port."""
    about = {name: value for name, value in (*entry.match, *entry.params) if isinstance(value, int)}
    named = {value for name, value in about.items() if name.endswith("port") and name != "registrar_port"}
    return named | {about["ethernet.dst_addr"] & 0xFF for _ in [0] if "ethernet.dst_addr" in about}


def flood(*ports: int) -> Multicast:
    return Multicast(FLOOD_GROUP, tuple(Replica(port, 0) for port in ports))


def held_by(job: str, rules: Rules) -> set[Entry]:
    return {entry for entry in rules.entries if entry.owner == job}


def test_a_job_cannot_take_what_is_another_ones(rig: Rig) -> None:
    if not rig.SHARED:
        pytest.skip("its P4Runtime server has no roles")
    rig.target.close()
    one, two = rig.another("one"), rig.another("two")
    try:
        one.connect()
        two.connect()
        reconcile(one, plan("b", job="one", ranks=2).rules, "one")
        before = one.read()
        taken = Entry(L2_FORWARD, FORWARD.match, FORWARD.action, (("port", 2),))
        with pytest.raises(TargetError, match="ALREADY_EXISTS"):
            reconcile(two, Rules.of([taken], [flood(1)]), "two")
        assert one.read().entries == before.entries
    finally:
        one.close()
        two.close()


def test_a_standby_takes_over_in_bounded_time_and_who_comes_back_is_not_primary(rig: Rig) -> None:
    first, standby = rig.target, rig.another()
    if isinstance(first, FakeTarget):
        pytest.skip("a switch in memory has no controllers that compete")
    try:
        reconcile(first, plan("a").rules)
        with pytest.raises(NotPrimaryError):
            standby.connect()
        with pytest.raises(NotPrimaryError):
            standby.apply(insert(GROUP))
        start = time.monotonic()
        first.close()
        assert connected(standby, 5)
        took = time.monotonic() - start
        assert took < 3, f"the take-over took {took:.2f} s"
        assert reconcile(standby, plan("a").rules).written == 0, "the pipeline was not pushed again"
        with pytest.raises(NotPrimaryError):
            first.connect()
        reconcile(standby, plan("b").rules)
        assert first.read() == plan("b").rules
        standby.close()
        assert connected(first, 5)
        reconcile(first, plan().rules)
    finally:
        standby.close()


def connected(target: Target, within_s: float) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        with contextlib.suppress(NotPrimaryError):
            target.connect()
            return True
        time.sleep(0.02)
    return False
