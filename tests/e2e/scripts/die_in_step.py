"""``die_in_step.py RANK STEP SCRIPT ARGS…`` runs the script; at the job's first start RANK dies before its STEP."""

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook


def main() -> None:
    rank, last, script, *arguments = sys.argv[1:]
    is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    steps = 0

    def count(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if is_first and os.environ["RANK"] == rank and steps == int(last):
            os.kill(os.getpid(), signal.SIGKILL)

    register_optimizer_step_pre_hook(count)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
