"""How a job of several groups numbers its ranks, and what each rank is told."""

from dataclasses import replace
from pathlib import Path

import pytest

from checkmate.config import CheckmateError
from checkmate.lab import LabConfig, lab_topology
from checkmate.launch import Job, job_environment, run_job
from checkmate.rank import rank_environment
from checkmate.topology import Topology, load_topology

PP2DP6 = Path(__file__).parents[2] / "deploy/inventories/pp2dp6.yaml"


def members(topology: Topology) -> list[list[int]]:
    return [topology.members(group) for group in topology.groups]


def test_ranks_are_numbered_host_by_host() -> None:
    topology = load_topology(PP2DP6)
    assert members(topology) == [list(range(6)), list(range(6, 12))]
    assert [place.host.name for place in topology.places] == [f"node{number:02}" for number in range(12)]
    first, second = topology.groups[0].ranks, topology.groups[1].ranks
    sharing = replace(topology, groups=tuple(replace(group, ranks=first) for group in topology.groups))
    assert members(sharing) == [list(range(0, 12, 2)), list(range(1, 12, 2))], "two ranks on each host"
    swapped = replace(topology, groups=tuple(reversed(topology.groups)))
    assert members(swapped) == [list(range(6, 12)), list(range(6))] and swapped.groups[0].ranks == second


@pytest.mark.parametrize(("interleaved", "wanted"), [(False, [[0, 1], [2, 3]]), (True, [[0, 2], [1, 3]])])
def test_a_lab_of_several_groups(interleaved: bool, wanted: list[list[int]], tmp_path: Path) -> None:
    lab = LabConfig(4, groups=2, interleaved=interleaved)
    topology = Topology.from_dict(lab_topology(lab, "ckm1", tmp_path).to_dict())
    assert members(topology) == wanted and [group.shadows for group in topology.groups] == [("shadow0",), ("shadow1",)]
    for rank in range(4):
        index = next(index for index, ranks in enumerate(wanted) if rank in ranks)
        told = rank_environment(topology, rank, attach=True)
        assert told["CHECKMATE_GROUP"] == f"dp{index}" and told["CHECKMATE_GROUP_INDEX"] == str(index)
        assert told["CHECKMATE_GROUP_COUNT"] == "2"
        assert told["CHECKMATE_GROUP_RANKS"] == ",".join(map(str, wanted[index]))
        assert told["CHECKMATE_SHADOWS"] == f"10.255.0.{100 + index}:7701"
    assert "CHECKMATE_SHADOWS" not in rank_environment(topology, 0, attach=False)
    shared = job_environment(topology, Job(tmp_path, tmp_path), None)
    assert shared["CHECKMATE_JOB_SHADOWS"] == "10.255.0.100:7701,10.255.0.101:7701"


def test_groups_of_a_lab_that_share_hosts_share_the_shadow(tmp_path: Path) -> None:
    lab = LabConfig(8, groups=2, interleaved=True, ranks_per_host=4, shadows=2)
    topology = Topology.from_dict(lab_topology(lab, "ckm1", tmp_path).to_dict())
    assert members(topology) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert [group.shadows for group in topology.groups] == [("shadow0", "shadow1")] * 2
    for rank in range(8):
        told = rank_environment(topology, rank, attach=True)
        index = int(told["CHECKMATE_GROUP_INDEX"])
        assert rank in members(topology)[index] and told["CHECKMATE_HOST_RANKS"] == "2,2"
        assert told["CHECKMATE_SHADOWS"] == f"10.255.0.100:{7701 + index},10.255.0.101:{7701 + index}"
    shared = job_environment(topology, Job(tmp_path, tmp_path), None)
    assert shared["CHECKMATE_JOB_SHADOWS"].split(",") == [
        f"10.255.0.{shadow}:{port}" for port in (7701, 7702) for shadow in (100, 101)
    ]


@pytest.mark.parametrize(("ranks", "each", "interleaved"), [(8, 4, False), (8, 3, True), (6, 4, True)])
def test_groups_share_the_hosts_of_a_lab_evenly_or_not_at_all(ranks: int, each: int, interleaved: bool) -> None:
    with pytest.raises(CheckmateError, match=f"2 groups, {each} of {ranks} ranks on each host: .* multiples of 2"):
        LabConfig(ranks, groups=2, interleaved=interleaved, ranks_per_host=each)


def test_a_lab_needs_groups_of_equal_size() -> None:
    for ranks, groups in ((4, 3), (4, 4), (4, 0)):
        with pytest.raises(CheckmateError, match=f"{ranks} ranks cannot be {groups} groups of equal size"):
            LabConfig(ranks, groups=groups)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"ranks": ("node3", "node2")}, r"groups\[1\].ranks: .* in dp1; write \['node2', 'node3'\]"),
        ({"shadows": ()}, "dp1 has no shadow, others have"),
    ],
)
def test_what_a_job_cannot_run_is_named(change: dict[str, tuple[str, ...]], text: str, tmp_path: Path) -> None:
    topology = lab_topology(LabConfig(4, groups=2), "ckm1", tmp_path)
    groups = (topology.groups[0], replace(topology.groups[1], **change))
    replace(topology, groups=groups).dump(tmp_path / "topology.yaml")
    with pytest.raises(CheckmateError, match=text):
        run_job(Job(tmp_path / "topology.yaml", tmp_path / "script.py"))
