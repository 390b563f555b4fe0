"""The generated set-up of a Tofino: Python that calls only what the SDE's tables have, with values in their ranges.

The SDE is not here, so that the script runs against a stand-in that notes every call.
"""

import difflib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from checkmate import config
from checkmate.config import CheckmateError
from checkmate.lab import LabConfig, lab_topology
from checkmate.plan import make_plan
from checkmate.planning.tofino import CELL_BYTES, SPARE_CELLS, setup_script
from checkmate.queues import SHADOW_BUFFER_BYTES
from checkmate.topology import Topology, load_topology

INVENTORIES = Path(__file__).parents[2] / "deploy" / "inventories"
TOFINO = ("testbed", "pp2dp6", "dp128")
POLICIES = config.POLICIES
POOLS = {f"{side}_APP_POOL_{number}" for side in ("IG", "EG") for number in range(4)} | {"IG_SKID_POOL"}
BAF = {"1.5%", "3%", "6%", "11%", "20%", "33%", "50%", "66%", "80%", "DISABLE"}
SPEEDS = {f"BF_SPEED_{speed}" for speed in ("10G", "25G", "40G", "50G", "100G")}
PORTS = [pipe * 128 + lane for pipe in range(4) for lane in range(64)]
CELLS = range(1, 260 * 1024)
BOOLEANS = {True, False}

TABLES: dict[str, dict[str, Any]] = {
    "port.port.add": {
        "DEV_PORT": PORTS,
        "SPEED": SPEEDS,
        "FEC": {"BF_FEC_TYP_NONE", "BF_FEC_TYP_FC", "BF_FEC_TYP_RS"},
        "N_LANES": {1, 2, 4},
        "AUTO_NEGOTIATION": {"PM_AN_DEFAULT", "PM_AN_FORCE_ENABLE", "PM_AN_FORCE_DISABLE"},
        "RX_MTU": range(9216, 10241),
        "TX_MTU": range(9216, 10241),
        "PORT_ENABLE": {True},
    },
    "port.port.mod": {"DEV_PORT": PORTS, "TX_PFC_EN_MAP": range(256), "RX_PFC_EN_MAP": range(256)},
    "port.port.dump": {"table": {True}},
    "pre.port.mod": {"DEV_PORT": PORTS, "MULTICAST_FORWARD_STATE": {True}},
    "tf1.tm.pool.cfg.mod": {"pool": POOLS, "size_cells": CELLS},
    "tf1.tm.pool.cfg.dump": {"table": {True}},
    "tf1.tm.pool.app_pfc.mod": {"pool": POOLS, "cos": range(8), "pfc_limit_cells": CELLS},
    "tf1.tm.port.flowcontrol.mod": {
        "dev_port": PORTS,
        "mode_tx": {"NONE", "PFC"},
        "mode_rx": {"NONE", "PFC"},
        "cos_to_icos": [list(range(8))],
    },
    "tf1.tm.queue.cfg.mod": {"pipe": range(4), "pg_id": range(18), "pg_queue": range(32), "pfc_cos": range(8)},
    "tf1.tm.queue.buffer.mod_with_shared_pool": {
        "pipe": range(4),
        "pg_id": range(18),
        "pg_queue": range(32),
        "hysteresis_cells": CELLS,
        "tail_drop_enable": BOOLEANS,
        "pool_id": {f"EG_APP_POOL_{number}" for number in range(4)},
        "pool_max_cells": CELLS,
        "dynamic_baf": BAF,
    },
    "tf1.tm.ppg.cfg.add_with_dev_port": {
        "pipe": range(4),
        "ppg_id": range(128),
        "dev_port": PORTS,
        f"icos_{config.TAGGED_CLASS}": {True},
        "guaranteed_cells": CELLS,
        "hysteresis_cells": CELLS,
        "pool_id": {f"IG_APP_POOL_{number}" for number in range(4)},
        "pool_max_cells": CELLS,
        "dynamic_baf": BAF,
        "pfc_enable": BOOLEANS,
        "pfc_skid_max_cells": CELLS,
    },
}
"""Calls that the SDE of Tofino 1 offers, as far as we make any, with what each field may be."""

Call = tuple[str, dict[str, Any]]


@dataclass
class Shell:
    """Stands for ``bfrt``: any path of names can be called, and the call is noted."""

    path: str = ""
    calls: list[Call] = field(default_factory=list)

    def __getattr__(self, name: str) -> "Shell":
        return Shell(f"{self.path}.{name}".lstrip("."), self.calls)

    def __call__(self, **values: Any) -> None:
        self.calls.append((self.path, values))


def inventory(name: str, policy: str) -> Topology:
    return Topology.from_dict(load_topology(INVENTORIES / f"{name}.yaml").to_dict() | {"policy": policy})


def script(name: str, policy: str) -> str:
    topology = inventory(name, policy)
    return setup_script(topology, make_plan(topology, {shadow.name for shadow in topology.shadows}))


def run(text: str) -> list[Call]:
    """As bfshell does: the script's names are not seen by functions in it, ``bfrt`` is."""
    shell = Shell()
    exec(compile(text, "setup.py", "exec"), {"bfrt": shell}, {})
    return shell.calls


def calls(name: str, policy: str, table: str) -> list[dict[str, Any]]:
    return [values for path, values in run(script(name, policy)) if path == table]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", TOFINO)
def test_only_calls_that_the_sde_has_with_values_in_range(name: str, policy: str) -> None:
    for table, values in run(script(name, policy)):
        assert table in TABLES
        assert values.keys() == TABLES[table].keys(), table
        for key, value in values.items():
            assert value in TABLES[table][key], f"{table} {key}={value}"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", TOFINO)
def test_every_port_of_the_inventory_is_set_up_and_no_other(name: str, policy: str) -> None:
    topology = inventory(name, policy)
    ports = sorted(nic.port for node in topology.nodes for nic in node.nics)
    for table, key in (
        ("port.port.add", "DEV_PORT"),
        ("port.port.mod", "DEV_PORT"),
        ("pre.port.mod", "DEV_PORT"),
        ("tf1.tm.port.flowcontrol.mod", "dev_port"),
    ):
        assert [values[key] for values in calls(name, policy, table)] == ports, table


def test_the_policies_differ_in_queues_and_flow_control_only() -> None:
    isolate, lossless = (script("testbed", policy).splitlines() for policy in ("isolate", "lossless"))
    first = isolate.index(next(line for line in isolate if "# 4. Queues and flow control" in line))
    last = isolate.index(next(line for line in isolate if "# 5. What the switch holds now" in line))
    for tag, start, end, *_ in difflib.SequenceMatcher(None, isolate, lossless, autojunk=False).get_opcodes():
        assert tag == "equal" or first < start <= end <= last, isolate[start:end]
    assert isolate != lossless


def test_the_plans_of_the_policies_differ_in_queues_only() -> None:
    isolate, lossless = (
        make_plan(inventory("testbed", policy), {"shadow0"}).to_dict() for policy in ("isolate", "lossless")
    )
    assert {key for key in isolate if isolate[key] != lossless[key]} == {"policy", "queues"}


def test_isolate_pauses_nobody_and_bounds_the_shadows_queues() -> None:
    flow = calls("testbed", "isolate", "tf1.tm.port.flowcontrol.mod")
    assert {(values["mode_tx"], values["mode_rx"]) for values in flow} == {("NONE", "NONE")}
    assert {values["TX_PFC_EN_MAP"] for values in calls("testbed", "isolate", "port.port.mod")} == {0}
    assert calls("testbed", "isolate", "tf1.tm.ppg.cfg.add_with_dev_port") == []
    queues = calls("testbed", "isolate", "tf1.tm.queue.buffer.mod_with_shared_pool")
    assert len(queues) == 8 and all(values["tail_drop_enable"] for values in queues)
    assert sum(values["pool_max_cells"] for values in queues) * CELL_BYTES <= SHADOW_BUFFER_BYTES


def test_lossless_pauses_every_trainer_on_the_tagged_class() -> None:
    topology = inventory("testbed", "lossless")
    trainers = {nic.port for host in topology.hosts for nic in host.nics}
    flow = calls("testbed", "lossless", "tf1.tm.port.flowcontrol.mod")
    assert {values["dev_port"] for values in flow if values["mode_tx"] == "PFC"} == trainers
    assert {values["mode_rx"] for values in flow} == {"PFC"}
    groups = calls("testbed", "lossless", "tf1.tm.ppg.cfg.add_with_dev_port")
    assert {values["dev_port"] for values in groups} == trainers
    assert len({(values["pipe"], values["ppg_id"]) for values in groups}) == len(trainers)
    masks = {values["DEV_PORT"]: values["TX_PFC_EN_MAP"] for values in calls("testbed", "lossless", "port.port.mod")}
    assert {port for port, mask in masks.items() if mask == 1 << config.TAGGED_CLASS} == trainers
    queues = calls("testbed", "lossless", "tf1.tm.queue.buffer.mod_with_shared_pool")
    assert len(queues) == len(masks) and not any(values["tail_drop_enable"] for values in queues)


@pytest.mark.parametrize("name", TOFINO)
def test_what_is_let_in_finds_room_and_the_switch_has_it(name: str) -> None:
    pools = {values["pool"]: values["size_cells"] for values in calls(name, "lossless", "tf1.tm.pool.cfg.mod")}
    groups = calls(name, "lossless", "tf1.tm.ppg.cfg.add_with_dev_port")
    assert sum(values["pool_max_cells"] for values in groups) == pools["IG_APP_POOL_1"]
    assert sum(values["pfc_skid_max_cells"] for values in groups) == pools["IG_SKID_POOL"]
    admitted = pools["IG_APP_POOL_1"] + pools["IG_SKID_POOL"]
    for values in calls(name, "lossless", "tf1.tm.queue.buffer.mod_with_shared_pool"):
        assert values["pool_max_cells"] >= admitted
    assert 2 * admitted <= pools["EG_APP_POOL_2"] <= SPARE_CELLS


def test_the_head_room_holds_what_a_100g_sender_still_sends() -> None:
    topology = inventory("testbed", "lossless")
    frames, reaction, cable = 2 * (9000 + 22), 394 * 64, 100_000_000_000 // 8 * 1000 // 1_000_000_000
    senders = [queue for queue in make_plan(topology, set()).queues if queue.sends_pause]
    assert {queue.headroom_bytes for queue in senders} == {frames + reaction + cable}


def test_where_a_queue_is_among_those_of_its_port_group() -> None:
    data = inventory("testbed", "isolate").to_dict()
    data["hosts"][11]["nics"][0] |= {"port": 45, "link": {"speed": "25G", "fec": "fc", "autoneg": False}}
    data["shadows"][0]["nics"][0] |= {"port": 47, "link": {"speed": "10G"}}
    topology = Topology.from_dict(data)
    noted = run(setup_script(topology, make_plan(topology, set())))
    ports = {values["DEV_PORT"]: values for path, values in noted if path == "port.port.add"}
    fields = ("SPEED", "FEC", "N_LANES", "AUTO_NEGOTIATION")
    assert [ports[45][key] for key in fields] == ["BF_SPEED_25G", "BF_FEC_TYP_FC", 1, "PM_AN_FORCE_DISABLE"]
    assert [ports[47][key] for key in fields] == ["BF_SPEED_10G", "BF_FEC_TYP_NONE", 1, "PM_AN_DEFAULT"]
    queues = [values for path, values in noted if path == "tf1.tm.queue.buffer.mod_with_shared_pool"]
    assert (queues[0]["pipe"], queues[0]["pg_id"], queues[0]["pg_queue"]) == (0, 11, 3 * 8 + config.TAGGED_CLASS)


def test_it_is_the_same_text_every_time_and_fits_a_page() -> None:
    assert script("dp128", "lossless") == script("dp128", "lossless")
    assert max(len(line) for policy in POLICIES for line in script("dp128", policy).splitlines()) <= 120


@pytest.mark.parametrize("policy", POLICIES)
def test_a_rack_without_shadows(policy: str) -> None:
    data = inventory("testbed", policy).to_dict() | {"shadows": []}
    data["groups"][0]["shadows"] = []
    topology = Topology.from_dict(data)
    assert [path for path, _ in run(setup_script(topology, make_plan(topology, set())))].count("port.port.add") == 12


def test_other_switches_have_none(tmp_path: Path) -> None:
    topology = lab_topology(LabConfig(2), "ckm0", tmp_path)
    with pytest.raises(CheckmateError, match=r"switch.target is 'ebpf': only 'tofino' has a set-up script"):
        setup_script(topology, make_plan(topology, set()))


def test_more_buffer_than_there_is() -> None:
    data = inventory("dp128", "lossless").to_dict()
    for group in data["groups"]:
        group["shadows"] = [shadow["name"] for shadow in data["shadows"]]
    topology = Topology.from_dict(data)
    with pytest.raises(CheckmateError, match="cells of buffer, a Tofino 1 has 163840 to spare; use policy isolate"):
        setup_script(topology, make_plan(topology, {shadow.name for shadow in topology.shadows}))
