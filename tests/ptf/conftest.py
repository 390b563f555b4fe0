"""The switch under test, and the file systems that the counter program needs."""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from ptf.target import SWITCHES, SwitchUnderTest, missing

MARKS = {"bmv2": pytest.mark.bmv2}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=MARKS.get(name, ())) for name in SWITCHES if not missing(name)],
)
def running_switch(request: pytest.FixtureRequest) -> Iterator[SwitchUnderTest]:
    """Each target in turn that can run here; test_targets says which can't."""
    yield from _running(request.param)


@pytest.fixture(scope="module")
def ebpf() -> Iterator[SwitchUnderTest]:
    """The eBPF switch, for what only a switch in the kernel sees."""
    yield from _running("ebpf")


def _running(target: str) -> Iterator[SwitchUnderTest]:
    if os.geteuid() != 0:
        pytest.skip("needs root for namespaces, BPF and raw sockets")
    with SWITCHES[target]() as running:
        yield running


@pytest.fixture(scope="module")
def bpffs() -> Iterator[Path]:
    """A BPF file system of these tests alone; cgroup v2 is mounted beside it, since not every machine has it."""
    folder = Path(tempfile.mkdtemp(prefix="ckmmounts"))
    folder.chmod(0o711)  # a sender without privilege must reach the map
    with ExitStack() as stack:
        stack.callback(folder.rmdir)
        for kind in ("bpf", "cgroup2"):
            point = folder / kind
            point.mkdir()
            stack.callback(point.rmdir)
            subprocess.run(["mount", "-t", kind, "ckmtest", point], check=True)
            stack.callback(subprocess.run, ["umount", "-l", point], check=True)
        yield folder / "bpf"
