"""Whatever happens to shadow, controller, switch control and copies: training goes on, and no wrong state is served."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
from support import link
from support.training import Rack, Run, assert_equal, needs_root, rack, soon

from checkmate.config import CheckmateError
from checkmate.lab import stop

pytestmark = [*needs_root, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 45
PAUSE_S = 0.2
STALL_S = 15.0
"""Longest time that a step may take while something of ours is dead; on a busy machine, so it is generous."""
DEATH_NOTICED_S = 30.0


@pytest.fixture(scope="module")
def nodes() -> Iterator[Rack]:
    """Two training nodes."""
    with rack(2, shadow_options=["--sets", "16"]) as built:
        yield built


@pytest.fixture(scope="module")
def reference(nodes: Rack) -> Run:
    """The same training without Checkmate; its states after each step are kept."""
    return nodes.start("reference", STEPS, attach=False).wait()


@pytest.fixture
def job(nodes: Rack, reference: Run, request: pytest.FixtureRequest) -> Iterator[Callable[..., Run]]:
    """Starts a job of this test on a shadow without state."""
    started: list[Run] = []
    name = re.sub(r"\W", "-", request.node.name).removeprefix("test-")

    def start(**options: Any) -> Run:
        nodes.renew_shadow()
        run = nodes.start(name, STEPS, options=[f"--pause={PAUSE_S}"], **options)
        started.append(run)
        return run

    yield start
    for run in started:
        stop(run.process)


def assert_unharmed(run: Run, reference: Run) -> None:
    """The job ended well, without a stall, with the state of the run without Checkmate; the shadow has it too."""
    assert_trained(run, reference)
    status, exported = run.rack.status(), run.rack.exported()
    assert status["verification"]["mismatches"] == 0, status["verification"]
    if status["committed"] != STEPS:
        pytest.fail(f"committed is {status['committed']}: {status}\n{run.output()}")
    assert exported.pop("step") == STEPS
    assert_equal(reference.state(), exported)


def assert_trained(run: Run, reference: Run) -> None:
    run.wait()
    assert_equal(reference.state(), run.state())
    for line in run.report():
        assert line["digest"] == reference.digests(0)[line["rank"], line["step"]]
    times = [line["time"] for line in run.report() if line["rank"] == 0]
    slowest = max(after - before for before, after in pairwise(times))
    assert slowest < STALL_S, f"a step took {slowest:.1f} s:\n{run.output()}"


def assert_serves_what_was(rack: Rack, reference: Run) -> int | None:
    """What the shadow would give out now is the exact state after some step; returns that."""
    try:
        exported = rack.exported()
    except CheckmateError as error:
        assert "no committed state" in str(error)
        return None
    step = int(exported.pop("step"))
    if step:
        assert_equal(reference.state(step), exported)
    return step


def ranks_of(rack: Rack) -> list[int]:
    """Process ids on the training nodes."""
    pids = []
    for host in rack.lab.topology.hosts:
        command = ["ip", "netns", "pids", str(host.netns)]
        pids += subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return [int(pid) for pid in pids]


def kill(rack: Rack, name: str) -> None:
    """A service is gone from one moment to the next."""
    process = rack.services.process(name)
    process.kill()
    process.wait(10)


def complete(rack: Rack) -> bool:
    """The control plane says that the group's gradients reach a shadow with a complete state."""
    status = rack.services.controller_status()
    return status is not None and bool(status["groups"]["dp0"]["complete"])


def live(rack: Rack, *shadows: str) -> Callable[[], bool]:
    """A condition on the control plane: these shadows are alive, and the switch knows it."""

    def holds() -> bool:
        status = rack.services.controller_status()
        return status is not None and status["in_sync"] and status["live_shadows"] == list(shadows)

    return holds


def test_a_killed_shadow_is_replaced_in_mid_run(nodes: Rack, reference: Run, job: Callable[..., Run]) -> None:
    """The new one is not complete until it was seeded, and serves nothing until then; then it commits again."""
    run = job()
    run.reaches(5)
    kill(nodes, "shadow")
    soon(live(nodes), "the control plane to notice")
    assert not complete(nodes)
    run.reaches(run.step() + 2)
    pids = ranks_of(nodes)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    nodes.services.start_shadow()
    soon(nodes.shadow_is(registered=True), "the new shadow to be in its groups")
    assert not complete(nodes)
    assert nodes.status()["committed"] is None
    with pytest.raises(CheckmateError, match="waits for a seed"):
        nodes.exported()
    before = run.step()
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    soon(lambda: nodes.status()["committed"] is not None, "a seed to be committed")
    assert nodes.status()["committed"] > before
    assert_serves_what_was(nodes, reference)
    soon(lambda: complete(nodes), "the group to be complete")
    assert_unharmed(run, reference)
    status = nodes.status()
    assert status["commits"] > status["seeds"]["adopted"] >= 1, f"{status}\n{run.output()}"


def test_a_stopped_shadow_catches_up(nodes: Rack, reference: Run, job: Callable[..., Run]) -> None:
    """It hangs for longer than the control plane waits, and wakes."""
    run = job()
    run.reaches(5)
    shadow = nodes.services.process("shadow")
    shadow.send_signal(signal.SIGSTOP)
    try:
        soon(live(nodes), "the control plane to notice")
        run.reaches(run.step() + 3)
    finally:
        shadow.send_signal(signal.SIGCONT)
    soon(nodes.shadow_is(registered=True), "the shadow to be in its groups again")
    assert_serves_what_was(nodes, reference)
    assert_unharmed(run, reference)


@contextmanager
def out_of_order(rack: Rack, name: str, how: signal.Signals) -> Iterator[None]:
    """A service is killed and later started again, or stopped and later continued."""
    process = rack.services.process(name)
    process.send_signal(how)
    try:
        if how == signal.SIGKILL:
            process.wait(10)
        yield
    finally:
        process.send_signal(signal.SIGCONT)
    if how == signal.SIGKILL:
        {"switch": rack.services.start_switch, "controller": rack.services.start_controller}[name]()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_without_a_controller_everything_goes_on(
    nodes: Rack, reference: Run, job: Callable[..., Run], how: signal.Signals
) -> None:
    """Steps are committed while it is dead, and the next one takes over the switch as it is."""
    run = job()
    run.reaches(5)
    with out_of_order(nodes, "controller", how):
        soon(nodes.shadow_is(registered=False), "the shadow to notice")
        committed = nodes.status()["committed"]
        run.reaches(run.step() + 3)
        soon(lambda: nodes.status()["committed"] > committed, "commits without a controller")
    soon(live(nodes, "shadow0"), "the controller to know the shadow")
    assert_unharmed(run, reference)
    if how == signal.SIGKILL:
        assert nodes.status()["gap_count"] == 0, nodes.status()["gaps"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_without_the_switchs_control_process_everything_goes_on(
    nodes: Rack, reference: Run, job: Callable[..., Run], how: signal.Signals
) -> None:
    """Its programs stay in the kernel: they forward and copy; the next one takes their place and is given the rules."""
    run = job()
    run.reaches(5)
    with out_of_order(nodes, "switch", how):
        committed = nodes.status()["committed"]
        run.reaches(run.step() + 5)
        soon(lambda: nodes.status()["committed"] > committed + 3, "commits without the control process")
    soon(live(nodes, "shadow0"), "the rules to be restored")
    assert_unharmed(run, reference)


@pytest.fixture
def copies_lost(nodes: Rack) -> Iterator[Callable[[int], None]]:
    """Loses one in so many copies on their way to the shadow; 0: none any more."""
    switch, (shadow,) = nodes.lab.topology.switch, nodes.lab.topology.shadows
    assert switch.netns is not None
    netns, ports = switch.netns, [switch.interfaces[nic.port] for nic in shadow.nics]
    losing = 0

    def lose(one_in: int) -> None:
        nonlocal losing
        for port in ports:
            if losing:
                link.stop_losing(netns, port, "egress")
            if one_in:
                link.lose(netns, port, one_in, "egress")
        losing = one_in

    yield lose
    lose(0)


def test_lost_copies_are_noticed_named_and_healed(
    nodes: Rack, reference: Run, job: Callable[..., Run], copies_lost: Callable[[int], None]
) -> None:
    """The shadow stops committing, says which bytes of which step, is seeded at a step boundary, commits again."""
    run = job()
    run.reaches(5)
    copies_lost(50)
    soon(lambda: nodes.status()["gap_count"], "the gap to be noticed")
    first = assert_serves_what_was(nodes, reference)
    copies_lost(0)
    status = nodes.status()
    gap = status["gaps"][0]
    assert first is not None and gap["iteration"] > first
    assert re.search(r"bytes? \d+", gap["reason"]), gap
    soon(lambda: nodes.status()["committed"] >= gap["iteration"], "the shadow to commit again")
    assert_serves_what_was(nodes, reference)
    # Lost bytes between two operations don't tell which iteration they are of.
    named = rf"damage in iteration (None|{gap['iteration']}):"
    assert re.search(named, nodes.lab.log_tail("shadow.log", 100)), gap
    assert_unharmed(run, reference)
    status = nodes.status()
    assert status["seeds"]["adopted"] >= 2 and status["seeds"]["mismatches"] == 0


def test_a_rank_that_dies_while_the_shadow_is_damaged(
    nodes: Rack, reference: Run, job: Callable[..., Run], copies_lost: Callable[[int], None]
) -> None:
    """More is repeated than one iteration, from a state that is whole."""
    run = job(die=[f"1@{STEPS // 2}:bucket-inside"])
    run.reaches(5)
    copies_lost(1)
    soon(lambda: run.digests(1), "the restarted job")
    copies_lost(0)
    run.wait()
    (restored,) = {note["step"] for note in run.notes("restore")}
    assert restored < STEPS // 2 - 1
    assert_equal(reference.state(), run.state())
    for start in (0, 1):
        digests = run.digests(start)
        assert digests and all(digest == reference.digests(0)[where] for where, digest in digests.items())
    assert {step for _, step in run.digests(1)} == set(range(restored + 1, STEPS + 1))


def test_a_wrong_token_is_refused_and_logged(nodes: Rack, reference: Run) -> None:
    """By the shadow, where training goes on without it, and by the control plane."""
    nodes.renew_shadow()
    name = "wrong-token"
    token = nodes.lab.directory / "wrong-token.token"
    token.write_text("0" * 64)
    token.chmod(0o600)
    right = nodes.services.topology_file
    text = right.read_text()
    wrong = nodes.lab.directory / "wrong-token.yaml"
    wrong.write_text(text.replace(str(nodes.lab.topology.token_file), str(token)))
    assert wrong.read_text() != text
    nodes.services.topology_file = wrong
    try:
        run = nodes.start(name, STEPS)
    finally:
        nodes.services.topology_file = right
    assert_trained(run, reference)
    assert "wrong job token" in run.said()
    status = nodes.status()
    assert status["committed"] is None and status["connections"]["refused"] > 0
    assert "refused: wrong job token" in nodes.lab.log_tail("shadow.log", 100)

    script = """
import sys, time
from checkmate.controlplane.registrar_client import RegistrarClient
from checkmate.topology import load_topology
topology = load_topology(sys.argv[1])
shadow = topology.shadows[0]
macs = [nic.mac for nic in shadow.nics]
client = RegistrarClient(topology.registrar, topology.job, shadow.name, macs, topology.read_token())
assert not client.wait_mirrored(2.0)
"""
    netns = nodes.lab.topology.shadows[0].netns
    assert netns is not None
    impostor = nodes.lab.spawn(netns, [sys.executable, "-P", "-c", script, wrong], "impostor.log")
    assert impostor.wait(60) == 0, nodes.lab.log_tail("impostor.log")
    assert "registration refused: wrong job token" in nodes.lab.log_tail("controller.log", 100)
    assert nodes.status()["registered"], "the impostor must not push the shadow out"


def test_a_job_whose_launcher_is_killed_goes_on_with_the_next(
    nodes: Rack, reference: Run, job: Callable[..., Run]
) -> None:
    """Its ranks die with it; a new launch goes on where the shadow is."""
    run = job()
    run.reaches(8)
    run.process.kill()
    run.process.wait(10)
    soon(lambda: not ranks_of(nodes), "the ranks to end", DEATH_NOTICED_S)
    committed = nodes.status()["committed"]
    again = nodes.start("launched-again", STEPS)
    again.wait()
    (restored,) = {note["step"] for note in again.notes("restore")}
    assert committed - 1 <= restored <= committed
    assert_equal(reference.state(), again.state())
    assert nodes.status()["committed"] == STEPS
    exported = nodes.exported()
    del exported["step"]
    assert_equal(reference.state(), exported)
