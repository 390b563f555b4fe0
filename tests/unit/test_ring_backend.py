"""The torch.distributed backend over loopback; the jobs are in tests/support/ring_ranks.py."""

import subprocess
import sys
from pathlib import Path

import pytest

JOBS = Path(__file__).parents[1] / "support/ring_ranks.py"


def run(job: str, ranks: int) -> None:
    command = [sys.executable, str(JOBS), job, str(ranks)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_every_collective_agrees_with_numpy(ranks: int) -> None:
    run("collectives", ranks)


def test_groups_come_and_go() -> None:
    run("group_life", 3)


def test_device_meshes_and_what_is_built_on_them() -> None:
    run("meshes", 4)


def test_what_is_not_supported_says_so() -> None:
    run("refusals", 2)


def test_empty_messages_are_messages() -> None:
    run("empty_messages", 4)


def test_results_are_the_same_bits_everywhere_and_every_time() -> None:
    run("determinism", 3)


def test_ddp_trains_the_same_parameters_on_all_ranks() -> None:
    run("ddp", 3)


def test_a_killed_rank_is_noticed_by_all_others() -> None:
    run("killed", 4)


def test_an_absent_rank_runs_into_the_timeout() -> None:
    run("absent", 3)


def test_waiting_costs_no_processor_time() -> None:
    run("idle", 2)


@pytest.mark.parametrize("ranks", [4, 5])
def test_ranks_that_share_hosts_find_their_places_in_the_rings(ranks: int) -> None:
    run("shared_hosts", ranks)
