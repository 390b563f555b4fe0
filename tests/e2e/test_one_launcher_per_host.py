"""``checkmate run --node`` on every host, as on machines of their own: ranks die, hosts come in any order."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from support.training import RUN_S, SCRIPT, Rack, assert_equal, needs_root, rack

from checkmate import metrics
from checkmate.compare import load_state

pytestmark = [*needs_root, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 8


class Launchers:
    """One for each host of a rack, each in its host's namespace, with a topology that knows of no namespaces."""

    def __init__(self, place: Rack, hosts: tuple[str, ...], name: str) -> None:
        self.lab = place.lab
        self.name = name
        self.file = self.lab.directory / f"{name}.yaml"
        topology = self.lab.topology
        group = dataclasses.replace(topology.groups[0], ranks=hosts)
        machines = tuple(dataclasses.replace(topology.host(name), netns=None) for name in dict.fromkeys(hosts))
        dataclasses.replace(topology, hosts=machines, groups=(group,)).dump(self.file)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, node: str, arguments: list[str]) -> None:
        """``checkmate run`` on one host."""
        bpf = self.lab.bpf / f"{self.name}-{node}"
        bpf.mkdir()
        command = [sys.executable, "-P", "-m", "checkmate", "run", "--topology", self.file, "--node", node]
        netns = self.lab.topology.host(node).netns
        assert netns is not None
        env = {metrics.VARIABLE: str(self.lab.directory / f"{self.name}.metrics")}
        argv = [*map(str, command), "--bpf", str(bpf), "--max-restarts=3", str(SCRIPT), *arguments]
        self.processes[node] = self.lab.spawn(netns, argv, f"{self.name}-{node}.log", env, trains=True)

    def wait(self) -> None:
        """All end well."""
        for node, process in self.processes.items():
            assert process.wait(RUN_S) == 0, self.lab.log_tail(f"{self.name}-{node}.log", 60)


def arguments(folder: Path, name: str, *more: str) -> list[str]:
    """Of the training script."""
    return [f"--steps={STEPS}", f"--out={folder / name}.pt", f"--report={folder / name}.report", *more]


def test_a_run_with_a_launcher_on_each_host_loses_a_rank_and_nothing_else() -> None:
    """Neither the addresses' order nor that of the start decides who is which rank: the topology does."""
    with rack(3) as place:
        hosts = ("node2", "node0", "node1")
        folder = place.lab.directory
        whole = place.start("whole", STEPS, attach=False)
        job = Launchers(place, hosts, "job")
        for node in ("node1", "node2", "node0"):
            job.start(node, arguments(folder, "job", "--die", "0@3:bucket-inside", "2@6:stepped"))
        job.wait()
        whole.wait()
        assert_equal(load_state(folder / "whole.pt"), load_state(folder / "job.pt"))
        status = place.status()
        assert status["committed"] == STEPS
        assert "rank 0 restored step 2" in (folder / "job-node2.log").read_text()


def test_a_launcher_starts_all_ranks_of_its_host() -> None:
    """They share the host's NIC, and die and come back together."""
    with rack(3, ranks_per_host=2) as place:
        folder = place.lab.directory
        whole = place.start("whole", STEPS, attach=False)
        job = Launchers(place, place.lab.topology.groups[0].ranks, "job")
        for node in ("node1", "node0"):
            job.start(node, arguments(folder, "job", "--die", "1@3:bucket-inside"))
        job.wait()
        whole.wait()
        assert_equal(load_state(folder / "whole.pt"), load_state(folder / "job.pt"))
        assert place.status()["committed"] == STEPS
