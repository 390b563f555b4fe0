"""Random training configurations: after each of 20 steps the shadow's state is the trainer's, bit for bit.

``CHECKMATE_DRAWS=5000`` draws more than the usual ones, ``CHECKMATE_FIRST_DRAW`` begins elsewhere.
"""

import os
from pathlib import Path

import pytest
from support.train.direct import DirectShadow
from support.train.draws import STEPS, Config, Training, draw
from support.train.fake_shadow import FakeShadow
from support.train.processes import finish, start

import checkmate
from checkmate.protocol import Seed
from checkmate.tensors import MASTER, named_state, pack_state

pytest_plugins = ["support.train.world"]

DRAWS = int(os.environ.get("CHECKMATE_DRAWS", "240"))
FIRST = int(os.environ.get("CHECKMATE_FIRST_DRAW", "0"))
BATCH = max(20, DRAWS // 50)
THREE = [seed for seed in range(40) if draw(seed).unused and not draw(seed).hook.startswith(("fp16", "bf16"))][:6]
"""Seeds of configurations for three ranks."""


def follow(config: Config, shadow: DirectShadow) -> None:
    training = Training(config)
    checkpoint = checkmate.attach(training.ddp, training.optimizer, masters=training.masters)
    training.make_scheduler()
    assert checkpoint.resume() is None
    for step in range(1, STEPS + 1):
        training.iterate()
        checkpoint.before_forward()  # the boundary, without a forward's random numbers
        assert shadow.unfollowed == [], f"step {step}"
        assert checkpoint.committed == step
        params, buffers = named_state(training.net)
        params += [(MASTER + name, master) for name, master in training.masters.items()]
        description, manifest, tensors = pack_state(params, buffers, training.optimizer)
        assert shadow.replica is not None
        assert shadow.replica.differences(Seed(step, description, manifest), tensors) == [], f"step {step}"
    checkpoint.close()
    assert shadow.seeds == [0]
    assert any(not record.skipped for record in shadow.records)


@pytest.mark.parametrize("first", range(FIRST, FIRST + DRAWS, BATCH))
def test_the_shadow_is_the_trainer(first: int, direct: DirectShadow) -> None:
    for seed in range(first, min(first + BATCH, FIRST + DRAWS)):
        direct.__init__()  # type: ignore[misc]
        config = draw(seed)
        try:
            follow(config, direct)
        except Exception as error:
            raise AssertionError(f"draw {seed}: {config}") from error


def test_three_ranks_with_data_and_branches_of_their_own(tmp_path: Path) -> None:
    """The reducer's own arithmetic: a gradient that no rank used, or one rank alone, is averaged or left alone."""
    unreachable = FakeShadow(1)  # for the settings alone
    unreachable.close()
    environment = {**unreachable.environment(tmp_path), "PYTHONPATH": str(Path(__file__).parents[1])}
    outputs = finish(start(3, "drawn_ranks.py", list(map(str, THREE)), tmp_path, environment), 240)
    assert outputs[0].count("followed ") == len(THREE)
