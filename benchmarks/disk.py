"""A slower disk for this process and its children: Linux limits the bandwidth of a block device by control group.

It holds what a process itself brings to the device: direct I/O, and what ``fsync`` and ``msync`` write.
"""

import argparse
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from common import amount

from checkmate.config import CheckmateError

_MB = 1_000_000


AUTO = -1.0
"""Of ``--write-mbps``: as many as make a write as long as is asked for."""


def add_limit_options(parser: argparse.ArgumentParser) -> None:
    """``--write-mbps`` and ``--write-iterations``."""

    def rate(text: str) -> float:
        return AUTO if text == "auto" else 0.0 if text == "0" else amount(text)

    text = "limit the disk to this many MB/s of writes (root; 0: no limit; auto: a write takes --write-iterations)"
    parser.add_argument("--write-mbps", type=rate, default=0.0, help=text)
    parser.add_argument("--write-iterations", type=amount, default=10.0, help="that one checkpoint's write takes")


def mbps(wanted: float, nbytes: int, iteration_s: float, iterations: float) -> float:
    """The limit that was asked for; for AUTO the one with which ``nbytes`` are written in so many iterations."""
    return nbytes / _MB / (iterations * iteration_s) if wanted == AUTO else wanted


@contextmanager
def write_limit(folder: str, rate: float) -> Iterator[None]:
    """While open, this process and its new children write at most ``rate`` MB/s to the device of ``folder``; 0: any.

    Raises CheckmateError without root, without the control group, or when ``folder`` is on no block device.
    """
    if not rate:
        yield
        return
    device = _device(folder)
    root, knob, rule = _controller()
    group, home = root / f"ckmbench{os.getpid()}", _home(root)
    with ExitStack() as stack:
        try:
            group.mkdir()
            stack.callback(group.rmdir)
            (group / knob).write_text(rule.format(device=device, rate=int(rate * _MB)))
        except OSError as error:
            raise CheckmateError(f"--write-mbps: {group}: {error.strerror}; it needs root, or leave it out") from None
        stack.callback(_move_all, group, home)
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield


def _move_all(group: Path, home: Path) -> None:
    for process in (group / "cgroup.procs").read_text().split():
        (home / "cgroup.procs").write_text(process)


def _device(folder: str) -> str:
    """major:minor of the whole disk: partitions have no limits of their own."""
    number = Path(folder).stat().st_dev
    place = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not place.exists():
        raise CheckmateError(f"--write-mbps: {folder} is on no block device; name another with --storage")
    disk = place.resolve().parent if (place / "partition").exists() else place
    return (disk / "dev").read_text().strip()


def _controller() -> tuple[Path, str, str]:
    """Where groups are made, the file that takes a limit, and its form: of version 2 of control groups, else of 1."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, options = line.split()[:4]
        root = Path(place)
        if kind == "cgroup2" and "io" in (root / "cgroup.subtree_control").read_text().split():
            return root, "io.max", "{device} wbps={rate}"
        if kind == "cgroup" and "blkio" in options.split(","):
            return root, "blkio.throttle.write_bps_device", "{device} {rate}"
    raise CheckmateError("--write-mbps: no control group limits I/O on this machine; leave it out")


def _home(root: Path) -> Path:
    """The group that this process is in."""
    version1 = root.name == "blkio"
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if ("blkio" in controllers.split(",")) if version1 else not controllers:
            return root / path.lstrip("/")
    return root
