"""The demo on BMv2 with the P4 program: a rank dies, and the result is the same, bit for bit."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.training import needs_root

from checkmate import lab
from checkmate.p4.v1model.bmv2 import BINARY

pytestmark = [
    *needs_root,
    pytest.mark.bmv2,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which(BINARY) is None, reason=f"{BINARY} is not on PATH"),
]


def test_the_demo(tmp_path: Path) -> None:
    small = ["--ranks=2", "--params=100000", "--steps=6", "--kill=1@3"]
    command = [sys.executable, "-P", "-m", "checkmate", "demo", "--switch=bmv2", *small, "--json"]
    with (tmp_path / "output").open("w") as output:
        demo = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=output, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}
        )
        said, _ = demo.communicate(timeout=500)
    assert demo.returncode == 0, (tmp_path / "output").read_text()
    result = json.loads(said.splitlines()[-1])
    assert result["params_equal"] and result["optimizer_equal"] and result["shadow_equal"]
    assert result["committed_steps"] == result["iterations"] == 6
    assert result["killed"].startswith("rank 1") and result["repeated_iterations"] == 1
    assert result["tagged_bytes"] == result["expected_bytes"] > 0
    assert (result["gaps"], result["drops"]) == (0, 0), "BMv2's queues were too small for the windows"
    assert result["copies"] > 0
    assert not list(Path("/run/netns").glob(f"ckm{demo.pid}-*"))
    assert not (lab.ROOT / f"ckm{demo.pid}").exists()
