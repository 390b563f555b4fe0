"""Controller, switch and a registering shadow as processes in a lab: traffic flows, and all is restored."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from checkmate import config, native
from checkmate.config import CheckmateError
from checkmate.controlplane.preflight import check_offloads
from checkmate.lab import Lab, LabConfig
from checkmate.p4.v1model.bmv2 import BINARY
from checkmate.status import query

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root: makes network namespaces")]

SHADOW = """
import sys, time
from checkmate.controlplane.registrar_client import RegistrarClient
from checkmate.topology import load_topology
topology = load_topology(sys.argv[1])
shadow = topology.shadows[0]
macs = [nic.mac for nic in shadow.nics]
client = RegistrarClient(topology.registrar, topology.job, shadow.name, macs, topology.read_token())
time.sleep(600)
"""


class Rack:
    """A lab with the processes of the control plane."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.topology_file = lab.directory / "topology.yaml"
        self.socket = lab.directory / "controller.sock"
        lab.topology.dump(self.topology_file)

    def switch(self) -> subprocess.Popen[bytes]:
        netns = self.lab.topology.switch.netns
        assert netns
        return self._checkmate(netns, "switch", "up")

    def controller(self) -> subprocess.Popen[bytes]:
        return self._checkmate(self.lab.management, "controller", "--socket", str(self.socket))

    def shadow(self) -> subprocess.Popen[bytes]:
        netns = self.lab.topology.shadows[0].netns
        assert netns
        return self.lab.spawn(netns, [sys.executable, "-P", "-c", SHADOW, self.topology_file], "shadow.log")

    def status(self) -> dict[str, Any]:
        return query(self.socket)

    def in_sync_with(self, *live: str) -> Callable[[], bool]:
        def check() -> bool:
            try:
                status = self.status()
            except CheckmateError:
                return False
            return bool(status["in_sync"] and status["live_shadows"] == list(live))

        return check

    def reachable(self) -> bool:
        """Whether the first rank reaches the last one, ARP included."""
        first, last = self.lab.topology.hosts[0], self.lab.topology.hosts[-1]
        inside = ["nsenter", f"--net=/run/netns/{first.netns}"]
        subprocess.run([*inside, "ip", "neigh", "flush", "all"], check=True, timeout=10)
        ping = [*inside, "ping", "-qc1", "-W2", last.nics[0].ip]
        return subprocess.run(ping, check=False, capture_output=True, timeout=10).returncode == 0

    def _checkmate(self, netns: str, *arguments: str) -> subprocess.Popen[bytes]:
        argv: list[str | Path] = [sys.executable, "-P", "-m", "checkmate", *arguments, "--topology", self.topology_file]
        return self.lab.spawn(netns, argv, f"{arguments[0]}.log")


@pytest.fixture
def rack(request: pytest.FixtureRequest) -> Iterator[Rack]:
    target = getattr(request, "param", "ebpf")
    if target == "bmv2" and shutil.which(BINARY) is None:
        pytest.skip(f"{BINARY} is not on PATH")
    try:
        native.library("switch.bpf.o")
    except config.CheckmateError as error:
        pytest.skip(str(error))
    with Lab(LabConfig(ranks=2, target=target)) as lab:
        yield Rack(lab)


def soon(condition: Callable[[], bool], within_s: float = 30.0) -> bool:
    end = time.monotonic() + within_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.1)
    return condition()


@pytest.mark.parametrize("rack", ["ebpf", pytest.param("bmv2", marks=pytest.mark.bmv2)], indirect=True)
def test_traffic_flows_with_and_without_a_shadow_and_a_killed_switch_is_restored(rack: Rack) -> None:
    switch = rack.switch()
    rack.controller()
    assert soon(rack.in_sync_with()), rack.lab.log_tail("controller.log") + rack.lab.log_tail("switch.log")
    assert rack.reachable()
    shadow = rack.shadow()
    assert soon(rack.in_sync_with("shadow0")), rack.lab.log_tail("shadow.log")
    assert rack.reachable()
    switch.send_signal(signal.SIGKILL)
    switch.wait(10)
    assert soon(lambda: rack.status()["switch"]["error"] != "")
    rack.switch()
    assert soon(rack.in_sync_with("shadow0")), rack.lab.log_tail("controller.log") + rack.lab.log_tail("switch.log")
    assert rack.reachable()
    shadow.send_signal(signal.SIGKILL)
    assert soon(rack.in_sync_with())
    assert rack.reachable()
    assert len(rack.status()["heartbeats"]) == 0


def test_a_lab_passes_the_preflight_of_offloads(rack: Rack) -> None:
    findings = check_offloads(rack.lab.topology)
    assert len(findings) == 4
    assert not [finding.problem for finding in findings if finding.problem]
    switch, port = rack.lab.topology.switch, rack.lab.topology.shadows[0].nics[0].port
    name = switch.interfaces[port]
    subprocess.run(["nsenter", f"--net=/run/netns/{switch.netns}", "ethtool", "-K", name, "tx", "on"], check=True)
    (problem,) = [finding.problem for finding in check_offloads(rack.lab.topology) if finding.problem]
    assert f"ethtool -K {name} tx off" in problem
