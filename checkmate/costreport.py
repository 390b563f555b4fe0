"""What ``checkmate costmodel`` prints and draws: the model for a cluster, and what the papers say of theirs."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from checkmate.config import CheckmateError
from checkmate.costmodel import (
    Cluster,
    break_even_rate,
    daly_interval,
    llama3_405b,
    min_interval,
    repeated_work_saved,
    wasted_fraction,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RATES = (1e-8, 1e-4)
"""Failures per GPU-hour that the plot goes from and to."""
POINTS = 200


@dataclass(frozen=True)
class Outcome:
    """One figure of the papers beside the model's, from the papers' inputs. ``agrees``: to the digits printed."""

    what: str
    published: str
    computed: str
    agrees: bool


@dataclass(frozen=True)
class Overlap:
    """Checkpoints that overlap with training: N in flight, each ``write_s`` long, for a slowdown of at most q."""

    in_flight: int
    write_s: float
    slowdown: float

    def interval(self, iteration_s: float) -> int:
        """Iterations between two checkpoints, at least."""
        return min_interval(self.write_s, self.in_flight, self.slowdown, iteration_s)


def published() -> list[Outcome]:
    """The papers' figures, computed again from their inputs; a row that does not agree says so.

    What the 0.31 % are of is our reading: the ports that shadows need, of a network's with five for each GPU. Shadows
    and ports that cost this share of everything pay from 8.9·10⁻⁷ failures per GPU-hour on; 1.1·10⁻⁷ takes a share of
    0.11 %.
    """
    run = llama3_405b()
    interval = run.best_interval_s()
    wasted = run.gpu_hours * run.wasted_conventional()
    wasted_each = run.gpu_hours * run.wasted_per_iteration()
    saved = repeated_work_saved(15.3)
    share = 1e-6 / run.failures_per_gpu_hour
    return [
        _row("checkpoint, 405·10⁹ at 6 bytes", "2.43 TB", f"{run.checkpoint_bytes / 1e12:.2f} TB"),
        _row("ω at 2 TB/s", "1.2 s", f"{run.stall_s:.1f} s"),
        _row("mean time between failures", "11,100 s", f"{round(run.mtbf_s, -2):,.0f} s"),
        # The paper goes on with its rounded values, 1.2 s and 11,100 s.
        _row("best interval, √(2·1.2·11,100)", "163 s", f"{(2 * 1.2 * 11_100) ** 0.5:.0f} s"),
        _row("the same in iterations of 4.58 s", "36", f"{interval / run.iteration_s:.0f}"),
        Outcome("GPU-hours wasted at that interval", "> 300,000", f"{wasted:,.0f}", wasted > 300_000),
        _row("with a checkpoint every iteration", "4,367", f"{wasted_each:,.0f}"),
        _row("switch ports for shadows", "256", f"{run.shadow_ports}"),
        _row("those of five for each GPU in the network", "0.31 %", f"{100 * run.shadow_port_share:.2f} %"),
        _row("repeated work saved by 15.3 times the checkpoints", "91.5 %", f"{100 * saved:.1f} %"),
        _row("10⁻⁶ failures per GPU-hour, of Meta's rate", "0.5 %", f"{100 * share:.0f} %"),
        _row("break-even per GPU-hour at 0.31 % of the cost", "1.1e-07", f"{break_even_rate(run):.1e}"),
        _row("the same at 0.11 % of the cost", "1.1e-07", f"{break_even_rate(run, 0.0011):.1e}"),
    ]


def figures(cluster: Cluster, overlap: Overlap | None) -> dict[str, float]:
    """The model's answers for one cluster, by name with unit."""
    best = cluster.best_interval_s()
    wasted = cluster.wasted_conventional()
    answers = {
        "checkpoint_tb": cluster.checkpoint_bytes / 1e12,
        "stall_s": cluster.stall_s,
        "mtbf_s": cluster.mtbf_s,
        "failures": cluster.failures,
        "young_interval_s": best,
        "daly_interval_s": daly_interval(cluster.stall_s, cluster.mtbf_s),
        "best_interval_iterations": best / cluster.iteration_s,
        "wasted_conventional_gpu_hours": cluster.gpu_hours * wasted,
        "wasted_conventional_percent": 100 * wasted,
        "wasted_per_iteration_gpu_hours": cluster.gpu_hours * cluster.wasted_per_iteration(),
        "wasted_per_iteration_percent": 100 * cluster.wasted_per_iteration(),
        "shadow_ports": cluster.shadow_ports,
        "shadow_cost_percent": 100 * cluster.shadow_share,
        "break_even_failures_per_gpu_hour": break_even_rate(cluster),
    }
    if overlap:
        iterations = overlap.interval(cluster.iteration_s)
        interval_s = iterations * cluster.iteration_s
        # The newest durable checkpoint began a write's time ago: as much more is lost with each failure.
        lost = wasted_fraction(interval_s, 0, cluster.mtbf_s, overlap.write_s) + 1 - 1 / overlap.slowdown
        answers |= {
            "overlapped_interval_iterations": iterations,
            "wasted_overlapped_gpu_hours_at_most": cluster.gpu_hours * lost,
            "wasted_overlapped_percent_at_most": 100 * lost,
        }
    return answers


def as_dict(cluster: Cluster, overlap: Overlap | None, outcomes: list[Outcome]) -> dict[str, Any]:
    """All of it for JSON: the inputs, the answers, the papers' figures."""
    return {
        "cluster": asdict(cluster),
        "overlap": asdict(overlap) if overlap else None,
        "figures": figures(cluster, overlap),
        "published": [asdict(outcome) for outcome in outcomes],
    }


def figures_table(cluster: Cluster, overlap: Overlap | None) -> Table:
    """Two columns: name with unit, value."""
    table = Table("figure", title=f"{cluster.gpus:,} GPUs for {cluster.hours:,.0f} hours", title_justify="left")
    table.add_column("value", justify="right")
    for name, value in figures(cluster, overlap).items():
        table.add_row(name.replace("_", " "), f"{value:,.0f}" if value >= 1000 else f"{value:.4g}")
    return table


def outcomes_table(outcomes: list[Outcome]) -> Table:
    """The papers' figures beside the model's."""
    table = Table("figure", title="What the papers state, from their inputs", title_justify="left")
    for heading in ("published", "computed"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for outcome in outcomes:
        table.add_row(outcome.what, outcome.published, outcome.computed, "" if outcome.agrees else "differs")
    return table


def draw(path: Path, cluster: Cluster) -> None:
    """Two plots: what is wasted by interval, and by failure rate. CheckmateError where matplotlib or the path fails."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - only plots need it
    except ImportError:
        raise CheckmateError("--plot needs matplotlib; install it: pip install matplotlib") from None
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_intervals(left, cluster)
    _draw_rates(right, cluster)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise CheckmateError(f"--plot {path}: {error}") from None


def _draw_intervals(axes: "Axes", cluster: Cluster) -> None:
    best = cluster.best_interval_s()
    intervals = _logspace(best / 30, best * 30)
    wasted = [100 * cluster.wasted_conventional(interval) for interval in intervals]
    axes.loglog(intervals, wasted, label="checkpoints that stop training")
    axes.axvline(best, color="grey", linestyle=":", label=f"√(2ωM) = {best:.0f} s")
    axes.axhline(100 * cluster.wasted_per_iteration(), color="C1", label="every iteration, no stop")
    axes.set(xlabel="seconds between checkpoints", ylabel="% of GPU-hours wasted")
    axes.legend()


def _draw_rates(axes: "Axes", cluster: Cluster) -> None:
    rates = _logspace(*RATES)

    def wasted(of: Callable[[Cluster], float]) -> list[float]:
        return [100 * of(Cluster(**(asdict(cluster) | {"failures_per_gpu_hour": rate}))) for rate in rates]

    axes.loglog(rates, wasted(lambda run: run.wasted_conventional()), label="best conventional interval")
    axes.loglog(rates, wasted(lambda run: run.wasted_per_iteration()), label="every iteration, no stop")
    shadows = wasted(lambda run: run.wasted_per_iteration() + run.shadow_share)
    axes.loglog(rates, shadows, label="the same, with the cost of shadows")
    axes.axvline(cluster.failures_per_gpu_hour, color="grey", linestyle=":", label="this cluster")
    axes.set(xlabel="failures per GPU-hour", ylabel="% of GPU-hours wasted")
    axes.legend()


def _logspace(start: float, stop: float) -> list[float]:
    return [start * (stop / start) ** (index / (POINTS - 1)) for index in range(POINTS)]


def _row(what: str, stated: str, computed: str) -> Outcome:
    return Outcome(what, stated, computed, stated == computed)
