"""Who may import whom: a stage knows the vocabulary and the stage before it; only a few modules compose stages."""

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

VOCABULARY = {
    "_lib",
    "arithmetic",
    "blocks",
    "checked",
    "compare",
    "config",
    "costmodel",
    "crc32c",
    "limits",
    "metrics",
    "native",
    "parts",
    "plain",
    "plan",
    "protocol",
    "queues",
    "rack",
    "rack_checks",
    "status",
    "strangers",
    "tensors",
    "topology",
    "wire",
}
STAGES: dict[str, set[str]] = {
    "train": {"nccl_plugin"},
    "nccl_plugin": set(),
    "p4": set(),
    "controlplane": {"p4"},
    "shadow": set(),
    "persist": set(),
    "planning": set(),
    "examples": {"train", "nccl_plugin"},
}
"""Each with the stages that it may import."""
COMPOSERS = {
    "__main__",
    "cli",
    "costreport",
    "demo",
    "lab",
    "launch",
    "persist_cli",
    "plan_cli",
    "progress",
    "rank",
    "services",
    "switch_cli",
}
"""They put stages together; no stage and no vocabulary may import them."""
FACADE = {"__init__": {"train"}}
"""What users import."""
WITHIN_SHADOW: dict[str, set[str]] = {"rx": {"reassembly"}, "reassembly": set(), "optim": set()}
"""The parts of the shadow that its other modules are built on; they know nothing of those."""
TORCHLESS = [
    "checkmate",
    "checkmate.cli",
    *(
        f"checkmate.{name}"
        for name in sorted(VOCABULARY - {"arithmetic", "blocks", "compare", "parts", "plain", "tensors"})
    ),
]

Import = tuple[str, int, str]
"""A module's name, a line, and the name that it imports there."""


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations, package
    return Path(next(iter(spec.submodule_search_locations)))


def _modules() -> Iterator[tuple[str, Path]]:
    """All modules of the package, by their names; a stage's folder may lie elsewhere in the source tree."""
    top = _folder("checkmate")
    yield from ((f"checkmate.{path.stem}", path) for path in sorted(top.glob("*.py")))
    for stage in STAGES:
        if importlib.util.find_spec(f"checkmate.{stage}") is None:
            continue
        folder = _folder(f"checkmate.{stage}")
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            if "tests" not in parts:
                yield ".".join(["checkmate", stage, *parts]), path


def _imports() -> Iterator[Import]:
    """Every import of ours anywhere in a module, also those in functions and for type checkers."""
    for module, path in _modules():
        package = module.split(".")[:-1]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = package[: len(package) + 1 - node.level] if node.level else []
                origin = ".".join([*base, *([node.module] if node.module else [])])
                names = [f"{origin}.{alias.name}" for alias in node.names]
            else:
                continue
            yield from ((module, node.lineno, name) for name in names if name.split(".")[0] == "checkmate")


def _part(name: str) -> str:
    """The vocabulary module, stage or composer that a dotted name belongs to."""
    parts = name.split(".")
    known = VOCABULARY | STAGES.keys() | COMPOSERS
    return parts[1] if len(parts) > 1 and parts[1] in known else "__init__"


def _allowed(part: str) -> set[str]:
    if part in VOCABULARY:
        return VOCABULARY
    if part in STAGES:
        return VOCABULARY | STAGES[part] | {part}
    if part in FACADE:
        return FACADE[part]
    return VOCABULARY | STAGES.keys() | COMPOSERS


def test_every_module_has_its_place() -> None:
    tops = {name.split(".")[1] for name, _ in _modules()}
    assert tops - VOCABULARY - STAGES.keys() - COMPOSERS - FACADE.keys() == set(), "say in this test what it may import"


def test_a_stage_imports_the_vocabulary_and_the_stage_before_it() -> None:
    # `checkmate` itself is what users import: the examples alone use it so.
    wrong = [
        f"{module}:{line} imports {name}"
        for module, line, name in _imports()
        if _part(name) not in _allowed(_part(module)) and not (_part(module) == "examples" and name == "checkmate")
    ]
    assert not wrong, "\n".join(wrong)


def test_the_parts_of_the_shadow_know_nothing_of_what_is_built_on_them() -> None:
    wrong = []
    for module, line, name in _imports():
        if not (module.startswith("checkmate.shadow.") and name.startswith("checkmate.shadow.")):
            continue
        ours, theirs = module.split(".")[2], name.split(".")[2]
        if ours in WITHIN_SHADOW and theirs not in WITHIN_SHADOW[ours] | {ours}:
            wrong.append(f"{module}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_the_rule_is_looked_at() -> None:
    """What this file finds includes imports that are known to be there."""
    found = {(module, name) for module, _, name in _imports()}
    assert ("checkmate.controlplane.pre", "checkmate.p4.shared.messages.p4runtime_pb2") in found
    assert ("checkmate.p4.ebpf.loader", "checkmate.p4.ebpf.netdev") in found  # a relative one
    assert ("checkmate.cli", "checkmate.launch.run_job") in found  # in a function


@pytest.mark.parametrize("stage", ["controlplane", "p4", None])
def test_control_needs_no_torch(stage: str | None) -> None:
    """Switches and controllers run where there is none, and `checkmate --help` must be quick."""
    names = TORCHLESS if stage is None else [name for name, _ in _modules() if name.startswith(f"checkmate.{stage}.")]
    names = [name.removesuffix(".__init__") for name in names]
    script = (
        f"import importlib, sys\nfor name in {names}: importlib.import_module(name)\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_programs_in_tests_run_the_installed_package() -> None:
    """`python -c` finds the checkout first, which is not whole: the stages lie in folders of their own."""
    tests = Path(__file__).parents[1]
    programs = [
        f"{path.relative_to(tests)}:{node.lineno}"
        for path in tests.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.List)
        if {"sys.executable", "'-c'"} <= (parts := {ast.unparse(part) for part in node.elts}) and "'-P'" not in parts
    ]
    assert not programs, programs
