"""What each rank notes about its own steps, one JSON object a line, in the file that CHECKMATE_METRICS names.

Kinds: ``{"kind": "step", "rank", "incarnation", "step", "tagged_bytes"}`` when a step's boundary is handed over, with
the gradient payload bytes that the plugin of this process has tagged so far; ``{"kind": "restore", "rank",
"incarnation", "step", "seconds"}`` when a rank has restored a step.
"""

import json
import os
from pathlib import Path
from typing import Any

VARIABLE = "CHECKMATE_METRICS"


def note(kind: str, **values: Any) -> None:
    """Append one line; does nothing when no file is asked for. Lines of several ranks never mix (O_APPEND)."""
    path = os.environ.get(VARIABLE)
    if path:
        line = json.dumps({"kind": kind, **values}).encode() + b"\n"
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)


def read(path: Path) -> list[dict[str, Any]]:
    """All complete lines of the file, oldest first; none when it does not exist."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    return [json.loads(line) for line in lines]
