"""Reading a topology file: what is right comes back unchanged, what is wrong is named with what to do."""

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from checkmate import config
from checkmate.config import CheckmateError
from checkmate.topology import Endpoint, Link, Topology, TopologyError, load_topology, read_token

TEXT = """
job: demo
mtu: 1500
token_file: /run/checkmate/token
registrar: 10.255.0.1:7702
switch:
  target: ebpf
  p4runtime: "10.255.0.2:9559"
  interfaces: {1: s1, 2: s2, 3: s3, 4: s4}
hosts:
  - {name: node0, management_ip: 10.255.0.10, nics: [{name: eth0, mac: "02:00:00:00:00:01", ip: 10.1.0.1, port: 1}]}
  - {name: node1, management_ip: 10.255.0.11, nics: [{name: eth0, mac: "02:00:00:00:00:02", ip: 10.1.0.2, port: 2}]}
shadows:
  - name: shadow0
    management_ip: 10.255.0.100
    nics:
      - {name: eth0, mac: "02:00:00:00:00:AA", ip: 10.1.0.3, port: 3}
      - {name: eth1, mac: "02:00:00:00:00:BB", ip: 10.1.0.4, port: 4}
groups:
  - {name: dp0, ranks: [node0, node1], shadows: [shadow0]}
"""
GOOD: dict[str, Any] = yaml.safe_load(TEXT)
ALIKE = "stage172", "stage622"
"""Names of groups that have the same number."""


def test_a_file_is_read_with_its_defaults(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text(TEXT)
    topology = load_topology(tmp_path / "t.yaml")
    assert topology.dscp_tag == config.DSCP_TAG and topology.switch.device_id == 1
    assert topology.registrar == Endpoint("10.255.0.1", 7702) and str(topology.registrar) == "10.255.0.1:7702"
    assert topology.shadow("shadow0").control == Endpoint("10.255.0.100", config.CONTROL_PORT)
    assert topology.shadow("shadow0").nics[0].mac == "02:00:00:00:00:aa"
    assert topology.switch.interfaces[4] == "s4" and topology.host("node1").nics[0].port == 2


def test_what_is_dumped_is_read_back_equal(tmp_path: Path) -> None:
    data = copy.deepcopy(GOOD)
    data["hosts"][0]["netns"], data["switch"]["netns"], data["shadows"][0]["control_port"] = "ns0", "sw", 9000
    topology = Topology.from_dict(data)
    topology.dump(tmp_path / "t.yaml")
    assert load_topology(tmp_path / "t.yaml") == topology


def test_a_group_may_have_no_shadow() -> None:
    data = copy.deepcopy(GOOD) | {"shadows": []}
    del data["groups"][0]["shadows"]
    assert Topology.from_dict(data).groups[0].shadows == ()


WRONG = [
    (("mtu",), 1400, "mtu: 1400 cannot be used; allowed: 1500 or 9000"),
    (("mtu",), True, "mtu: True cannot be used"),
    (("dscp_tag",), 0x30, "dscp_tag: 48 cannot be used; allowed: one bit"),
    (("job",), "a job", "job: 'a job' cannot be used; allowed: a name of letters"),
    (("token_file",), "token", "token_file: 'token' cannot be used; allowed: an absolute path"),
    (("registrar",), "somewhere:7702", "registrar: 'somewhere:7702' cannot be used; allowed: an IPv4 address"),
    (("registrar",), "10.255.0.1", "registrar: '10.255.0.1' cannot be used; allowed: host:port"),
    (("registrar",), "10.255.0.1:70000", "allowed: a TCP port, 1 to 65535"),
    (("policy",), "lossles", "policy: 'lossles' cannot be used; did you mean 'lossless'?"),
    (("policy",), "lossless", "policy: 'lossless' cannot be used; the target ebpf has no PFC"),
    (("switch", "pipes"), 2, "switch.pipes: 2 cannot be used; allowed: for the target tofino only"),
    (("switch", "link"), {"speed": "25G"}, "allowed: for the target tofino only; remove the key"),
    (("hosts", 1, "ranks"), 2, "hosts[1].ranks: 'node1' runs 2 (default 1) but has 1 places in groups (dp0)"),
    (("hosts", 1, "ranks"), "8", "hosts[1].ranks: '8' cannot be used; allowed: a number of ranks, 0 to 64"),
    (("hosts", 1, "nics", 0, "mtu"), 9000, "hosts[1].nics[0].mtu: 9000 is not the job's 1500; every link"),
    (("hosts", 1, "nics", 0, "link"), {"speed": "1G"}, "link.speed: '1G' cannot be used; did you mean"),
    (("hosts", 1, "nics", 0, "link"), {"fec": "fc"}, "link.fec: 'fc' cannot be used; allowed at 100G: rs, none"),
    (("hosts", 1, "nics", 0, "link"), {"autoneg": "yes"}, "link.autoneg: 'yes' cannot be used; allowed: true or false"),
    (("mtuu",), 1500, "mtuu: unknown key; did you mean 'mtu'?"),
    (("switch", "target"), "epbf", "switch.target: 'epbf' cannot be used; did you mean 'ebpf'?"),
    (("switch", "device_id"), 0, "switch.device_id: 0 cannot be used"),
    (("switch", "interfaces"), {}, "switch.interfaces: missing"),
    (("switch", "interfaces", 2), "s1", "switch.interfaces[2]: 's1' is used twice, first at switch.interfaces[1]"),
    (("switch", "interfaces"), {1: "s1"}, "hosts[1].nics[0].port: 2 is no port of the switch; allowed: 1; add it to"),
    (("hosts", 1, "name"), "node0", "hosts[1].name: 'node0' is used twice, first at hosts[0].name"),
    (("hosts", 1, "name"), "shadow0", "shadows[0].name: 'shadow0' is used twice, first at hosts[1].name"),
    (("hosts", 1, "management_ip"), "10.255.0.10", "hosts[1].management_ip: '10.255.0.10' is used twice"),
    (("hosts", 1, "nics", 0, "mac"), "02:00:00:00:00:01", "hosts[1].nics[0].mac: '02:00:00:00:00:01' is used twice"),
    (("hosts", 1, "nics", 0, "mac"), "02:00:00:00:00:aA", "shadows[0].nics[0].mac: '02:00:00:00:00:aa' is used twice"),
    (("hosts", 1, "nics", 0, "mac"), "03:00:00:00:00:01", "make the first byte even"),
    (("hosts", 1, "nics", 0, "mac"), 37230101, "with the quotes"),
    (("hosts", 1, "nics", 0, "ip"), "10.1.0.1", "hosts[1].nics[0].ip: '10.1.0.1' is used twice"),
    (("hosts", 1, "nics", 0, "ip"), "10.1.0.256", "hosts[1].nics[0].ip: '10.1.0.256' cannot be used"),
    (("hosts", 1, "nics", 0, "ip"), "224.0.0.1", "neither multicast nor broadcast"),
    (("hosts", 1, "nics", 0, "port"), 1, "hosts[1].nics[0].port: 1 is used twice, first at hosts[0].nics[0].port"),
    (("hosts", 1, "nics", 0, "port"), 511, "hosts[1].nics[0].port: 511 cannot be used; allowed: a switch port number"),
    (("hosts", 1, "nics", 0, "port"), "2", "hosts[1].nics[0].port: '2' cannot be used"),
    (("hosts", 1, "nics", 0, "name"), "a-name-that-is-too-long", "at most 15 characters"),
    (("hosts", 1, "nics"), [], "hosts[1].nics: [] cannot be used; allowed: a list with at least one entry"),
    (("hosts", 1, "mangement_ip"), "1.2.3.4", "did you mean 'management_ip'?"),
    (("hosts",), {}, "hosts: {} cannot be used; allowed: a list"),
    (("shadows", 0, "nics", 1, "name"), "eth0", "shadows[0].nics[1].name: 'eth0' is used twice"),
    (("shadows", 0, "nics"), [{"name": "x", "mac": "02:00:00:00:01:01", "ip": "10.1.0.9", "port": 3}],
     "shadows[0].nics: 1 given, exactly 2 are needed"),
    (("groups", 0, "ranks"), ["node0"], "groups[0].ranks: ['node0'] cannot be used; allowed: 2 host names or more"),
    (("groups", 0, "ranks", 1), "nod1", "groups[0].ranks[1]: no host is named 'nod1'; did you mean 'node1'?"),
    (("groups", 0, "ranks", 1), "node0", "groups[0].ranks: all on 'node0': their gradients cross no"),
    (("groups", 0, "ranks"), ["node0", "node0", "node1"],
     "hosts[0].ranks: 'node0' runs 1 (default 1) but has 2 places in groups (dp0, dp0)"),
    (("groups", 0, "ranks"), ["node0", "node1", "node0"], "groups[0].ranks[2]: 'node0' again, after 'node1'; a host's"),
    (("groups", 0, "shadows", 0), "node0", "groups[0].shadows[0]: no shadow is named 'node0'"),
    (("groups", 0, "shadows"), ["shadow0", "shadow0"], "groups[0].shadows[1]: 'shadow0' is used twice"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value", "text"), WRONG, ids=[f"{'.'.join(map(str, w[0]))}-{w[1]}" for w in WRONG])
def test_what_is_wrong_is_named(path: tuple[Any, ...], value: Any, text: str) -> None:
    data = copy.deepcopy(GOOD)
    place: Any = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(TopologyError) as caught:
        Topology.from_dict(data, "some.yaml")
    assert any(text in line for line in caught.value.problems), str(caught.value)
    assert str(caught.value).startswith("some.yaml: ")


@pytest.mark.parametrize("key", sorted(GOOD))
def test_a_missing_key_is_named(key: str) -> None:
    data = {name: value for name, value in copy.deepcopy(GOOD).items() if name != key}
    if key == "shadows":
        data["groups"][0]["shadows"] = []
        assert Topology.from_dict(data).shadows == ()
        return
    with pytest.raises(TopologyError) as caught:
        Topology.from_dict(data)
    assert any(line.startswith(f"{key}: missing; allowed: ") for line in caught.value.problems)


def test_a_host_in_two_groups_is_refused() -> None:
    data = copy.deepcopy(GOOD)
    data["groups"].append({"name": "dp1", "ranks": ["node1", "node0"], "shadows": []})
    with pytest.raises(TopologyError, match=r"hosts\[0\]\.ranks: 'node0' runs 1 .* 2 places in groups \(dp0, dp1\)"):
        Topology.from_dict(data)


def tofino(**ports: Any) -> dict[str, Any]:
    """GOOD at a Tofino; ``ports``: of node0 and node1, and what their NICs say of their links."""
    data = copy.deepcopy(GOOD) | {"switch": {"target": "tofino", "p4runtime": "10.255.0.2:9559"}}
    nics = [nic for node in (*data["hosts"], *data["shadows"]) for nic in node["nics"]]
    for nic, port in zip(nics, (0, 4, 8, 12), strict=True):
        nic["port"] = port
    for host, change in zip(data["hosts"], (ports.get("node0"), ports.get("node1")), strict=True):
        host["nics"][0] |= change or {}
    return data


def test_a_tofino_is_read_with_its_links() -> None:
    data = tofino(node1={"port": 140, "link": {"speed": "40G", "autoneg": True}})
    topology = Topology.from_dict(data | {"policy": "lossless"})
    nics = [host.nics[0] for host in topology.hosts]
    assert [topology.switch.link_of(nic) for nic in nics] == [Link("100G", "rs", None), Link("40G", "none", True)]
    assert Topology.from_dict(topology.to_dict()) == topology and topology.policy == "lossless"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"port": 2},
            "hosts[1].nics[0].port: 2 cannot run at 100G, which takes 4 lanes; allowed: multiples of 4; take 0",
        ),
        (
            {"port": 68},
            "68 is no front-panel port of 2 pipes; allowed: 0 to 63, 128 to 191; correct it or switch.pipes",
        ),
        ({"port": 256}, "256 is no front-panel port of 2 pipes"),
        ({"port": 3, "link": {"speed": "25G"}}, "3 at 25G takes 1 lanes, of which hosts[0].nics[0].port (0) has one"),
    ],
)
def test_ports_that_a_tofino_does_not_have(change: dict[str, Any], text: str) -> None:
    with pytest.raises(TopologyError) as caught:
        Topology.from_dict(tofino(node1=change))
    (problem,) = caught.value.problems
    assert text in problem


def test_hosts_may_run_several_ranks_where_the_switch_can_tell() -> None:
    data = copy.deepcopy(GOOD)
    for host in data["hosts"]:
        host["ranks"] = 2
    data["groups"].append({"name": "dp1", "ranks": ["node0", "node1"], "shadows": ["shadow0"]})
    assert [len(host.nics) for host in Topology.from_dict(data).hosts] == [1, 1]
    for key, value, text in (
        ("shadows", [], "groups[1].shadows: none, but groups[0] has shadow0 and shares 'node0' with it"),
        ("ranks", ["node1", "node0"], "groups[1].ranks: 'node1' sends to 'node0' here and in groups[0], but is rank 0"),
    ):
        wrong = copy.deepcopy(data)
        wrong["groups"][1][key] = value
        with pytest.raises(TopologyError) as caught:
            Topology.from_dict(wrong)
        (problem,) = caught.value.problems
        assert problem.startswith(text)


def test_a_host_that_is_only_forwarded_to() -> None:
    data = copy.deepcopy(GOOD)
    data["switch"]["interfaces"][5] = "s5"
    nic = {"name": "eth0", "mac": "02:00:00:00:00:05", "ip": "10.1.0.5", "port": 5}
    data["hosts"].append({"name": "spare", "management_ip": "10.255.0.50", "ranks": 0, "nics": [nic]})
    assert Topology.from_dict(data).host("spare").ranks == 0
    del data["hosts"][2]["ranks"]
    with pytest.raises(TopologyError, match=r"hosts\[2\]\.ranks: 'spare' runs 1 .* is in no group"):
        Topology.from_dict(data)


def test_problems_of_a_file_have_their_lines(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text(TEXT.replace("mtu: 1500", "mtu: 15OO").replace("port: 4}", "port: 3}"))
    with pytest.raises(TopologyError) as caught:
        load_topology(tmp_path / "t.yaml")
    assert [line.partition(": '")[0].partition(": 3")[0] for line in caught.value.problems] == [
        "line 3: mtu",
        "line 18: shadows[0].nics[1].port",
    ]


def test_all_problems_come_at_once() -> None:
    data = copy.deepcopy(GOOD) | {"mtu": 1, "jop": "x", "registrar": 3}
    data["groups"][0]["ranks"] = ["node0", "nodeX"]
    with pytest.raises(TopologyError) as caught:
        Topology.from_dict(data)
    assert len(caught.value.problems) == 4
    assert len(str(caught.value).splitlines()) == 5


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(sorted(GOOD)) | st.text(), inner),
    max_leaves=12,
)


@settings(max_examples=50)
@given(data=_JSON, key=st.sampled_from(sorted(GOOD)))
def test_any_content_is_either_read_or_refused(data: Any, key: str) -> None:
    for content in (data, GOOD | {key: data}):
        try:
            Topology.from_dict(content)
        except TopologyError as error:
            assert error.problems


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CheckmateError, match=r"nothing\.yaml: No such file"):
        load_topology(tmp_path / "nothing.yaml")
    (tmp_path / "broken.yaml").write_text("a: [")
    with pytest.raises(CheckmateError, match="not valid YAML"):
        load_topology(tmp_path / "broken.yaml")
    (tmp_path / "twice.yaml").write_text("switch: {interfaces: {1: s1, 1: s2}}")
    with pytest.raises(CheckmateError, match="the key 1 is given twice"):
        load_topology(tmp_path / "twice.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckmateError, match="not valid YAML"):
        load_topology(tmp_path / "binary.yaml")
    with pytest.raises(CheckmateError, match="more than 1048576 bytes"):
        load_topology("/dev/zero")


BOMB = "".join(["a: &a [x]\n", *(f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefghijklmno"))])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[" * 20_000, "nested too deeply"),
        (BOMB, "aliases are not allowed"),
        ("a: &a [*a]", "aliases are not allowed"),
        ("a: 2001-99-99", "month must be"),
        ("? {b: c}\n: 1", "unhashable"),
        ("job: " + "x " * 100_000, "job: 'x x"),
    ],
    ids=["deep", "bomb", "cycle", "date", "key", "long"],
)
def test_hostile_files(text: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "t.yaml"
    file.write_text(text)
    with pytest.raises(CheckmateError, match=problem) as caught:
        load_topology(file)
    assert len(str(caught.value)) < 2000


def test_the_token(tmp_path: Path) -> None:
    token = tmp_path / "token"
    with pytest.raises(CheckmateError, match=r"No such file.*openssl"):
        read_token(token)
    token.write_text("0123456789abcdef\n")
    token.chmod(0o604)
    with pytest.raises(CheckmateError, match=r"mode 0604.*chmod 0600"):
        read_token(token)
    token.chmod(0o640)
    assert read_token(token) == b"0123456789abcdef"
    token.write_text("short")
    with pytest.raises(CheckmateError, match="5 bytes, 16 to 4096"):
        read_token(token)
    token.write_text("x" * 5000)
    with pytest.raises(CheckmateError, match="16 to 4096"):
        read_token(token)


def test_a_name_that_does_not_exist() -> None:
    with pytest.raises(CheckmateError, match="no host is named 'node9'; did you mean"):
        Topology.from_dict(GOOD).host("node9")


def test_the_example_is_a_topology() -> None:
    topology = load_topology(Path(__file__).parents[2] / "examples" / "topology.yaml")
    assert [host.name for host in topology.hosts] == ["node0", "node1"]


def _sharing(names: list[str], **shadow: Any) -> dict[str, Any]:
    """Groups of these names, each with a rank on both hosts."""
    data = copy.deepcopy(GOOD)
    data["groups"] = [{"name": name, "ranks": ["node0", "node1"], "shadows": ["shadow0"]} for name in names]
    for host in data["hosts"]:
        host["ranks"] = len(names)
    data["shadows"][0] |= shadow
    return data


def test_a_shadow_has_a_control_port_for_each_of_its_groups() -> None:
    topology = Topology.from_dict(_sharing(["part0", "part1", "part2"], control_port=9000))
    shadow = topology.shadow("shadow0")
    assert topology.followed(shadow) == topology.groups
    assert [topology.controls(group) for group in topology.groups] == [f"10.255.0.100:900{g}" for g in range(3)]
    assert topology.controls(*topology.groups[1:]) == "10.255.0.100:9001,10.255.0.100:9002"


def test_groups_of_a_shadow_whose_ports_or_frames_cannot_be_told_apart_are_refused() -> None:
    with pytest.raises(TopologyError) as caught:
        Topology.from_dict(_sharing(["part0", "part1"], control_port=65535))
    assert caught.value.problems == [
        "shadows[0].control_port: 65535 is the first of 2, one for each of its groups; allowed: 1 to 65534"
    ]
    with pytest.raises(TopologyError) as caught:
        Topology.from_dict(_sharing(list(ALIKE)))
    (problem,) = caught.value.problems
    assert problem.startswith(f"groups: shadows[0] follows {ALIKE[0]!r} and {ALIKE[1]!r}, whose frames look alike")


def test_control_ports_that_other_servers_of_the_machine_have_are_refused() -> None:
    """By default the registrar's port is the one after a shadow's."""
    data = _sharing(["part0", "part1"])
    data["registrar"], data["switch"]["p4runtime"] = "10.255.0.100:7702", "10.255.0.100:9559"
    with pytest.raises(TopologyError) as caught:
        Topology.from_dict(data)
    assert caught.value.problems == [
        "shadows[0].control_port: 7701 is the first of 2, one for each of its groups; registrar has 7702 at the same "
        "address; move one of the two"
    ]
    for port, at in ((7703, None), (7702, "registrar"), (9559, "switch.p4runtime")):
        data["shadows"][0]["control_port"] = port
        if at is None:
            Topology.from_dict(data)
            continue
        with pytest.raises(TopologyError, match=f"{at} has {port} at the same address"):
            Topology.from_dict(data)
