"""``checkmate switch status|counters|verify`` against a lab: right where all is right, and named where it is not."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from checkmate import config, examples, native
from checkmate.lab import Lab, LabConfig, stop
from checkmate.plan import make_plan
from checkmate.services import Services

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root: makes network namespaces")]

RANKS = 3
STEPS = 5000
PAIRS = RANKS * (RANKS - 1)


DAMAGE = """
import sys
from dataclasses import replace
from checkmate import config
from checkmate.controlplane.target import Kind, Update
from checkmate.controlplane.targets import target_of
from checkmate.plan import LIVE_GROUP, Replica, make_plan
from checkmate.topology import load_topology
topology = load_topology(sys.argv[1])
rules = make_plan(topology, {"shadow0"}).rules
short, long, missing = rules.groups[1:4]
live = next(entry for entry in rules.entries if entry.table == LIVE_GROUP and entry.group == missing.id)
target = target_of(topology)
target.connect()
target.apply([
    Update(Kind.MODIFY, replace(short, replicas=short.replicas[:1])),
    Update(Kind.MODIFY, replace(long, replicas=(*long.replicas, Replica(topology.shadows[0].nics[1].port, 1)))),
])
target.apply([Update(Kind.DELETE, live)])
target.apply([Update(Kind.DELETE, missing)])
target.close()
"""
"""Takes the shadow from a group, puts its other port into the next one, removes the third, which entries still use."""


class Rack:
    """A lab with switch, controller and shadow, and its switch commands."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self.lab = services.lab
        self.file = services.topology_file

    def run(self, *arguments: str, fails_with: int = 0) -> str:
        """Output of a ``checkmate switch`` command."""
        return self.python("-m", "checkmate", "switch", *arguments, "-t", str(self.file), fails_with=fails_with)

    def python(self, *arguments: str, fails_with: int = 0) -> str:
        """Output of a Python process in the management namespace."""
        inside = ["nsenter", f"--net=/run/netns/{self.lab.management}", sys.executable, "-P"]
        done = subprocess.run([*inside, *arguments], check=False, capture_output=True, text=True, timeout=120)
        assert done.returncode == fails_with and "Traceback" not in done.stderr, done.stdout + done.stderr
        return done.stdout + done.stderr

    def verify(self, *arguments: str, fails_with: int = 0) -> dict[str, Any]:
        """Answer of ``checkmate switch verify``."""
        answer: dict[str, Any] = json.loads(
            self.run("verify", "--json", *arguments, fails_with=fails_with).splitlines()[0]
        )
        return answer


@pytest.fixture(scope="module", params=["ebpf", pytest.param("bmv2", marks=pytest.mark.bmv2)])
def rack(request: pytest.FixtureRequest) -> Iterator[Rack]:
    if request.param == "ebpf":
        try:
            native.library("switch.bpf.o")
        except config.CheckmateError as error:
            pytest.skip(str(error))
    elif shutil.which("simple_switch_grpc") is None:
        pytest.skip("simple_switch_grpc is not on PATH")
    with Lab(LabConfig(RANKS, target=request.param)) as lab:
        yield Rack(Services(lab).start())


def test_a_switch_that_is_as_planned(rack: Rack) -> None:
    status = json.loads(rack.run("status", "--json"))
    assert status["pipeline"] == "ours" and status["primary"] is True and status["problems"] == []
    assert [port["role"] for port in status["ports"].values()] == ["trainer"] * RANKS + ["shadow"] * 2
    assert len(status["groups"]) == 1 + RANKS - 1 + RANKS
    assert status["usage"]["heartbeat entries"]["used"] == PAIRS
    traffic = json.loads(rack.run("counters", "--once", "--interval", "0.2", "--json"))
    assert len(traffic["groups"]) == RANKS - 1 + RANKS
    assert all(rate["packets_per_s"] == 0 for rate in traffic["groups"].values())


def test_every_group_copies_once_and_the_shadow_is_not_disturbed(rack: Rack) -> None:
    answer = rack.verify()
    assert answer["problems"] == [] and len(answer["groups"]) == RANKS - 1 + RANKS
    assert all(group["outcome"] == "ok" and not group["problems"] for group in answer["groups"])
    assert sum(group["probes"] for group in answer["groups"]) == PAIRS
    status = rack.services.shadow_status()
    assert status is not None
    received = status["receiver"]
    assert (received["packets"], received["stale"], received["flows"]) == (PAIRS, PAIRS, PAIRS)
    assert not any(received[name] for name in ("malformed", "header_errors", "damages", "gaps", "crc_errors"))
    again = rack.verify("--node", "node0")
    assert [group["probes"] for group in again["groups"]] == [1] * (RANKS - 1), "one host verifies its own flows"


def test_verifying_disturbs_no_running_job(rack: Rack) -> None:
    """It passes though a job's own frames are counted, and not a gradient is lost."""
    if rack.lab.topology.switch.target != "ebpf":
        pytest.skip("shown on the eBPF switch: BMv2 is too slow to train over in a moment")
    arguments = [f"--steps={STEPS}", "--params=300000"]
    job = rack.services.run(examples.TRAIN, arguments, log="job.log")

    def committed() -> int:
        return (rack.services.shadow_status() or {}).get("committed") or 0

    rack.services.wait_for("training to begin", lambda: job.poll() is not None or committed() > 2, 120)
    answer = rack.verify()
    first = committed()
    assert job.poll() is None and 2 < first < STEPS, rack.lab.log_tail("job.log")
    assert answer["problems"] == [] and all(group["outcome"] == "ok" for group in answer["groups"])
    assert sum(group["tagged"] for group in answer["groups"]) > PAIRS, "the job's frames were there"
    rack.services.wait_for("training to go on", lambda: job.poll() is not None or committed() > first + 10, 120)
    status = rack.services.shadow_status()
    assert status is not None and job.poll() in (None, 0), rack.lab.log_tail("job.log")
    assert status["gap_count"] == 0 and status["receiver"]["damages"] == 0 and status["receiver"]["gaps"] == 0
    stop(job)


def test_what_is_wrong_is_named_and_the_next_controller_repairs_it(rack: Rack) -> None:
    """A group without its shadow, one with a member too many, and one that is missing (case W1)."""
    short, long, missing = make_plan(rack.lab.topology, {"shadow0"}).rules.groups[1:4]
    stop(rack.services.process("controller"))
    rack.python("-c", DAMAGE, str(rack.file))
    answer = rack.verify(fails_with=1)
    found = {group["group"]: group for group in answer["groups"]}
    assert all(found[group.id]["outcome"] == "wrong" for group in (short, long, missing))
    assert all(found[group["group"]]["outcome"] == "ok" for group in answer["groups"] if group["group"] > missing.id)
    assert "0 frames at shadow0/rx1" in str(found[short.id]["problems"])
    assert "1 frames at shadow0/rx1 (port 5), not 0" in str(found[long.id]["problems"])
    assert "0 frames at shadow0/rx" in str(found[missing.id]["problems"])
    assert "0 frames at node" not in str(found[missing.id]["problems"]), "its traffic flows"
    counted = json.loads(rack.run("counters", "--once", "--interval", "0.2", "--json"))["ports"]["group_missing"]
    assert sum(rate["packets"] for rate in counted.values()) >= found[missing.id]["probes"] > 0
    text = " ".join(answer["problems"])
    assert (
        "port 5 (shadow0/rx1) sent" in text
        and "no controller is connected" in text
        and "missing multicast group" in text
    )
    rack.services.start_controller()
    rack.services.wait_for("the repair", lambda: (rack.services.controller_status() or {}).get("in_sync"))
    status = rack.services.controller_status()
    assert status is not None
    assert "missing multicast group: heartbeat: ingress_port" in str(status["alarms"])
    assert all(group["outcome"] == "ok" for group in rack.verify()["groups"])


def test_a_switch_that_does_not_answer_is_an_error_of_its_own(rack: Rack) -> None:
    stop(rack.services.process("switch"))
    assert str(rack.lab.topology.switch.p4runtime) in rack.run("verify", fails_with=2)
