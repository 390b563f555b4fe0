"""A controller process that gets SIGKILL in the middle of its writing: the next one ends at the plan."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from support.topologies import topology_of

from checkmate.controlplane.reconcile import BATCH, reconcile
from checkmate.controlplane.target import NotPrimaryError, Target, UnreachableError
from checkmate.controlplane.targets import target_of
from checkmate.p4.ebpf.fake import FakeDatapath
from checkmate.p4.ebpf.p4runtime_server import Server
from checkmate.plan import HEARTBEAT, make_plan

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


def soon(condition: Callable[[], bool], within_s: float) -> bool:
    end = time.monotonic() + within_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


def test_killed_in_the_middle_of_a_batch(tmp_path: Path) -> None:
    datapath = SlowDatapath(range(1, 110))
    with Server(datapath, "127.0.0.1:0") as server:
        job = topology_of(server.port, RANKS, (100, 101))
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
