"""The switch under test."""

import os
from collections.abc import Iterator

import pytest
from ptf.target import SwitchUnderTest, ebpf_switch


@pytest.fixture(scope="module")
def running_switch() -> Iterator[SwitchUnderTest]:
    if os.geteuid() != 0:
        pytest.skip("needs root for namespaces, BPF and raw sockets")
    with ebpf_switch() as running:
        yield running
