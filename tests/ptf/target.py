"""Switches under test: programmed through P4Runtime, spoken to with frames on their ports."""

import contextlib
import functools
import itertools
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ptf import frames
from ptf.frames import patched
from ptf.model import Model
from ptf.wire import Rack, Wire, rack, settle, wait_readable

from checkmate.controlplane.target import Counters, Kind, Target, Update
from checkmate.controlplane.targets.p4runtime import P4RuntimeTarget
from checkmate.p4.ebpf.loader import Switch
from checkmate.p4.ebpf.p4runtime_server import Server
from checkmate.p4.v1model.bmv2 import BINARY, Bmv2, pipeline
from checkmate.plan import Rules, diff
from checkmate.topology import Endpoint

TRAINER_PORTS = (1, 2, 3, 4)
SHADOW_PORTS = (5, 6)
PORTS = range(1, 7)
BURST = 50
"""Frames that may be on their way to one port: BMv2's queues hold 64 and drop what is more."""
_ARRIVAL_S = 10.0
_FENCE_MAC = 0x02FE00000000
"""Address of a fence, the frame that follows a test's frames to a port; the last byte is that port."""

_racks = itertools.count()
Frames = dict[int, list[bytes]]
Hop = tuple[int, int]
"""From a port to another."""


class Delta(NamedTuple):
    """How counters changed: {(counter, port): (packets, bytes)} without zeros, and packets of counted entries."""

    ports: dict[tuple[str, int], tuple[int, int]]
    entries: dict[object, int]


@dataclass
class SwitchUnderTest:
    """The switch of one test run.

    ``sees_missing_groups``: its data path notices that a live group is gone or empty, forwards the frame and counts it.
    """

    name: str
    control: Target
    wires: Mapping[int, Wire]
    rack: Rack
    sees_missing_groups: bool
    rules: Rules = field(default_factory=Rules)

    def program(self, rules: Rules) -> None:
        """Make the switch hold exactly these rules, which the tests' model gets too."""
        change = diff(self.control.read(), rules)
        updates = [Update(Kind.DELETE, item) for item in change.removed]
        updates += [Update(Kind.MODIFY, item) for _, item in change.changed]
        updates += [Update(Kind.INSERT, item) for item in change.added]
        if updates:
            self.control.apply(updates)
        self.rules = rules

    def exchange(self, *sent: tuple[int, bytes]) -> Frames:
        """Send frames into ports, in order, and collect all that leaves until the switch is quiet.

        Only frames that come in by one port keep their order on every switch.
        """
        cpus = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(cpus)})  # one CPU's queue keeps frames in order, the fences last
        out: Frames = defaultdict(list)
        try:
            for port, frame in sent:
                self.wires[port].send(frame)
            for hops in self._fences(sent):
                for source, target in hops:
                    self.wires[source].send(fence(source, target))
                self._collect(hops, out)
            return out
        finally:
            os.sched_setaffinity(0, cpus)

    def _fences(self, sent: Iterable[tuple[int, bytes]]) -> list[list[Hop]]:
        """What follows frames on every way out, and then to the ports that they came from, where nothing may leave."""
        sources = {port for port, _ in sent} or set(self.wires)
        onward = [(source, target) for source in sources for target in self.wires if target != source]
        return [onward, [(1 if source != 1 else 2, source) for source in sources]]

    def _collect(self, hops: Iterable[Hop], out: Frames) -> None:
        waiting = {fence(*hop): hop for hop in hops}
        for left in settle(_ARRIVAL_S):
            for port in self.wires:
                while (frame := self.wires[port].receive()) is not None:
                    if waiting.pop(frame, None) is None:
                        out[port].append(frame)
            if not waiting:
                return
            wait_readable(self.wires, left)
        raise AssertionError(f"frames sent last (from, to) {sorted(waiting.values())} have not arrived")

    def expect(self, *sent: tuple[int, bytes]) -> Frames:
        """Send frames; every frame that leaves and every counter must be as the model says."""
        model = Model(self.rules, frozenset(self.wires))
        wanted: Frames = defaultdict(list)
        for source, frame in sent:
            for port, leaving in model.process(source, frame).items():
                wanted[port] += leaving
        for source, target in (hop for hops in self._fences(sent) for hop in hops):
            model.process(source, fence(source, target))
        before = self.counters()
        out = self.exchange(*sent)
        change = self._difference(before, self.counters())
        for port in self.wires:
            assert out[port] == wanted[port], f"port {port}: {_first_difference(out[port], wanted[port])}"
        assert change.ports == {key: (model.frames[key], model.octets[key]) for key in model.frames}
        assert change.entries == dict(model.entry_frames)
        return out

    def counters(self) -> Counters:
        """All counters of all ports."""
        return self.control.counters(list(self.wires))

    @staticmethod
    def _difference(before: Counters, after: Counters) -> Delta:
        ports: dict[tuple[str, int], tuple[int, int]] = {}
        for name, values in after.ports.items():
            for port, value in values.items():
                old = before.ports.get(name, {}).get(port, (0, 0))
                if value != old:
                    ports[name, port] = (value[0] - old[0], value[1] - old[1])
        entries = {key: value.packets - before.entries[key].packets for key, value in after.entries.items()}
        return Delta(ports, {key: value for key, value in entries.items() if value})


@functools.cache
def fence(source: int, target: int) -> bytes:
    """The frame that ends an exchange from one port to another: what may leave any port, a shadow's too."""
    frame = frames.tcp(
        source, frames.REGISTRAR, [], payload=b"", tos=0, dport=frames.REGISTRAR_TCP, sport=source << 8 | target
    )
    return patched(frame, 0, fence_address(target).to_bytes(6, "big")).ljust(60, b"\0")


def fence_address(port: int) -> int:
    """Where the fences of a port go; the rules must forward it there."""
    return _FENCE_MAC | port


def _first_difference(got: list[bytes], wanted: list[bytes]) -> str:
    for index, (one, other) in enumerate(zip(got, wanted, strict=False)):
        if one != other:
            return f"frame {index} of {len(got)} is\n{one.hex()}\nbut must be\n{other.hex()}"
    return f"{len(got)} frames instead of {len(wanted)}: {[frame.hex() for frame in (got + wanted)[-2:]]}"


@contextlib.contextmanager
def ebpf_switch() -> Iterator[SwitchUnderTest]:
    """The eBPF switch with its P4Runtime server, in a rack of namespaces."""
    with contextlib.ExitStack() as stack:
        built, wires = stack.enter_context(_wired_rack())
        switch = stack.enter_context(Switch(built.interfaces, built.switch_netns))
        server = stack.enter_context(Server(switch, "127.0.0.1:0"))
        control = P4RuntimeTarget(Endpoint("127.0.0.1", server.port), device_id=1)
        stack.callback(control.close)
        control.connect()
        yield SwitchUnderTest("ebpf", control, wires, built, sees_missing_groups=True)


@contextlib.contextmanager
def bmv2_switch() -> Iterator[SwitchUnderTest]:
    """BMv2 with our program, in a rack of namespaces."""
    with contextlib.ExitStack() as stack:
        built, wires = stack.enter_context(_wired_rack())
        # A socket in the file system is in reach from every namespace.
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ckmptf"))
        address: Any = f"unix:{folder}/p4runtime"
        stack.enter_context(Bmv2(built.interfaces, address, 1, built.switch_netns))
        control = P4RuntimeTarget(address, device_id=1, device_config=pipeline(), timeout_s=30)
        stack.callback(control.close)
        control.connect()
        yield SwitchUnderTest("bmv2", control, wires, built, sees_missing_groups=False)


@contextlib.contextmanager
def _wired_rack() -> Iterator[tuple[Rack, Mapping[int, Wire]]]:
    with contextlib.ExitStack() as stack:
        built = stack.enter_context(rack(PORTS, frozenset(SHADOW_PORTS), f"ptf{next(_racks)}x"))
        wires = {port: Wire(netns, built.far_interface) for port, netns in built.far_netns.items()}
        for wire in wires.values():
            stack.callback(wire.close)
        yield built, wires


SWITCHES: dict[str, Callable[[], contextlib.AbstractContextManager[SwitchUnderTest]]] = {
    "ebpf": ebpf_switch,
    "bmv2": bmv2_switch,
}

TARGETS = (*SWITCHES, "tofino")


def missing(target: str) -> str | None:
    """Why the tests can't run on a target here; None when they can."""
    if target == "bmv2" and shutil.which(BINARY) is None:
        return f"{BINARY} is not on PATH"
    if target == "tofino":
        there = shutil.which("tofino-model") is not None
        return "how to start tofino-model could never be tried" if there else "tofino-model is not on PATH"
    return None
