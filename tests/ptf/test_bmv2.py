"""BMv2 as a process: it starts, is watched, and always ends; its interfaces are left as they were."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from ptf.wire import Rack, rack
from support.training import soon

from checkmate.config import CheckmateError
from checkmate.p4.ebpf.netdev import Namespace, enabled_offloads
from checkmate.p4.v1model import bmv2

PORTS = range(1, 3)
OFFLOADS = ("tx", "rx", "tso", "gso", "gro")
GONE_S = 30.0


@pytest.fixture
def built() -> Iterator[Rack]:
    """Two ports; asked for by all tests that run BMv2."""
    if os.geteuid() != 0:
        pytest.skip("needs root: namespaces and raw sockets")
    if shutil.which(bmv2.BINARY) is None:
        pytest.skip(f"{bmv2.BINARY} is not on PATH")
    with rack(PORTS, frozenset(), "bmv2") as made:
        yield made


def offloads(built: Rack) -> list[list[str]]:
    with closing(Namespace(built.switch_netns)) as namespace, namespace.entered():
        return [enabled_offloads(name, OFFLOADS) for name in built.interfaces.values()]


def alive(pid: int) -> bool:
    return Path("/proc", str(pid)).exists()


def test_without_it_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with (
        pytest.raises(CheckmateError, match=r"simple_switch_grpc is not on PATH.*p4lang-bmv2"),
        bmv2.Bmv2({}, "unix:x"),
    ):
        pass


def test_the_demo_says_so_before_it_makes_anything() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "checkmate", "demo", "--switch", "bmv2"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "PATH": "/nowhere"},
    )
    assert done.returncode == 2
    assert "simple_switch_grpc is not on PATH" in done.stderr
    assert "creates namespaces" not in done.stdout


@pytest.mark.root
@pytest.mark.bmv2
def test_it_ends_and_offloads_come_back(built: Rack, tmp_path: Path) -> None:
    before = offloads(built)
    assert all(before), "nothing to put back"
    with bmv2.Bmv2(built.interfaces, f"unix:{tmp_path}/p4", 1, built.switch_netns) as switch:
        assert offloads(built) == [[]] * len(PORTS)
        assert alive(switch.pid)
        switch.check()
    assert offloads(built) == before
    assert not alive(switch.pid)


@pytest.mark.root
@pytest.mark.bmv2
def test_offloads_that_were_off_stay_off(built: Rack, tmp_path: Path) -> None:
    """As those that a killed one has left."""
    off = [word for offload in OFFLOADS for word in (offload, "off")]
    with closing(Namespace(built.switch_netns)) as namespace, namespace.entered():
        for name in built.interfaces.values():
            subprocess.run(["ethtool", "-K", name, *off], check=True)
    with bmv2.Bmv2(built.interfaces, f"unix:{tmp_path}/p4", 1, built.switch_netns):
        pass
    assert offloads(built) == [[]] * len(PORTS)


@pytest.mark.root
@pytest.mark.bmv2
def test_it_listens_where_it_is_told_alone(built: Rack) -> None:
    with closing(Namespace(built.switch_netns)) as namespace, namespace.entered():
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with bmv2.Bmv2(built.interfaces, "127.0.0.1:9559", 1, built.switch_netns) as switch:
        sockets = Path(f"/proc/{switch.pid}/net/tcp").read_text() + Path(f"/proc/{switch.pid}/net/tcp6").read_text()
        listening = [line.split()[1] for line in sockets.splitlines() if " 0A " in line]
        assert [address.endswith("0100007F:2557") for address in listening] == [True], listening  # 127.0.0.1:9559


@pytest.mark.root
@pytest.mark.bmv2
def test_a_second_one_at_the_same_address_is_refused(built: Rack, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/p4"
    with bmv2.Bmv2(built.interfaces, address, 1, built.switch_netns) as switch:
        with pytest.raises(CheckmateError, match="something listens on"):
            bmv2.Bmv2({}, address).__enter__()
        switch.check()


@pytest.mark.root
@pytest.mark.bmv2
def test_an_interface_that_is_not_there_is_named(built: Rack, tmp_path: Path) -> None:
    before = offloads(built)
    ports = {**built.interfaces, 9: "nothing9"}
    with (
        pytest.raises(CheckmateError, match="nothing9"),
        bmv2.Bmv2(ports, f"unix:{tmp_path}/p4", 1, built.switch_netns),
    ):
        pass
    assert offloads(built) == before


@pytest.mark.root
@pytest.mark.bmv2
def test_its_death_is_noticed(built: Rack, tmp_path: Path) -> None:
    with bmv2.Bmv2(built.interfaces, f"unix:{tmp_path}/p4", 1, built.switch_netns) as switch:
        os.kill(switch.pid, signal.SIGKILL)

        def is_noticed() -> bool:
            try:
                switch.check()
            except CheckmateError as error:
                assert "ended with status -9" in str(error)
                return True
            return False

        soon(is_noticed, "the error", GONE_S)


@pytest.mark.root
@pytest.mark.bmv2
def test_it_dies_with_its_owner(built: Rack, tmp_path: Path) -> None:
    script = (
        "import sys, time\nfrom checkmate.p4.v1model.bmv2 import Bmv2\n"
        f"with Bmv2({dict(built.interfaces)}, 'unix:{tmp_path}/p4', 1, {built.switch_netns!r}) as switch:\n"
        "    print(switch.pid, flush=True)\n    time.sleep(60)\n"
    )
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    owner = subprocess.Popen([sys.executable, "-P", "-c", script], stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert alive(pid)
    finally:
        owner.kill()
        owner.communicate()
    soon(lambda: not alive(pid), "its end", GONE_S)
