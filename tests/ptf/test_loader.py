"""The eBPF switch comes and goes without trace, whatever was there before and however it ends."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from ptf.wire import Rack, rack

from checkmate import native
from checkmate.config import CheckmateError
from checkmate.p4.ebpf import libbpf, loader
from checkmate.p4.ebpf.datapath import DatapathFull, Registrar, Replica
from checkmate.p4.ebpf.libbpf import constants
from checkmate.p4.ebpf.loader import Switch, preflight
from checkmate.p4.ebpf.netdev import Namespace

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root for namespaces and BPF")]

TIMEOUT_S = 15.0


@pytest.fixture
def built() -> Iterator[Rack]:
    with rack(range(1, 3), frozenset(), "ldr") as made:
        yield made


def show(built: Rack, tool: str, *arguments: str) -> str:
    return subprocess.check_output([tool, "-n", built.switch_netns, *arguments], text=True)


def state(built: Rack) -> list[Any]:
    """All that the switch could leave behind on its interfaces."""
    links = json.loads(show(built, "ip", "-j", "-d", "link"))
    return [[(link["ifname"], link["promiscuity"]) for link in links], show(built, "tc", "qdisc"), filters(built)]


def filters(built: Rack) -> list[str]:
    return [
        show(built, "tc", "filter", "show", "dev", name, direction)
        for name in built.interfaces.values()
        for direction in ("ingress", "egress")
    ]


def programs(built: Rack) -> list[str]:
    """Names of the switch's programs on the interfaces, ingress and egress."""
    return [name for shown in filters(built) for name in re.findall(r"name (ckm_\w+)", shown)]


def test_nothing_is_left(built: Rack) -> None:
    before = state(built)
    with Switch(built.interfaces, built.switch_netns):
        assert programs(built) == ["ckm_ingress", "ckm_egress"] * 2
    assert state(built) == before


def test_nothing_is_left_after_an_error(built: Rack, monkeypatch: pytest.MonkeyPatch) -> None:
    before = state(built)
    with pytest.raises(ZeroDivisionError), Switch(built.interfaces, built.switch_netns):
        raise ZeroDivisionError
    assert state(built) == before
    attach = libbpf.Filter
    made: list[int] = []

    def fail_later(*arguments: Any) -> Any:
        made.append(1)
        if len(made) == 4:
            raise OSError("no")
        return attach(*arguments)

    monkeypatch.setattr(libbpf, "Filter", fail_later)
    with pytest.raises(OSError, match="no"):
        Switch(built.interfaces, built.switch_netns).__enter__()
    assert state(built) == before


def test_what_others_attached_stays(built: Rack) -> None:
    other = libbpf.Object(native.library("switch.bpf.o"))
    with contextlib.closing(Namespace(built.switch_netns)) as namespace, namespace.entered():
        index = socket.if_nametoindex(built.interfaces[1])
        libbpf.add_clsact(index)
        libbpf.Filter(index, libbpf.INGRESS, other.program("ckm_egress"), handle=1, priority=9)
    other.close()
    before = state(built)
    assert programs(built) == ["ckm_egress"]
    with Switch(built.interfaces, built.switch_netns):
        assert len(programs(built)) == 5
    assert state(built) == before


def test_an_interface_has_one_switch(built: Rack) -> None:
    with Switch(built.interfaces, built.switch_netns):
        with pytest.raises(CheckmateError, match="p2 already belongs to a running switch"):
            Switch({7: "p2"}, built.switch_netns).__enter__()
        assert len(programs(built)) == 4


def test_interfaces_that_vanish_do_not_hinder_the_end(built: Rack) -> None:
    with Switch(built.interfaces, built.switch_netns):
        subprocess.run(["ip", "-n", built.switch_netns, "link", "del", "p1"], check=True)
        subprocess.run(["ip", "netns", "del", built.switch_netns], check=True)


SERVE = """
import logging, sys
from checkmate.p4.ebpf.p4runtime_server import serve
assert "torch" not in sys.modules
logging.basicConfig(level="INFO")
serve({1: "p1", 2: "p2"}, sys.argv[1], 3, sys.argv[2])
"""


@contextlib.contextmanager
def serving(built: Rack) -> Iterator[subprocess.Popen[str]]:
    """A switch in a process of its own, once it listens."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, "-P", "-c", SERVE, address, built.switch_netns]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if "P4Runtime" in line:
                    break
            else:
                raise AssertionError("the switch ended at once")
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_switch_and_cleans_up(built: Rack, number: signal.Signals) -> None:
    before = state(built)
    with serving(built) as process:
        assert len(programs(built)) == 4
        process.send_signal(number)
        assert process.wait(TIMEOUT_S) == 0
    assert state(built) == before


def test_the_next_switch_replaces_one_that_was_killed(built: Rack) -> None:
    before = state(built)
    with serving(built) as process:
        process.send_signal(signal.SIGKILL)
        process.wait(TIMEOUT_S)
    assert len(programs(built)) == 4, "a killed switch goes on forwarding"
    end = time.monotonic() + TIMEOUT_S
    while state(built)[0] != before[0] and time.monotonic() < end:
        time.sleep(0.05)  # the kernel closes the sockets of a dead process in its own time
    with Switch(built.interfaces, built.switch_netns):
        assert len(programs(built)) == 4
    assert programs(built) == []


def test_offloads_towards_a_shadow_are_refused_with_the_command(built: Rack) -> None:
    advice = r"interface p2 .*run `ethtool -K p2 tx off`"
    with pytest.raises(CheckmateError, match=advice):
        preflight(["p1", "p2"], ["p2"], built.switch_netns)
    with Switch(built.interfaces, built.switch_netns) as switch:
        with pytest.raises(CheckmateError, match=advice):
            switch.set_shadow_port(2, Registrar(1, 2))
        command = ["ip", "netns", "exec", built.switch_netns, "ethtool", "-K", "p2", "tx", "off"]
        subprocess.run(command, check=True, capture_output=True)
        switch.set_shadow_port(2, Registrar(1, 2))
    preflight(["p1", "p2"], ["p2"], built.switch_netns)


def test_a_full_group(built: Rack) -> None:
    with Switch(built.interfaces, built.switch_netns) as switch:
        switch.set_group(1, (Replica(1, 0),) * 64)
        with pytest.raises(DatapathFull, match="64"):
            switch.set_group(1, (Replica(1, 0),) * 65)


def test_full_maps(built: Rack) -> None:
    with Switch(built.interfaces, built.switch_netns) as switch:
        for number in range(constants.CKM_GROUPS):
            switch.set_group(1 + number, ())
        with pytest.raises(DatapathFull):
            switch.set_group(1 + constants.CKM_GROUPS, ())
        for number in range(constants.CKM_HEARTBEATS):
            switch.set_heartbeat(1, number.to_bytes(6, "big"), 1)
        with pytest.raises(DatapathFull):
            switch.set_heartbeat(1, b"\1" * 6, 1)
        switch.set_heartbeat(1, bytes(6), None)
        switch.set_heartbeat(1, b"\1" * 6, 1)


def test_what_is_missing_is_named(built: Rack, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckmateError, match="no network interface nowhere"):
        preflight(["p1", "nowhere"], netns=built.switch_netns)
    with pytest.raises(CheckmateError, match="no network namespace ckm-none"):
        preflight(["p1"], netns="ckm-none")
    with pytest.raises(CheckmateError, match="given for two ports"):
        Switch({1: "p1", 2: "p1"})
    with pytest.raises(CheckmateError, match="512"):
        Switch({512: "p1"})
    monkeypatch.setattr(loader, "_effective_capabilities", lambda: 0)
    with pytest.raises(CheckmateError, match="CAP_BPF and CAP_NET_ADMIN"):
        preflight(["p1"], netns=built.switch_netns)
