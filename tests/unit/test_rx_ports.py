"""Receive ports: DPDK's af_packet driver on veths, each scenario of support/rx_ports.py in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from checkmate import native

_SCENARIOS = Path(__file__).parents[1] / "support/rx_ports.py"

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: namespaces, veths and packet sockets"),
    pytest.mark.skipif(
        not (Path(next(iter(native._lib.__path__))) / "libcheckmate_shadow.so").exists(), reason="built without DPDK"
    ),
]


def ip(*command: str) -> None:
    subprocess.run(["ip", *command], check=True, capture_output=True)


@pytest.fixture(params=[1500])
def link(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Arguments for a scenario: sender's and receiver's namespace, MTU; veths s0-r0 and s1-r1 between them."""
    mtu = str(request.param)
    sender, receiver = (f"ckmrx{os.getpid()}{end}" for end in "sr")
    with ExitStack() as stack:
        for netns in (sender, receiver):
            ip("netns", "add", netns)
            stack.callback(ip, "netns", "del", netns)
        for i in range(2):
            ip("link", "add", f"s{i}", "netns", sender, "type", "veth", "peer", "name", f"r{i}", "netns", receiver)
            for netns, end in ((sender, f"s{i}"), (receiver, f"r{i}")):
                ip("-n", netns, "link", "set", end, "mtu", mtu, "up")
        yield [sender, receiver, mtu]


def run(scenario: str, link: list[str]) -> None:
    command = [sys.executable, str(_SCENARIOS), scenario, *link]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("link", [1500, 9000], indirect=True)
def test_receives_exactly_and_again_after_reopening(link: list[str]) -> None:
    run("receive_exactly", link)


def test_idle_receiver_uses_less_than_two_percent_of_a_cpu(link: list[str]) -> None:
    run("use_little_cpu_when_idle", link)


def test_torch_threads_keep_their_affinity(link: list[str]) -> None:
    run("leave_torch_unpinned", link)


def test_drops_in_the_driver_are_seen_from_the_stream(link: list[str]) -> None:
    run("see_driver_drops", link)


def test_truncated_packets_are_counted(link: list[str]) -> None:
    run("count_truncated", link)


def test_interface_that_goes_down_is_reported(link: list[str]) -> None:
    run("report_port_failure", link)


def test_what_cannot_work_is_refused_with_what_to_do(link: list[str]) -> None:
    run("refuse_what_cannot_work", link)


def test_nothing_is_left_in_the_run_directory(link: list[str]) -> None:
    before = set(Path("/run").glob("dpdk/*"))
    run("receive_exactly", link)
    assert set(Path("/run").glob("dpdk/*")) == before
