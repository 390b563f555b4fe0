"""The controller between shadows that come and go and a switch that restarts."""

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from checkmate.config import CheckmateError
from checkmate.controlplane import controller
from checkmate.controlplane.controller import Controller
from checkmate.controlplane.reconcile import reconcile
from checkmate.controlplane.registrar_client import RegistrarClient
from checkmate.controlplane.target import Kind, Update
from checkmate.controlplane.targets import target_of
from checkmate.controlplane.targets.p4runtime import P4RuntimeTarget
from checkmate.p4.ebpf.datapath import Count, Counter
from checkmate.p4.ebpf.fake import FakeDatapath
from checkmate.p4.ebpf.p4runtime_server import Server
from checkmate.plan import HEARTBEAT, REPLICATE, Entry, make_plan
from checkmate.status import query
from checkmate.topology import Topology

TOKEN = b"0123456789abcdef0123456789abcdef"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def make_topology(folder: Path) -> Topology:
    def nic(name: str, port: int) -> dict[str, object]:
        return {"name": name, "mac": f"02:00:00:00:00:{port:02x}", "ip": f"10.1.0.{port}", "port": port}

    token = folder / "token"
    token.write_bytes(TOKEN)
    token.chmod(0o600)
    return Topology.from_dict(
        {
            "job": "test",
            "mtu": 1500,
            "token_file": str(token),
            "registrar": f"127.0.0.1:{free_port()}",
            "switch": {
                "target": "ebpf",
                "p4runtime": f"127.0.0.1:{free_port()}",
                "interfaces": {port: f"p{port}" for port in (1, 2, 3, 8, 9)},
            },
            "hosts": [
                {"name": f"node{i}", "management_ip": f"10.255.0.{i}", "nics": [nic("eth0", i)]} for i in (1, 2, 3)
            ],
            "shadows": [{"name": "s", "management_ip": "10.255.1.1", "nics": [nic("eth0", 8), nic("eth1", 9)]}],
            "groups": [{"name": "dp", "ranks": ["node1", "node2", "node3"], "shadows": ["s"]}],
        }
    )


class Rig:
    """A controller, its switch, and shadows; all are stopped at the end."""

    def __init__(self, folder: Path) -> None:
        self.topology = make_topology(folder)
        self.status_socket = folder / "status"
        self.controller = Controller(self.topology, self.status_socket, interval_s=0.1)
        self._stack = ExitStack()
        self._switch = ExitStack()

    def start_switch(self) -> FakeDatapath:
        datapath = FakeDatapath(range(1, 10))
        self._switch.enter_context(Server(datapath, str(self.topology.switch.p4runtime)))
        return datapath

    def stop_switch(self) -> None:
        self._switch.close()

    def start(self) -> None:
        self._stack.enter_context(self.controller)

    def shadow(self) -> RegistrarClient:
        macs = [nic.mac for nic in self.topology.shadows[0].nics]
        client = RegistrarClient(self.topology.registrar, "test", "s", macs, TOKEN)
        self._stack.callback(client.close)
        return client

    def status(self) -> dict[str, Any]:
        return query(self.status_socket)

    def in_sync_with(self, *live: str) -> Callable[[], bool]:
        return lambda: (status := self.controller.status())["in_sync"] and status["live_shadows"] == list(live)

    def close(self) -> None:
        self._stack.close()
        self._switch.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()


def soon(condition: Callable[[], Any], within_s: float = 8.0) -> bool:
    end = time.monotonic() + within_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return bool(condition())


def test_forwarding_without_a_shadow_copies_with_one_forwarding_after_it(rig: Rig) -> None:
    datapath = rig.start_switch()
    rig.start()
    assert soon(rig.in_sync_with())
    assert len(datapath.l2) == 3 and not datapath.heartbeats and list(datapath.groups) == [1]
    shadow = rig.shadow()
    assert shadow.wait_mirrored(5) and rig.in_sync_with("s")()
    assert len(datapath.heartbeats) == 6 and set(datapath.heartbeats.values()) < set(datapath.groups)
    shadow.close()
    assert soon(rig.in_sync_with())
    assert not datapath.heartbeats and len(datapath.l2) == 3


def test_a_restarted_switch_is_restored_with_the_copies(rig: Rig) -> None:
    rig.start_switch()
    rig.start()
    shadow = rig.shadow()
    assert shadow.wait_mirrored(5)
    rig.stop_switch()
    assert soon(lambda: rig.controller.status()["switch"]["error"]) and soon(lambda: not shadow.mirrored)
    datapath = rig.start_switch()
    assert soon(rig.in_sync_with("s")) and shadow.wait_mirrored(5)
    assert len(datapath.heartbeats) == 6 and len(datapath.rewrites) == 2


def test_a_restarted_controller_lets_copies_go_on(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until their shadow had the time to register with it; if that is gone, they end."""
    monkeypatch.setattr(controller, "GRACE_S", 2.0)
    datapath = rig.start_switch()
    rig.start()
    shadow = rig.shadow()
    assert shadow.wait_mirrored(5)
    rig.controller.close()
    shadow.close()
    calls = datapath.calls
    rig.controller = Controller(rig.topology, rig.status_socket, interval_s=0.1)
    rig.start()
    assert soon(lambda: rig.controller.status()["switch"]["synchronised_at"])
    assert len(datapath.heartbeats) == 6 and datapath.calls == calls
    assert not rig.controller.status()["in_sync"] and not rig.controller.status()["live_shadows"]
    assert soon(rig.in_sync_with())
    assert not datapath.heartbeats


def test_a_switch_that_comes_up_late_is_waited_for_and_that_is_said_once(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.start()
    shadow = rig.shadow()
    assert soon(lambda: rig.controller.status()["live_shadows"] == ["s"]) and not shadow.wait_mirrored(0.5)
    said = [record for record in caplog.records if record.name == "checkmate.controller"]
    assert len(said) == 1 and str(rig.topology.switch.p4runtime) in said[0].getMessage()
    rig.start_switch()
    assert soon(rig.in_sync_with("s")) and shadow.wait_mirrored(5)


def test_a_late_shadow_is_not_counted_until_it_was_seeded(rig: Rig) -> None:
    """Training goes on before, and its copies go to the shadow before it is complete (case W3)."""
    datapath = rig.start_switch()
    rig.start()
    assert soon(rig.in_sync_with())
    datapath.counts[Counter.TAGGED_IN, 1] = Count(1000, 1_500_000)
    assert rig.status()["groups"] == {"dp": {"mirrored": [], "complete": False}}
    shadow = rig.shadow()
    assert shadow.wait_mirrored(5)
    assert rig.status()["groups"] == {"dp": {"mirrored": ["s"], "complete": False}}
    shadow.set_seeded(True)
    assert soon(lambda: rig.status()["groups"]["dp"]["complete"])
    shadow.close()
    assert soon(lambda: rig.status()["groups"] == {"dp": {"mirrored": [], "complete": False}})
    again = rig.shadow()
    assert again.wait_mirrored(5)
    assert rig.status()["groups"] == {"dp": {"mirrored": ["s"], "complete": False}}, "what it knew is gone with it"


@contextmanager
def process(rig: Rig, folder: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """``checkmate controller`` with its status at ``folder/other``."""
    rig.topology.dump(folder / "topology.yaml")
    files = ["-t", str(folder / "topology.yaml"), "--socket", str(folder / "other")]
    command = [sys.executable, "-P", "-m", "checkmate", "controller", *files, *options]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as started:
        try:
            yield started
        finally:
            started.kill()


def asked(path: Path) -> dict[str, Any]:
    """Status at a socket, empty while nobody answers."""
    try:
        return query(path)
    except CheckmateError:
        return {}


def test_a_standby_takes_over_when_the_primary_is_killed_and_copies_go_on(rig: Rig, tmp_path: Path) -> None:
    datapath = rig.start_switch()
    with process(rig, tmp_path) as primary:
        assert soon(lambda: asked(tmp_path / "other").get("in_sync"), 30)
        shadow = rig.shadow()
        assert shadow.wait_mirrored(5)
        rig.controller.close()
        rig.controller = Controller(rig.topology, rig.status_socket, interval_s=0.1, standby=True)
        rig.start()
        assert soon(lambda: "another primary" in rig.controller.status()["switch"]["error"])
        assert not rig.controller.status()["primary"] and not rig.controller.status()["alarms"]
        calls, start = datapath.calls, time.monotonic()
        primary.kill()
        assert soon(lambda: rig.controller.status()["primary"])
        took = time.monotonic() - start
        assert took < 3, f"the take-over took {took:.2f} s"
    assert soon(rig.in_sync_with("s"), 15) and shadow.wait_mirrored(5)
    assert len(datapath.heartbeats) == 6 and datapath.calls == calls, "nothing had to be written"
    with process(rig, tmp_path, "--standby"):
        assert soon(lambda: "another primary" in asked(tmp_path / "other").get("switch", {}).get("error", ""), 30)
        assert rig.controller.status()["primary"] and rig.in_sync_with("s")()


def test_a_controller_that_is_outbid_writes_no_more_and_leaves_the_shadows(rig: Rig) -> None:
    datapath = rig.start_switch()
    rig.start()
    shadow = rig.shadow()
    assert shadow.wait_mirrored(5)
    switch = rig.topology.switch
    other = P4RuntimeTarget(switch.p4runtime, switch.device_id, job="test", election_id=1000)
    other.connect()
    assert soon(lambda: not rig.controller.status()["primary"]) and soon(lambda: not shadow.mirrored)
    with socket.create_server(rig.topology.registrar):  # is free for whoever serves the switch now
        reconcile(other, make_plan(rig.topology, set()).rules, "test")
        calls = datapath.calls
        assert not soon(lambda: datapath.calls != calls, 0.5)
        other.close()
        assert soon(lambda: rig.controller.status()["primary"])
        assert soon(lambda: "registrar" in str(rig.controller.status()["alarms"]))
    assert soon(rig.in_sync_with("s"), 15) and shadow.wait_mirrored(5)
    assert len(datapath.heartbeats) == 6


def test_status_over_the_socket(rig: Rig) -> None:
    datapath = rig.start_switch()
    rig.start()
    shadow = rig.shadow()
    assert shadow.wait_mirrored(5)
    datapath.counts[Counter.COPIES_OUT, 8] = Count(3, 4500)
    datapath.heartbeat_counts[1, bytes.fromhex("020000000002")] = Count(3, 4500)
    assert soon(lambda: rig.status()["counters"]["copies_out"] == {"8": {"packets": 3, "bytes": 4500}})
    status = rig.status()
    counted = [entry for entry in status["heartbeats"] if entry["packets"]]
    assert counted == [{"ingress_port": 1, "ethernet.dst_addr": "02:00:00:00:00:02", "packets": 3, "bytes": 4500}]
    assert status["groups"] == {"dp": {"mirrored": ["s"], "complete": False}}
    shadow.set_seeded(True)
    assert soon(lambda: rig.status()["groups"] == {"dp": {"mirrored": ["s"], "complete": True}})
    assert rig.status_socket.stat().st_mode & 0o777 == 0o600


def test_an_entry_for_a_missing_group_is_an_alarm_and_is_repaired(rig: Rig) -> None:
    datapath = rig.start_switch()
    target = target_of(rig.topology)
    target.connect()
    match = (("ingress_port", 1), ("ethernet.dst_addr", 0x02_00_00_00_00_02))
    target.apply([Update(Kind.INSERT, Entry(HEARTBEAT, match, REPLICATE, (("group", 77),)))])
    target.close()
    rig.start()
    assert soon(rig.in_sync_with())
    assert "missing multicast group" in rig.controller.status()["alarms"][0]["text"]
    assert not datapath.heartbeats and len(datapath.l2) == 3


def test_the_registrar_address_in_use_is_refused_and_nothing_is_left(rig: Rig) -> None:
    with socket.create_server(rig.topology.registrar), pytest.raises(CheckmateError, match="registrar 127"):
        rig.controller.start()
    rig.controller.close()
    assert not [thread for thread in threading.enumerate() if thread.name in ("control-plane", "reconcile")]


def test_run_ends_at_sigterm_imports_no_torch_and_leaves_no_socket(rig: Rig, tmp_path: Path) -> None:
    rig.controller.close()
    rig.topology.dump(tmp_path / "topology.yaml")
    script = (
        "import sys; from pathlib import Path; from checkmate.topology import load_topology\n"
        "from checkmate.controlplane.controller import Controller\n"
        f"Controller(load_topology({str(tmp_path / 'topology.yaml')!r}), Path({str(rig.status_socket)!r})).run()\n"
        "assert 'torch' not in sys.modules\nprint('ended')"
    )
    rig.start_switch()
    with subprocess.Popen([sys.executable, "-P", "-c", script], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert soon(rig.status_socket.exists) and soon(lambda: rig.status()["in_sync"])
            process.send_signal(signal.SIGTERM)
            output, _ = process.communicate(timeout=10)
        finally:
            process.kill()
    assert output == "ended\n" and process.returncode == 0
    assert not rig.status_socket.exists()


def test_a_world_readable_token_is_refused_before_anything_starts(tmp_path: Path) -> None:
    topology = make_topology(tmp_path)
    topology.token_file.chmod(0o644)
    with pytest.raises(CheckmateError, match="chmod 0600"):
        Controller(topology)


def test_the_plan_of_the_status_is_the_one_on_the_switch(rig: Rig) -> None:
    rig.start_switch()
    rig.start()
    assert soon(rig.in_sync_with())
    plan = make_plan(rig.topology, frozenset())
    assert rig.controller.status()["switch"]["entries"] == len(plan.rules.entries)
    assert rig.controller.status()["switch"]["updates_written"] == len(plan.rules.items)
