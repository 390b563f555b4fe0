"""A rank is killed at every kind of moment: the restored run equals one that never failed, bit for bit."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from support.training import Rack, Run, assert_equal, needs_root, parameter_bytes, rack

pytestmark = [*needs_root, pytest.mark.slow, pytest.mark.timeout(900)]

DONE = ("step-post", "stepped", "scheduled", "over")
"""Moments at which the victim has updated its parameters."""


@dataclass(frozen=True)
class Campaign:
    """A job whose k-th start ends with the k-th death."""

    ranks: int
    steps: int
    deaths: tuple[str, ...]
    options: tuple[str, ...] = ()
    channels: int = 2


CAMPAIGNS = {
    # Epochs end after steps 6 and 12.
    "middle": Campaign(
        3,
        16,
        (
            "0@3:forward",
            "1@4:backward",
            "2@5:bucket-first",
            "0@6:bucket-inside",
            "1@7:bucket-last",
            "2@8:reduced",
            "0@9:step-pre",
            "1@10:half-stepped",
            "2@11:step-post",
            "0@12:stepped",
            "1@13:scheduled",
            "2@14:bucket-inside",
        ),
    ),
    # DDP has one bucket in iteration 1 and cuts it into several in iteration 2.
    "first and last": Campaign(
        2,
        4,
        (
            "0@1:forward",
            "1@1:bucket-inside",
            "0@1:half-stepped",
            "1@1:scheduled",
            "1@2:backward",
            "0@2:bucket-first",
            "1@2:bucket-last",
            "0@2:step-post",
            "1@2:scheduled",
            "0@4:forward",
            "1@4:bucket-inside",
            "0@4:half-stepped",
            "1@4:scheduled",
            "0@4:over",
        ),
        ("--default-adamw",),
        channels=1,
    ),
    "scaled and clipped": Campaign(
        3,
        7,
        ("1@3:bucket-inside", "0@5:stepped"),
        ("--scaled", "--default-adamw"),
        channels=2,
    ),
    "during the restore": Campaign(
        4,
        6,
        ("2@3:bucket-inside", "3@0:restore", "0@0:restore", "1@5:reduced"),
        channels=4,
    ),
}

KILLS = [
    pytest.param(name, index, id=f"{name}-{death}")
    for name, campaign in CAMPAIGNS.items()
    for index, death in enumerate(campaign.deaths)
]


@dataclass(frozen=True)
class Outcome:
    """What a campaign left: its run, one that never failed, and the shadow's status and state."""

    campaign: Campaign
    run: Run
    reference: Run
    status: dict[str, Any] | None
    exported: dict[str, Any] | None


@pytest.fixture(scope="module")
def outcomes() -> Iterator[Any]:
    """By name of the campaign; each is run once, when it is first asked for."""
    with ExitStack() as stack:

        @cache
        def outcome(name: str) -> Outcome:
            campaign = CAMPAIGNS[name]
            return _run(stack.enter_context(rack(campaign.ranks)), campaign)

        yield outcome


def _run(rack: Rack, campaign: Campaign) -> Outcome:
    run = rack.start(
        "killed", campaign.steps, die=campaign.deaths, options=campaign.options, channels=campaign.channels
    )
    run.join()
    status, exported = rack.services.shadow_status(), None
    if status is not None and status["committed"] is not None:
        exported = rack.exported()
    reference = rack.start(
        "reference", campaign.steps, attach=False, options=campaign.options, channels=campaign.channels
    )
    return Outcome(campaign, run, reference.wait(), status, exported)


@pytest.mark.parametrize(("name", "index"), KILLS)
def test_training_goes_on_from_the_last_iteration(outcomes: Any, name: str, index: int) -> None:
    """At most one iteration is repeated, and every step after it is that of the run that never failed."""
    outcome: Outcome = outcomes(name)
    run, reference = outcome.run, outcome.reference.digests(0)
    victim, when = outcome.campaign.deaths[index].split("@")
    step, moment = when.split(":")
    (death,) = [line for line in run.report() if "died" in line and line["start"] == index]
    assert (death["rank"], death["step"], death["died"]) == (int(victim), int(step), moment), run.output()

    if moment == "restore":
        assert not run.digests(index)
        return
    completed = int(step) if moment in DONE else int(step) - 1
    restored = _restored(run, index + 1)
    assert completed - 1 <= restored <= completed, run.output()

    after = run.digests(index + 1)
    for number in range(restored + 1, max((step for _, step in after), default=restored) + 1):
        for rank in range(outcome.campaign.ranks):
            if (rank, number) in after:
                assert after[rank, number] == reference[rank, number], f"step {number} of rank {rank} differs"


def _restored(run: Run, start: int) -> int:
    """The step that this start of the job, or the next one that survived its restore, went on from."""
    notes = [note for note in run.notes("restore") if note["incarnation"] > start]
    assert notes, run.output()
    first = min(note["incarnation"] for note in notes)
    (step,) = {note["step"] for note in notes if note["incarnation"] == first}
    return int(step)


@pytest.mark.parametrize("name", CAMPAIGNS)
def test_the_end_is_that_of_a_run_that_never_failed(outcomes: Any, name: str) -> None:
    outcome: Outcome = outcomes(name)
    run, campaign = outcome.run, outcome.campaign
    assert run.process.returncode == 0, run.output()
    expected = outcome.reference.state()
    assert_equal(expected, run.state())
    assert outcome.exported is not None and outcome.status is not None
    assert outcome.exported.pop("step") == campaign.steps
    assert_equal(expected, outcome.exported)
    assert outcome.status["committed"] == campaign.steps
    assert outcome.status["gap_count"] == 0, outcome.status["gaps"]
    assert run.tagged_bytes() == campaign.steps * parameter_bytes(expected)
