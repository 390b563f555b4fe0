"""The C tests of the ring engine (schedule, reductions, engine on a mock plugin), under sanitizers."""

import subprocess
from pathlib import Path

PLUGIN = Path(__file__).parents[2] / "nccl_plugin"


def test_c() -> None:
    command = ["make", "-C", str(PLUGIN), "-s", "ring-test"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"schedule: ok", "reduce: ok", "engine: ok"} <= set(done.stdout.splitlines())
