"""Exports of the shards of one state, joined to what a shadow of all would have exported."""

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from checkmate.config import CheckmateError
from checkmate.status import export

SAME_STEP_S = 30.0
"""How long shards' states of one step are tried for while training goes on."""
PAUSE_S = (0.1, 3.2)
"""First and longest pause between two attempts."""


class DifferentSteps(CheckmateError):
    """The shards are of different steps, or of different runs."""


@contextmanager
def exported(sockets: Sequence[Path], folder: Path) -> Iterator[dict[str, Any]]:
    """The state that these shadows hold, mapped from files in ``folder`` that last as long.

    All are asked at once, so that their states are of one step, most likely. Raises CheckmateError when they are not
    all shards of one state, or of different steps for SAME_STEP_S.
    """
    end, pause = time.monotonic() + SAME_STEP_S, PAUSE_S[0]
    while True:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".export") as made:
            files = [Path(made, str(number)) for number in range(len(sockets))]
            with ThreadPoolExecutor(len(sockets), "checkmate-export") as pool:
                list(pool.map(export, sockets, files))
            parts = [torch.load(file, map_location="cpu", weights_only=True, mmap=True) for file in files]
            try:
                state = parts[0] if len(parts) == 1 else join(parts)
            except DifferentSteps:
                if time.monotonic() + pause > end:
                    raise
            else:
                yield state
                return
        time.sleep(pause)
        pause = min(2 * pause, PAUSE_S[1])


def join(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """``{"model", "optimizer", "step"}`` of which these are all parts.

    Raises CheckmateError when they are of different steps or runs, or not all shards of one state.
    """
    shards = [part.get("shard") for part in parts]
    if None in shards:
        raise CheckmateError("one of these shadows holds a whole state, not a shard: name the shadows of one group")
    if len(groups := {shard["group"] for shard in shards if shard}) > 1:
        raise CheckmateError(
            f"these are shards of several groups, {', '.join(sorted(groups))}: name the sockets of all shadows of one "
            "group"
        )
    steps = sorted({part["step"] for part in parts})
    if len(steps) > 1:
        raise DifferentSteps(
            f"the shadows' states are of the steps {steps}, because training goes on: try again at its end"
        )
    if len(histories := {shard["history"] for shard in shards if shard}) > 1:
        raise DifferentSteps(
            f"the shadows' states are of step {steps[0]}, but of different runs, which began in the incarnations "
            f"{sorted(histories)}: name the shadows of one group, and try again when all follow the newest run"
        )
    order: list[list[str]] = shards[0]["order"]  # type: ignore[index]
    held = {name for shard in shards if shard for names in shard["params"] for name in names}
    if missing := [name for names in order for name in names if name not in held]:
        raise CheckmateError(
            f"{len(missing)} parameter(s) are in none of these shards, for example {missing[0]}: name the sockets of "
            "all shadows of the group"
        )
    joined = {key: value for key, value in parts[0].items() if key != "shard"}
    for kind in ("model", "masters"):
        if any(kind in part for part in parts):
            joined[kind] = {name: value for part in parts for name, value in part.get(kind, {}).items()}
    return {**joined, "optimizer": _join_optimizers(parts, order)}


def _join_optimizers(parts: Sequence[Mapping[str, Any]], order: Sequence[Sequence[str]]) -> dict[str, Any]:
    """torch numbers parameters in the order of the groups."""
    states: dict[str, Any] = {}
    for part in parts:
        names = [name for group in part["shard"]["params"] for name in group]
        numbers = [number for group in part["optimizer"]["param_groups"] for number in group["params"]]
        of = dict(zip(numbers, names, strict=True))
        states |= {of[number]: state for number, state in part["optimizer"]["state"].items()}
    groups, first = [], 0
    for fields, members in zip(parts[0]["optimizer"]["param_groups"], order, strict=True):
        groups.append({**fields, "params": list(range(first, first + len(members)))})
        first += len(members)
    everyone = [name for members in order for name in members]
    return {
        "state": {number: states[name] for number, name in enumerate(everyone) if name in states},
        "param_groups": groups,
    }
