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
from checkmate.topology import Endpoint, Topology, TopologyError, load_topology, read_token

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
    (("groups", 0, "ranks", 1), "node0", "groups[0].ranks[1]: 'node0' is used twice"),
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
    with pytest.raises(TopologyError, match=r"hosts\[0\]\.ranks: 'node0' runs 1 .* in 2 groups \(dp0, dp1\)"):
        Topology.from_dict(data)


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


@settings(max_examples=50, deadline=None)
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
