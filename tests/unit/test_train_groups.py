"""Jobs of several data-parallel groups: what one rank finds wrong all ranks hear, and none waits for it."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.train.fake_shadow import FakeShadow, order
from support.train.processes import SUPPORT

from checkmate.config import CheckmateError
from checkmate.protocol import State
from checkmate.train.settings import Settings

GROUPS = ("0,1", "2,3")
RANKS = range(4)


@dataclass
class Scenario:
    """What the two shadows hold, the script's arguments; and what came of it."""

    held: tuple[int | None, int | None] = (None, None)
    arguments: tuple[str, ...] = ()
    shadows: list[FakeShadow] = field(default_factory=lambda: [FakeShadow(2), FakeShadow(2)])
    said: list[str] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)

    def environments(self, folder: Path) -> list[dict[str, str]]:
        return [
            {
                "CHECKMATE_GROUP": f"stage{rank // 2}",
                "CHECKMATE_GROUP_COUNT": "2",
                "CHECKMATE_GROUP_RANKS": GROUPS[rank // 2],
                "RANK": str(rank),
                **self.shadows[rank // 2].environment(folder),
            }
            for rank in RANKS
        ]


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Scenario]]:
    folder = tmp_path_factory.mktemp("groups")
    runs = {
        "plain": Scenario(),
        "world": Scenario(arguments=("WORLD",)),
        "refused": Scenario(arguments=("REFUSED",)),
        "lost": Scenario((3, None)),
        "apart": Scenario((3, 2)),
        "unfollowed": Scenario(),
        "half unfollowed": Scenario((None, 3)),
        "swapped": Scenario((3, 3)),
    }
    for shadow, part in zip(runs["swapped"].shadows, (1, 0), strict=True):
        shadow.states = {rank: (State(3, {}, [], {"part": [part, 2]}), []) for rank in (0, 1)}
    for name in ("unfollowed", "half unfollowed"):
        runs[name].shadows[0].refusal = "other bits"
    for run in runs.values():
        for shadow, step in zip(run.shadows, run.held, strict=True):
            shadow.committed = step
    plan = [(name, run.environments(folder), [str(folder / name), *run.arguments]) for name, run in runs.items()]
    command = [sys.executable, str(SUPPORT / "run_groups.py"), str(folder), json.dumps(plan)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    for name, statuses in json.loads(done.stdout).items():
        runs[name].statuses = statuses
        runs[name].said = [(folder / f"{name}.said.{rank}").read_text() for rank in RANKS]
        assert len(list(folder.glob(f"{name}.[0-3]"))) == statuses.count(0)
    yield runs
    for run in runs.values():
        for shadow in run.shadows:
            shadow.close()


def test_a_stage_that_begins_by_receiving_attaches_first(scenarios: dict[str, Scenario]) -> None:
    run = scenarios["plain"]
    assert run.statuses == [0] * 4, run.said
    for shadow in run.shadows:
        for rank in (0, 1):
            assert [what for what in order(shadow, rank) if what != "L"] == ["S1", "B1", "S2", "B2", "S3", "B3"]
        assert [seed.step for seed, _ in shadow.seeds] == [0]


def test_a_rank_that_refuses_is_heard_in_all_groups(scenarios: dict[str, Scenario]) -> None:
    run = scenarios["refused"]
    assert run.statuses == [0] * 4, run.said
    assert ["rank(s) [2, 3] cannot attach" in said for said in run.said] == [True, True, False, False], run.said
    assert all("not attached: optimizer torch.optim.adagrad.Adagrad" in said for said in run.said[2:])
    assert run.shadows[0].messages == run.shadows[1].messages == []


def test_gradients_of_other_ranks_than_the_groups_are_refused(scenarios: dict[str, Scenario]) -> None:
    run = scenarios["world"]
    assert run.statuses == [0] * 4, run.said
    for rank, said in enumerate(run.said):
        wanted = [int(number) for number in GROUPS[rank // 2].split(",")]
        assert "not attached: the module's gradients are reduced over the ranks [0, 1, 2, 3]" in said
        assert f"group stage{rank // 2} consists of {wanted}: give the module process_group=" in said


@pytest.mark.parametrize(("name", "text"), [
    ("lost", "shadows of the job's groups hold no common step (by group: rank 0's: 3; rank 2's: -1"),
    ("apart", "shadows of the job's groups hold no common step (by group: rank 0's: 3; rank 2's: 2"),
])  # fmt: skip
def test_states_of_different_steps_are_never_mixed(scenarios: dict[str, Scenario], name: str, text: str) -> None:
    run = scenarios[name]
    assert run.statuses == [1] * 4, run.said
    assert all(text in said for said in run.said), run.said


def test_what_a_shadow_can_never_follow_is_heard_in_all_groups(scenarios: dict[str, Scenario]) -> None:
    """All go on without checkpoints, but where another group's shadow holds a state: nobody goes back behind that."""
    for name, status in (("unfollowed", 0), ("half unfollowed", 1)):
        run = scenarios[name]
        assert run.statuses == [status] * 4, run.said
        assert "can't follow this job: other bits" in run.said[0]
        assert all("the job's shadows can't be used: see the message of rank(s) [0]" in said for said in run.said[1:])


def test_a_state_of_another_part_of_the_job_is_not_restored(scenarios: dict[str, Scenario]) -> None:
    """The parts of a layer have equal shapes: nothing else would tell, where a topology swaps their names."""
    run = scenarios["swapped"]
    assert run.statuses == [1] * 4, run.said
    for rank, said in enumerate(run.said):
        was, now = ((2, 1), (1, 2))[rank // 2]
        assert f"it is of group {was} of 2 in the order of their first ranks, which is group {now} of 2 now" in said


def test_members_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shadow = FakeShadow(2)
    for name, value in shadow.environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    shadow.close()
    Settings.from_environment().check_members([0, 1], 2)
    with pytest.raises(CheckmateError, match=r"this job, which has one group, consists of \[0, 1, 2, 3\]"):
        Settings.from_environment().check_members([0, 1], 4)
    monkeypatch.setenv("CHECKMATE_GROUP_RANKS", "0,2")
    Settings.from_environment().check_members([0, 2], 4)
    monkeypatch.setenv("CHECKMATE_GROUP_RANKS", "0;2")
    with pytest.raises(CheckmateError, match="CHECKMATE_GROUP_RANKS=0;2 is not a list of rank numbers"):
        Settings.from_environment()
