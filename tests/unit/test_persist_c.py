"""The C tests of the persistence engine, under the address and undefined behaviour sanitizers; threads under theirs."""

import subprocess
from pathlib import Path

import pytest

PERSIST = Path(__file__).parents[2] / "checkmate/persist"
BUILD = PERSIST.parents[1] / "build/persist"
NAMES = sorted(path.stem for path in PERSIST.glob("tests/test_*.c"))
THREADED = ["test_engine", "test_faults"]
"""Under the thread sanitizer, which slows the others down too much."""


@pytest.fixture(scope="module")
def built() -> Path:
    """The folder with the test programs."""
    programs = [BUILD / name for name in NAMES] + [BUILD / "threads" / name for name in THREADED]
    subprocess.run(["make", "-C", PERSIST, "-s", *programs, f"BUILD={BUILD}"], check=True, timeout=280)
    return BUILD


@pytest.mark.parametrize("name", [*NAMES, *(f"threads/{name}" for name in THREADED)])
def test_c(built: Path, name: str) -> None:
    done = subprocess.run([built / name], capture_output=True, text=True, timeout=280, check=False)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("the thread sanitizer does not know this kernel's memory layout")
    assert done.returncode == 0, done.stderr
