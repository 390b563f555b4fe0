"""Scripts under plain torchrun, over gloo: what runs with Checkmate are compared with."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from support.training import RUN_S

TORCH_ABORT = "terminate called without an active exception"
"""A thread of torch's rarely ends plain torchrun so, at the interpreter's exit."""


def plain_torchrun(ranks: int, arguments: Sequence[str], appended: Path | None = None) -> str:
    """What the script says. Nothing of Checkmate is loaded; ``appended``: a file that its ranks append to."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CHECKMATE_")}
    environment["GLOO_SOCKET_IFNAME"] = "lo"
    for _attempt in range(2):
        if appended is not None:
            appended.unlink(missing_ok=True)
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=RUN_S, env=environment)
        if TORCH_ABORT not in done.stderr:
            break
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout
