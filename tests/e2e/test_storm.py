"""Ranks, shadows and whole jobs are killed at random moments: the run ends as one that was never disturbed.

From each seed a run is drawn for each shape; CHECKMATE_STORM=N draws of N seeds, CHECKMATE_STORM_SEED is the first.
"""

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.storm import Draw, Storm
from support.torchrun import plain_torchrun
from support.training import assert_equal, needs_root, rack, soon

from checkmate import examples, parts
from checkmate.compare import load_state
from checkmate.lab import stop

pytestmark = [*needs_root, pytest.mark.slow, pytest.mark.timeout(900)]

DRAWS = int(os.environ.get("CHECKMATE_STORM", "1"))
FIRST = int(os.environ.get("CHECKMATE_STORM_SEED", "349"))
STEPS = 100
STRIKES = 4 if DRAWS > 1 else 2
RANKS, GROUPS, SHADOWS = 4, 2, 2
"""Ranks of the job, groups, and shadows of each group."""


@dataclass(frozen=True)
class Shape:
    """An example whose group g saves its part as OUT.g. ``lab``: more of the lab's configuration."""

    script: str
    params: int
    lab: dict[str, Any] = field(default_factory=dict)

    @property
    def command(self) -> list[str]:
        """The script and its options."""
        path = examples.TRAIN.with_name(self.script)
        return [str(path), f"--steps={STEPS}", f"--params={self.params}", "--bucket-cap-mb=0.1"]


OWN_HOSTS = "hosts of their own"
SHAPES = {
    OWN_HOSTS: Shape("train_pipeline.py", 100_000),
    "shared hosts and shadows": Shape("train_tensor.py", 200_000, {"interleaved": True, "ranks_per_host": 2}),
}


@pytest.fixture(scope="module", params=SHAPES)
def shape(request: pytest.FixtureRequest) -> Shape:
    return SHAPES[request.param]


@pytest.fixture(scope="module")
def reference(shape: Shape, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Each group's final state of a run that nothing disturbs, over gloo."""
    out = tmp_path_factory.mktemp("storm") / "plain.pt"
    plain_torchrun(RANKS, [*shape.command, f"--out={out}"])
    return [load_state(out.with_name(f"{out.name}.{group}")) for group in range(GROUPS)]


@pytest.fixture(scope="module")
def place(shape: Shape) -> Iterator[Any]:
    with rack(RANKS, groups=GROUPS, shadows=SHADOWS, **shape.lab) as built:
        yield built
        prefix, directory = built.lab.prefix, built.lab.directory
    assert not directory.exists() and not list(Path("/run/netns").glob(f"{prefix}-*"))
    found = subprocess.run(["pgrep", "-f", str(directory)], check=False, capture_output=True, text=True)
    assert found.stdout == "", "processes are left"


@pytest.fixture
def nodes(place: Any) -> Any:
    """The rack, with shadows that hold nothing."""
    for number in range(len(place.lab.topology.shadows)):
        stop(place.services.process(f"shadow{number or ''}"))
        place.services.start_shadow(number)
    soon(
        lambda: all((place.services.shadow_status(n) or {}).get("registered") for n in range(GROUPS * SHADOWS)),
        "shadows in their groups",
    )
    return place


@pytest.mark.parametrize("seed", range(FIRST, FIRST + DRAWS))
def test_a_storm_leaves_the_run_that_was_never_disturbed(
    seed: int, shape: Shape, nodes: Any, reference: list[Any]
) -> None:
    draw = Draw.of(seed, RANKS, len(nodes.lab.topology.shadows), STRIKES)
    undisturbed(nodes, draw, shape, reference)


@pytest.mark.parametrize("shape", [OWN_HOSTS], indirect=True)
def test_shadows_that_come_late_join_a_job_of_several_groups(shape: Shape, nodes: Any, reference: list[Any]) -> None:
    """It began without checkpoints, because a shadow of one group was away, and has them in the end."""
    storm = undisturbed(nodes, Draw(0, 0.6, (3, 8), ()), shape, reference)
    assert storm.whole, storm.story()
    assert min(note["step"] for note in storm.notes()) > 1, "the shadow came before the job began"
    assert not [note for note in storm.notes() if note["kind"] == "restore"]


def undisturbed(nodes: Any, draw: Draw, shape: Shape, reference: list[Any]) -> Storm:
    """The job in that storm ends as the one without."""
    print(draw)
    storm = Storm(nodes, f"storm{draw.seed}", draw, shape.command)
    storm.run()
    sockets = nodes.services.sockets_of.values()
    for group, (expected, of_group) in enumerate(zip(reference, sockets, strict=True)):
        assert_equal(expected, load_state(storm.out.with_name(f"{storm.out.name}.{group}")))
        if storm.whole:
            with parts.exported(of_group, nodes.lab.directory) as state:
                exported = dict(state)
            assert exported.pop("step") == STEPS, storm.story()
            assert_equal(expected, exported)
    return storm
