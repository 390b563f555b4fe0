"""``checkmate plan``: what it prints, writes and compares, how it says what is wrong, and its exit codes."""

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from checkmate.cli import app
from checkmate.config import CheckmateError
from checkmate.controlplane.reconcile import reconcile
from checkmate.controlplane.targets.p4runtime import P4RuntimeTarget
from checkmate.p4.ebpf.fake import FakeDatapath
from checkmate.p4.ebpf.p4runtime_server import Server
from checkmate.plan import Rules, make_plan
from checkmate.topology import Endpoint, load_topology

INVENTORIES = Path(__file__).parents[2] / "deploy" / "inventories"
DEMO = INVENTORIES / "demo.yaml"
SVG = "{http://www.w3.org/2000/svg}"

WRONG = """\
job: wrong
mtu: 9000
token_file: /etc/checkmate/token
registrar: 10.255.0.1:7702
policy: lossles
switch:
  target: tofino
  p4runtime: 10.255.0.2:9559
  link: {speed: 100G, fec: fc}
  pipe: 2
hosts:
  - name: node0
    management_ip: 10.255.0.10
    nics: [{name: eth0, mac: "02:00:00:00:01:00", ip: 10.1.0.10, port: 0}]
  - name: node1
    management_ip: 10.255.0.11
    nics:
      - name: eth0
        mac: "02:00:00:00:01:00"
        ip: 10.1.0.10
        port: 0
        mtu: 1500
  - name: node2
    management_ip: 10.255.0.12
    nics: [{name: eth0, mac: "02:00:00:00:01:02", ip: 10.1.0.12, port: 64}]
  - name: node3
    management_ip: ten
    nics: [{name: eth0, mac: "02:00:00:00:01:03", ip: 10.1.0.13, port: 6}]
shadows:
  - name: shadow0
    management_ip: 10.255.0.100
    nics: [{name: rx0, mac: "02:00:00:00:02:00", ip: 10.1.0.200, port: 8}]
groups:
  - {name: dp0, ranks: [node0, node1, node2], shadows: [shadow0]}
  - {name: dp1, ranks: [node1, node2], shadows: []}
"""
PROBLEMS = [
    (5, "policy: 'lossles' cannot be used; did you mean 'lossless'?"),
    (9, "switch.link.fec: 'fc' cannot be used; allowed at 100G: rs, none"),
    (10, "switch.pipe: unknown key; did you mean 'pipes'?"),
    (15, "hosts[1].ranks: 'node1' runs 1 (default 1) but has 2 places in groups (dp0, dp1)"),
    (19, "hosts[1].nics[0].mac: '02:00:00:00:01:00' is used twice, first at hosts[0].nics[0].mac"),
    (20, "hosts[1].nics[0].ip: '10.1.0.10' is used twice"),
    (21, "hosts[1].nics[0].port: 0 is used twice, first at hosts[0].nics[0].port"),
    (22, "hosts[1].nics[0].mtu: 1500 is not the job's 9000"),
    (23, "hosts[2].ranks: 'node2' runs 1 (default 1) but has 2 places in groups (dp0, dp1)"),
    (25, "hosts[2].nics[0].port: 64 is no front-panel port of 2 pipes; allowed: 0 to 63, 128 to 191"),
    (26, "hosts[3].ranks: 'node3' runs 1 (default 1) but is in no group"),
    (27, "hosts[3].management_ip: 'ten' cannot be used; allowed: an IPv4 address"),
    (28, "hosts[3].nics[0].port: 6 cannot run at 100G, which takes 4 lanes; allowed: multiples of 4; take 4"),
    (32, "shadows[0].nics: 1 given, exactly 2 are needed"),
    (35, "groups[1].shadows: none, but groups[0] has shadow0 and shares 'node1' with it"),
    (35, "groups[1].ranks: 'node1' sends to 'node2' here and in groups[0], but is rank 0 of only one"),
]
"""What is wrong in it, in the order of its lines."""


def plan(*arguments: str | Path) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["plan", *map(str, arguments)])


def refusal(*arguments: str | Path) -> str:
    result = plan(*arguments)
    assert isinstance(result.exception, CheckmateError), result.output
    return str(result.exception)


def test_everything_that_is_wrong_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(WRONG)
    head, *lines = refusal(file).splitlines()
    assert head == f"{file}: {len(PROBLEMS)} to fix"
    for line, (number, text) in zip(lines, PROBLEMS, strict=True):
        assert line.startswith(f"  line {number}: {text}"), line


def test_exit_codes_of_the_command_itself(tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text(WRONG)
    for arguments, code in (([str(DEMO), "--json"], 0), ([str(tmp_path / "wrong.yaml")], 2), (["--svg"], 2)):
        done = subprocess.run(
            [sys.executable, "-P", "-m", "checkmate", "plan", *arguments],
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        assert (code == 0) == bool(done.stdout), "what is wrong goes to standard error"


def test_tables_name_everything() -> None:
    text = plan(INVENTORIES / "pp2dp6.yaml").output
    for part in (
        "pp2dp6: multicast groups",
        "stage1: rank 0 to node11/eth0",
        "pp2dp6: heartbeat entries",
        "pp2dp6: rewrite entries",
        "dst_ip 10.1.0.203",
        "pp2dp6: forwarding",
        "any other, and broadcast",
        "pp2dp6: queues of tagged frames, policy isolate",
        "at most 983,040",
    ):
        assert part in text
    assert re.search(r"heartbeat entries +│ 60 +│ 4,096", text)
    assert "queues" not in plan(DEMO).output, "a software switch has none"


def test_json_is_one_object_and_the_plan() -> None:
    topology = load_topology(DEMO)
    assert json.loads(plan(DEMO, "--json").output) == make_plan(topology, {"shadow0"}).to_dict()
    assert plan(DEMO, "--json").output == plan(DEMO, "--json").output
    nobody = json.loads(plan(DEMO, "--json", "--live", "none").output)
    assert nobody["live_shadows"] == [] and len(nobody["groups"]) == 1
    assert "no shadow is named 'shadow9'" in refusal(DEMO, "--live", "shadow9")


def test_the_picture(tmp_path: Path) -> None:
    file = tmp_path / "rack.svg"
    assert plan(INVENTORIES / "testbed.yaml", "--svg", file).exit_code == 0
    root = ET.parse(file).getroot()
    texts = [element.text for element in root.iter(f"{SVG}text")]
    topology = load_topology(INVENTORIES / "testbed.yaml")
    for node in topology.nodes:
        assert texts.count(node.name) == 1
        for nic in node.nics:
            assert nic.mac in texts and nic.ip in texts and str(nic.port) in texts
    assert texts.count("rank 0") == texts.count("other ranks") == 4
    first = file.read_bytes()
    assert plan(INVENTORIES / "testbed.yaml", "--svg", file).exit_code == 0 and file.read_bytes() == first


@pytest.mark.parametrize("name", ["testbed", "dp128"])
def test_nothing_in_the_picture_is_on_top_of_something_else(name: str, tmp_path: Path) -> None:
    file = tmp_path / "rack.svg"
    plan(INVENTORIES / f"{name}.yaml", "--svg", file)
    root = ET.parse(file).getroot()
    width, height = (float(root.attrib[key]) for key in ("width", "height"))
    places = [(element.attrib["x"], element.attrib["y"]) for element in root.iter(f"{SVG}text")]
    assert len(places) == len(set(places))
    assert all(0 <= float(x) <= width and 0 <= float(y) <= height for x, y in places)
    topology = load_topology(INVENTORIES / f"{name}.yaml")
    legend = [
        text for text in (e.text for e in root.iter(f"{SVG}text")) if text and re.fullmatch(r"\S+: \d+ ranks, .*", text)
    ]
    assert len(legend) == len(topology.groups)


def test_names_that_mean_something_in_svg_are_escaped(tmp_path: Path) -> None:
    inventory, picture = tmp_path / "t.yaml", tmp_path / "rack.svg"
    inventory.write_text(DEMO.read_text().replace("name: rx0", "name: 'a<&\"b'"))
    assert plan(inventory, "--svg", picture).exit_code == 0
    assert 'a<&"b' in [element.text for element in ET.parse(picture).getroot().iter(f"{SVG}text")]


def test_the_set_up_script_is_written(tmp_path: Path) -> None:
    file = tmp_path / "setup.py"
    assert plan(INVENTORIES / "testbed.yaml", "--tofino-setup", file, "--json").exit_code == 0
    compile(file.read_text(), "setup.py", "exec")
    assert "only 'tofino' has a set-up script" in refusal(
        DEMO, "--svg", tmp_path / "none.svg", "--tofino-setup", tmp_path / "none.py"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["setup.py"], "nothing is written when one cannot be"


def test_files_that_cannot_be_written(tmp_path: Path) -> None:
    assert f"--svg {tmp_path}: Is a directory" in refusal(DEMO, "--svg", tmp_path)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(FakeDatapath(range(1, 7)), "127.0.0.1:0", device_id=1) as server:
        yield server


def hold(server: Server, rules: Rules) -> None:
    with closing(P4RuntimeTarget(Endpoint("127.0.0.1", server.port), 1, timeout_s=10)) as target:
        target.connect()
        reconcile(target, rules)


def test_the_same_as_the_live_switch(server: Server) -> None:
    hold(server, make_plan(load_topology(DEMO), {"shadow0"}).rules)
    address = f"127.0.0.1:{server.port}"
    same = plan(DEMO, "--diff", "--switch", address)
    assert same.exit_code == 0 and same.output == f"the switch at {address} holds the plan\n"
    assert json.loads(plan(DEMO, "--diff", "--switch", address, "--json").output) == {
        "equal": True, "removed": [], "changed": [], "added": [],
    }  # fmt: skip


def test_different_from_the_live_switch_while_a_controller_runs(server: Server) -> None:
    rules = make_plan(load_topology(DEMO), frozenset()).rules
    address = f"127.0.0.1:{server.port}"
    with closing(P4RuntimeTarget(Endpoint("127.0.0.1", server.port), 1, timeout_s=10)) as controller:
        controller.connect()
        reconcile(controller, rules)
        result = plan(DEMO, "--diff", "--switch", address)
        assert result.exit_code == 1
        lines = result.output.splitlines()
        assert "+ heartbeat: ingress_port=1 ethernet.dst_addr=02:c4:ec:00:01:01 → replicate(group=6)" in lines
        assert lines[-1] == "the switch copies to no shadow: for that plan give --live none"
        told = json.loads(plan(DEMO, "--diff", "--switch", address, "--json").output)
        assert not told["equal"] and len(told["added"]) == 7 + 7 + 12 and not told["removed"] and not told["changed"]
        assert plan(DEMO, "--diff", "--switch", address, "--live", "none").exit_code == 0
        assert controller.read() == rules, "looking has changed nothing"
        controller.apply([])  # and the controller is still the primary


def test_a_switch_that_cannot_be_read() -> None:
    assert "127.0.0.1:1" in refusal(DEMO, "--diff", "--switch", "127.0.0.1:1")
    assert "--switch nowhere: allowed: host:port" in refusal(DEMO, "--diff", "--switch", "nowhere")
    assert "only used with --diff" in refusal(DEMO, "--switch", "127.0.0.1:1")


def test_help_says_it_all() -> None:
    text = " ".join(plan("--help").output.split())
    for part in (
        "Exit codes: 0",
        "--tofino-setup FILE",
        "--svg FILE",
        "--live NAME",
        "without disturbing it",
        "bfshell -b",
    ):
        assert part in text
