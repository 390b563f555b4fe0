"""The C tests of the plugin, under the address and undefined behaviour sanitizers."""

import subprocess
from pathlib import Path

import pytest

PLUGIN = Path(__file__).parents[2] / "nccl_plugin"
NAMES = sorted(path.stem for path in PLUGIN.glob("tests/test_*.c"))


@pytest.fixture(scope="module")
def built() -> Path:
    """The folder with the test programs."""
    build = PLUGIN.parent / "build/nccl_plugin"
    subprocess.run(["make", "-C", PLUGIN, "-s", "tests", f"BUILD={build}"], check=True)
    return build / "tests"


@pytest.mark.parametrize("command", [*NAMES, "test_net 4096"])
def test_c(built: Path, command: str) -> None:
    name, *arguments = command.split()
    done = subprocess.run([built / name, *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
