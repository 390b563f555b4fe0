"""A switch behind a P4Runtime server: the eBPF switch, BMv2 and Tofino alike."""

import hashlib
from collections.abc import Sequence
from typing import Any

from checkmate.controlplane import pre, tables
from checkmate.controlplane.client import Client
from checkmate.controlplane.target import Count, Counters, Kind, TargetError, UnreachableError, Update
from checkmate.p4.shared import p4info
from checkmate.p4.shared.messages import p4runtime_pb2
from checkmate.plan import Entry, Key, Rules
from checkmate.topology import Endpoint

_KINDS = {
    Kind.INSERT: p4runtime_pb2.Update.INSERT,
    Kind.MODIFY: p4runtime_pb2.Update.MODIFY,
    Kind.DELETE: p4runtime_pb2.Update.DELETE,
}


class P4RuntimeTarget:
    """Implements ``Target``.

    ``address``: HOST:PORT, or what else gRPC takes. ``device_config``: what the target's compiler made of our program,
    None where the switch's own tools load it. ``job``: the P4Runtime role of the controller, and the owner of the
    entries that it writes.
    """

    def __init__(
        self,
        address: Endpoint | str,
        device_id: int,
        device_config: bytes | None = b"",
        job: str = "",
        election_id: int | None = None,
        timeout_s: float = 5.0,
    ) -> None:
        self._info = p4info.load()
        self._job = job
        self._known: tables.Tables | None = None
        self._device_config = device_config
        self._client = Client(str(address), device_id, job, election_id, timeout_s)

    def connect(self) -> None:
        """See ``Target``."""
        if self._client.primary:
            return
        self._client.connect()
        self._known = None
        info, held = self._client.pipeline()
        if self._device_config is None:
            if not self._has_our_rules(info):
                raise TargetError("the switch runs another pipeline than ours: load p4/tna with the switch's SDE")
            return
        cookie = _cookie(self._info, self._device_config)
        if not self._is_ours(info) or held != cookie:
            self._client.set_pipeline(self._info, self._device_config, cookie)

    def pipeline(self) -> str:
        """Whose pipeline the switch runs: "ours", "another" or "none". Needs no primary, as all that only reads."""
        info, _ = self._client.pipeline()
        return "ours" if self._has_our_rules(info) else "another" if info.tables else "none"

    def has_primary(self) -> bool | None:
        """Whether a controller of our job is primary; None when the switch does not tell."""
        try:
            return self._client.has_primary()
        except UnreachableError:
            raise
        except TargetError:
            return None

    def read(self) -> Rules:
        """See ``Target``. Groups come first: what says whose they are was written before them."""
        entries, groups = [], []
        for entity in self._client.read([pre.read_all(), *self._tables.reads()]):
            if entity.HasField("packet_replication_engine_entry"):
                groups.append(pre.decode(entity.packet_replication_engine_entry))
            elif not self._tables.is_initial(entity.table_entry):
                entries.append(self._tables.decode(entity.table_entry))
        return Rules.of(entries, groups)

    def apply(self, updates: Sequence[Update]) -> None:
        """See ``Target``."""
        self._client.write([(str(update), self._encode(update)) for update in updates])

    def counters(self, ports: Sequence[int]) -> Counters:
        """See ``Target``."""
        values: dict[str, dict[int, Count]] = {name: {} for name in self._tables.counters.values()}
        entries: dict[Key, Count] = {}
        for entity in self._client.read(self._tables.counter_reads(ports)):
            if entity.HasField("table_entry"):
                message = entity.table_entry
                entries[self._tables.decode(message).key] = tables.count(message.counter_data)
            elif any(value := tables.count(entity.counter_entry.data)):
                values[self._tables.counters[entity.counter_entry.counter_id]][entity.counter_entry.index.index] = value
        return Counters(values, entries)

    def close(self) -> None:
        """See ``Target``."""
        self._client.close()

    @property
    def _tables(self) -> tables.Tables:
        """With the ids of the program that the switch runs: each compiler gives others."""
        if self._known is None:
            info, _ = self._client.pipeline()
            self._known = tables.Tables(info if self._has_our_rules(info) else self._info, self._job)
        return self._known

    def _has_our_rules(self, info: Any) -> bool:
        return bool(tables.shape(info) == tables.shape(self._info))

    def _is_ours(self, info: Any) -> bool:
        """Whether all is the same but for the architecture that it was compiled for."""
        here, there = type(info)(), type(info)()
        here.CopyFrom(self._info)
        there.CopyFrom(info)
        for each in (here, there):
            each.ClearField("pkg_info")
        return bool(here == there)

    def _encode(self, update: Update) -> Any:
        message = p4runtime_pb2.Update(type=_KINDS[update.kind])
        if isinstance(update.item, Entry):
            message.entity.table_entry.CopyFrom(self._tables.encode(update.item, reset=update.kind is Kind.DELETE))
            if not update.item.match:
                message.type = p4runtime_pb2.Update.MODIFY
        else:
            message.entity.packet_replication_engine_entry.CopyFrom(pre.encode(update.item))
        return message


def _cookie(info: Any, device_config: bytes) -> int:
    """Tells our pipeline from every other."""
    content = info.SerializeToString(deterministic=True) + device_config
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big")
