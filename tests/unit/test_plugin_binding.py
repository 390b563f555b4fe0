"""The Python side of the plugin's library: buckets, counters, parameters, and the loader's errors."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from checkmate.config import DSCP_TAG, CheckmateError
from checkmate.native import library
from checkmate.nccl_plugin.binding import NET_PLUGIN, Plugin, plugin_path
from checkmate.nccl_plugin.bpf.loader import MAP_NAME, CounterProgram


def test_buckets_and_counters() -> None:
    plugin = Plugin()
    plugin.register_bucket(0x1000, 4096, 0)
    plugin.register_bucket(0x1000, 8192, 0)
    plugin.set_iteration(7)
    plugin.set_incarnation(1)
    with pytest.raises(CheckmateError, match="bucket 3"):
        plugin.register_bucket(0, 4096, 3)
    plugin.unregister_buckets()
    plugin.set_incarnation(0)
    counters = plugin.counters()
    assert counters.tagged_frames == counters.tagged_bytes == 0
    assert counters.untagged == {}


def test_bucket_limit_names_the_bucket() -> None:
    plugin = Plugin()
    for bucket in range(4096):
        plugin.register_bucket(0x1000 + bucket, 4, bucket)
    with pytest.raises(CheckmateError, match="bucket 4096"):
        plugin.register_bucket(0x100, 4, 4096)
    plugin.unregister_buckets()


def test_path_is_the_one_that_nccl_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NET_PLUGIN, "/opt/libother.so")
    assert plugin_path() == Path("/opt/libother.so")
    monkeypatch.setenv(NET_PLUGIN, "ib")
    assert plugin_path() == library("libcheckmate_net.so")
    with pytest.raises(CheckmateError, match=r"/opt/libother\.so"):
        Plugin(Path("/opt/libother.so"))


def test_parameters_and_readme_agree() -> None:
    parameters = {parameter.name: parameter for parameter in Plugin().parameters()}
    assert int(parameters["CHECKMATE_DSCP"].default, 0) == DSCP_TAG
    printed = subprocess.run(
        [sys.executable, "-P", "-m", "checkmate.nccl_plugin.binding", "--params"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert len(printed.splitlines()) == 2 + len(parameters)
    readme = (Path(__file__).parents[2] / "nccl_plugin/README.md").read_text(encoding="utf-8")
    assert printed in readme, "paste the output of `python -m checkmate.nccl_plugin.binding --params` there"


def test_loader_refuses_a_directory_on_another_file_system(tmp_path: Path) -> None:
    with pytest.raises(CheckmateError, match="not on a BPF file system"):
        CounterProgram.load(tmp_path)
    with pytest.raises(CheckmateError, match="not a directory"):
        CounterProgram.load(tmp_path / "missing")


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: BPF")
def test_loader_leaves_nothing(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "bpf", "ckmplug", tmp_path], check=True)
    try:
        with pytest.raises(CheckmateError, match="cgroup"):
            CounterProgram.load(tmp_path, cgroup=tmp_path / "missing")
        with pytest.raises(CheckmateError, match="cannot attach"):
            CounterProgram.load(tmp_path, cgroup=tmp_path)
        assert not (tmp_path / MAP_NAME).exists()
        with CounterProgram.load(tmp_path) as program:
            assert program.map_path.exists()
            program.close()
        with CounterProgram.load(tmp_path) as first, CounterProgram.load(tmp_path):  # as after a killed owner
            assert first.map_path.exists()
        assert not (tmp_path / MAP_NAME).exists()
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)
