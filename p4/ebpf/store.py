"""All that a controller has written: checked against the P4Info, carried to the data path, read back as written.

Nothing here knows gRPC. A write first goes to the data path and then into the store, so that an update which the
data path refuses leaves both as they were.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from checkmate.config import CheckmateError

from ..shared import p4info
from ..shared.messages import code_pb2, p4info_pb2, p4runtime_pb2
from .datapath import Count, Counter, Datapath, DatapathFull, Replica
from .refusal import Refusal, invalid
from .schema import Key, TableSchema
from .tables import Tables

_Update = p4runtime_pb2.Update
_INSERT, _MODIFY, _DELETE = _Update.INSERT, _Update.MODIFY, _Update.DELETE
_GROUP_BITS = 16
_RID_BITS = 16
_PORT_BITS = 9


@dataclass
class _Table:
    schema: TableSchema
    default: Any
    entries: dict[Key, Any] = field(default_factory=dict)


@contextlib.contextmanager
def _datapath_errors() -> Iterator[None]:
    """Turn what the data path raises into refusals."""
    try:
        yield
    except DatapathFull as error:
        raise Refusal(code_pb2.RESOURCE_EXHAUSTED, str(error)) from error
    except CheckmateError as error:
        raise Refusal(code_pb2.FAILED_PRECONDITION, str(error)) from error
    except OSError as error:
        raise Refusal(code_pb2.INTERNAL, str(error)) from error


class Store:
    """Tables, counters and multicast groups of one switch. Not thread-safe: the server serialises its calls."""

    def __init__(self, info: p4info_pb2.P4Info, datapath: Datapath) -> None:
        actions = {action.preamble.id: action for action in info.actions}
        schemas = [TableSchema(table, actions) for table in info.tables]
        self._tables = {schema.id: _Table(schema, schema.initial_default) for schema in schemas}
        self._counters = {counter.preamble.id: Counter(counter.preamble.name) for counter in info.counters}
        self._sizes: dict[int, int] = {counter.preamble.id: counter.size for counter in info.counters}
        self._groups: dict[int, Any] = {}
        self._datapath = datapath
        self._meaning = Tables(datapath)

    def clear(self) -> None:
        """Remove all entries and groups, reset default actions and counters."""
        for table in self._tables.values():
            for entry in list(table.entries.values()):
                self._write_table_entry(_DELETE, entry)
            if not table.schema.constant_default:
                self._write_default(table, p4runtime_pb2.TableEntry(table_id=table.schema.id))
        for group in list(self._groups.values()):
            self._write_group(_DELETE, group)
        for number, counter in self._counters.items():
            self._datapath.write_counter(counter, range(self._sizes[number]), Count())

    def write(self, update: Any) -> None:
        """Carry out one p4.v1.Update; raises Refusal, and then nothing has changed."""
        kind, entity = update.type, update.entity
        if kind not in (_INSERT, _MODIFY, _DELETE):
            invalid("the update's type is not set")
        with _datapath_errors():
            match entity.WhichOneof("entity"):
                case "table_entry" if entity.table_entry.is_default_action:
                    self._write_default_entry(kind, entity.table_entry)
                case "table_entry":
                    self._write_table_entry(kind, entity.table_entry)
                case "counter_entry":
                    self._write_counter(kind, entity.counter_entry)
                case "direct_counter_entry":
                    self._write_direct_counter(kind, entity.direct_counter_entry)
                case "packet_replication_engine_entry":
                    self._write_group(kind, _multicast(entity.packet_replication_engine_entry))
                case None:
                    invalid("the update has no entity")
                case other:
                    raise Refusal(code_pb2.UNIMPLEMENTED, f"the switch has nothing that a {other} could describe")

    def read(self, entity: Any) -> list[Any]:
        """All p4.v1.Entity messages that a request's entity selects; raises Refusal."""
        with _datapath_errors():
            match entity.WhichOneof("entity"):
                case "table_entry":
                    return self._read_table_entries(entity.table_entry)
                case "counter_entry":
                    return self._read_counters(entity.counter_entry)
                case "direct_counter_entry":
                    return self._read_direct_counters(entity.direct_counter_entry)
                case "packet_replication_engine_entry":
                    return self._read_groups(_multicast(entity.packet_replication_engine_entry))
                case None:
                    invalid("the request has no entity")
                case other:
                    raise Refusal(code_pb2.UNIMPLEMENTED, f"the switch has nothing that a {other} could describe")

    def dangling_groups(self) -> set[int]:
        """Multicast groups that entries or default actions refer to and that are not configured or empty."""
        live = {number for number, group in self._groups.items() if group.replicas}
        return {
            group
            for table in self._tables.values()
            for entry in (*table.entries.values(), table.default)
            if (group := table.schema.call(entry.action, default=entry.is_default_action).arguments.get("group"))
        } - live

    # Tables

    def _table(self, number: int) -> _Table:
        table = self._tables.get(number)
        if table is None:
            invalid(f"no table has the id {number}")
        return table

    def _write_table_entry(self, kind: int, entry: Any) -> None:
        table = self._table(entry.table_id)
        schema, key = table.schema, table.schema.key(entry)
        old = table.entries.get(key)
        _check_existence(kind, old is not None, f"entry of {schema.name}")
        match = schema.match_values(key)
        if kind == _DELETE:
            self._meaning.set_entry(schema.name, match, key.priority, None)
            del table.entries[key]
            return
        _check_extras(schema, entry)
        count = _count(entry.counter_data)
        if kind == _INSERT and len(table.entries) >= schema.size:
            raise Refusal(code_pb2.RESOURCE_EXHAUSTED, f"table {schema.name} holds {schema.size} entries and is full")
        new = self._stored(schema, key, entry, old)
        if old is None or new.action != old.action:
            call = schema.call(new.action, default=False)
            self._meaning.set_entry(schema.name, match, key.priority, call)
        table.entries[key] = new
        if entry.HasField("counter_data"):
            self._datapath.write_heartbeat(*_heartbeat_of(schema, key), count)

    def _stored(self, schema: TableSchema, key: Key, entry: Any, old: Any) -> Any:
        new = schema.entry(key)
        if entry.HasField("action"):
            schema.call(entry.action, default=False)
            new.action.CopyFrom(schema.canonical_action(entry.action))
        elif old is None:
            invalid("an entry to be inserted needs an action")
        else:
            new.action.CopyFrom(old.action)
        new.metadata, new.controller_metadata = entry.metadata, entry.controller_metadata
        return new

    def _write_default_entry(self, kind: int, entry: Any) -> None:
        table = self._table(entry.table_id)
        if kind != _MODIFY:
            invalid("a default entry can only be modified")
        if entry.match or entry.priority:
            invalid("a default entry has neither match fields nor a priority")
        if table.schema.constant_default:
            raise Refusal(code_pb2.PERMISSION_DENIED, f"the default action of {table.schema.name} is constant")
        _check_extras(table.schema, entry)
        self._write_default(table, entry)

    def _write_default(self, table: _Table, entry: Any) -> None:
        """Without an action: reset it to the program's."""
        schema = table.schema
        new = p4runtime_pb2.TableEntry()
        new.CopyFrom(schema.initial_default)
        if entry.HasField("action"):
            schema.call(entry.action, default=True)
            new.action.CopyFrom(schema.canonical_action(entry.action))
            new.metadata, new.controller_metadata = entry.metadata, entry.controller_metadata
        self._meaning.set_default(schema.name, schema.call(new.action, default=True))
        table.default = new

    def _read_table_entries(self, wanted: Any) -> list[Any]:
        entities = []
        for table, key, entry in self._select(wanted):
            entity = p4runtime_pb2.Entity()
            entity.table_entry.CopyFrom(entry)
            if key and table.schema.has_counter and wanted.HasField("counter_data"):
                _set_count(entity.table_entry.counter_data, self._heartbeat_count(table, key))
            entities.append(entity)
        return entities

    def _select(self, wanted: Any) -> Iterator[tuple[_Table, Key | None, Any]]:
        """Entries that the filter ``wanted`` (p4.v1.TableEntry) selects; the key of a default entry is None."""
        if wanted.table_id == 0:
            if wanted.match or wanted.HasField("action") or wanted.priority or wanted.is_default_action:
                invalid("a read of all tables takes no other filter")
            for table in self._tables.values():
                yield from ((table, key, entry) for key, entry in table.entries.items())
            return
        table = self._table(wanted.table_id)
        if wanted.is_default_action:
            yield table, None, table.default
            return
        exact = table.schema.key(wanted) if wanted.match else None
        for key, entry in table.entries.items():
            if (exact is None or key == exact) and _passes(entry, wanted):
                yield table, key, entry

    # Counters

    def _heartbeat_count(self, table: _Table, key: Key) -> Count:
        return self._datapath.read_heartbeat(*_heartbeat_of(table.schema, key))

    def _write_direct_counter(self, kind: int, wanted: Any) -> None:
        if kind != _MODIFY:
            invalid("a direct counter can only be modified")
        table = self._counted(wanted.table_entry.table_id)
        key = table.schema.key(wanted.table_entry)
        _check_existence(_MODIFY, key in table.entries, f"entry of {table.schema.name}")
        if wanted.HasField("data"):
            self._datapath.write_heartbeat(*_heartbeat_of(table.schema, key), _count(wanted.data))

    def _read_direct_counters(self, wanted: Any) -> list[Any]:
        number = wanted.table_entry.table_id
        tables = [self._counted(number)] if number else [t for t in self._tables.values() if t.schema.has_counter]
        keys = [(table, key) for table in tables for key in table.entries]
        if wanted.table_entry.match:
            one = (self._counted(number), self._counted(number).schema.key(wanted.table_entry))
            _check_existence(_MODIFY, one in keys, f"entry of {one[0].schema.name}")
            keys = [one]
        entities = []
        for table, key in keys:
            entity = p4runtime_pb2.Entity()
            entity.direct_counter_entry.table_entry.CopyFrom(table.schema.entry(key))
            _set_count(entity.direct_counter_entry.data, self._heartbeat_count(table, key))
            entities.append(entity)
        return entities

    def _counted(self, number: int) -> _Table:
        table = self._table(number)
        if not table.schema.has_counter:
            invalid(f"table {table.schema.name} has no direct counter")
        return table

    def _counter(self, wanted: Any) -> tuple[Counter, range]:
        """The counter and the indexes that a p4.v1.CounterEntry means."""
        counter = self._counters.get(wanted.counter_id)
        if counter is None:
            invalid(f"no counter has the id {wanted.counter_id}")
        size = self._sizes[wanted.counter_id]
        if not wanted.HasField("index"):
            return counter, range(size)
        index: int = wanted.index.index
        if index < 0:
            invalid(f"the index {index} of counter {counter.value} is negative")
        if index >= size:
            raise Refusal(code_pb2.OUT_OF_RANGE, f"counter {counter.value} has indexes 0 to {size - 1}, not {index}")
        return counter, range(index, index + 1)

    def _write_counter(self, kind: int, wanted: Any) -> None:
        if kind != _MODIFY:
            invalid("a counter can only be modified")
        counter, indexes = self._counter(wanted)
        if wanted.HasField("data"):
            self._datapath.write_counter(counter, indexes, _count(wanted.data))

    def _read_counters(self, wanted: Any) -> list[Any]:
        if wanted.counter_id == 0:
            numbers = [p4runtime_pb2.CounterEntry(counter_id=number) for number in self._counters]
            return [entity for number in numbers for entity in self._read_counters(number)]
        counter, indexes = self._counter(wanted)
        entities = []
        for index, value in zip(indexes, self._datapath.read_counter(counter, indexes), strict=True):
            entity = p4runtime_pb2.Entity()
            entity.counter_entry.counter_id = wanted.counter_id
            entity.counter_entry.index.index = index
            _set_count(entity.counter_entry.data, value)
            entities.append(entity)
        return entities

    # Multicast groups

    def _write_group(self, kind: int, group: Any) -> None:
        number = group.multicast_group_id
        if not 0 < number < 1 << _GROUP_BITS:
            invalid(f"the multicast group {number} is not allowed: groups are 1 to {(1 << _GROUP_BITS) - 1}")
        _check_existence(kind, number in self._groups, f"multicast group {number}")
        if kind == _DELETE:
            self._datapath.set_group(number, None)
            del self._groups[number]
            return
        replicas = tuple(self._replica(replica) for replica in group.replicas)
        ports = [replica.port for replica in replicas]
        if len(set(ports)) != len(ports):
            invalid(f"multicast group {number} names a port twice: a port gets at most one copy")
        self._meaning.check_ports(ports)
        self._datapath.set_group(number, replicas)
        self._groups[number] = p4runtime_pb2.MulticastGroupEntry()
        self._groups[number].CopyFrom(group)

    def _replica(self, replica: Any) -> Replica:
        if replica.backup_replicas:
            raise Refusal(code_pb2.UNIMPLEMENTED, "replicas have no backups")
        match replica.WhichOneof("port_kind"):
            case "egress_port":
                port = int(replica.egress_port)
            case "port":
                try:
                    port = p4info.decode(replica.port, _PORT_BITS)
                except ValueError as error:
                    invalid(f"port of a replica: {error}")
            case _:
                invalid("a replica needs a port")
        if replica.instance >= 1 << _RID_BITS:
            invalid(f"the instance {replica.instance} of a replica does not fit into {_RID_BITS} bits")
        return Replica(port, replica.instance)

    def _read_groups(self, wanted: Any) -> list[Any]:
        number = wanted.multicast_group_id
        if number:
            _check_existence(_MODIFY, number in self._groups, f"multicast group {number}")
        entities = []
        for group in [self._groups[number]] if number else self._groups.values():
            entity = p4runtime_pb2.Entity()
            entity.packet_replication_engine_entry.multicast_group_entry.CopyFrom(group)
            entities.append(entity)
        return entities


def _check_existence(kind: int, exists: bool, what: str) -> None:
    if kind == _INSERT and exists:
        raise Refusal(code_pb2.ALREADY_EXISTS, f"the {what} exists already")
    if kind != _INSERT and not exists:
        raise Refusal(code_pb2.NOT_FOUND, f"there is no such {what}")


def _check_extras(schema: TableSchema, entry: Any) -> None:
    if entry.is_const:
        invalid("a controller cannot write constant entries")
    if entry.HasField("meter_config") or entry.HasField("meter_counter_data"):
        invalid(f"table {schema.name} has no direct meter")
    if entry.idle_timeout_ns:
        invalid(f"table {schema.name} has no idle time-out")
    if entry.HasField("counter_data") and (entry.is_default_action or not schema.has_counter):
        invalid(f"table {schema.name} has no direct counter for this entry")


def _passes(entry: Any, wanted: Any) -> bool:
    """Whether an entry passes the filters other than its match; unset ones let everything pass."""
    action = wanted.action.action.action_id
    return (
        (not wanted.priority or entry.priority == wanted.priority)
        and (not action or entry.action.action.action_id == action)
        and (not wanted.metadata or entry.metadata == wanted.metadata)
        and (not wanted.controller_metadata or entry.controller_metadata == wanted.controller_metadata)
    )


def _heartbeat_of(schema: TableSchema, key: Key) -> tuple[int, bytes]:
    """Port and address of an entry of the only table with a direct counter."""
    match = schema.match_values(key)
    return match["ingress_port"].value, match["ethernet.dst_addr"].value.to_bytes(6, "big")


def _multicast(entry: Any) -> Any:
    if entry.WhichOneof("type") != "multicast_group_entry":
        raise Refusal(code_pb2.UNIMPLEMENTED, "the switch has multicast groups only")
    return entry.multicast_group_entry


def _count(data: Any) -> Count:
    if data.packet_count < 0 or data.byte_count < 0:
        invalid("a counter cannot be negative")
    return Count(data.packet_count, data.byte_count)


def _set_count(data: Any, value: Count) -> None:
    data.packet_count, data.byte_count = value.packets, value.bytes
