"""Start the ranks of a test as processes."""

import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

SUPPORT = Path(__file__).parent


def start(
    world: int, script: str, args: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
) -> list[subprocess.Popen[str]]:
    """``world`` processes of a script in this folder; RANK and WORLD_SIZE are set, args[0] becomes a store's file."""
    store = folder / "store"
    store.unlink(missing_ok=True)
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(world), **(environment or {})}
    return [
        subprocess.Popen(
            [sys.executable, str(SUPPORT / script), str(store), *args],
            env={**shared, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]


def finish(processes: Sequence[subprocess.Popen[str]], timeout: float = 60) -> list[str]:
    """Outputs by rank; AssertionError with them when one failed."""
    timer = threading.Timer(timeout, lambda: [process.kill() for process in processes])
    timer.start()
    outputs = [process.communicate()[0] for process in processes]
    timer.cancel()
    codes = [process.returncode for process in processes]
    assert codes == [0] * len(processes), f"exit codes {codes}\n" + "\n--- next rank\n".join(outputs)
    return outputs
