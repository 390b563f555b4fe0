"""The C tests of the receive core, under the address and undefined-behaviour sanitizers."""

import shutil
import subprocess
from pathlib import Path

import pytest


@pytest.mark.skipif(shutil.which("make") is None or shutil.which("cc") is None, reason="needs make and a C compiler")
def test_c_tests_pass() -> None:
    shadow = Path(__file__).parents[2] / "shadow"
    done = subprocess.run(["make", "-C", shadow, "test"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
