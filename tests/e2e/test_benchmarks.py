"""Each benchmark command runs, in the smallest set-up that it allows, and prints figures that belong together."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.training import needs_root

FOLDER = Path(__file__).parents[2] / "benchmarks"

pytestmark = [*needs_root, pytest.mark.slow, pytest.mark.timeout(300)]


def test_nonsense_is_refused() -> None:
    command = [sys.executable, str(FOLDER / "ingest.py"), "--repetitions=0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "must be a whole number, 1 or more" in done.stderr


def figures(script: str, *options: str) -> Any:
    """The object that a benchmark prints as its last line."""
    command = [sys.executable, str(FOLDER / script), *options, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_all_reduce(tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    small = ["--ranks=2", "--sizes=1", "--repetitions=1", "--block-s=0.2"]
    measured = figures("allreduce.py", *small, f"--plot={plot}")
    row = measured["rows"][0]
    assert row["bytes"] == 1 << 20
    medians = {kind: spread["median"] for kind, spread in row["bandwidth"].items()}
    assert row["ratios"]["tagged/gloo"]["median"] == pytest.approx(medians["tagged"] / medians["gloo"])
    mirrored = measured["mirrored"]
    assert mirrored["tagged_bytes"] > 0
    assert mirrored["received_bytes"] == mirrored["tagged_bytes"] or mirrored["gaps"]
    assert plot.stat().st_size > 0


def test_training() -> None:
    small = ["--ranks=2", "--params=100000", "--steps=2", "--repetitions=2"]
    measured = figures("training.py", *small, "--kinds=none,checkmate")
    seconds = measured["measured"]["seconds"]
    assert len(seconds["none"]) == len(seconds["checkmate"]) == 2
    assert min(*seconds["none"], *seconds["checkmate"]) > 0
    assert measured["measured"]["committed"] >= 2 * 2


def test_ingest() -> None:
    measured = figures("ingest.py", "--megabytes=4", "--repetitions=1")
    assert [result["payload"] for result in measured["results"]] == [1448, 8948]
    for result in measured["results"]:
        assert result["ratio"] == pytest.approx(result["ingest_gbs"][0] / result["copy_gbs"][0])


def test_optimizer() -> None:
    measured = figures("optimizer.py", "--elements=200000", "--repetitions=3")
    assert measured["ratios"].keys() == {"flat", "parameters", "bf16 gradients", "bf16 masters"}
    assert all(0 < ratio["least"] <= ratio["median"] for ratio in measured["ratios"].values())


def test_hop(tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    small = ["--payloads=1448", "--repetitions=2", "--blocks=2", "--singles=20"]
    measured = figures("hop.py", *small, f"--plot={plot}")
    rows = {row["kind"]: row for row in measured["rows"]}
    assert {"direct", "ebpf", "ebpf mirrored"} <= rows.keys()
    assert ("bmv2 mirrored" in rows) is (shutil.which("simple_switch_grpc") is not None)
    assert all(row["rate"]["least"] > 0 and row["latency_us"]["least"] > 0 for row in rows.values())
    assert plot.stat().st_size > 0


def test_commit() -> None:
    measured = figures("commit.py", "--params=100000", "--ranks=2", "--steps=5")
    (row,) = measured["results"]
    assert len(row["wait_s"]) == len(row["step_s"]) == 2
    assert all(value > 0 for value in (*row["wait_s"], *row["step_s"]))


def test_restore() -> None:
    measured = figures("restore.py", "--megabytes=8", "--ranks=1,2", "--repetitions=2")
    kinds = {"one TCP stream", "one TCP stream, used memory", "memcpy", "restore, 1 rank", "restore, 2 ranks"}
    assert measured["rates"].keys() == kinds
    assert all(len(rates) == 2 and min(rates) > 0 for rates in measured["rates"].values())
    assert measured["against_stream"]["one TCP stream"]["median"] == 1
