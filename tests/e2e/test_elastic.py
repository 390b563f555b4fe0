"""A job that ends and is started again on other hosts, fewer or more, goes on from the same shadow."""

import dataclasses
import sys
from pathlib import Path

import pytest
from support.training import RUN_S, SCRIPT, Rack, assert_equal, needs_root, rack

from checkmate import metrics
from checkmate.compare import load_state

pytestmark = [*needs_root, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 12


def run_on(place: Rack, name: str, hosts: tuple[str, ...], die: str | None = None) -> int:
    """Run the script, without restarts, with one rank on each of these hosts; its exit status."""
    lab = place.lab
    base = lab.directory / name
    machines = tuple(dataclasses.replace(host, ranks=int(host.name in hosts)) for host in lab.topology.hosts)
    group = dataclasses.replace(lab.topology.groups[0], ranks=hosts)
    dataclasses.replace(lab.topology, hosts=machines, groups=(group,)).dump(Path(f"{base}.yaml"))
    command = [sys.executable, "-P", "-m", "checkmate", "run", "--topology", f"{base}.yaml", "--bpf", str(lab.bpf)]
    script = [str(SCRIPT), f"--steps={STEPS}", f"--out={base}.pt", f"--report={base}.report"]
    script += ["--die", die] if die else []
    env = {metrics.VARIABLE: f"{base}.metrics"}
    process = lab.spawn(lab.management, [*command, "--max-restarts=0", *script], f"{name}.log", env, trains=True)
    return process.wait(RUN_S)


def test_a_job_goes_on_with_fewer_ranks_and_then_with_more() -> None:
    with rack(4) as place:
        folder = place.lab.directory
        assert run_on(place, "four", ("node0", "node1", "node2", "node3"), "1@4:bucket-inside") == 2, (
            place.lab.log_tail("four.log", 60)
        )
        assert run_on(place, "two", ("node2", "node3"), "0@8:stepped") == 2, place.lab.log_tail("two.log", 60)
        assert run_on(place, "three", ("node0", "node2", "node3")) == 0, place.lab.log_tail("three.log", 60)
        for name, ranks, step in (("two", 2, 3), ("three", 3, 7)):
            restores = [note for note in metrics.read(folder / f"{name}.metrics") if note["kind"] == "restore"]
            assert [note["step"] for note in restores] == [step] * ranks
        status = place.status()
        assert (status["committed"], status["world"], status["gaps"]) == (STEPS, 3, [])
        exported = place.exported()
        assert exported.pop("step") == STEPS
        assert_equal(load_state(folder / "three.pt"), exported)
