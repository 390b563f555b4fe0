"""Ctrl-C, many times, while a lab is up or being built: nothing of it is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from checkmate.lab import Lab, LabConfig, sigterm_interrupts
with sigterm_interrupts(), Lab(LabConfig(2), say=lambda text: print(text, flush=True)):
    print("up", flush=True)
    time.sleep(60)
"""


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
@pytest.mark.parametrize("moment", ["creates", "up"])
def test_a_storm_of_signals_leaves_nothing(moment: str) -> None:
    lab = subprocess.Popen(
        [sys.executable, "-P", "-c", SCRIPT],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert lab.stdout is not None
    for line in lab.stdout:
        if line.startswith(moment):
            break
    while lab.poll() is None:
        os.killpg(lab.pid, signal.SIGINT)  # as a terminal does: the commands of the clean-up get it, too
        time.sleep(0.02)
    prefix = f"ckm{lab.pid}"
    assert not list(Path("/run/checkmate").glob(f"{prefix}*"))
    assert not list(Path("/run/netns").glob(f"{prefix}-*"))
    assert prefix not in Path("/proc/mounts").read_text()
