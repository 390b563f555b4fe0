"""The threads of this process, as the kernel lists them."""

import contextlib
from pathlib import Path


def thread_names() -> dict[int, str]:
    """Thread id → name. One that was joined may be listed a moment longer, and end while it is looked at."""
    names = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            names[int(task.name)] = (task / "comm").read_text().strip()
    return names
