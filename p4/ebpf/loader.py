"""The eBPF data path on a set of interfaces: loaded, attached, programmed and, in the end, removed without trace."""

import contextlib
import errno
import logging
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from checkmate import native
from checkmate.config import CheckmateError

from . import libbpf, netdev
from .datapath import Count, Counter, DatapathFull, Drop, Flood, Forward, L2Action, Registrar, Replica, Rewrite
from .libbpf import constants

_log = logging.getLogger(__name__)

# "CK": easy to tell in `tc filter show` from what others attach. Filters run in order of priority.
_HANDLE = 0x434B
_PRIORITY = 0x434B
_CAP_NET_ADMIN, _CAP_SYS_ADMIN, _CAP_BPF = 12, 21, 39

_COUNTER_INDEX: dict[Counter, int] = {
    counter: getattr(constants, f"CKM_{counter.name}") * constants.CKM_PORTS for counter in Counter
}


def _network(value: int, size: int) -> int:
    """An integer whose native bytes are those of ``value`` in network order."""
    return int.from_bytes(value.to_bytes(size, "big"), "little")


def _full_or_raise(error: OSError) -> DatapathFull:
    if error.errno in (errno.E2BIG, errno.ENOMEM, errno.ENOSPC):
        return DatapathFull(str(error))
    raise error


def preflight(interfaces: Iterable[str], shadow_interfaces: Iterable[str] = (), netns: str | None = None) -> None:
    """Check, without changing anything, that a switch can run; raises CheckmateError with what to do."""
    effective = _effective_capabilities()
    has_bpf = effective >> _CAP_BPF & 1 or effective >> _CAP_SYS_ADMIN & 1
    if not (has_bpf and effective >> _CAP_NET_ADMIN & 1):
        raise CheckmateError("the switch needs CAP_BPF and CAP_NET_ADMIN to load and attach its programs; run as root")
    native.library("switch.bpf.o")
    with contextlib.closing(netdev.Namespace(netns)) as namespace, namespace.entered():
        for name in interfaces:
            netdev.interface_index(name)
        for name in shadow_interfaces:
            netdev.interface_index(name)
            netdev.check_shadow_port(name)


def _effective_capabilities() -> int:
    status = Path("/proc/thread-self/status").read_text()
    return int(status.split("CapEff:")[1].split()[0], 16)


class Switch:
    """The data path on ``ports`` (port number → interface), all in one network namespace; a context manager.

    Entering loads the programs and attaches them; leaving puts the interfaces back as they were. Implements
    ``Datapath``. An interface belongs to one switch at a time. If the process is killed, the programs stay attached
    and go on forwarding until the next switch on the same interfaces takes their place.
    """

    def __init__(self, ports: Mapping[int, str], netns: str | None = None) -> None:
        bad = [port for port in ports if not 0 <= port < constants.CKM_PORTS]
        if bad:
            raise CheckmateError(f"port numbers {bad} are not allowed: they must be 0 to {constants.CKM_PORTS - 1}")
        if len(set(ports.values())) != len(ports):
            raise CheckmateError(f"an interface is given for two ports: {dict(ports)}; give each port its own")
        self._names = dict(ports)
        self._netns = netns
        self._indexes: dict[int, int] = {}
        self._heartbeat_slots: dict[tuple[int, bytes], int] = {}
        self._free_slots: list[int] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        preflight(self._names.values(), netns=self._netns)
        with ExitStack() as stack:
            self._namespace = netdev.Namespace(self._netns)
            stack.callback(self._namespace.close)
            with self._namespace.entered(), ExitStack() as undo:
                self._indexes = {port: netdev.interface_index(name) for port, name in self._names.items()}
                for port, index in self._indexes.items():
                    undo.enter_context(netdev.claim(index, self._names[port]))
                undo.enter_context(netdev.promiscuous(list(self._indexes.values())))
                self._load(undo)
                self._attach(undo)
                stack.callback(self._close_inside, undo.pop_all())
            self._stack = stack.pop_all()
        _log.info("switch on %s", ", ".join(f"{port}={name}" for port, name in sorted(self._names.items())))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _close_inside(self, undo: ExitStack) -> None:
        with self._namespace.entered():
            undo.close()

    def _load(self, undo: ExitStack) -> None:
        loaded = libbpf.Object(native.library("switch.bpf.o"))
        undo.callback(loaded.close)
        self._ingress, self._egress = loaded.program("ckm_ingress"), loaded.program("ckm_egress")
        self._ports = loaded.map("ports", "uint32_t", "struct ckm_port")
        self._ifindexes = loaded.map("ifindexes", "uint32_t", "uint32_t")
        self._tagged_dscps = loaded.map("tagged_dscps", "uint32_t", "uint32_t")
        self._heartbeats = loaded.map("heartbeats", "struct ckm_heartbeat_key", "struct ckm_heartbeat")
        self._heartbeat_counters = loaded.map("heartbeat_counters", "uint32_t", "struct ckm_count", per_cpu=True)
        self._l2 = loaded.map("l2", "struct ckm_l2_key", "struct ckm_l2")
        self._l2_default = loaded.map("l2_default", "uint32_t", "struct ckm_l2")
        self._groups = loaded.map("groups", "uint32_t", "struct ckm_group")
        self._live_groups = loaded.map("live_groups", "uint32_t", "uint32_t")
        self._rewrites = loaded.map("rewrites", "struct ckm_rewrite_key", "struct ckm_rewrite")
        self._counters = loaded.map("counters", "uint32_t", "struct ckm_count", per_cpu=True)
        self._free_slots = list(range(constants.CKM_HEARTBEATS))
        self._heartbeat_slots = {}

    def _attach(self, undo: ExitStack) -> None:
        for port, index in self._indexes.items():
            self._ifindexes.set(port, index)
            self.set_shadow_port(port, None)
            if libbpf.add_clsact(index):
                undo.callback(libbpf.remove_clsact, index)
            for direction, program in ((libbpf.INGRESS, self._ingress), (libbpf.EGRESS, self._egress)):
                attached = libbpf.Filter(index, direction, program, _HANDLE, _PRIORITY)
                undo.callback(attached.detach)

    @property
    def ports(self) -> frozenset[int]:
        return frozenset(self._names)

    def set_tagged_dscps(self, dscps: frozenset[int]) -> None:
        for dscp in range(constants.CKM_DSCPS):
            self._tagged_dscps.set(dscp, dscp in dscps)

    def set_shadow_port(self, port: int, registrar: Registrar | None) -> None:
        value: dict[str, int] = {"number": port}
        if registrar:
            with self._namespace.entered():
                netdev.check_shadow_port(self._names[port])
            value |= {
                "is_shadow": 1,
                "registrar_ip_be": _network(registrar.ip, 4),
                "registrar_port_be": _network(registrar.port, 2),
            }
        self._ports.set(self._indexes[port], value)

    def set_heartbeat(self, port: int, dst_mac: bytes, group: int | None) -> None:
        key, name = {"port": port, "dst": dst_mac}, (port, dst_mac)
        if group is None:
            self._heartbeats.delete(key)
            self._free_slots.append(self._heartbeat_slots.pop(name))
            return
        slot = self._heartbeat_slots.get(name)
        if slot is None:
            if not self._free_slots:
                raise DatapathFull("no counter is free")
            slot = self._free_slots[-1]
            self._heartbeat_counters.set(slot, (0, 0))
            _set(self._heartbeats, key, {"group": group, "counter": slot})
            self._heartbeat_slots[name] = self._free_slots.pop()
        else:
            _set(self._heartbeats, key, {"group": group, "counter": slot})

    def set_l2(self, dst_mac: bytes, action: L2Action | None) -> None:
        key = {"dst": dst_mac}
        if action is None:
            self._l2.delete(key)
        else:
            _set(self._l2, key, _l2_value(action))

    def set_l2_default(self, action: L2Action) -> None:
        self._l2_default.set(0, _l2_value(action))

    def set_live_group(self, group: int, live: bool) -> None:
        if live:
            _set(self._live_groups, group, 1)
        else:
            self._live_groups.delete(group)

    def set_group(self, group: int, replicas: tuple[Replica, ...] | None) -> None:
        if replicas is None:
            self._groups.delete(group)
            return
        if len(replicas) > constants.CKM_REPLICAS:
            raise DatapathFull(f"a multicast group has at most {constants.CKM_REPLICAS} replicas")
        # The last member gets the frame itself, the others clones: no shortage of memory can lose the frame of
        # the next rank (rid 0), which is all that training depends on.
        members = [
            {"ifindex": self._indexes[r.port], "port": r.port, "rid": r.rid}
            for r in sorted(replicas, key=lambda r: r.rid == 0)
        ]
        _set(self._groups, group, {"size": len(members), "replicas": members})

    def set_rewrite(self, port: int, rid: int, rewrite: Rewrite | None) -> None:
        key = {"port": port, "rid": rid}
        if rewrite is None:
            self._rewrites.delete(key)
            return
        value = {"dst_mac": rewrite.dst_mac, "src_mac": rewrite.src_mac, "dst_ip_be": _network(rewrite.dst_ip, 4)}
        _set(self._rewrites, key, value)

    def read_counter(self, counter: Counter, ports: range) -> list[Count]:
        values = self._counters.read(_COUNTER_INDEX[counter] + ports.start, len(ports))
        return [_total(value) for value in values]

    def write_counter(self, counter: Counter, ports: Iterable[int], value: Count) -> None:
        for port in ports:
            self._counters.set(_COUNTER_INDEX[counter] + port, (value.packets, value.bytes))

    def read_heartbeat(self, port: int, dst_mac: bytes) -> Count:
        return _total(self._heartbeat_counters.get(self._heartbeat_slots[port, dst_mac]))

    def write_heartbeat(self, port: int, dst_mac: bytes, value: Count) -> None:
        self._heartbeat_counters.set(self._heartbeat_slots[port, dst_mac], (value.packets, value.bytes))


def _set(table: libbpf.Map, key: Any, value: Any) -> None:
    try:
        table.set(key, value)
    except OSError as error:
        raise _full_or_raise(error) from error


def _total(per_cpu: Any) -> Count:
    return Count(sum(value.packets for value in per_cpu), sum(value.bytes for value in per_cpu))


def _l2_value(action: L2Action) -> dict[str, int]:
    match action:
        case Forward(port):
            return {"action": constants.CKM_FORWARD, "argument": port}
        case Flood(group):
            return {"action": constants.CKM_FLOOD, "argument": group}
        case Drop():
            return {"action": constants.CKM_DROP, "argument": 0}
