"""The benchmarks of persistence run, small; all ways of saving bring back what they saved."""

import json
import os
import subprocess
import sys
import time
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

import pytest

from checkmate.config import CheckmateError

FOLDER = Path(__file__).parents[2] / "benchmarks"
SMALL = ["--params=300000", "--batch=1"]


def output(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def figures(script: str, *options: str) -> Any:
    """The object that a benchmark prints as its last line."""
    return json.loads(output(str(FOLDER / script), *options, "--json").splitlines()[-1])


def test_recovery_is_exact_for_every_way(tmp_path: Path) -> None:
    """The command compares each state with the model's, bit for bit."""
    plot = tmp_path / "plot.png"
    measured = figures("persist_recovery.py", *SMALL, "--repetitions=2", f"--storage={tmp_path}", f"--plot={plot}")
    assert {one["kind"] for one in measured["measured"]} == {
        *("PCcheck", "CheckFreq", "GPM", "Gemini", "torch async", "DCP async_save", "torch.save")
    }
    assert all(min(one["loads"]) > 0 for one in measured["measured"])
    assert plot.stat().st_size > 0


def test_goodput_really_and_by_the_model(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trace.write_text("# three drops, of which the last is outside\n0,4\n10,5\n20,3\n30,4\n40,3\n90,1\n")
    options = [f"--trace={trace}", "--hours=0.02", "--seconds=8", "--intervals=5,0", "--kinds=PCcheck,GPM"]
    measured = figures("persist_goodput.py", *SMALL, *options, f"--storage={tmp_path}")["measured"]
    assert [one["kind"] for one in measured] == ["PCcheck", "GPM", "PCcheck"]  # GPM has no rule for its interval
    assert measured[2]["interval"] >= 1
    for one in measured[:2]:
        assert one["failures"] == 2
        assert one["goodput"] > 0
        assert one["goodput"] == pytest.approx(one["modelled"], rel=0.5)


def test_nonsense_is_refused(tmp_path: Path) -> None:
    sys.path.append(str(FOLDER))
    from common import amount, counts, folder, numbers  # noqa: PLC0415 - a folder of scripts

    assert (numbers(""), numbers("0,3"), counts("1,4"), amount("0.5"), folder(str(tmp_path))) == (
        *((), (0, 3), (1, 4), 0.5),
        str(tmp_path),
    )
    for parse, text in ((numbers, "-1"), (counts, "0"), (counts, ""), (amount, "0"), (amount, "nan"), (folder, "/no")):
        with pytest.raises(ArgumentTypeError, match=r"must be|is no folder"):
            parse(text)
    trace = tmp_path / "trace"
    trace.write_text("0,4\nsoon,3\n")
    command = [sys.executable, str(FOLDER / "persist_goodput.py"), f"--trace={trace}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2
    assert "trace:2: 'soon,3' is not of the form seconds,machines" in done.stderr


@pytest.mark.slow
def test_sustained_write(tmp_path: Path) -> None:
    small = ["--megabytes=4", "--chunk=1", "--checkpoints=2", "--repetitions=2", f"--folder={tmp_path}"]
    measured = figures("persist_write.py", *small)
    assert all(len(rates) == 2 and min(rates) > 0 for rates in measured["rates"].values())
    engine, plain = (measured["rates"][name] for name in ("engine", "plain"))
    quotients = [ours / theirs for ours, theirs in zip(engine, plain, strict=True)]
    assert measured["ratio"]["median"] == pytest.approx(sum(quotients) / 2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_slowdown(tmp_path: Path) -> None:
    options = ["--models=vision", "--intervals=1", "--repetitions=2", "--kinds=PCcheck,Gemini"]
    measured = figures("persist_slowdown.py", *SMALL, *options, f"--storage={tmp_path}")["measured"]
    assert set(measured[0]["seconds"]["1"]) == {"none", "PCcheck", "Gemini"}


@pytest.mark.slow
def test_time_and_knobs(tmp_path: Path) -> None:
    options = ["--repetitions=2", f"--storage={tmp_path}"]
    measured = figures("persist_time.py", "--sizes=4", "--kinds=GPM", *options)["measured"]
    assert set(measured[0]["seconds"]) == {"PCcheck", "GPM", "dd"}
    knobs = figures("persist_sensitivity.py", "--mib=4", "--saves=2", *options)["measured"]
    assert len(knobs) == 11
    assert all(min(one["mb_per_s"]) > 0 for one in knobs)


def test_the_trace_says_where_it_is_from_and_can_be_made_again() -> None:
    kept = (FOLDER / "traces/spot-64.csv").read_text()
    assert kept == output(str(FOLDER / "preemptions.py"))
    assert kept.startswith("# Made by")


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: limits the disk by a control group")
def test_a_limited_disk_is_slower_and_the_limit_goes_again(tmp_path: Path) -> None:
    sys.path.append(str(FOLDER))
    from disk import write_limit  # noqa: PLC0415 - a folder of scripts

    def seconds() -> float:
        start = time.monotonic()
        with (tmp_path / "data").open("wb") as file:
            file.write(bytes(8_000_000))
            file.flush()
            os.fsync(file.fileno())
        return time.monotonic() - start

    before = Path("/proc/self/cgroup").read_text()
    try:
        with write_limit(str(tmp_path), 8):
            limited = seconds()
    except CheckmateError as error:
        pytest.skip(str(error))
    assert limited > 0.7
    assert Path("/proc/self/cgroup").read_text() == before
