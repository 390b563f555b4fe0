"""A job that ends and is started again on other hosts, fewer or more, goes on from the same shadow."""

import dataclasses

import pytest
from support.training import Rack, Run, assert_equal, needs_root, rack

pytestmark = [*needs_root, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 12


def start_on(place: Rack, name: str, hosts: tuple[str, ...], *die: str) -> Run:
    """The script, without restarts, with one rank on each of these hosts."""
    topology = place.lab.topology
    machines = tuple(dataclasses.replace(host, ranks=int(host.name in hosts)) for host in topology.hosts)
    group = dataclasses.replace(topology.groups[0], ranks=hosts)
    file = place.lab.directory / f"{name}.yaml"
    dataclasses.replace(topology, hosts=machines, groups=(group,)).dump(file)
    return place.start(name, STEPS, die=die, max_restarts=0, topology_file=file)


def test_a_job_goes_on_with_fewer_ranks_and_then_with_more() -> None:
    with rack(4) as place:
        four = start_on(place, "four", ("node0", "node1", "node2", "node3"), "1@4:bucket-inside")
        assert four.join() == 2, four.output()
        two = start_on(place, "two", ("node2", "node3"), "0@8:stepped")
        assert two.join() == 2, two.output()
        three = start_on(place, "three", ("node0", "node2", "node3"))
        assert three.join() == 0, three.output()
        for run, ranks, step in ((two, 2, 3), (three, 3, 7)):
            assert [note["step"] for note in run.notes("restore")] == [step] * ranks
        status = place.status()
        assert (status["committed"], status["world"], status["gaps"]) == (STEPS, 3, [])
        exported = place.exported()
        assert exported.pop("step") == STEPS
        assert_equal(three.state(), exported)
