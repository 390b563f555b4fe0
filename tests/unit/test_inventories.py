"""The inventories in deploy/: what their plans need of the switch, and for the demo's the whole plan."""

import json
from pathlib import Path

import pytest

from checkmate import config
from checkmate.lab import LabConfig, lab_topology
from checkmate.plan import FLOOD_GROUP, Plan, make_plan
from checkmate.topology import Topology, load_topology

INVENTORIES = Path(__file__).parents[2] / "deploy" / "inventories"
GOLDEN = Path(__file__).parent / "golden"

FIGURES = {
    # name: DP groups, heartbeat entries, multicast groups (flood included), rewrite entries, forwarding entries
    "demo": (1, 4 * 3, 2 * 4 - 1 + 1, 2, 4),
    "testbed": (1, 12 * 11, 2 * 12 - 1 + 1, 8, 12),
    "pp2dp6": (2, 2 * 6 * 5, 2 * (2 * 6 - 1) + 1, 4, 12),
    "dp16": (1, 4 * 3 * 2 * 2, 2 * (2 * 4 - 1) + 1, 2, 8),
    "dp128": (128, 16 * 2, 16 * 2 + 1, 32, 32),
}


def load(name: str) -> tuple[Topology, Plan]:
    topology = load_topology(INVENTORIES / f"{name}.yaml")
    return topology, make_plan(topology, {shadow.name for shadow in topology.shadows})


def test_every_inventory_is_looked_at() -> None:
    assert {path.stem for path in INVENTORIES.glob("*.yaml")} == FIGURES.keys()


@pytest.mark.parametrize("name", FIGURES)
def test_what_a_plan_needs(name: str) -> None:
    topology, plan = load(name)
    groups, heartbeats, multicasts, rewrites, forwarding = FIGURES[name]
    used = {use.what: use.used for use in plan.usage}
    assert len(topology.groups) == groups
    assert used["heartbeat entries"] == heartbeats
    assert used["multicast groups"] == multicasts == len(plan.rules.groups)
    assert used["live_group entries"] == multicasts - 1
    assert used["rewrite entries"] == rewrites
    assert used["l2_forward entries"] == forwarding
    assert used["port_role entries"] == sum(len(node.nics) for node in topology.nodes)
    assert plan.rules.dangling() == ()


@pytest.mark.parametrize("name", FIGURES)
def test_every_copying_group_has_the_next_rank_and_one_port_of_each_shadow(name: str) -> None:
    topology, plan = load(name)
    hosts = {nic.port for host in topology.hosts for nic in host.nics}
    shadows = {nic.port: shadow.name for shadow in topology.shadows for nic in shadow.nics}
    flood, *copying = plan.rules.groups
    assert flood.id == FLOOD_GROUP and {replica.port for replica in flood.replicas} == hosts
    for group in copying:
        (target,) = group.forwarding
        copied = [shadows[port] for port, rid in group.replicas if rid == config.SHADOW_RID]
        host = next(host.name for host in topology.hosts if any(nic.port == target for nic in host.nics))
        wanted = {shadow for dp in topology.groups if host in dp.ranks for shadow in dp.shadows}
        assert sorted(copied) == sorted(wanted)


def test_stages_do_not_reach_each_other_s_shadow() -> None:
    topology, plan = load("pp2dp6")
    ports = {shadow.name: {nic.port for nic in shadow.nics} for shadow in topology.shadows}
    for number, meaning in plan.group_names.items():
        if number != FLOOD_GROUP:
            copies = next(group for group in plan.rules.groups if group.id == number).replicas
            stage = meaning[len("stage")]
            assert {port for port, rid in copies if rid == config.SHADOW_RID} <= ports[f"shadow{stage}"]


def test_ports_of_the_testbed_fit_a_switch_of_32() -> None:
    topology, plan = load("testbed")
    assert len(plan.ports) == 20 and all(port % 4 == 0 and port < 192 for port in plan.ports)
    assert {topology.switch.link_of(nic).speed for node in topology.nodes for nic in node.nics} == {"100G"}


def test_the_demo_s_is_the_rack_that_the_demo_builds(tmp_path: Path) -> None:
    topology, plan = load("demo")
    built = lab_topology(LabConfig(4), "ckm0", tmp_path)
    theirs = make_plan(built, {"shadow0"})
    assert plan.rules == theirs.rules and plan.ports == theirs.ports and plan.group_names == theirs.group_names
    assert topology.groups == built.groups and topology.mtu == built.mtu


@pytest.mark.parametrize("name", ["demo", "pp2dp6"])
def test_the_json_is_as_it_was(name: str) -> None:
    """A change of these files is a change for everybody who reads the JSON: look at it, and say so in the changelog."""
    _, plan = load(name)
    assert plan.to_dict() == json.loads((GOLDEN / f"plan_{name}.json").read_text())
