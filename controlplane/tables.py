"""Table entries between the plan's words and P4Runtime's: every id and width comes from the P4Info, by name."""

from collections.abc import Sequence
from typing import Any

from checkmate.controlplane.target import Count, TargetError
from checkmate.p4.shared import p4info
from checkmate.p4.shared.messages import p4info_pb2, p4runtime_pb2
from checkmate.plan import Entry, Ternary


class Tables:
    """The tables, actions and counters of one P4Info. ``owner``: the job in whose name entries are written."""

    def __init__(self, info: p4info_pb2.P4Info, owner: str = "") -> None:
        self._owner = owner
        self._tables = _Named("table", info.tables)
        self._actions = _Named("action", info.actions)
        self.counters = {counter.preamble.id: counter.preamble.name for counter in info.counters}
        self._counted = [counter.direct_table_id for counter in info.direct_counters]

    def encode(self, entry: Entry, reset: bool = False) -> Any:
        """A P4Runtime TableEntry; with ``reset`` it has no action: what the deletion of an entry needs.

        Raises TargetError for a name that the P4Info does not have or a value that does not fit.
        """
        table = self._tables.named(entry.table)
        message = p4runtime_pb2.TableEntry(table_id=table.preamble.id, priority=entry.priority)
        message.metadata = self._owner.encode()
        message.is_default_action = not entry.match
        fields = {field.name: field for field in table.match_fields}
        for name, value in entry.match:
            self._encode_match(message.match.add(), _of(fields, name, entry.table), value)
        if not reset:
            self._encode_action(message.action.action, entry)
        return message

    def decode(self, message: Any) -> Entry:
        """The inverse; raises TargetError for an id that the P4Info does not have."""
        table = self._tables.by_id(message.table_id)
        action = self._actions.by_id(message.action.action.action_id)
        names = {param.id: param.name for param in action.params}
        values = {names.get(param.param_id, ""): _number(param.value) for param in message.action.action.params}
        return Entry(
            table=table.preamble.name,
            match=() if message.is_default_action else self._decode_match(table, message),
            action=action.preamble.name,
            params=tuple((name, values[name]) for name in names.values() if name in values),
            priority=message.priority,
            owner=message.metadata.decode(errors="replace"),
        )

    def reads(self) -> list[Any]:
        """Entities that together ask for all entries, and all default actions that can be set."""
        tables = [table.preamble.id for table in self._tables.items]
        settable = [table.preamble.id for table in self._tables.items if not table.const_default_action_id]
        return [
            p4runtime_pb2.Entity(table_entry=message)
            for message in (
                *(p4runtime_pb2.TableEntry(table_id=number) for number in tables),
                *(p4runtime_pb2.TableEntry(table_id=number, is_default_action=True) for number in settable),
            )
        ]

    def counter_reads(self, ports: Sequence[int]) -> list[Any]:
        """Entities that together ask for all counters of ``ports`` and of entries."""
        cells = [
            p4runtime_pb2.CounterEntry(counter_id=number, index=p4runtime_pb2.Index(index=port))
            for number in self.counters
            for port in ports
        ]
        entries = [
            p4runtime_pb2.TableEntry(table_id=number, counter_data=p4runtime_pb2.CounterData())
            for number in self._counted
        ]
        return [
            *(p4runtime_pb2.Entity(counter_entry=cell) for cell in cells),
            *(p4runtime_pb2.Entity(table_entry=entry) for entry in entries),
        ]

    def is_initial(self, message: Any) -> bool:
        """Whether this is a default action that nobody has set."""
        if not message.is_default_action:
            return False
        initial = self._tables.by_id(message.table_id).initial_default_action.action_id
        return not message.HasField("action") or bool(message.action.action.action_id == initial)

    def _encode_match(self, message: Any, field: Any, value: int | Ternary) -> None:
        message.field_id = field.id
        exact = field.match_type == p4info_pb2.MatchField.EXACT
        if exact is isinstance(value, Ternary):
            raise TargetError(f"match field {field.name} of the pipeline is of another kind than the plan's")
        if isinstance(value, Ternary):
            message.ternary.value = _bytes(field, value.value)
            message.ternary.mask = _bytes(field, value.mask)
        else:
            message.exact.value = _bytes(field, value)

    def _encode_action(self, message: Any, entry: Entry) -> None:
        action = self._actions.named(entry.action)
        message.action_id = action.preamble.id
        params = {param.name: param for param in action.params}
        for name, value in entry.params:
            param = _of(params, name, entry.action)
            message.params.add(param_id=param.id, value=_bytes(param, value))

    @staticmethod
    def _decode_match(table: Any, message: Any) -> tuple[tuple[str, int | Ternary], ...]:
        given = {match.field_id: match for match in message.match}
        match: list[tuple[str, int | Ternary]] = []
        for field in table.match_fields:
            part = given.get(field.id)
            if field.match_type == p4info_pb2.MatchField.EXACT:
                match.append((field.name, _number(part.exact.value) if part else 0))
            else:
                ternary = part.ternary if part else p4runtime_pb2.FieldMatch.Ternary()
                match.append((field.name, Ternary(_number(ternary.value), _number(ternary.mask))))
        return tuple(match)


class _Named:
    """Objects of one kind in a P4Info, by name and by id."""

    def __init__(self, kind: str, items: Any) -> None:
        self._kind = kind
        self.items = list(items)
        self._names = {item.preamble.name: item for item in items}
        self._ids = {item.preamble.id: item for item in items}

    def named(self, name: str) -> Any:
        return _of(self._names, name, f"{self._kind}s of the pipeline")

    def by_id(self, number: int) -> Any:
        if number not in self._ids:
            raise TargetError(f"the switch reports a {self._kind} with id {number}, which its P4Info does not have")
        return self._ids[number]


def shape(info: p4info_pb2.P4Info) -> Any:
    """What a P4Info says without its ids and sizes, which each compiler gives: equal for the same rules."""
    tables = {table.preamble.id: table.preamble.name for table in info.tables}
    actions = {action.preamble.id: action.preamble.name for action in info.actions}
    return (
        {
            table.preamble.name: (
                [(field.name, field.bitwidth, field.match_type) for field in table.match_fields],
                sorted(actions.get(ref.id, "") for ref in table.action_refs),
            )
            for table in info.tables
        },
        {action.preamble.name: [(param.name, param.bitwidth) for param in action.params] for action in info.actions},
        {counter.preamble.name: counter.spec.unit for counter in info.counters},
        {counter.preamble.name: tables.get(counter.direct_table_id) for counter in info.direct_counters},
    )


def count(data: Any) -> Count:
    """Value of a P4Runtime CounterData."""
    return Count(data.packet_count, data.byte_count)


def _of(known: dict[str, Any], name: str, where: str) -> Any:
    if name not in known:
        raise TargetError(
            f"{where}: there is no {name!r}, only {', '.join(known)}; plan and P4Info must be of one build"
        )
    return known[name]


def _bytes(field: Any, value: int) -> bytes:
    if not 0 <= value < 1 << field.bitwidth:
        raise TargetError(f"{field.name}: {value} does not fit in {field.bitwidth} bits")
    return p4info.encode(value)


def _number(value: bytes) -> int:
    return int.from_bytes(value, "big")
