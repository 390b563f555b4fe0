"""What checkpoints cost: time lost to saving, work lost to failures, and the interval that loses least.

Three models meet here. Young (CACM 17(9), 1974) and Daly (FGCS 22(3), 2006): a job that stops for ω seconds every T
seconds and fails every M seconds loses the fraction ω/T + T/2M of its time, least at T = √(2ωM). Checkmate (NSDI
2026): every iteration is a checkpoint and nothing stops, so that half an iteration is lost for each failure, against
the price of shadows and switch ports. PCcheck (ASPLOS 2025): N checkpoints of duration T_w overlap with training, so
that one may start every f ≥ T_w/(N·q·t) iterations. Times are seconds unless a name says hours; a fraction is of all
GPU-hours of the run.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from checkmate.config import CheckmateError

SWITCH_TIERS_PORTS = 5
"""Ports of a three-tier fat tree for each host: two at the leaf, two at the aggregation, one at the core."""


@dataclass(frozen=True)
class Cluster:
    """A training run and the machines it has.

    ``failures_per_gpu_hour``: interruptions of the job for each GPU and hour. ``storage_bytes_per_s``: of all nodes
    together. ``shards``: parts that the state is cut into (by tensor and pipeline parallelism), each the data-parallel
    group of a shadow with two ports. ``shadow_share``: what shadows and ports cost, as a fraction of the whole.
    """

    params: float
    bytes_per_param: float
    gpus: int
    hours: float
    failures_per_gpu_hour: float
    storage_bytes_per_s: float
    iteration_s: float
    shards: int
    shadow_share: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "shadow_share":
                _require(name, value, math.isfinite(value) and value > 0, "a number greater than 0")
        _require("shadow_share", self.shadow_share, 0 <= self.shadow_share < 1, "a fraction, 0 to less than 1")
        if not all(map(math.isfinite, (self.gpu_hours, self.checkpoint_bytes, self.stall_s, self.mtbf_s))):
            raise CheckmateError(f"{self}: no cluster is that large; the numbers overflow")

    @property
    def gpu_hours(self) -> float:
        """Of the whole run."""
        return self.gpus * self.hours

    @property
    def checkpoint_bytes(self) -> float:
        """Size of one checkpoint of the whole model."""
        return self.params * self.bytes_per_param

    @property
    def stall_s(self) -> float:
        """ω: how long training stands still for a checkpoint that nothing overlaps with."""
        return self.checkpoint_bytes / self.storage_bytes_per_s

    @property
    def mtbf_s(self) -> float:
        """M: mean time between failures of the job."""
        return 3600.0 / (self.failures_per_gpu_hour * self.gpus)

    @property
    def failures(self) -> float:
        """Expected in the run."""
        return self.failures_per_gpu_hour * self.gpu_hours

    @property
    def shadow_ports(self) -> int:
        """Switch ports of the shadows: both boundary ranks of each group send to one of their own."""
        return 2 * self.shards

    @property
    def shadow_port_share(self) -> float:
        """Of the ports of a non-blocking three-tier network with one link for each GPU."""
        return self.shadow_ports / (SWITCH_TIERS_PORTS * self.gpus)

    def best_interval_s(self) -> float:
        """The conventional interval that loses least (Young)."""
        return young_interval(self.stall_s, self.mtbf_s)

    def wasted_conventional(self, interval_s: float | None = None) -> float:
        """Fraction wasted by checkpoints that stop training; at the best interval unless one is given."""
        return wasted_fraction(interval_s or self.best_interval_s(), self.stall_s, self.mtbf_s)

    def wasted_per_iteration(self) -> float:
        """Fraction wasted when each iteration is a checkpoint at no cost to it: half an iteration for each failure."""
        return self.iteration_s / (2 * self.mtbf_s)


def llama3_405b() -> Cluster:
    """The run that Checkmate's introduction takes its figures from (The Llama 3 Herd of Models, section 3.3).

    54 days on 16,384 GPUs with 419 unexpected interruptions; 128 groups of 128 ranks; 2 TB/s of storage; 6 bytes for
    each parameter, iterations of 4.58 s.
    """
    gpus, hours = 16_384, 54 * 24.0
    return Cluster(
        params=405e9,
        bytes_per_param=6,
        gpus=gpus,
        hours=hours,
        failures_per_gpu_hour=419 / (gpus * hours),
        storage_bytes_per_s=2e12,
        iteration_s=4.58,
        shards=128,
        shadow_share=256 / (SWITCH_TIERS_PORTS * gpus),
    )


def young_interval(stall_s: float, mtbf_s: float) -> float:
    """Time between checkpoints that wastes least, to first order: √(2ωM) (Young 1974)."""
    return math.sqrt(2 * stall_s * mtbf_s)


def daly_interval(stall_s: float, mtbf_s: float) -> float:
    """Computing time between checkpoints that wastes least, to higher order (Daly 2006, equation 37)."""
    if stall_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = stall_s / (2 * mtbf_s)
    return young_interval(stall_s, mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_s


def wasted_fraction(interval_s: float, stall_s: float, mtbf_s: float, recovery_s: float = 0.0) -> float:
    """Fraction of time lost to stops and to work done again, for stops of ω every T: ω/T + (T/2 + R)/M."""
    return stall_s / interval_s + (interval_s / 2 + recovery_s) / mtbf_s


def break_even_rate(cluster: Cluster, share: float | None = None) -> float:
    """Failures per GPU-hour at which the hardware for per-iteration checkpoints pays for itself.

    That is where a conventional run's best interval wastes as much more as the hardware costs: ``share`` of the whole,
    ``cluster.shadow_share`` by default. With r the root of the job's failures per second, √(2ω)·r = share + t/2·r².
    Raises CheckmateError when it never pays.
    """
    share = cluster.shadow_share if share is None else share
    linear, square = math.sqrt(2 * cluster.stall_s), cluster.iteration_s / 2
    discriminant = linear**2 - 4 * square * share
    if discriminant < 0:
        raise CheckmateError(f"shadow_share is {share:g}: at no failure rate do checkpoints cost that much")
    # The smaller root, in the form that loses no digits: the two terms of the usual one are nearly equal.
    root = 2 * share / (linear + math.sqrt(discriminant))
    return root**2 * 3600.0 / cluster.gpus


def repeated_work_saved(times_as_often: float) -> float:
    """By what fraction work repeated after a failure shrinks when checkpoints are taken this many times as often."""
    return 1 - 1 / times_as_often


def min_interval(write_s: float, in_flight: int, slowdown: float, iteration_s: float) -> int:
    """Iterations between checkpoints that N of them in flight can follow: f ≥ T_w/(N·q·t) (PCcheck).

    ``write_s``: T_w, from start to durable, the worst seen, with N in flight. ``slowdown``: q, the factor that an
    iteration may take longer, 1.05 for 5 %. ``iteration_s``: t, without checkpoints. At least 1. Raises
    CheckmateError for values that make no sense.
    """
    _require("N", in_flight, in_flight >= 1, "a whole number of at least 1")
    _require("q", slowdown, math.isfinite(slowdown) and slowdown >= 1, "a factor of at least 1, such as 1.05")
    _require("t", iteration_s, math.isfinite(iteration_s) and iteration_s > 0, "more than 0 seconds")
    _require("T_w", write_s, math.isfinite(write_s) and write_s >= 0, "0 seconds or more")
    return max(1, math.ceil(write_s / (in_flight * slowdown * iteration_s)))


def worst_rework(interval: int, write_s: float, in_flight: int, iteration_s: float) -> float:
    """Seconds of training that a failure undoes at most with N checkpoints in flight (PCcheck).

    Those since the last checkpoint started, and those of checkpoints that were still being written: the newest
    durable one was started T_w ago at most, and at most N were in flight.
    """
    return iteration_s * (interval + min(in_flight * interval, math.ceil(write_s / iteration_s)))


def goodput(
    failures_s: Sequence[float], duration_s: float, iteration_s: float, interval: int, lag_s: float, restart_s: float
) -> float:
    """Useful iterations a second of a run with failures at these times (increasing, from the start of the run).

    ``iteration_s``: of an iteration with all that checkpoints cost. Each failure costs ``restart_s`` and the work since
    the newest durable checkpoint: one is started every ``interval`` iterations and durable ``lag_s`` later. A failure
    during a restart starts it anew.
    """
    useful = 0  # iterations that the newest durable checkpoint holds
    resumed = 0.0
    for failure in [*failures_s, duration_s]:
        lived = min(failure, duration_s) - resumed
        if failure >= duration_s:
            return (useful + max(0, math.floor(lived / iteration_s))) / duration_s
        durable = max(0.0, lived - lag_s)
        useful += math.floor(durable / (interval * iteration_s)) * interval
        resumed = failure + restart_s
    return useful / duration_s


def _require(name: str, value: float, holds: bool, allowed: str) -> None:
    if not holds:
        raise CheckmateError(f"{name} is {value:g}: it must be {allowed}")
