"""What the ranks of a job that share hosts find in their environment."""

from dataclasses import replace
from pathlib import Path

import pytest

from checkmate.config import CheckmateError
from checkmate.lab import LabConfig, lab_topology
from checkmate.rank import rank_environment
from checkmate.topology import Topology


def lab(ranks: int, **shape: int) -> Topology:
    topology = lab_topology(LabConfig(ranks, **shape), "ckm", Path("/nowhere"))
    assert Topology.from_dict(topology.to_dict()) == topology, "a lab is a valid topology"
    return topology


def column(topology: Topology, name: str) -> list[str | None]:
    return [rank_environment(topology, rank).get(name) for rank in range(len(topology.groups[0].ranks))]


def test_ranks_of_a_host_are_numbered_and_share_its_nics() -> None:
    topology = lab(7, ranks_per_host=3, nics=2)
    assert topology.groups[0].ranks == ("node0",) * 3 + ("node1",) * 3 + ("node2",)
    assert column(topology, "RANK") == [str(rank) for rank in range(7)]
    assert column(topology, "CHECKMATE_IFNAME") == ["=eth0", "=eth1", "=eth0"] * 2 + ["=eth0,eth1"]
    assert column(topology, "CHECKMATE_HOST_RANKS") == ["3,3,1"] * 7


def test_more_nics_than_ranks_are_dealt_out() -> None:
    topology = lab(4, ranks_per_host=2, nics=4)
    assert column(topology, "CHECKMATE_IFNAME") == ["=eth0,eth2", "=eth1,eth3"] * 2


def test_on_machines_of_their_own_ranks_see_all_nics() -> None:
    """NCCL takes the one that is nearest to the GPU."""
    topology = lab(4, ranks_per_host=2, nics=2)
    topology = replace(topology, hosts=tuple(replace(host, netns=None) for host in topology.hosts))
    assert column(topology, "CHECKMATE_IFNAME") == ["=eth0,eth1"] * 4
    assert column(topology, "GROUP_RANK") == ["0", "0", "1", "1"]


def test_a_host_for_each_rank_is_nothing_special() -> None:
    assert column(lab(3), "CHECKMATE_HOST_RANKS") == [None] * 3
    assert column(lab(3), "CHECKMATE_IFNAME") == ["=eth0"] * 3
    assert column(lab(3), "GROUP_RANK") == [None] * 3, "as the agent says"


@pytest.mark.parametrize("ranks_per_host", [0, 4, 5])
def test_a_lab_has_two_hosts_or_more(ranks_per_host: int) -> None:
    with pytest.raises(CheckmateError, match=rf"4 ranks, {ranks_per_host} on each host: .* allowed: 1 to 3"):
        LabConfig(4, ranks_per_host=ranks_per_host)
