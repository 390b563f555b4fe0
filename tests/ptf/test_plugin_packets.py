"""On the wire: every payload packet of the tagged flow has the mark and the right option, nothing else has either."""

import contextlib
import functools
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from support import link
from support.link import DSCP_TAG, Capture, Packet, Rack, stream

from checkmate.crc32c import crc32c
from checkmate.native import library
from checkmate.nccl_plugin.bpf.loader import CounterProgram
from checkmate.wire import HEADER_BYTES

PLUGIN = Path(__file__).parents[2] / "nccl_plugin"
MESSAGES, BYTES = 40, 256 << 10

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: namespaces, BPF, packet sockets"),
]


def length_of(message: int) -> int:
    """As in traffic.c."""
    return 0 if message % 7 == 3 else BYTES // 4096 * 4 if message % 11 == 6 else BYTES


def tagged_messages() -> list[int]:
    """The last rank of two tags the last two slices of every four."""
    return [message for message in range(MESSAGES) if message % 4 >= 2]


@pytest.fixture(scope="session")
def traffic() -> Path:
    """The program that is either end."""
    build = PLUGIN.parent / "build/nccl_plugin"
    subprocess.run(["make", "-C", PLUGIN, "-s", "traffic", f"BUILD={build}"], check=True)
    return build / "tests/traffic"


def transfer(rack: Rack, program: Path, counter_map: Path | None, profiler: bool = True) -> dict[str, str]:
    """Send all messages from one namespace to the other; what the sender printed."""
    environment = {**os.environ, "CHECKMATE_IFNAME": "=eth0", "CHECKMATE_COUNTER_MAP": str(counter_map or "")}
    start = functools.partial(subprocess.Popen, env=environment, stdout=subprocess.PIPE, text=True)
    sizes, lib = [str(MESSAGES), str(BYTES)], library("libcheckmate_net.so")
    with contextlib.ExitStack() as stack:
        receiver = stack.enter_context(start(rack.command(rack.receiver, program, lib, "recv", *sizes)))
        stack.callback(receiver.kill)
        assert receiver.stdout
        handle = receiver.stdout.readline().strip()
        command = rack.command(rack.sender, program, lib, "send", *sizes, handle, "1" if profiler else "0")
        sender = stack.enter_context(start(command))
        stack.callback(sender.kill)
        printed, _ = sender.communicate(timeout=60)
        received, _ = receiver.communicate(timeout=60)
        assert sender.returncode == receiver.returncode == 0
        assert f"received {MESSAGES}" in received
    return dict(line.split(" ", 1) for line in printed.splitlines())


def check_frames(data: bytes) -> None:
    """The stream holds the final chunks, in order, and nothing else."""
    at = 0
    for message in tagged_messages():
        header = data[at : at + HEADER_BYTES]
        assert header[:4] == b"CKMF"
        assert int.from_bytes(header[8:16], "little") == message
        assert int.from_bytes(header[56:60], "little") == message  # step
        length = int.from_bytes(header[60:64], "little")
        assert length == length_of(message)
        assert crc32c(header[:84]) == int.from_bytes(header[84:88], "little")
        payload = data[at + HEADER_BYTES : at + HEADER_BYTES + length]
        assert crc32c(payload) == int.from_bytes(header[80:84], "little")
        at += HEADER_BYTES + length
    assert at == len(data)


def check_packets(seen: list[Packet], mtu: int, offload: bool) -> None:
    """Mark and option on every payload packet of one flow, on no other; then what the flow carries."""
    marked = [packet for packet in seen if packet.source == link.SENDER and packet.dscp & DSCP_TAG]
    payload = [packet for packet in marked if packet.payload]
    assert len({packet.ports for packet in marked}) == 1
    assert all(packet.option is not None and packet.last for packet in payload)
    assert len({packet.option for packet in payload}) == 1
    assert sum(packet.option is not None for packet in seen) == len(payload)
    others = [packet for packet in seen if packet.ports not in (marked[0].ports, marked[0].ports[::-1])]
    assert sum(len(packet.payload) for packet in others) > BYTES
    assert not any(packet.dscp for packet in others)
    if not offload:
        assert max(len(packet.payload) for packet in payload) <= mtu - 20 - 20 - 8
    check_frames(stream(payload))


@pytest.mark.parametrize(
    ("mtu", "offload", "loss"),
    [(1500, True, 0), (1500, False, 0), (9000, True, 0), (9000, False, 0), (1500, False, 50), (9000, True, 50)],
)
def test_option_on_every_tagged_packet(traffic: Path, bpffs: Path, mtu: int, offload: bool, loss: int) -> None:
    with CounterProgram.load(bpffs) as program, link.rack(mtu, offload) as rack:
        if loss:
            rack.lose(one_in=loss)
        with Capture(rack.receiver) as capture:
            printed = transfer(rack, traffic, program.map_path)
    tagged = tagged_messages()
    assert int(printed["tagged_connections"]) == 1
    assert int(printed["tagged_frames"]) == len(tagged)
    assert int(printed["tagged_bytes"]) == sum(length_of(message) for message in tagged)
    assert "warning" not in printed
    seen = capture.packets()
    check_packets(seen, mtu, offload)
    if loss and not offload:  # a few thousand packets: some were certainly lost, and sent again
        assert len({(packet.ports, packet.seq) for packet in seen if packet.payload}) < sum(
            bool(packet.payload) for packet in seen
        )


def assert_untagged(capture: Capture) -> None:
    seen = capture.packets()
    assert sum(len(packet.payload) for packet in seen) > MESSAGES * BYTES / 2
    assert not any(packet.payload and packet.dscp for packet in seen)
    assert not any(packet.option is not None for packet in seen)


def test_without_profiler_nothing_is_tagged(traffic: Path, bpffs: Path) -> None:
    with (
        CounterProgram.load(bpffs) as program,
        link.rack(1500, True) as rack,
        Capture(rack.receiver) as capture,
    ):
        printed = transfer(rack, traffic, program.map_path, profiler=False)
    assert_untagged(capture)
    assert int(printed["no_profiler"]) == MESSAGES
    assert "NCCL_PROFILER_PLUGIN" in printed["warning"]


def test_without_map_nothing_is_tagged(traffic: Path) -> None:
    with link.rack(1500, True) as rack, Capture(rack.receiver) as capture:
        printed = transfer(rack, traffic, None)
    assert_untagged(capture)
    assert int(printed["tagged_frames"]) == 0
    assert int(printed["no_option"]) == len(tagged_messages())


def test_program_that_is_gone_is_noticed(traffic: Path, bpffs: Path) -> None:
    """A pin that a killed owner left: no program arms the sockets, so that nothing may be tagged."""
    with CounterProgram.load(bpffs) as program:
        kept = bpffs / "left"
        os.link(program.map_path, kept)
    with link.rack(1500, True) as rack, Capture(rack.receiver) as capture:
        printed = transfer(rack, traffic, kept)
    assert_untagged(capture)
    assert int(printed["tagged_connections"]) == 0
    assert int(printed["no_option"]) == len(tagged_messages())


def test_two_programs_at_once(traffic: Path, bpffs: Path) -> None:
    """Two jobs on one machine do not disturb each other."""
    (bpffs / "other").mkdir()
    with (
        CounterProgram.load(bpffs) as mine,
        CounterProgram.load(bpffs / "other"),
        link.rack(1500, True) as rack,
        Capture(rack.receiver) as capture,
    ):
        printed = transfer(rack, traffic, mine.map_path)
    assert int(printed["tagged_connections"]) == 1
    check_packets(capture.packets(), 1500, True)


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv (util-linux)")
def test_training_needs_no_privilege(traffic: Path, bpffs: Path) -> None:
    """With permission to use the pinned map, a process without any capability tags."""
    with CounterProgram.load(bpffs) as program, link.rack(1500, True) as rack:
        bpffs.chmod(0o711)
        program.map_path.chmod(0o666)
        unprivileged = traffic.with_name("traffic-unprivileged")
        unprivileged.write_text(
            f'#!/bin/sh\nexec setpriv --reuid 65534 --regid 65534 --clear-groups --bounding-set -all {traffic} "$@"\n'
        )
        unprivileged.chmod(0o755)
        printed = transfer(rack, unprivileged, program.map_path)
    assert int(printed["tagged_frames"]) == len(tagged_messages())


def test_dead_host_is_an_error_within_the_timeout(traffic: Path) -> None:
    """The link goes dark, so that nothing is reset and nothing acknowledged: both ends notice."""
    environment = {**os.environ, "CHECKMATE_IFNAME": "=eth0", "CHECKMATE_TIMEOUT_MS": "2000"}
    start = functools.partial(
        subprocess.Popen, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    sizes, lib = ["1000000", str(BYTES)], library("libcheckmate_net.so")
    with link.rack(1500, True) as rack, contextlib.ExitStack() as stack:
        receiver = stack.enter_context(start(rack.command(rack.receiver, traffic, lib, "recv", *sizes)))
        stack.callback(receiver.kill)
        assert receiver.stdout
        handle = receiver.stdout.readline().strip()
        sender = stack.enter_context(start(rack.command(rack.sender, traffic, lib, "send", *sizes, handle, "0")))
        stack.callback(sender.kill)
        time.sleep(0.5)
        assert sender.poll() is receiver.poll() is None
        link.run("ip", "-n", rack.receiver, "link", "set", "eth0", "down")
        for process in (sender, receiver):
            _, error = process.communicate(timeout=15)
            assert "is 6, NCCL_SUCCESS is 0" in error  # a remote error
