"""``paced.py PAUSE REPORT SCRIPT ARGS…`` runs the script with a pause before each optimizer step, of PAUSE seconds.

REPORT gets one JSON line for each step of each rank: rank, start of the job, and the machine's monotonic clock.
"""

import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook


def main() -> None:
    pause, report, script, *arguments = sys.argv[1:]
    where = {"rank": int(os.environ["RANK"]), "start": int(os.environ["TORCHELASTIC_RESTART_COUNT"])}

    def step(*_: Any) -> None:
        time.sleep(float(pause))
        with Path(report).open("ab", buffering=0) as file:  # lines of several ranks never mix (O_APPEND)
            file.write(json.dumps({**where, "pid": os.getpid(), "time": time.monotonic()}).encode() + b"\n")

    register_optimizer_step_pre_hook(step)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
