"""``die_in_step.py RANK STEP SCRIPT ARGS…`` runs the script; at the job's first start RANK dies before its STEP.

STEP counts optimizer steps; with ``:backward`` behind it, RANK dies before the first backward pass of that step.
"""

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook


def main() -> None:
    rank, when, script, *arguments = sys.argv[1:]
    last, _, moment = when.partition(":")
    is_victim = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == rank
    steps = 0

    def count(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if is_victim and not moment and steps == int(last):
            os.kill(os.getpid(), signal.SIGKILL)

    backward: Any = torch.autograd.backward

    def watched(*args: Any, **kwargs: Any) -> Any:
        if is_victim and moment == "backward" and steps == int(last) - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return backward(*args, **kwargs)

    torch.autograd.backward = watched
    register_optimizer_step_pre_hook(count)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
