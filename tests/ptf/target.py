"""A switch under test: programmed through P4Runtime, spoken to with frames on its ports."""

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ptf.model import Model
from ptf.wire import Rack, Wire, rack, settle, wait_readable

from checkmate.controlplane.target import Counters, Kind, Target, Update
from checkmate.controlplane.targets.p4runtime import P4RuntimeTarget
from checkmate.p4.ebpf.loader import Switch
from checkmate.p4.ebpf.p4runtime_server import Server
from checkmate.plan import Rules, diff
from checkmate.topology import Endpoint

TRAINER_PORTS = (1, 2, 3, 4)
SHADOW_PORTS = (5, 6)
PORTS = range(1, 7)
_ARRIVAL_S = 3.0
_FENCE = bytes.fromhex("02fe00000000")
"""First five bytes of the address of the frame that follows a test's frames; the last one is its port."""

Frames = dict[int, list[bytes]]


class Delta(NamedTuple):
    """How counters changed: {(counter, port): (packets, bytes)} without zeros, and packets of counted entries."""

    ports: dict[tuple[str, int], tuple[int, int]]
    entries: dict[object, int]


@dataclass
class SwitchUnderTest:
    """The switch of one test run."""

    control: Target
    wires: Mapping[int, Wire]
    rack: Rack
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

    def exchange(self, *frames: tuple[int, bytes]) -> Frames:
        """Send frames into ports, in order, and collect all that leaves until the switch is quiet."""
        cpus = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(cpus)})  # one CPU's queue keeps frames in order, the fence last
        try:
            for port, frame in frames:
                self.wires[port].send(frame)
            for port in self.wires:
                self.wires[1 if port != 1 else 2].send(fence(port))
            return self._collect()
        finally:
            os.sched_setaffinity(0, cpus)

    def _collect(self) -> Frames:
        out: Frames = defaultdict(list)
        waiting = set(self.wires)
        for left in settle(_ARRIVAL_S):
            for port in self.wires:
                while (frame := self.wires[port].receive()) is not None:
                    if frame == fence(port):
                        waiting.discard(port)
                    else:
                        out[port].append(frame)
            if not waiting:
                return out
            wait_readable(self.wires, left)
        raise AssertionError(f"ports {sorted(waiting)} are silent: the last frame has not arrived")

    def expect(self, *frames: tuple[int, bytes]) -> Frames:
        """Send frames; every frame that leaves and every counter must be as the model says."""
        model = Model(self.rules, frozenset(self.wires))
        wanted: Frames = defaultdict(list)
        for sender, frame in (*frames, *((1 if port != 1 else 2, fence(port)) for port in self.wires)):
            for port, leaving in model.process(sender, frame).items():
                wanted[port] += [one for one in leaving if one != fence(port)]
        before = self.counters()
        out = self.exchange(*frames)
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


def fence(port: int) -> bytes:
    """The frame that ends an exchange at a port."""
    return _FENCE[:5] + bytes([port]) + bytes.fromhex("02fd00000000") + b"\x88\xb5" + b"fence".ljust(46, b"\0")


def fence_address(port: int) -> int:
    """Where the fence of a port goes; the rules must forward it there."""
    return int.from_bytes(fence(port)[:6], "big")


def _first_difference(got: list[bytes], wanted: list[bytes]) -> str:
    for index, (one, other) in enumerate(zip(got, wanted, strict=False)):
        if one != other:
            return f"frame {index} of {len(got)} is\n{one.hex()}\nbut must be\n{other.hex()}"
    return f"{len(got)} frames instead of {len(wanted)}: {[frame.hex() for frame in (got + wanted)[-2:]]}"


@contextlib.contextmanager
def ebpf_switch() -> Iterator[SwitchUnderTest]:
    """The eBPF switch with its P4Runtime server, in a rack of namespaces."""
    with contextlib.ExitStack() as stack:
        built = stack.enter_context(rack(PORTS, frozenset(SHADOW_PORTS)))
        wires = {port: Wire(netns, built.far_interface) for port, netns in built.far_netns.items()}
        for wire in wires.values():
            stack.callback(wire.close)
        switch = stack.enter_context(Switch(built.interfaces, built.switch_netns))
        server = stack.enter_context(Server(switch, "127.0.0.1:0"))
        control = P4RuntimeTarget(Endpoint("127.0.0.1", server.port), device_id=1)
        stack.callback(control.close)
        control.connect()
        yield SwitchUnderTest(control, wires, built)
