"""What the plan says for a topology and its live shadows."""

import io
import json
from itertools import permutations, product
from typing import Any

import pytest
from rich.console import Console

from checkmate import config
from checkmate.config import CheckmateError
from checkmate.plan import (
    CLASSIFY,
    FLOOD_GROUP,
    HEARTBEAT,
    L2_FORWARD,
    LIVE_GROUP,
    PORT_ROLE,
    REWRITE,
    Entry,
    Multicast,
    Plan,
    Replica,
    Rules,
    Ternary,
    diff,
    make_plan,
)
from checkmate.planning.tables import tables
from checkmate.topology import Topology

RANKS = 4
PORTS = {f"node{i}": i + 1 for i in range(2 * RANKS)}
SHADOW_PORTS = {"s0": (101, 102), "s1": (103, 104), "s2": (105, 106)}


def nic(name: str, port: int) -> dict[str, Any]:
    return {"name": name, "mac": f"02:00:00:00:00:{port:02x}", "ip": f"10.1.0.{port}", "port": port}


TOPOLOGY = Topology.from_dict(
    {
        "job": "test",
        "mtu": 9000,
        "token_file": "/nowhere/token",
        "registrar": "10.255.0.1:7702",
        "switch": {"target": "bmv2", "p4runtime": "127.0.0.1:9559"},
        "hosts": [
            {"name": name, "management_ip": f"10.255.0.{port}", "nics": [nic("eth0", port)]}
            for name, port in PORTS.items()
        ],
        "shadows": [
            {"name": name, "management_ip": f"10.255.1.{first}", "nics": [nic("eth0", first), nic("eth1", second)]}
            for name, (first, second) in SHADOW_PORTS.items()
        ],
        "groups": [
            {"name": "dp0", "ranks": ["node2", "node0", "node1", "node3"], "shadows": ["s0", "s1"]},
            {"name": "dp1", "ranks": ["node4", "node5", "node6", "node7"], "shadows": ["s2"]},
        ],
    }
)


def mac(port: int) -> int:
    return 0x02_00_00_00_00_00 | port


def copies(plan: Plan) -> dict[tuple[int, int], tuple[Replica, ...]]:
    """(source port, destination MAC) → replicas."""
    groups = {group.id: group.replicas for group in plan.rules.groups}
    return {
        (dict(entry.match)["ingress_port"], dict(entry.match)["ethernet.dst_addr"]): groups[entry.group]  # type: ignore[index, misc]
        for entry in plan.rules.entries
        if entry.table == HEARTBEAT
    }


def table(plan: Plan, name: str) -> list[Entry]:
    return [entry for entry in plan.rules.entries if entry.table == name]


def test_every_ordered_pair_of_ranks_is_copied_to_the_right_port_of_each_live_shadow() -> None:
    found = copies(make_plan(TOPOLOGY, {"s0", "s1", "s2"}))
    expected = {}
    for group in TOPOLOGY.groups:
        for source, target in permutations(group.ranks, 2):
            side = 0 if source == group.ranks[0] else 1
            replicas = [Replica(SHADOW_PORTS[shadow][side], config.SHADOW_RID) for shadow in group.shadows]
            expected[PORTS[source], mac(PORTS[target])] = (Replica(PORTS[target], 0), *replicas)
    assert found == expected
    assert len(found) == 2 * RANKS * (RANKS - 1)


@pytest.mark.parametrize("live", [(), ("s0",), ("s2",), ("s0", "s1"), ("s1", "s2")])
def test_groups_without_a_live_shadow_are_only_forwarded(live: tuple[str, ...]) -> None:
    found = copies(make_plan(TOPOLOGY, set(live)))
    for group in TOPOLOGY.groups:
        mirrored = [shadow for shadow in group.shadows if shadow in live]
        sources = {PORTS[name] for name in group.ranks}
        replicas = {value for (source, _), value in found.items() if source in sources}
        assert bool(replicas) is bool(mirrored)
        assert all(len(value) == 1 + len(mirrored) for value in replicas)
    assert len(table(make_plan(TOPOLOGY, set(live)), L2_FORWARD)) == 2 * RANKS + 1


def test_ranks_of_one_host_are_one_to_the_switch() -> None:
    """Its rules know hosts: whatever rank of rank 0's host sends, and from whatever NIC, is the first rank's."""
    data = TOPOLOGY.to_dict()
    for host in data["hosts"]:
        host["ranks"] = 2
        host["nics"].append(nic("eth1", host["nics"][0]["port"] + 50))
    for group in data["groups"]:
        group["ranks"] = [name for name in group["ranks"] for _ in range(2)]
    found = copies(make_plan(Topology.from_dict(data), {"s0", "s1", "s2"}))
    for (source, target), replicas in copies(make_plan(TOPOLOGY, {"s0", "s1", "s2"})).items():
        for out, to in product((source, source + 50), (target, target + 50)):
            at = to & 0xFF
            assert found.pop((out, to)) == tuple(sorted([Replica(at, 0), *(r for r in replicas if r.rid)]))
    assert not found


def test_forwarding_by_address_and_flooding_to_ranks_only() -> None:
    plan = make_plan(TOPOLOGY, {"s0"})
    forward = {entry.match: dict(entry.params) for entry in table(plan, L2_FORWARD)}
    assert forward.pop(()) == {"group": FLOOD_GROUP}
    assert forward == {(("ethernet.dst_addr", mac(port)),): {"port": port} for port in PORTS.values()}
    flood = next(group for group in plan.rules.groups if group.id == FLOOD_GROUP)
    assert flood.replicas == tuple(Replica(port, 0) for port in sorted(PORTS.values()))


def test_roles_rewriting_and_classification() -> None:
    plan = make_plan(TOPOLOGY, set())
    roles = {dict(entry.match)["ingress_port"]: entry.action for entry in table(plan, PORT_ROLE)}
    trainers = dict.fromkeys(PORTS.values(), "CheckmateIngress.trainer_port")
    shadows = {port: "CheckmateIngress.shadow_port" for ports in SHADOW_PORTS.values() for port in ports}
    assert roles == trainers | shadows
    rewritten = {dict(entry.match)["egress_port"]: entry for entry in table(plan, REWRITE)}
    assert rewritten.keys() == shadows.keys()
    assert dict(rewritten[101].match)["egress_rid"] == config.SHADOW_RID
    params = dict(rewritten[101].params)
    assert params["dst_mac"] == mac(101) and params["dst_ip"] == 0x0A_01_00_65
    assert params["src_mac"] >> 40 & 3 == 2, "a locally administered unicast address"
    (classify,) = table(plan, CLASSIFY)
    assert classify.match == (("ipv4.dscp", Ternary(0x20, 0x20)),) and classify.priority > 0


def test_a_group_number_never_changes_its_meaning() -> None:
    seen: dict[int, tuple[int, ...]] = {}
    for live in (set(), {"s0"}, {"s1"}, {"s2"}, {"s0", "s1", "s2"}):
        for group in make_plan(TOPOLOGY, live).rules.groups:
            assert seen.setdefault(group.id, group.forwarding) == group.forwarding
    assert len(seen) > 1 + RANKS


def test_the_same_plan_every_time_and_nothing_refers_to_nothing() -> None:
    plan = make_plan(TOPOLOGY, {"s1", "s0"})
    assert plan == make_plan(TOPOLOGY, frozenset({"s0", "s1"}))
    assert json.dumps(plan.to_dict()) == json.dumps(make_plan(TOPOLOGY, {"s0", "s1"}).to_dict())
    assert plan.rules.dangling() == ()


def test_two_nics_of_a_host_are_both_copied() -> None:
    data = TOPOLOGY.to_dict()
    data["hosts"][0]["nics"].append(nic("eth1", 50))
    found = copies(make_plan(Topology.from_dict(data), {"s0"}))
    assert found[50, mac(2)] == (Replica(2, 0), Replica(102, 1))
    assert found[2, mac(50)] == (Replica(50, 0), Replica(102, 1))
    assert (1, mac(50)) not in found, "a host sends nothing to itself"


def test_an_unknown_shadow_is_refused() -> None:
    with pytest.raises(CheckmateError, match="no shadow is named 's9'"):
        make_plan(TOPOLOGY, {"s9"})


def test_the_difference_is_readable() -> None:
    before, after = (make_plan(TOPOLOGY, live).rules for live in ({"s0", "s2"}, {"s0", "s1"}))
    change = diff(before, after)
    assert not diff(before, before) and str(diff(before, before)) == ""
    assert {item.table for item in change.removed if isinstance(item, Entry)} == {HEARTBEAT, LIVE_GROUP}
    assert all(isinstance(item, Multicast) for pair in change.changed for item in pair) and not change.added
    lines = str(change).splitlines()
    assert "- heartbeat: ingress_port=5 ethernet.dst_addr=02:00:00:00:00:06 → replicate(group=14)" in lines
    assert any(line.startswith("+ group ") and "port 104 rid 1" in line for line in lines)


def test_dangling_references_are_found() -> None:
    rules = make_plan(TOPOLOGY, {"s2"}).rules
    missing = Rules.of(rules.entries, rules.groups[:-1])
    assert {entry.group for entry in missing.dangling()} == {rules.groups[-1].id}


def test_two_rules_for_the_same_traffic_are_refused() -> None:
    group = Multicast(2, (Replica(1, 0),))
    with pytest.raises(CheckmateError, match="two rules for the same traffic"):
        Rules.of([], [group, Multicast(2, ())])


def test_it_prints_every_name_and_address() -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(tables(make_plan(TOPOLOGY, {"s0"})))
    text = console.export_text()
    for part in ("dp0: rank 0 to node0/eth0", "s0/eth1 (port 102, rid 1)", "dst_ip 10.1.0.101", "0x20&&&0x20"):
        assert part in text


def test_json_has_addresses_as_text() -> None:
    data = make_plan(TOPOLOGY, {"s0"}).to_dict()
    heartbeat = next(entry for entry in data["entries"] if entry["table"] == HEARTBEAT)
    assert heartbeat["match"] == {"ingress_port": 1, "ethernet.dst_addr": "02:00:00:00:00:02"}
    assert data["live_shadows"] == ["s0"] and data["ports"]["102"] == "s0/eth1"
