"""The P4 programs: one set of names and numbers with the rest, and build outputs that their sources compile to."""

import json
import re
import shutil
import subprocess
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format

from checkmate import config
from checkmate.p4.ebpf.libbpf import constants
from checkmate.p4.shared import p4info
from checkmate.p4.shared.messages import p4info_pb2

_P4 = Path(str(resources.files("checkmate.p4")))
_SHARED = {path.name: path.read_text() for path in (_P4 / "shared").glob("*.p4")}
_WIRE = (Path(str(resources.files("checkmate.nccl_plugin"))) / "include/checkmate/wire.h").read_text()
_BUILT = _P4 / "v1model/checkmate.json"
_TARGETS = ["v1model", "tna"]
_SECONDS = 200
_TOFINO = ("--target", "tofino", "--arch", "tna", "--std", "p4-16", "--p4runtime-force-std-externs")
_INCIDENTAL = ("source_info", "__meta__", "program")


def _number(text: str, pattern: str) -> int:
    found = re.search(pattern + r"\s+\(?(\w+?)u?\b", text)
    assert found, pattern
    return int(found[1], 0)


def _constant(name: str) -> int:
    return _number(_SHARED["constants.p4"], rf"\b{name}\b(?: =)?")


@pytest.mark.parametrize(
    ("name", "c_name"),
    [("OPTION_KIND", "CKM_TCPOPT_KIND"), ("OPTION_LENGTH", "CKM_TCPOPT_LEN"), ("OPTION_EXID", "CKM_TCPOPT_EXID")],
)
def test_the_option_is_that_of_the_wire_format(name: str, c_name: str) -> None:
    assert _constant(name) == _number(_WIRE, f"#define {c_name}")


@pytest.mark.parametrize(
    ("name", "c_name"),
    [
        ("PORTS", "CKM_PORTS"),
        ("CLASSIFY_SIZE", "CKM_DSCPS"),
        ("HEARTBEAT_SIZE", "CKM_HEARTBEATS"),
        ("LIVE_GROUP_SIZE", "CKM_GROUPS"),
        ("L2_FORWARD_SIZE", "CKM_L2_ENTRIES"),
        ("REWRITE_SIZE", "CKM_REWRITES"),
    ],
)
def test_tables_are_as_large_as_those_of_the_ebpf_switch(name: str, c_name: str) -> None:
    assert _constant(name) == getattr(constants, c_name)


def test_class_and_replica_id_are_those_of_the_plan() -> None:
    assert _constant("TAGGED_CLASS") == config.TAGGED_CLASS
    assert _constant("ORIGINAL_RID") != config.SHADOW_RID


@pytest.mark.parametrize("target", _TARGETS)
def test_names_are_those_of_the_p4info_in_its_order(target: str) -> None:
    """Without a compiler: what the shared control bodies declare, in the controls of each target."""
    text = (_P4 / target / "checkmate.p4").read_text()
    info = p4info.load()
    for control, body in (("CheckmateIngress", "ingress.p4"), ("CheckmateEgress", "egress.p4")):
        assert re.search(rf'control {control}\([^{{]*{{\n#include "\.\./shared/{body}"', text)
        for kind, pattern in {
            "tables": r"^    table (\w+)",
            "actions": r"^    action (\w+)",
            "counters": r"^    PORT_COUNTER\((\w+)\)",
            "direct_counters": r"^    ENTRY_COUNTER\((\w+)\)",
        }.items():
            declared = [f"{control}.{name}" for name in re.findall(pattern, _SHARED[body], re.MULTILINE)]
            names = [item.preamble.name for item in getattr(info, kind)]
            assert declared == [name for name in names if name.startswith(f"{control}.")]


def test_the_compiled_program_has_the_tables_and_counters_of_the_p4info() -> None:
    program = json.loads(_BUILT.read_text())
    info = p4info.load()
    sizes = {table["name"]: table["max_size"] for pipeline in program["pipelines"] for table in pipeline["tables"]}
    for table in info.tables:
        assert sizes[table.preamble.name] == table.size
    compiled = {counter["name"] for counter in program["counter_arrays"]}
    assert compiled == {item.preamble.name for item in (*info.counters, *info.direct_counters)}


@pytest.mark.p4c
def test_the_sources_compile_to_the_build_outputs(tmp_path: Path) -> None:
    compiler = shutil.which("p4c-bm2-ss")
    if compiler is None:
        pytest.skip("p4c-bm2-ss (p4lang's p4c) is not on PATH")
    built, info = tmp_path / "checkmate.json", tmp_path / "checkmate.p4info.txtpb"
    command: list[str | Path] = [compiler, "--std", "p4-16", "-o", built, "--p4runtime-files", info, "checkmate.p4"]
    done = subprocess.run(command, cwd=_P4 / "v1model", capture_output=True, text=True, timeout=_SECONDS, check=False)
    assert (done.returncode, done.stderr) == (0, ""), "p4c finds fault with the sources"
    assert text_format.Parse(info.read_text(), p4info_pb2.P4Info()) == p4info.load()
    assert _essence(json.loads(built.read_text())) == _essence(json.loads(_BUILT.read_text()))


def test_tofino_has_the_same_names_in_the_same_order() -> None:
    """Ids of tables and counters differ: Tofino's compiler makes them of names that begin with the pipe's."""
    assert _names(_tofino_info(_P4 / "tna/checkmate.p4info.txtpb")) == _names(p4info.load())


@pytest.mark.p4c
@pytest.mark.slow
def test_the_tofino_program_fits(tmp_path: Path) -> None:
    compiler = shutil.which("p4c-barefoot")
    if compiler is None:
        pytest.skip("p4c-barefoot (p4lang's p4c with its Tofino back end) is not on PATH")
    info = tmp_path / "checkmate.p4info.txtpb"
    command: list[str | Path] = [compiler, *_TOFINO, "--p4runtime-files", info, "-o", tmp_path, "checkmate.p4"]
    done = subprocess.run(command, cwd=_P4 / "tna", capture_output=True, text=True, timeout=_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    assert not re.findall(r"^\S*\.p4\b.*", done.stderr, re.MULTILINE), "p4c finds fault with the sources"
    assert _tofino_info(info) == _tofino_info(_P4 / "tna/checkmate.p4info.txtpb")
    stages = re.findall(r"^stage \d+ (\w+):", (tmp_path / "pipe/checkmate.bfa").read_text(), re.MULTILINE)
    assert stages.count("ingress") <= 4
    assert stages.count("egress") <= 5
    if assembler := shutil.which("bfas"):
        words: list[str | Path] = ["--target", "tofino", "-o", tmp_path / "pipe", tmp_path / "pipe/checkmate.bfa"]
        done = subprocess.run([assembler, *words], capture_output=True, text=True, timeout=_SECONDS, check=False)
        assert done.returncode == 0, done.stderr
        assert "Can't match parser state" not in done.stderr, "this p4c writes parsers that match nothing: p4/README.md"


def _tofino_info(path: Path) -> p4info_pb2.P4Info:
    """Without the externs that only Tofino's own driver knows."""
    info = text_format.Parse(path.read_text(), p4info_pb2.P4Info())
    info.ClearField("externs")
    return info


def _names(info: p4info_pb2.P4Info) -> dict[str, list[str]]:
    kinds = ("tables", "actions", "counters", "direct_counters")
    return {kind: [item.preamble.name for item in getattr(info, kind)] for kind in kinds}


def _essence(program: Any) -> Any:
    """A compiled program without what depends on the compiler's version and on lines and paths of the source."""
    if isinstance(program, dict):
        return {key: _essence(value) for key, value in program.items() if key not in _INCIDENTAL}
    return [_essence(item) for item in program] if isinstance(program, list) else program
