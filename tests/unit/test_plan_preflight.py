"""Preflight: what is missing is named with what to install or run."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkmate.config import CheckmateError
from checkmate.controlplane import preflight
from checkmate.topology import Topology

NETNS = f"ckm-pre-{os.getpid()}"


def problems(findings: list[preflight.Finding]) -> dict[str, str]:
    return {finding.what: finding.problem for finding in findings if finding.problem}


def test_missing_commands_are_named_with_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path: None if name == "ethtool" else f"/bin/{name}")
    assert problems(preflight.check_machine())["command ethtool"] == "missing; apt-get install ethtool"


def test_without_rights_or_options_each_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(preflight, "_create_map", _raise(PermissionError(1, "Operation not permitted")))
    monkeypatch.setattr(preflight, "_open_packet_socket", _raise(OSError(97, "Address family not supported")))
    found = problems(preflight.check_machine())
    assert "run with sudo" in found["root"]
    assert "CAP_BPF" in found["BPF maps"]
    assert found["raw sockets (AF_PACKET)"] == "Address family not supported; the kernel needs CONFIG_PACKET"
    with pytest.raises(CheckmateError, match=r"not ready:[\s\S]*root[\s\S]*BPF maps[\s\S]*AF_PACKET"):
        preflight.require(preflight.check_machine())


def _raise(error: OSError) -> object:
    def action() -> None:
        raise error

    return action


def state_of_the_machine() -> tuple[int, ...]:
    """Numbers of our interfaces and of this process's open files."""
    ours = [path for path in Path("/sys/class/net").iterdir() if path.name in ("ckm0", "ckm1")]
    return len(ours), len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_trying_things_leaves_nothing_behind() -> None:
    before = state_of_the_machine()
    findings = preflight.check_machine()
    assert state_of_the_machine() == before
    assert {"BPF maps", "BPF tc programs", "BPF sock_ops programs", "veth links", "tc's clsact"} <= {
        finding.what for finding in findings
    }


def topology(target: str) -> Topology:
    def nic(name: str, port: int) -> dict[str, object]:
        return {"name": name, "mac": f"02:00:00:00:00:0{port}", "ip": f"10.1.0.{port}", "port": port}

    return Topology.from_dict(
        {
            "job": "test",
            "mtu": 1500,
            "token_file": "/nowhere/token",
            "registrar": "10.255.0.1:7702",
            "switch": {
                "target": target,
                "p4runtime": "127.0.0.1:9559",
                "interfaces": {port: f"s{port}" for port in (1, 2, 3, 4)},
                "netns": NETNS,
            },
            "hosts": [
                {"name": f"node{i}", "management_ip": f"10.255.0.{i}", "netns": NETNS, "nics": [nic(f"h{i}", i)]}
                for i in (1, 2)
            ],
            "shadows": [
                {
                    "name": "s",
                    "management_ip": "10.255.0.9",
                    "netns": NETNS,
                    "nics": [nic("h3", 3), nic("h4", 4)],
                }
            ],
            "groups": [{"name": "dp", "ranks": ["node1", "node2"], "shadows": ["s"]}],
        }
    )


def run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=10, stdout=subprocess.DEVNULL)


@pytest.fixture
def veths() -> Iterator[None]:
    run("ip", "netns", "add", NETNS)
    try:
        for port in (1, 2, 3, 4):
            run("ip", "-n", NETNS, "link", "add", f"s{port}", "type", "veth", "peer", "name", f"h{port}")
        yield
    finally:
        run("ip", "netns", "delete", NETNS)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: makes a network namespace")
@pytest.mark.parametrize(("target", "named"), [("ebpf", {"s3", "s4"}), ("bmv2", {"s1", "s2", "s3", "s4", "h1", "h2"})])
def test_an_offload_left_on_names_the_interface_and_a_command_that_cures_it(
    veths: None, target: str, named: set[str]
) -> None:
    found = problems(preflight.check_offloads(topology(target)))
    assert {what.split()[2] for what in found} == named
    for problem in found.values():
        command = problem.split("`")[1]
        assert re.match(f"ip netns exec {NETNS} ethtool -K [sh][1-4] ", command)
        run(*command.split())
    assert problems(preflight.check_offloads(topology(target))) == {}


def test_interfaces_of_other_machines_are_not_looked_at() -> None:
    assert preflight.check_offloads(topology("ebpf")) == []
