"""Two shadows share a group's state: ranks and shadows die, and what is restored is one whole, bit for bit."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.training import Rack, Run, assert_equal, needs_root, rack, soon

from checkmate import parts
from checkmate.lab import stop

pytestmark = [*needs_root, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 24


@pytest.fixture(scope="module")
def two() -> Iterator[Rack]:
    with rack(2, shadows=2) as built:
        yield built


@pytest.fixture(scope="module")
def reference(two: Rack) -> Run:
    return two.start("reference", STEPS, attach=False).wait()


def joined(rack: Rack) -> dict[str, Any]:
    """The state that all shadows hold together."""
    with parts.exported(rack.services.shadow_sockets, rack.lab.directory) as state:
        return dict(state)


@contextmanager
def ranks_stand_still(rack: Rack) -> Iterator[None]:
    """So that a shadow has the time to start."""
    listed = [
        subprocess.run(["ip", "netns", "pids", str(host.netns)], check=True, capture_output=True, text=True).stdout
        for host in rack.lab.topology.hosts
    ]
    pids = [int(pid) for pid in " ".join(listed).split()]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def statuses(rack: Rack) -> list[dict[str, Any]]:
    found = [rack.services.shadow_status(number) for number in (0, 1)]
    assert None not in found, rack.lab.log_tail("shadow1.log")
    return [status for status in found if status is not None]


def assert_whole(run: Run, reference: Run) -> None:
    run.wait()
    assert_equal(reference.state(), run.state())
    soon(
        lambda: [s["committed"] for s in statuses(run.rack)] == [STEPS, STEPS], f"the last commit {statuses(run.rack)}"
    )
    state = joined(run.rack)
    assert state.pop("step") == STEPS
    assert_equal(reference.state(), state)
    assert [s["verification"]["mismatches"] for s in statuses(run.rack)] == [0, 0]


def test_ranks_die_and_both_halves_come_back(two: Rack, reference: Run) -> None:
    run = two.start("killed", STEPS, die=("0@5:bucket-inside", "1@12:half-stepped"))
    assert_whole(run, reference)
    restored = {note["step"] for note in run.notes("restore")}
    assert restored <= {4, 5, 11, 12} and len(restored) == 2, run.output()
    assert [s["seeds"]["adopted"] for s in statuses(two)] == [1, 1], "each kept its state all along"
    sizes = [s["memory"]["state"] for s in statuses(two)]
    assert min(sizes) > 0.2 * sum(sizes), "a shadow holds its shard only"


def test_a_shadow_dies_in_mid_run_and_is_seeded_again(two: Rack, reference: Run) -> None:
    for number in (0, 1):  # another job
        stop(two.services.process("shadow" if number == 0 else "shadow1"))
        two.services.start_shadow(number)
    soon(lambda: all((two.services.shadow_status(n) or {}).get("registered") for n in (0, 1)), "both in their groups")
    run = two.start("bereaved", STEPS, options=["--pause=0.3"], die=(f"1@{STEPS - 2}:bucket-inside",))
    run.reaches(4)
    process = two.services.process("shadow1")
    process.kill()
    process.wait(10)
    name = str(two.lab.topology.shadows[1].control)
    soon(lambda: (two.services.shadow_status() or {}).get("waits_for") == [name], "the other one to name it")
    held = (two.services.shadow_status() or {})["committed"]
    with ranks_stand_still(two):
        two.services.start_shadow(1)
        soon(lambda: (two.services.shadow_status(1) or {}).get("registered"), "the new one to be in its groups")
    soon(lambda: all(s and s["committed"] and s["committed"] > held for s in map(two.services.shadow_status, (0, 1))),
         "both to commit again")  # fmt: skip
    assert_whole(run, reference)
    assert run.notes("restore"), "the rank that died later was restored from the seeded one, too"


def test_the_demo_joins_shards(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "checkmate", "demo", "--shadows", "2", "--ranks", "2", "--params", "100000"]
    result = subprocess.run(
        [*command, "--steps", "8", "--kill", "1@3", "--json"],
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["committed_steps"] == 8 and found["shadow_equal"] and found["params_equal"]
