"""Training frameworks' own loops under ``checkmate run``: a rank is killed, and the end is that of a run without it."""

import importlib.util
import re
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
STEP = re.compile(r"rank (\d+) step (\d+) (.*)", re.MULTILINE)


@dataclass(frozen=True)
class Case:
    """An example, the step before which rank 1 is killed (an epoch has six batches), options that leave Checkmate out,
    and options."""

    library: str
    script: str
    dies: int
    plain: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


CASES = {
    "lightning": Case("lightning", "train_lightning.py", 9, ("--plain",)),
    "lightning, accumulating": Case(
        "lightning", "train_lightning.py", 6, ("--plain",), ("--accumulate=2", "--schedule-every-step")
    ),
    "transformers, accumulating": Case("transformers", "train_transformers.py", 5, ("--plain",), ("--accumulate=2",)),
    "accelerate, accumulating": Case("accelerate", "train_accelerate.py", 5, options=("--accumulate=2",)),
}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Rack]:
    with rack(2) as built:
        yield built


@pytest.mark.parametrize("name", CASES)
def test_a_killed_run_ends_as_one_without_checkmate(nodes: Rack, name: str, tmp_path: Path) -> None:
    case = CASES[name]
    if importlib.util.find_spec(case.library) is None:
        pytest.skip(f"needs {case.library}: pip install 'checkmate[lightning,accelerate]'")
    script = str(examples.TRAIN.with_name(case.script))
    plain, out = tmp_path / "plain.pt", tmp_path / "out.pt"
    reference = plain_torchrun(2, [script, *case.options, *case.plain, f"--out={plain}"])
    nodes.renew_shadow()
    arguments = ["1", str(case.dies), script, *case.options, f"--out={out}"]
    job = nodes.services.run(DIE, arguments, log=f"{tmp_path.name}.log", max_restarts=1)
    code = job.wait(RUN_S)
    said = (nodes.lab.directory / f"{tmp_path.name}.log").read_text(errors="replace")
    assert code == 0, said[-6000:]
    assert_equal(load_state(plain), load_state(out))
    status, exported = nodes.status(), nodes.exported()
    assert (status["committed"], status["incarnation"], status["gap_count"]) == (exported.pop("step"), 2, 0)
    assert_equal(load_state(plain), exported)
    assert (status["seeds"]["adopted"], status["seeds"]["mismatches"]) == (1, 0), said[-6000:]
    assert len({step for _, step, _ in _steps(reference)}) == status["committed"]
    assert set(_steps(said)) == set(_steps(reference))  # what was repeated, too


def _steps(said: str) -> list[tuple[str, str, str]]:
    """Rank, step, and what is said of it."""
    return STEP.findall(said)
