"""What a switch must do with a frame: the rules in plain Python, independent of every target.

``Model.process`` takes one frame and the port it arrives on and says which frames leave on which ports; it counts
as the switch counts. The rules are those that the control plane writes, in its words.
"""

import struct
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from checkmate.plan import Entry, Key, Rules, Ternary

_ETHERNET = 14
_TYPE_IPV4 = 0x0800
_TYPE_VLAN = 0x8100
_TCP = 6
_OPTION = struct.Struct(">BBHI")
_OPTION_HEAD = (253, 8, 0x434B)


@dataclass(frozen=True)
class Headers:
    """Offsets and values of a well-formed TCP/IPv4 frame."""

    ip: int
    tcp: int
    payload_bytes: int
    dscp: int
    dst_ip: int
    dst_port: int
    seq: int
    counter: int | None


@dataclass
class Model:
    """A switch with ``ports``. Its counts: ``frames`` and ``octets`` by (counter, port), ``entry_frames`` by entry."""

    rules: Rules
    ports: frozenset[int]
    frames: Counter[tuple[str, int]] = field(default_factory=Counter)
    octets: Counter[tuple[str, int]] = field(default_factory=Counter)
    entry_frames: Counter[Key] = field(default_factory=Counter)

    def process(self, port: int, frame: bytes) -> dict[int, list[bytes]]:
        """Frames that leave, by port."""
        out: dict[int, list[bytes]] = defaultdict(list)
        headers = parse(frame)
        role = self._entry("port_role", ingress_port=port)
        if role and role.action.endswith(".shadow_port"):
            registrar = dict(role.params)
            allowed = isinstance(headers, Headers) and (headers.dst_ip, headers.dst_port) == (
                registrar["registrar_ip"],
                registrar["registrar_port"],
            )
            if not allowed:
                self._count("CheckmateIngress.shadow_dropped", port, frame)
                return out
        elif isinstance(headers, Headers) and headers.payload_bytes and self._tagged(headers.dscp):
            if self._heartbeat(port, frame, headers, out):
                return out
        else:
            self._count(f"CheckmateIngress.{'malformed' if headers == 'malformed' else 'untagged'}", port, frame)
        self._l2_forward(port, frame, out)
        return out

    def _heartbeat(self, port: int, frame: bytes, headers: Headers, out: dict[int, list[bytes]]) -> bool:
        self._count("CheckmateIngress.tagged_in", port, frame)
        if headers.counter is None:
            self._count("CheckmateIngress.tagged_without_option", port, frame)
            return False
        entry = self._entry("heartbeat", ingress_port=port, **{"ethernet.dst_addr": _dst(frame)})
        if entry is None:
            return False
        self.entry_frames[entry.key] += 1
        members = self._members(entry.group, port) if self._entry("live_group", group=entry.group or 0) else []
        if not members:
            self._count("CheckmateIngress.group_missing", port, frame)
        for to, rid in members:
            if rid == 0:
                out[to].append(frame)
                continue
            rewrite = self._entry("rewrite", egress_port=to, egress_rid=rid)
            self._count(f"CheckmateEgress.{'copies_out' if rewrite else 'rewrite_missing'}", to, frame)
            if rewrite:
                out[to].append(copy(frame, headers, **dict(rewrite.params)))
        return bool(members)

    def _l2_forward(self, port: int, frame: bytes, out: dict[int, list[bytes]]) -> None:
        entry = self._entry("l2_forward", **{"ethernet.dst_addr": _dst(frame)}) or self._default("l2_forward")
        to: list[int] = []
        if entry and entry.action.endswith(".forward"):
            to = [number for number in [dict(entry.params)["port"]] if number != port]
        elif entry and entry.action.endswith(".flood"):
            to = [number for number, _ in self._members(entry.group, port)]
        if not to:
            self._count("CheckmateIngress.dropped", port, frame)
        for number in to:
            out[number].append(frame)

    def _members(self, group: int | None, ingress: int) -> list[tuple[int, int]]:
        found = [g for g in self.rules.groups if g.id == group]
        return [(r.port, r.rid) for g in found for r in g.replicas if r.port != ingress]

    def _tagged(self, dscp: int) -> bool:
        fields = [value for entry in self.rules.entries if ".classify" in entry.table for _, value in entry.match]
        return any(isinstance(f, Ternary) and dscp & f.mask == f.value for f in fields)

    def _entry(self, table: str, **match: int) -> Entry | None:
        entries = (e for e in self.rules.entries if e.table.endswith("." + table) and e.match)
        return next((e for e in entries if dict(e.match) == match), None)

    def _default(self, table: str) -> Entry | None:
        return next((e for e in self.rules.entries if e.table.endswith("." + table) and not e.match), None)

    def _count(self, counter: str, port: int, frame: bytes) -> None:
        self.frames[counter, port] += 1
        self.octets[counter, port] += len(frame)


def _dst(frame: bytes) -> int:
    return int.from_bytes(frame[:6], "big")


def parse(frame: bytes) -> Headers | str:
    """Headers of a TCP/IPv4 frame, with at most one VLAN tag; else ``other`` or ``malformed``."""
    ip, kind = _ETHERNET, int.from_bytes(frame[12:14], "big")
    if kind == _TYPE_VLAN:
        ip, kind = _ETHERNET + 4, int.from_bytes(frame[16:18], "big")
    if kind != _TYPE_IPV4:
        return "other"
    if len(frame) < ip + 20:
        return "malformed"
    header, total = (frame[ip] & 15) * 4, int.from_bytes(frame[ip + 2 : ip + 4], "big")
    if frame[ip] >> 4 != 4 or header < 20 or total < header or total > len(frame) - ip:
        return "malformed"
    fragment = int.from_bytes(frame[ip + 6 : ip + 8], "big") & 0x3FFF
    if frame[ip + 9] != _TCP or fragment:
        return "other"
    return _parse_tcp(frame, ip, ip + header, total - header)


def _parse_tcp(frame: bytes, ip: int, tcp: int, available: int) -> Headers | str:
    if available < 20:
        return "malformed"
    header = (frame[tcp + 12] >> 4) * 4
    if header < 20 or header > available:
        return "malformed"
    seq = int.from_bytes(frame[tcp + 4 : tcp + 8], "big")
    counter = None
    if header >= 28:
        *head, value = _OPTION.unpack_from(frame, tcp + header - 8)
        counter = (seq + value) & 0xFFFFFFFF if tuple(head) == _OPTION_HEAD else None
    return Headers(
        ip=ip,
        tcp=tcp,
        payload_bytes=available - header,
        dscp=frame[ip + 1] >> 2,
        dst_ip=int.from_bytes(frame[ip + 16 : ip + 20], "big"),
        dst_port=int.from_bytes(frame[tcp + 2 : tcp + 4], "big"),
        seq=seq,
        counter=counter,
    )


def copy(frame: bytes, headers: Headers, src_mac: int, dst_mac: int, dst_ip: int) -> bytes:
    """What a shadow receives; checksums that were wrong stay wrong."""
    assert headers.counter is not None
    new = bytearray(frame)
    new[0:12] = dst_mac.to_bytes(6, "big") + src_mac.to_bytes(6, "big")
    new[headers.ip + 16 : headers.ip + 20] = dst_ip.to_bytes(4, "big")
    new[headers.tcp + 4 : headers.tcp + 8] = headers.counter.to_bytes(4, "big")
    address = (headers.dst_ip, dst_ip)
    _update(new, headers.ip + 10, address)
    _update(new, headers.tcp + 16, address, (headers.seq, headers.counter))
    return bytes(new)


def _update(frame: bytearray, offset: int, *changes: tuple[int, int]) -> None:
    """RFC 1624: a checksum after 32-bit words have changed."""
    total = ~int.from_bytes(frame[offset : offset + 2], "big") & 0xFFFF
    for old, new in changes:
        for word in (~(old >> 16), ~old, new >> 16, new):
            total += word & 0xFFFF
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    frame[offset : offset + 2] = (~total & 0xFFFF).to_bytes(2, "big")


def checksums_valid(frame: bytes) -> bool:
    """Whether the IPv4 and TCP checksums of a well-formed frame are right."""
    headers = parse(frame)
    assert isinstance(headers, Headers)
    end = headers.ip + int.from_bytes(frame[headers.ip + 2 : headers.ip + 4], "big")
    segment = frame[headers.tcp : end]
    pseudo = frame[headers.ip + 12 : headers.ip + 20] + struct.pack(">HH", _TCP, len(segment))
    return ones_sum(frame[headers.ip : headers.tcp]) == 0xFFFF and ones_sum(pseudo + segment) == 0xFFFF


def ones_sum(data: bytes) -> int:
    """Ones-complement sum of 16-bit words, the last one padded."""
    total: int = sum(struct.unpack(f">{(len(data) + 1) // 2}H", data + b"\0" * (len(data) % 2)))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total
