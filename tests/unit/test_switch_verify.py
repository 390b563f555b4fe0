"""What the counters of a switch that can only be read tell, and what `checkmate switch` makes of it."""

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.topologies import topology_of
from typer.testing import CliRunner

from checkmate import switch_cli
from checkmate.config import CheckmateError
from checkmate.controlplane.rates import Sample, traffic
from checkmate.controlplane.reconcile import reconcile
from checkmate.controlplane.target import Count, Counters
from checkmate.controlplane.targets import target_of
from checkmate.p4.ebpf import datapath as path
from checkmate.p4.ebpf.fake import FakeDatapath
from checkmate.p4.ebpf.p4runtime_server import Server
from checkmate.plan import CLASSIFY, HEARTBEAT, Rules, make_plan

COPIES = path.Counter.COPIES_OUT


class Switch:
    """A switch that holds the plan of two ranks and a shadow; its counters are what the test says."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.topology = topology_of(port, 2, (8, 9))
        self.file = folder / "topology.yaml"
        self.topology.dump(self.file)
        self.datapath = FakeDatapath(range(1, 10))
        self._stack = ExitStack()
        self._stack.enter_context(Server(self.datapath, f"127.0.0.1:{port}"))
        self.controller = target_of(self.topology)
        self._stack.callback(self.controller.close)
        self.controller.connect()
        reconcile(self.controller, make_plan(self.topology, {"s"}).rules, "test")

    def close(self) -> None:
        self._stack.close()

    def pass_frames(self, source: int, target: int, tagged: int, copies: int) -> None:
        """Count ``tagged`` frames from one rank to another, and ``copies`` to the shadow."""
        place = (COPIES, 8 if source == 1 else 9)
        self.datapath.heartbeat_counts[source, bytes([2, 0, 0, 0, 0, target])] += path.Count(tagged, 100 * tagged)
        self.datapath.counts[place] = self.datapath.counts.get(place, path.Count()) + path.Count(copies, 100 * copies)

    def run(self, *arguments: str) -> tuple[int, dict[str, Any], str]:
        """Exit code, 2 for an error, the JSON that was printed, and the error's text."""
        done = CliRunner().invoke(switch_cli.app, [*arguments, "--json", "-t", str(self.file)])
        printed = json.loads(done.stdout.splitlines()[0]) if done.stdout else {}
        if isinstance(done.exception, CheckmateError):
            return 2, printed, str(done.exception)
        return done.exit_code, printed, ""


@pytest.fixture
def switch(tmp_path: Path) -> Iterator[Switch]:
    switch = Switch(tmp_path)
    yield switch
    switch.close()


def meanwhile(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], None]) -> None:
    """What happens while a command waits."""
    monkeypatch.setattr(switch_cli, "sleep", lambda _: happens())


def test_a_jobs_own_traffic_is_judged_by_the_counters(switch: Switch, monkeypatch: pytest.MonkeyPatch) -> None:
    switch.pass_frames(1, 2, 1000, 17)  # of no concern

    def job() -> None:
        switch.pass_frames(1, 2, 10, 10)
        switch.pass_frames(2, 1, 7, 7)

    meanwhile(monkeypatch, job)
    code, answer, _ = switch.run("verify")
    assert code == 0 and answer["problems"] == []
    assert [(group["tagged"], group["outcome"]) for group in answer["groups"]] == [(7, "ok"), (10, "ok")]


@pytest.mark.parametrize("copies", [0, 9, 11, 20])
def test_copies_that_are_missing_or_too_many_are_named(
    switch: Switch, monkeypatch: pytest.MonkeyPatch, copies: int
) -> None:
    def job() -> None:
        switch.pass_frames(1, 2, 10, copies)
        switch.pass_frames(2, 1, 5, 5)

    meanwhile(monkeypatch, job)
    code, answer, _ = switch.run("verify")
    assert code == 1 and [group["outcome"] for group in answer["groups"]] == ["ok", "wrong"]
    assert answer["problems"] == [f"port 8 (s/eth0) sent {copies} copies of 10 tagged frames"]


def test_without_traffic_it_says_what_to_run_where(switch: Switch, monkeypatch: pytest.MonkeyPatch) -> None:
    meanwhile(monkeypatch, lambda: switch.pass_frames(1, 2, 1, 1))
    code, answer, error = switch.run("verify")
    assert code == 2 and [group["outcome"] for group in answer["groups"]] == ["not seen", "ok"]
    assert "1 of 2 groups" in error and f"on node2: checkmate switch verify -t {switch.file} --node node2" in error


def test_an_unknown_node_and_a_switch_that_is_gone(switch: Switch) -> None:
    assert "did you mean 'node1'" in switch.run("verify", "--node", "nod1")[2]
    switch.close()
    for command in ("status", "counters", "verify"):
        code, _, error = switch.run(command, *(["--once"] if command == "counters" else []))
        assert code == 2 and str(switch.topology.switch.p4runtime) in error


def test_status_names_what_is_not_as_planned(switch: Switch) -> None:
    code, status, _ = switch.run("status")
    assert code == 0 and status["primary"] is True and status["shadows"] == ["s"] and status["problems"] == []
    assert status["ports"]["8"] == {"name": "s/eth0", "role": "shadow"}
    assert status["groups"][1]["members"][1] == {"port": 9, "rid": 1, "name": "s/eth1"}
    left = make_plan(switch.topology, {"s"}).rules
    without_tag = [entry for entry in left.entries if entry.table != CLASSIFY]
    reconcile(switch.controller, Rules.of(without_tag, left.groups), "test")
    switch.controller.close()
    code, status, _ = switch.run("status")
    assert code == 1 and "no controller is connected" in status["problems"][0]
    assert "+ classify: ipv4.dscp" in status["problems"][1] and len(status["problems"]) == 2


def test_counters_over_an_interval(switch: Switch, monkeypatch: pytest.MonkeyPatch) -> None:
    meanwhile(monkeypatch, lambda: switch.pass_frames(1, 2, 10, 9))
    code, seen, _ = switch.run("counters", "--once")
    assert code == 0 and seen["ports"]["copies_out"]["8"]["packets"] == 9
    assert {number: group["packets"] for number, group in seen["groups"].items()} == {"5": 0, "6": 10}
    assert seen["ports"]["copies_out"]["8"]["packets_per_s"] > 0


def test_rates_between_two_samples() -> None:
    rules = make_plan(topology_of(1, 2, (8, 9)), {"s"}).rules
    entry = next(entry for entry in rules.entries if entry.table == HEARTBEAT)
    before = Sample(Counters({"CheckmateIngress.untagged": {1: Count(100, 1000)}}, {entry.key: Count(5, 500)}), 10.0)
    after = Sample(Counters({"CheckmateIngress.untagged": {1: Count(300, 2000)}}, {entry.key: Count(2, 200)}), 12.0)
    found = traffic(rules, before, after)
    rate = {"packets": 300, "bytes": 2000, "packets_per_s": 100.0, "bits_per_s": 4000}
    assert found.ports["untagged"][1].to_dict() == rate
    assert entry.group is not None
    assert found.groups[entry.group] == (Count(2, 200), 1.0, 800.0), "reset by a restart"
