"""Receiver on real ports, as a program: EAL can be set up once in a process, so each scenario has its own.

``python rx_ports.py SCENARIO SENDER_NETNS RECEIVER_NETNS MTU``: veth pairs s0-r0 and s1-r1 join the namespaces.
"""

import ctypes
import os
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from checkmate.shadow.rx.receiver import Damage, Event, OpComplete, Receiver, RxConfig

sys.path.append(str(Path(__file__).parents[1]))
from checkmate.config import CheckmateError
from support.copies import AllReduce, Sender, gradients
from support.threads import thread_names

PATIENCE_S = 20
CLONE_NEWNET = 0x40000000
HEADERS = 40
OP = AllReduce(count=400_000, nchannels=2, elements_per_slice=16384)


class Link:
    """The sender's ends of both pairs."""

    def __init__(self, sender: str, receiver: str, mtu: int) -> None:
        self.sender_netns = sender
        self.receiver_netns = receiver
        self.mtu = mtu
        self.sockets: list[socket.socket] = []
        # Namespaces are per thread: sockets stay in the one that they were made in.
        thread = threading.Thread(target=self._open, args=(sender,))
        thread.start()
        thread.join()
        assert len(self.sockets) == 2

    def _open(self, netns: str) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        with Path("/run/netns", netns).open() as namespace:
            assert libc.setns(namespace.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        for i in range(2):
            raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
            raw.bind((f"s{i}", 0))
            self.sockets.append(raw)

    def config(self, **options: object) -> RxConfig:
        """Both ports; ``options`` as RxConfig's."""
        ports = tuple((f"r{i}", self.receiver_netns) for i in range(2))
        return RxConfig(**{"ifaces": ports, "mtu": self.mtu, "gap_timeout_s": 0.2} | options)  # type: ignore[arg-type]

    def send(self, sender: Sender, iteration: int) -> bytes:
        """First's flows on one port, last's on the other, as fast as it goes; the content."""
        content = gradients(OP, iteration)
        flows = sender.packets(OP, content, self.mtu - HEADERS, iteration=iteration)
        for (_, ring_pos), packets in flows.items():
            for data in packets:
                self.sockets[ring_pos > 0].send(data)
        return content

    def ip(self, *command: str) -> None:
        """An ip command in the receiver's namespace."""
        subprocess.run(["ip", "-n", self.receiver_netns, *command], check=True)


def collect(receiver: Receiver, done: Callable[[list[Event]], bool]) -> list[Event]:
    """Events until ``done`` says so."""
    events: list[Event] = []
    deadline = time.monotonic() + PATIENCE_S
    while not done(events):
        assert time.monotonic() < deadline, (events, receiver.counters())
        events += receiver.poll(0.2)
    return events


def completed(iteration: int) -> Callable[[list[Event]], bool]:
    return lambda events: any(isinstance(e, OpComplete) and e.iteration == iteration for e in events)


def receive_exactly(link: Link) -> None:
    """Twice in one process: ports can be opened again after they were closed."""
    namespace = Path("/proc/thread-self/ns/net").readlink()
    for _ in range(2):
        sender = Sender()
        with Receiver(link.config()) as receiver:
            assert Path("/proc/thread-self/ns/net").readlink() == namespace
            receiver.set_incarnation(1)
            for iteration in range(1, 4):
                content = link.send(sender, iteration)
                (event,) = collect(receiver, completed(iteration))
                assert isinstance(event, OpComplete)
                assert receiver.buffer(event) == content
                receiver.release(event)
            counters = receiver.counters()
            assert counters["gaps"] == counters["driver_drops"] == counters["truncated"] == 0, counters
            assert counters["payload_bytes"] == 3 * OP.nbytes


def use_little_cpu_when_idle(link: Link) -> None:
    with Receiver(link.config()) as receiver:
        link.send(Sender(), 1)
        time.sleep(0.5)
        before = resource.getrusage(resource.RUSAGE_SELF)
        begin = time.monotonic()
        assert receiver.poll(1.5) == []
        seconds = time.monotonic() - begin
        after = resource.getrusage(resource.RUSAGE_SELF)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        assert used < 0.02 * seconds, f"{used} s of CPU in {seconds} s"


def leave_torch_unpinned(link: Link) -> None:
    import torch  # noqa: PLC0415 - only this scenario pays for it

    allowed = os.sched_getaffinity(0)
    torch.set_num_threads(max(2, len(allowed)))
    torch.ones(1 << 20).add(1)
    before = {task.name for task in Path("/proc/self/task").iterdir()}
    with Receiver(link.config()):
        torch.ones(1 << 20).mul(2)
        inherited: list[set[int]] = []
        new = threading.Thread(target=lambda: inherited.append(os.sched_getaffinity(0)))
        new.start()
        affinities = {task: os.sched_getaffinity(int(task)) for task in before}
        assert all(affinity == allowed for affinity in affinities.values()), affinities
        new.join()
        assert inherited == [allowed]
        (receive,) = [thread for thread, name in thread_names().items() if name == "checkmate-rx"]
        assert os.sched_getaffinity(receive) == allowed


def see_driver_drops(link: Link) -> None:
    """A ring far too small: what it drops is seen from the stream, and later iterations are whole again."""
    sender = Sender()
    with Receiver(link.config(ring_frames=32)) as receiver:
        receiver.set_incarnation(1)
        iteration = 0
        while not receiver.counters()["driver_drops"]:
            iteration += 1
            assert iteration < 50
            link.send(sender, iteration)
            time.sleep(0.05)
        events = receiver.poll(0)
        for resumed in range(iteration + 1, iteration + 21):
            content = trickle(link, sender, receiver, resumed)
            events += receiver.poll(1)
            if completed(resumed)(events):
                break
        damages = [event for event in events if isinstance(event, Damage)]
        assert damages, receiver.counters()
        assert "lost" in damages[0].reason or "middle" in damages[0].reason
        assert any("receive ring dropped" in damage.where for damage in damages) or damages[0].iteration is None
        assert receiver.counters()["gaps"] > 0
        (whole,) = [event for event in events if isinstance(event, OpComplete) and event.iteration == resumed]
        assert receiver.buffer(whole) == content


def trickle(link: Link, sender: Sender, receiver: Receiver, iteration: int) -> bytes:
    """Sends no more at once than a small ring holds; the content. What is dropped all the same is not waited for."""
    content = gradients(OP, iteration)
    for (_, ring_pos), packets in sender.packets(OP, content, link.mtu - HEADERS, iteration=iteration).items():
        for begin in range(0, len(packets), 8):
            batch = packets[begin : begin + 8]
            wanted = receiver.counters()["packets"] + len(batch)
            for data in batch:
                link.sockets[ring_pos > 0].send(data)
            deadline = time.monotonic() + 0.2
            while receiver.counters()["packets"] < wanted and time.monotonic() < deadline:
                time.sleep(0.0002)
    return content


def count_truncated(link: Link) -> None:
    """The MTU is raised under a running receiver: what its ring can't hold whole is counted, not misread."""
    with Receiver(link.config()) as receiver:
        receiver.set_incarnation(1)
        link.ip("link", "set", "r1", "mtu", "9000")
        flows = Sender().packets(OP, gradients(OP, 1), 4000)
        subprocess.run(
            ["nsenter", f"--net=/run/netns/{sys.argv[2]}", "ip", "link", "set", "s1", "mtu", "9000"], check=True
        )
        for data in next(packets for flow, packets in flows.items() if flow[1] > 0)[:5]:
            link.sockets[1].send(data)
        deadline = time.monotonic() + PATIENCE_S
        while receiver.counters()["truncated"] < 5:
            assert time.monotonic() < deadline, receiver.counters()
            time.sleep(0.05)
        assert receiver.counters()["packets"] == 0


def report_port_failure(link: Link) -> None:
    with Receiver(link.config()) as receiver:
        receiver.set_incarnation(3)
        link.ip("link", "set", "r1", "down")
        (event,) = collect(receiver, bool)
        assert isinstance(event, Damage)
        assert event.reason == "receive port r1 failed: Network is down"
        assert (event.incarnation, event.iteration, event.bucket) == (3, None, None)


def refuse_what_cannot_work(link: Link) -> None:
    """Each error names the interface and what to do; after them a right receiver still opens."""
    netns = link.receiver_netns
    link.ip("link", "add", "off", "type", "veth", "peer", "name", "offpeer")
    cases: list[tuple[RxConfig, str]] = [
        (link.config(mtu=1400), "interface r0 has MTU 1500.*mtu to 1500.*ip link set r0 mtu 1400"),
        (link.config(ifaces=[("none", netns)]), "interface none: No such device"),
        (link.config(ifaces=[("off", netns)]), "interface off is down.*ip link set off up"),
        (link.config(ifaces=[("r0", "nonsuch")]), "namespace /run/netns/nonsuch: No such file"),
        (link.config(ifaces=[("r0", netns)] * 9), "9 receive ports: 1 to 8"),
        (link.config(ifaces=(), devargs=["0000:ff:1f.7"]), "PCI port 0000:ff:1f.7"),
    ]
    for config, expected in cases:
        try:
            Receiver(config).close()
        except CheckmateError as error:
            assert re.search(expected, str(error)), error
        else:
            raise AssertionError(f"{config} was accepted")
    receive_exactly(link)


SCENARIOS = (
    receive_exactly, use_little_cpu_when_idle, leave_torch_unpinned, see_driver_drops, count_truncated,
    report_port_failure, refuse_what_cannot_work,
)  # fmt: skip


def main() -> None:
    """Command line."""
    name, sender, receiver, mtu = sys.argv[1:]
    scenario = {f.__name__: f for f in SCENARIOS}[name]
    scenario(Link(sender, receiver, int(mtu)))


if __name__ == "__main__":
    main()
