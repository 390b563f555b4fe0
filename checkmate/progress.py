"""The live view of a training run: what a person watches while the demo works."""

import json
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_LINE_SECONDS = 5.0
"""Between two lines where the output is no terminal."""


class LossFile:
    """Follows a file to which ranks append {"rank", "step", "loss"} lines; reads only what is new."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.step = 0
        self.loss: float | None = None

    def read(self) -> None:
        """Take over new complete lines."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        complete = new[: new.rfind(b"\n") + 1]
        self._offset += len(complete)
        for line in complete.splitlines():
            record = json.loads(line)
            if record["rank"] == 0:
                self.step, self.loss = record["step"], record["loss"]


class RunView:
    """Context manager that shows step, loss, committed step, tagged rate and gaps while a run lasts."""

    def __init__(self, console: Console, steps: int, losses: Path) -> None:
        self._console = console
        self._steps = steps
        self._losses = LossFile(losses)
        self._live = Live(console=console, refresh_per_second=8, transient=False) if console.is_terminal else None
        self._next_line = 0.0
        self._rate = _Rate()

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.update(None)
        if self._live:
            self._live.stop()

    @property
    def step(self) -> int:
        """Newest step that rank 0 has finished."""
        return self._losses.step

    def update(self, shadow: dict[str, Any] | None) -> None:
        """Show the newest figures; ``shadow`` is the shadow's status or None."""
        self._losses.read()
        figures = self._figures(shadow)
        if self._live:
            self._live.update(self._table(figures))
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _LINE_SECONDS
            self._console.print("  " + "  ".join(f"{name} {value}" for name, value in figures.items()), soft_wrap=True)

    def _figures(self, shadow: dict[str, Any] | None) -> dict[str, str]:
        figures = {"step": f"{self._losses.step}/{self._steps}"}
        if self._losses.loss is not None:
            figures["loss"] = f"{self._losses.loss:.3f}"
        if shadow:
            committed = shadow["committed"]
            figures["committed"] = "-" if committed is None else str(committed)
            figures["tagged"] = f"{self._rate.update(shadow['receiver']['payload_bytes']) / 1e6:.1f} MB/s"
            figures["gaps"] = str(shadow["receiver"]["gaps"])
            figures["shadow"] = str(shadow["state"])
        return figures

    def _table(self, figures: dict[str, str]) -> Table:
        table = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=self._steps, completed=self._losses.step, width=24)
        table.add_row(bar, *(Text.assemble((f"{name} ", "dim"), value) for name, value in figures.items()))
        return table


class _Rate:
    """Bytes per second over the last interval of at least half a second."""

    def __init__(self) -> None:
        self._since, self._bytes, self._value = time.monotonic(), 0, 0.0

    def update(self, total: int) -> float:
        now = time.monotonic()
        if now - self._since >= 0.5:
            self._value = (total - self._bytes) / (now - self._since)
            self._since, self._bytes = now, total
        return self._value
