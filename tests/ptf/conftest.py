"""The switch under test, and the file systems that the counter program needs."""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from ptf.target import SwitchUnderTest, ebpf_switch


@pytest.fixture(scope="module")
def running_switch() -> Iterator[SwitchUnderTest]:
    if os.geteuid() != 0:
        pytest.skip("needs root for namespaces, BPF and raw sockets")
    with ebpf_switch() as running:
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
