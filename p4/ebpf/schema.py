"""Checks of table entries against the P4Info, and their canonical form."""

from dataclasses import dataclass
from typing import Any

from ..shared import p4info
from ..shared.messages import code_pb2, p4info_pb2, p4runtime_pb2
from .refusal import Refusal, invalid

_MatchField = p4info_pb2.MatchField
_ActionRef = p4info_pb2.ActionRef


@dataclass(frozen=True)
class FieldValue:
    """Value and mask of one match field; the mask of an exact field is all ones, of an omitted one 0."""

    value: int
    mask: int


@dataclass(frozen=True)
class Key:
    """What identifies an entry within its table: a value for every match field by id, and the priority."""

    match: tuple[tuple[int, FieldValue], ...]
    priority: int


@dataclass(frozen=True)
class Call:
    """An action and its arguments, by the P4Info's names."""

    action: str
    arguments: dict[str, int]


class TableSchema:
    """One table of the P4Info."""

    def __init__(self, table: p4info_pb2.Table, actions: dict[int, p4info_pb2.Action]) -> None:
        self.id: int = table.preamble.id
        self.name: str = table.preamble.name
        self.size: int = table.size
        self.has_counter = bool(table.direct_resource_ids)
        self.constant_default = bool(table.const_default_action_id)
        self._fields = {field.id: field for field in table.match_fields}
        self._references = {reference.id: reference for reference in table.action_refs}
        self._actions = actions
        self.needs_priority = any(field.match_type != _MatchField.EXACT for field in table.match_fields)
        self.initial_default = p4runtime_pb2.TableEntry(table_id=self.id, is_default_action=True)
        self.initial_default.action.action.action_id = table.initial_default_action.action_id

    def key(self, entry: Any) -> Key:
        """Key of a p4.v1.TableEntry, checked."""
        given: dict[int, FieldValue] = {}
        for match in entry.match:
            field = self._fields.get(match.field_id)
            if field is None:
                invalid(f"table {self.name} has no match field {match.field_id}")
            if match.field_id in given:
                invalid(f"match field {field.name} is given twice")
            given[match.field_id] = _field_value(field, match)
        for field in self._fields.values():
            if field.id not in given:
                if field.match_type == _MatchField.EXACT:
                    invalid(f"match field {field.name} of table {self.name} is missing")
                given[field.id] = FieldValue(0, 0)
        self._check_priority(entry.priority)
        return Key(tuple(sorted(given.items(), key=lambda item: item[0])), entry.priority)

    def _check_priority(self, priority: int) -> None:
        if self.needs_priority and priority <= 0:
            invalid(f"an entry of table {self.name} needs a priority above 0")
        if not self.needs_priority and priority != 0:
            invalid(f"an entry of table {self.name} has no priority, but {priority} is given")

    def match_values(self, key: Key) -> dict[str, FieldValue]:
        """The key's fields by name."""
        return {self._fields[number].name: value for number, value in key.match}

    def call(self, table_action: Any, *, default: bool) -> Call:
        """The action of a p4.v1.TableAction, checked; ``default``: it is to be the default action."""
        if table_action.WhichOneof("type") != "action":
            invalid(f"table {self.name} takes a direct action")
        given = table_action.action
        reference = self._references.get(given.action_id)
        if reference is None:
            invalid(f"table {self.name} has no action {given.action_id}")
        action = self._actions[given.action_id]
        if reference.scope == (_ActionRef.TABLE_ONLY if default else _ActionRef.DEFAULT_ONLY):
            raise Refusal(code_pb2.PERMISSION_DENIED, f"action {action.preamble.name} cannot be used so in {self.name}")
        return Call(action.preamble.name, _arguments(action, given.params))

    def entry(self, key: Key) -> Any:
        """A p4.v1.TableEntry with this key in canonical form."""
        entry = p4runtime_pb2.TableEntry(table_id=self.id, priority=key.priority)
        for number, value in key.match:
            if value.mask == 0:
                continue
            match = entry.match.add(field_id=number)
            if self._fields[number].match_type == _MatchField.EXACT:
                match.exact.value = p4info.encode(value.value)
            else:
                match.ternary.value = p4info.encode(value.value)
                match.ternary.mask = p4info.encode(value.mask)
        return entry

    def canonical_action(self, table_action: Any) -> Any:
        """A checked p4.v1.TableAction in canonical form."""
        result = p4runtime_pb2.TableAction()
        result.action.action_id = table_action.action.action_id
        for param in sorted(table_action.action.params, key=lambda param: int(param.param_id)):
            value = int.from_bytes(param.value, "big")
            result.action.params.add(param_id=param.param_id, value=p4info.encode(value))
        return result


def _decode(data: bytes, width: int, what: str) -> int:
    try:
        return p4info.decode(data, width)
    except ValueError as error:
        invalid(f"{what}: {error}")


def _field_value(field: p4info_pb2.MatchField, match: Any) -> FieldValue:
    kind, width = match.WhichOneof("field_match_type"), field.bitwidth
    if field.match_type == _MatchField.EXACT and kind == "exact":
        return FieldValue(_decode(match.exact.value, width, field.name), (1 << width) - 1)
    if field.match_type == _MatchField.TERNARY and kind == "ternary":
        value = _decode(match.ternary.value, width, field.name)
        mask = _decode(match.ternary.mask, width, f"mask of {field.name}")
        if mask == 0:
            invalid(f"match field {field.name} has a mask of zeros: leave it out")
        if value & ~mask:
            invalid(f"match field {field.name} has bits set outside its mask")
        return FieldValue(value, mask)
    wanted = _MatchField.MatchType.Name(field.match_type)
    invalid(f"match field {field.name} takes {wanted} values, not {kind}")


def _arguments(action: p4info_pb2.Action, params: Any) -> dict[str, int]:
    wanted = {param.id: param for param in action.params}
    arguments: dict[str, int] = {}
    for param in params:
        known = wanted.get(param.param_id)
        if known is None:
            invalid(f"action {action.preamble.name} has no parameter {param.param_id}")
        if known.name in arguments:
            invalid(f"parameter {known.name} is given twice")
        arguments[known.name] = _decode(param.value, known.bitwidth, known.name)
    missing = [param.name for param in wanted.values() if param.name not in arguments]
    if missing:
        invalid(f"action {action.preamble.name} lacks parameters: {', '.join(missing)}")
    return arguments
