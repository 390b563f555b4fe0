"""A controller process that gets SIGKILL in the middle of its writing: the next one ends at the plan."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from checkmate.controlplane.reconcile import BATCH, reconcile
from checkmate.controlplane.target import NotPrimaryError, Target, UnreachableError
from checkmate.controlplane.targets import target_of
from checkmate.p4.ebpf.fake import FakeDatapath
from checkmate.p4.ebpf.p4runtime_server import Server
from checkmate.plan import HEARTBEAT, make_plan
from checkmate.topology import Topology

RANKS = 24
WRITER = """
import sys
from checkmate.controlplane.reconcile import reconcile
from checkmate.controlplane.targets import target_of
from checkmate.plan import make_plan
from checkmate.topology import load_topology
topology = load_topology(sys.argv[1])
target = target_of(topology)
target.connect()
reconcile(target, make_plan(topology, {"s"}).rules, topology.job)
"""


class SlowDatapath(FakeDatapath):
    """Takes its time over each heartbeat entry, so that there is a middle to be killed in."""

    pause_s = 0.004

    def set_heartbeat(self, port: int, dst_mac: bytes, group: int | None) -> None:
        time.sleep(self.pause_s)
        super().set_heartbeat(port, dst_mac, group)


def topology(port: int) -> Topology:
    def nic(name: str, number: int) -> dict[str, object]:
        return {"name": name, "mac": f"02:00:00:00:00:{number:02x}", "ip": f"10.1.0.{number}", "port": number}

    hosts = range(1, RANKS + 1)
    return Topology.from_dict(
        {
            "job": "test",
            "mtu": 1500,
            "token_file": "/nowhere/token",
            "registrar": "127.0.0.1:7702",
            "switch": {
                "target": "ebpf",
                "p4runtime": f"127.0.0.1:{port}",
                "interfaces": {number: f"p{number}" for number in (*hosts, 100, 101)},
            },
            "hosts": [{"name": f"node{i}", "management_ip": f"10.255.0.{i}", "nics": [nic("eth0", i)]} for i in hosts],
            "shadows": [{"name": "s", "management_ip": "10.255.1.1", "nics": [nic("eth0", 100), nic("eth1", 101)]}],
            "groups": [{"name": "dp", "ranks": [f"node{i}" for i in hosts], "shadows": ["s"]}],
        }
    )


def soon(condition: Callable[[], bool], within_s: float) -> bool:
    end = time.monotonic() + within_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


def test_killed_in_the_middle_of_a_batch(tmp_path: Path) -> None:
    datapath = SlowDatapath(range(1, 110))
    with Server(datapath, "127.0.0.1:0") as server:
        job = topology(server.port)
        job.dump(tmp_path / "topology.yaml")
        wanted = make_plan(job, {"s"}).rules
        assert sum(entry.table == HEARTBEAT for entry in wanted.entries) > 2 * BATCH
        with subprocess.Popen([sys.executable, "-P", "-c", WRITER, str(tmp_path / "topology.yaml")]) as writer:
            try:
                assert soon(lambda: len(datapath.heartbeats) > BATCH + BATCH // 4, 60)
            finally:
                writer.kill()
        assert set(datapath.heartbeats.values()) <= datapath.groups.keys()
        successor = target_of(job)
        try:
            assert soon(lambda: _connects(successor), 10)
            left = successor.read()
            assert BATCH < sum(entry.table == HEARTBEAT for entry in left.entries) < RANKS * (RANKS - 1)
            assert not left.dangling()
            written = reconcile(successor, wanted, job.job).written
            assert written == len(wanted.items) - len(left.items), "only what was missing"
            assert successor.read() == wanted
        finally:
            successor.close()


def _connects(target: Target) -> bool:
    """False while the switch has not noticed the end of the killed one."""
    with contextlib.suppress(NotPrimaryError, UnreachableError):
        target.connect()
        return True
    return False
