"""The example scripts: the unmodified one without Checkmate, the three-line one under torchrun, one result."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.torchrun import plain_torchrun
from support.training import RUN_S, Rack, assert_equal, needs_root, rack, soon

from checkmate import examples
from checkmate.compare import load_state
from checkmate.nccl_plugin.bpf.loader import CounterProgram

pytestmark = [*needs_root, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 100
"""So many that a kill after the third meets a training that still goes on."""
ARGUMENTS = [f"--steps={STEPS}", "--params=100000", "--bucket-cap-mb=0.2", "--seed=3"]
RENDEZVOUS_PORT = 29500


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Final state of examples/train.py under plain torchrun, over gloo: nothing of Checkmate is loaded."""
    folder = tmp_path_factory.mktemp("plain")
    out, losses = folder / "plain.pt", folder / "losses"
    script = [str(examples.TRAIN), *ARGUMENTS, f"--out={out}", f"--metrics={losses}"]
    plain_torchrun(2, script, appended=losses)
    assert len(losses.read_text().splitlines()) == 2 * STEPS
    return out


@pytest.fixture
def nodes() -> Iterator[Rack]:
    with rack(2) as built:
        yield built


def test_the_unmodified_example_knows_nothing_of_checkmate(reference: Path) -> None:
    """With two ranks a sum does not depend on the order: gloo and our rings give the same bits (see below)."""
    sources = [path.read_text() for path in (examples.TRAIN, examples.TRAIN.with_name("model.py"))]
    assert not any(re.search(r"^\s*(import|from) checkmate", source, re.MULTILINE) for source in sources)
    assert load_state(reference)["model"]


def test_the_unmodified_example_ends_the_same_with_checkmate(nodes: Rack, reference: Path) -> None:
    out = nodes.lab.directory / "auto.pt"
    job = nodes.services.run(examples.TRAIN, [*ARGUMENTS, f"--out={out}"], log="auto.log")
    assert job.wait(RUN_S) == 0, nodes.lab.log_tail("auto.log", 40)
    assert_equal(load_state(reference), load_state(out))
    exported = nodes.exported()
    assert exported.pop("step") == STEPS
    assert_equal(load_state(reference), exported)


def test_three_lines_under_torchrun_survive_a_kill(nodes: Rack, reference: Path) -> None:
    """One torchrun on each node, as on a cluster; a rank is killed, and the end is that of plain torchrun."""
    out = nodes.lab.directory / "explicit.pt"
    with CounterProgram.load(nodes.lab.bpf) as program:
        agents = [_torchrun(nodes, rank, program.map_path, [*ARGUMENTS, f"--out={out}"]) for rank in (0, 1)]
        soon(lambda: (nodes.status()["committed"] or 0) >= 3, "three commits", RUN_S)
        os.kill(_worker(nodes, 1), signal.SIGKILL)
        for rank, agent in enumerate(agents):
            assert agent.wait(RUN_S) == 0, nodes.lab.log_tail(f"agent{rank}.log", 60)
    assert "fresh start" in (log := (nodes.lab.directory / "agent0.log").read_text())
    assert re.search(r"resumed after step \d+", log)
    assert_equal(load_state(reference), load_state(out))
    status, exported = nodes.status(), nodes.exported()
    assert (status["committed"], status["incarnation"], exported.pop("step")) == (STEPS, 2, STEPS)
    assert_equal(load_state(reference), exported)


def _torchrun(nodes: Rack, rank: int, counter_map: Path, arguments: list[str]) -> "subprocess.Popen[bytes]":
    topology = nodes.lab.topology
    host, first = topology.hosts[rank], topology.hosts[0]
    assert host.netns is not None
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=3"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={first.management_ip}:{RENDEZVOUS_PORT}", "--rdzv-id=explicit"]
    command += [f"--rdzv-conf=is_host={rank == 0}", f"--local-addr={host.management_ip}"]
    environment = {
        "CHECKMATE_SHADOWS": str(topology.shadows[0].control),
        "CHECKMATE_TOKEN_FILE": str(topology.token_file),
        "CHECKMATE_JOB": topology.job,
        "CHECKMATE_IFNAME": "=" + host.nics[0].name,
        "CHECKMATE_COUNTER_MAP": str(counter_map),
    }
    return nodes.lab.spawn(host.netns, [*command, examples.EXPLICIT, *arguments], f"agent{rank}.log", environment)


def _worker(nodes: Rack, rank: int) -> int:
    """Process id of the training process on a node."""
    netns = str(nodes.lab.topology.hosts[rank].netns)
    pids = subprocess.run(["ip", "netns", "pids", netns], check=True, capture_output=True, text=True).stdout.split()
    commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids}
    (pid,) = [pid for pid, command in commands.items() if b"torch.distributed.run" not in command]
    return pid
