"""What each target holds: agreed with the switch programs, and more than that is refused by name."""

import re
from typing import Any

import pytest

from checkmate.limits import LIMITS
from checkmate.p4.ebpf.libbpf import constants
from checkmate.p4.shared import p4info
from checkmate.plan import make_plan
from checkmate.rack import MAX_PORT, TARGETS
from checkmate.topology import Topology, TopologyError


def rack(ranks: int, target: str = "bmv2", shadows: int = 1, group: int = 0) -> Topology:
    """``ranks`` hosts in groups of ``group`` (0: one), each copied to all ``shadows``; shadows' ports first."""

    def nic(port: int) -> dict[str, Any]:
        address = f"10.{1 + port // 250}.0.{1 + port % 250}"
        return {
            "name": f"p{port % 2}",
            "mac": f"02:00:00:00:{port >> 8:02x}:{port & 255:02x}",
            "ip": address,
            "port": port,
        }

    def management(index: int) -> str:
        return f"10.255.{index // 250}.{1 + index % 250}"

    names = [f"s{i}" for i in range(shadows)]
    hosts = [f"h{i}" for i in range(ranks)]
    size = group or ranks
    ports = range(2 * shadows + ranks)
    return Topology.from_dict(
        {
            "job": "test",
            "mtu": 1500,
            "token_file": "/nowhere/token",
            "registrar": "10.254.0.1:7702",
            "switch": {"target": target, "p4runtime": "127.0.0.1:9559"}
            | ({"interfaces": {port: f"p{port}" for port in ports}} if target == "ebpf" else {}),
            "hosts": [
                {"name": name, "management_ip": management(i), "nics": [nic(2 * shadows + i)]}
                for i, name in enumerate(hosts)
            ],
            "shadows": [
                {"name": name, "management_ip": management(ranks + i), "nics": [nic(2 * i), nic(2 * i + 1)]}
                for i, name in enumerate(names)
            ],
            "groups": [
                {"name": f"dp{start}", "ranks": hosts[start : start + size], "shadows": names}
                for start in range(0, ranks, size)
            ],
        }
    )


def plan(topology: Topology) -> Any:
    return make_plan(topology, {shadow.name for shadow in topology.shadows})


@pytest.mark.parametrize("target", TARGETS)
def test_table_sizes_are_those_of_the_program(target: str) -> None:
    assert LIMITS[target].tables == {table.preamble.alias: table.size for table in p4info.load().tables}


def test_the_ebpf_switch_s_own_limits() -> None:
    assert LIMITS["ebpf"].groups == constants.CKM_GROUPS
    assert LIMITS["ebpf"].replicas == constants.CKM_REPLICAS


def test_hardware_goal() -> None:
    assert LIMITS["tofino"].groups >= 1024 and LIMITS["tofino"].tables["rewrite"] >= 2048


def test_as_many_as_fit_are_planned() -> None:
    used = {use.what: (use.used, use.limit) for use in plan(rack(64, "ebpf")).usage}
    assert used["replicas of one group"] == (64, 64)
    assert used["heartbeat entries"][0] == 64 * 63


def test_128_groups_of_hosts_of_their_own() -> None:
    topology = rack(256, shadows=2, group=2)
    used = {use.what: use.used for use in plan(topology).usage}
    assert len(topology.groups) == 128
    assert used["heartbeat entries"] == 256 and used["multicast groups"] == 2 * 128 + 1
    assert used["replication nodes"] == 2 * 2 * 128 + 1


@pytest.mark.parametrize(
    ("topology", "problems"),
    [
        (
            rack(65, "ebpf"),
            {"groups: 4160 heartbeat entries are needed (", "hosts: 65 replicas of one group are needed ("},
        ),
        (rack(65), {"groups: 4160 heartbeat entries are needed ("}),
    ],
    ids=["ebpf", "bmv2"],
)
def test_all_that_is_exceeded_is_named_at_once(topology: Topology, problems: set[str]) -> None:
    with pytest.raises(TopologyError) as caught:
        plan(topology)
    assert {re.sub(r"\(.*", "(", line) for line in caught.value.problems} == problems
    assert all(f"{topology.switch.target} holds" in line and "use fewer" in line for line in caught.value.problems)


def test_ports_are_limited_by_their_width() -> None:
    assert MAX_PORT < constants.CKM_PORTS
