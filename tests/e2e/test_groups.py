"""Jobs of several data-parallel groups: a rank is killed, and every part ends as in a run that never failed."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.torchrun import plain_torchrun
from support.training import RUN_S, Rack, assert_equal, needs_root, rack

from checkmate import examples
from checkmate.compare import load_state

pytestmark = [*needs_root, pytest.mark.slow, pytest.mark.timeout(900)]

DIE = Path(__file__).parent / "scripts/die_in_step.py"
RANKS, GROUPS, STEPS = 4, 2, 6


@dataclass(frozen=True)
class Case:
    """An example whose group g saves its part as OUT.g; rank ``victim`` is killed in its fourth step.

    It is killed when all have sent what belongs to the step before, and before a group can finish this one. Groups
    whose hosts have several ranks share them, and the shadow.
    """

    script: str
    interleaved: bool
    victim: int
    options: tuple[str, ...] = ("--params=100000", "--bucket-cap-mb=0.1")
    ranks_per_host: int = 1


CASES = {
    "pipeline": Case(
        "train_pipeline.py",
        interleaved=False,
        victim=3,
        options=("--params=100000", "--bucket-cap-mb=0.1", "--clip=0.1"),  # at each step
    ),
    "tensor": Case("train_tensor.py", interleaved=True, victim=2, options=("--params=200000", "--bucket-cap-mb=0.1")),
    "hsdp": Case("train_hsdp.py", interleaved=True, victim=3, options=("--params=100000",)),
    "tensor in a host": Case(
        "train_tensor.py",
        interleaved=True,
        victim=2,
        options=("--params=200000", "--bucket-cap-mb=0.1"),
        ranks_per_host=2,
    ),
    "hsdp in a host": Case("train_hsdp.py", interleaved=True, victim=3, options=("--params=100000",), ranks_per_host=2),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def nodes(case: Case) -> Iterator[Rack]:
    with rack(RANKS, groups=GROUPS, interleaved=case.interleaved, ranks_per_host=case.ranks_per_host) as built:
        yield built


def test_copies_of_a_group_reach_exactly_its_shadow(case: Case, nodes: Rack) -> None:
    """Probes of the switch: each shadow gets one from each of its group's two flows, and nothing of the other's.

    What goes between the same hosts is the same to the switch.
    """
    command = [sys.executable, "-P", "-m", "checkmate", "switch", "verify", "--json"]
    inside = [
        "nsenter",
        f"--net=/run/netns/{nodes.lab.management}",
        *command,
        "--topology",
        nodes.services.topology_file,
    ]
    done = subprocess.run(inside, check=True, capture_output=True, text=True, timeout=120)
    answer = json.loads(done.stdout.splitlines()[0])
    assert answer["problems"] == [] and len(answer["groups"]) == RANKS // case.ranks_per_host
    assert all(group["outcome"] == "ok" and not group["problems"] for group in answer["groups"])
    for index in range(GROUPS):
        status = nodes.services.shadow_status(index)
        assert status is not None and status["receiver"]["packets"] == RANKS // GROUPS


def test_a_killed_run_ends_as_one_without_checkmate(case: Case, nodes: Rack, tmp_path: Path) -> None:
    script = str(examples.TRAIN.with_name(case.script))
    options = [f"--steps={STEPS}", *case.options]
    plain, out = tmp_path / "plain.pt", tmp_path / "out.pt"
    # over gloo: in groups of two ranks a sum does not depend on the order
    plain_torchrun(RANKS, [script, *options, f"--out={plain}"])
    arguments = [str(case.victim), "4:backward", script, *options, f"--out={out}"]
    job = nodes.services.run(DIE, arguments, log="job.log", max_restarts=1)
    code = job.wait(RUN_S)
    said = (nodes.lab.directory / "job.log").read_text(errors="replace")
    assert code == 0, said[-6000:]
    assert [f"rank {rank} restored step 3" in said for rank in range(RANKS)] == [True] * RANKS, said[-6000:]
    for index in range(GROUPS):
        expected = load_state(plain.with_name(f"plain.pt.{index}"))
        assert_equal(expected, load_state(out.with_name(f"out.pt.{index}")))
        exported = nodes.exported(index)
        assert exported.pop("step") == STEPS
        assert_equal(expected, exported)
        status = nodes.services.shadow_status(index)
        assert status is not None and (status["committed"], status["incarnation"]) == (STEPS, 2)
        assert (status["gap_count"], status["seeds"]["adopted"], status["seeds"]["mismatches"]) == (0, 1, 0)
