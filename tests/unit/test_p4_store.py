"""The store: entries checked as the P4Runtime specification says, carried to a data path, read back as written."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkmate.config import CheckmateError
from checkmate.p4.ebpf.datapath import Count, Counter, Drop, Flood, Forward, L2Action, Registrar, Replica, Rewrite
from checkmate.p4.ebpf.fake import FakeDatapath
from checkmate.p4.ebpf.refusal import Refusal
from checkmate.p4.ebpf.store import Store
from checkmate.p4.shared import p4info
from checkmate.p4.shared.messages import code_pb2, p4runtime_pb2

INSERT, MODIFY, DELETE = p4runtime_pb2.Update.INSERT, p4runtime_pb2.Update.MODIFY, p4runtime_pb2.Update.DELETE
INFO = p4info.load()
TABLES = {table.preamble.alias: table for table in INFO.tables}
ACTIONS = {action.preamble.alias: action for action in INFO.actions}
COUNTERS = {counter.preamble.alias: counter.preamble.id for counter in INFO.counters}
MAC = 0x020000000001
MAC_BYTES = MAC.to_bytes(6, "big")


class World:
    """A store on a fake data path."""

    def __init__(self, max_groups: int = 1024) -> None:
        self.datapath = FakeDatapath(max_groups=max_groups)
        self.store = Store(INFO, self.datapath)

    def write(self, kind: int, **entity: Any) -> None:
        self.store.write(p4runtime_pb2.Update(type=kind, entity=p4runtime_pb2.Entity(**entity)))

    def read(self, **entity: Any) -> list[Any]:
        return self.store.read(p4runtime_pb2.Entity(**entity))

    def refuses(self, code: str, kind: int, **entity: Any) -> str:
        calls = self.datapath.calls
        with pytest.raises(Refusal) as refusal:
            self.write(kind, **entity)
        assert code_pb2.Code.Name(refusal.value.code) == code
        assert self.datapath.calls == calls, "a refused update reached the data path"
        return refusal.value.message


@pytest.fixture
def world() -> World:
    return World()


def action(name: str, *values: int) -> Any:
    result = p4runtime_pb2.TableAction()
    result.action.action_id = ACTIONS[name].preamble.id
    for param, value in zip(ACTIONS[name].params, values, strict=True):
        result.action.params.add(param_id=param.id, value=p4info.encode(value))
    return result


def entry(table: str, match: tuple[int, ...] = (), call: Any = None, **fields: Any) -> Any:
    result = p4runtime_pb2.TableEntry(table_id=TABLES[table].preamble.id, action=call, **fields)
    for field, value in zip(TABLES[table].match_fields, match, strict=False):
        result.match.add(field_id=field.id).exact.value = p4info.encode(value)
    return result


def classify(value: int, mask: int, priority: int = 1) -> Any:
    result = entry("classify", (), action("mark_tagged"), priority=priority)
    ternary = result.match.add(field_id=1).ternary
    ternary.value, ternary.mask = p4info.encode(value), p4info.encode(mask)
    return result


def group(number: int, *replicas: tuple[int, int]) -> Any:
    result = p4runtime_pb2.PacketReplicationEngineEntry()
    result.multicast_group_entry.multicast_group_id = number
    for port, rid in replicas:
        result.multicast_group_entry.replicas.add(egress_port=port, instance=rid)
    return result


HEARTBEAT = entry("heartbeat", (1, MAC), action("replicate", 7))
FORWARD = entry("l2_forward", (MAC,), action("forward", 2))
ROLE = entry("port_role", (3,), action("shadow_port", 0x0A010001, 7702))
LIVE = entry("live_group", (7,), action("group_is_live"))
REWRITE = entry("rewrite", (3, 1), action("to_shadow", 0x02434B000003, MAC, 0x0A0100C8))


def test_entries_reach_the_data_path_and_leave_it(world: World) -> None:
    entries = (HEARTBEAT, LIVE, FORWARD, ROLE, REWRITE, classify(0x20, 0x20))
    for new in entries:
        world.write(INSERT, table_entry=new)
    path = world.datapath
    assert path.heartbeats == {(1, MAC_BYTES): 7}
    assert path.live_groups == {7}
    assert path.l2 == {MAC_BYTES: Forward(2)}
    assert path.shadow_ports == {3: Registrar(0x0A010001, 7702)}
    assert path.rewrites == {(3, 1): Rewrite(bytes.fromhex("02434b000003"), MAC_BYTES, 0x0A0100C8)}
    assert path.tagged_dscps == frozenset(range(0x20, 0x40))
    assert len(world.read(table_entry=p4runtime_pb2.TableEntry())) == len(entries)
    for old in entries:
        world.write(DELETE, table_entry=old)
    assert not (path.heartbeats or path.live_groups or path.l2 or path.shadow_ports)
    assert not (path.rewrites or path.tagged_dscps)
    assert world.read(table_entry=p4runtime_pb2.TableEntry()) == []


@pytest.mark.parametrize("new", [HEARTBEAT, LIVE, FORWARD, ROLE, REWRITE, classify(1, 3)])
def test_what_is_written_is_read(world: World, new: Any) -> None:
    written = p4runtime_pb2.TableEntry()
    written.CopyFrom(new)
    written.metadata, written.controller_metadata = b"cookie", 5
    world.write(INSERT, table_entry=written)
    (read,) = world.read(table_entry=p4runtime_pb2.TableEntry(table_id=new.table_id))
    assert read.table_entry == written


def test_long_byte_strings_are_accepted_and_read_back_short(world: World) -> None:
    long = p4runtime_pb2.TableEntry()
    long.CopyFrom(FORWARD)
    long.match[0].exact.value = b"\0\0\0" + long.match[0].exact.value
    long.action.action.params[0].value = b"\0\0\0\2"
    world.write(INSERT, table_entry=long)
    (read,) = world.read(table_entry=p4runtime_pb2.TableEntry(table_id=FORWARD.table_id))
    assert read.table_entry == FORWARD


def test_insert_twice_modify_and_delete_what_is_not_there(world: World) -> None:
    world.refuses("NOT_FOUND", MODIFY, table_entry=HEARTBEAT)
    world.refuses("NOT_FOUND", DELETE, table_entry=HEARTBEAT)
    world.write(INSERT, table_entry=HEARTBEAT)
    world.refuses("ALREADY_EXISTS", INSERT, table_entry=HEARTBEAT)
    world.write(MODIFY, table_entry=entry("heartbeat", (1, MAC), action("replicate", 8)))
    assert world.datapath.heartbeats == {(1, MAC_BYTES): 8}


def test_an_unchanged_entry_is_not_written_again(world: World) -> None:
    world.write(INSERT, table_entry=HEARTBEAT)
    calls = world.datapath.calls
    world.write(MODIFY, table_entry=HEARTBEAT)
    world.write(MODIFY, table_entry=entry("heartbeat", (1, MAC), metadata=b"only this changes"))
    assert world.datapath.calls == calls
    (read,) = world.read(table_entry=p4runtime_pb2.TableEntry(table_id=HEARTBEAT.table_id))
    assert read.table_entry.metadata == b"only this changes"
    assert read.table_entry.action == HEARTBEAT.action


def _without_action(new: Any) -> Any:
    changed = p4runtime_pb2.TableEntry()
    changed.CopyFrom(new)
    changed.ClearField("action")
    return changed


def _with_extra_param() -> Any:
    changed = p4runtime_pb2.TableEntry()
    changed.CopyFrom(FORWARD)
    changed.action.action.params.add(param_id=9, value=b"\1")
    return changed


MALFORMED = {
    "unknown table": p4runtime_pb2.TableEntry(table_id=4711),
    "no match": entry("l2_forward", (), action("forward", 1)),
    "half a match": entry("heartbeat", (1,), action("replicate", 1)),
    "field given twice": p4runtime_pb2.TableEntry(
        table_id=FORWARD.table_id, match=[*FORWARD.match, *FORWARD.match], action=FORWARD.action
    ),
    "unknown field": p4runtime_pb2.TableEntry(
        table_id=FORWARD.table_id, match=[p4runtime_pb2.FieldMatch(field_id=9)], action=FORWARD.action
    ),
    "value too wide": entry("l2_forward", (1 << 48,), action("forward", 1)),
    "empty value": p4runtime_pb2.TableEntry(
        table_id=FORWARD.table_id,
        match=[p4runtime_pb2.FieldMatch(field_id=1, exact=p4runtime_pb2.FieldMatch.Exact())],
        action=FORWARD.action,
    ),
    "ternary for exact": p4runtime_pb2.TableEntry(
        table_id=FORWARD.table_id, match=classify(1, 1).match, action=FORWARD.action
    ),
    "exact for ternary": entry("classify", (1,), action("mark_tagged"), priority=1),
    "mask of zeros": classify(0, 0),
    "bits outside the mask": classify(3, 1),
    "no priority": classify(1, 1, priority=0),
    "negative priority": classify(1, 1, priority=-1),
    "priority without ternary": entry("l2_forward", (MAC,), action("forward", 1), priority=1),
    "no action": _without_action(FORWARD),
    "action of another table": entry("l2_forward", (MAC,), action("replicate", 1)),
    "action profile": p4runtime_pb2.TableEntry(
        table_id=FORWARD.table_id, match=FORWARD.match, action=p4runtime_pb2.TableAction(action_profile_member_id=1)
    ),
    "parameter too wide": entry("l2_forward", (MAC,), action("forward", 512)),
    "missing parameter": p4runtime_pb2.TableEntry(
        table_id=FORWARD.table_id,
        match=FORWARD.match,
        action=p4runtime_pb2.TableAction(
            action=p4runtime_pb2.Action(action_id=FORWARD.action.action.action_id),
        ),
    ),
    "extra parameter": _with_extra_param(),
    "forward to a port without interface": entry("l2_forward", (MAC,), action("forward", 100)),
    "role of a port without interface": entry("port_role", (100,), action("trainer_port")),
    "constant": p4runtime_pb2.TableEntry(
        table_id=FORWARD.table_id, match=FORWARD.match, action=FORWARD.action, is_const=True
    ),
    "idle time-out": p4runtime_pb2.TableEntry(
        table_id=FORWARD.table_id, match=FORWARD.match, action=FORWARD.action, idle_timeout_ns=1
    ),
    "meter": p4runtime_pb2.TableEntry(
        table_id=FORWARD.table_id,
        match=FORWARD.match,
        action=FORWARD.action,
        meter_config=p4runtime_pb2.MeterConfig(cir=1),
    ),
    "counter of a table without": p4runtime_pb2.TableEntry(
        table_id=FORWARD.table_id,
        match=FORWARD.match,
        action=FORWARD.action,
        counter_data=p4runtime_pb2.CounterData(packet_count=1),
    ),
    "negative counter": p4runtime_pb2.TableEntry(
        table_id=HEARTBEAT.table_id,
        match=HEARTBEAT.match,
        action=HEARTBEAT.action,
        counter_data=p4runtime_pb2.CounterData(packet_count=-1),
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_entries_are_refused(world: World, case: str) -> None:
    world.refuses("INVALID_ARGUMENT", INSERT, table_entry=MALFORMED[case])


def test_an_action_for_defaults_only_cannot_be_an_entrys(world: World) -> None:
    world.refuses("PERMISSION_DENIED", INSERT, table_entry=entry("heartbeat", (1, MAC), action("NoAction")))


def default_of(world: World) -> L2Action:
    return world.datapath.l2_default


def test_the_default_action_of_l2_forward(world: World) -> None:
    flood = entry("l2_forward", (), action("flood", 1), is_default_action=True)
    world.write(MODIFY, table_entry=flood)
    assert default_of(world) == Flood(1)
    query = entry("l2_forward", is_default_action=True)
    assert [entity.table_entry for entity in world.read(table_entry=query)] == [flood]
    assert world.read(table_entry=entry("l2_forward")) == []
    world.write(MODIFY, table_entry=query)
    assert default_of(world) == Drop()
    world.refuses("INVALID_ARGUMENT", INSERT, table_entry=flood)
    world.refuses("INVALID_ARGUMENT", DELETE, table_entry=flood)
    matched = entry("l2_forward", (MAC,), action("drop"), is_default_action=True)
    world.refuses("INVALID_ARGUMENT", MODIFY, table_entry=matched)


def test_other_default_actions_are_constant(world: World) -> None:
    for table in ("classify", "port_role", "heartbeat", "live_group", "rewrite"):
        world.refuses("PERMISSION_DENIED", MODIFY, table_entry=entry(table, is_default_action=True))
        (read,) = world.read(table_entry=entry(table, is_default_action=True))
        assert read.table_entry.action.action.action_id == TABLES[table].initial_default_action.action_id


def test_a_full_table(world: World) -> None:
    for mask in range(1, TABLES["classify"].size):
        world.write(INSERT, table_entry=classify(0, mask))
    world.write(INSERT, table_entry=classify(0, 1, priority=2))
    world.refuses("RESOURCE_EXHAUSTED", INSERT, table_entry=classify(0, 1, priority=3))


def test_what_the_data_path_refuses_is_not_stored(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise CheckmateError("run `ethtool -K p3 tx off`")

    monkeypatch.setattr(world.datapath, "set_shadow_port", refuse)
    assert "ethtool" in world.refuses("FAILED_PRECONDITION", INSERT, table_entry=ROLE)
    assert world.read(table_entry=p4runtime_pb2.TableEntry()) == []


@given(st.lists(st.tuples(st.integers(0, 63), st.integers(1, 63)), max_size=8))
def test_classification_is_that_of_the_entries(pairs: list[tuple[int, int]]) -> None:
    world = World()
    wanted = {(value & mask, mask) for value, mask in pairs}
    for value, mask in wanted:
        world.write(INSERT, table_entry=classify(value, mask))
    tagged = {dscp for dscp in range(64) for value, mask in wanted if dscp & mask == value}
    assert world.datapath.tagged_dscps == tagged


def test_reading_with_filters(world: World) -> None:
    other = entry("l2_forward", (MAC + 1,), action("drop"), metadata=b"m")
    for new in (FORWARD, other, HEARTBEAT):
        world.write(INSERT, table_entry=new)

    def found(**fields: Any) -> list[Any]:
        return [entity.table_entry for entity in world.read(table_entry=p4runtime_pb2.TableEntry(**fields))]

    table = FORWARD.table_id
    assert found() == [FORWARD, other, HEARTBEAT] or found() == [HEARTBEAT, FORWARD, other]
    assert found(table_id=table) == [FORWARD, other]
    assert found(table_id=table, match=other.match) == [other]
    assert found(table_id=table, action=action("drop")) == [other]
    assert found(table_id=table, metadata=b"m") == [other]
    assert found(table_id=table, controller_metadata=1) == []
    with pytest.raises(Refusal):
        found(match=FORWARD.match)
    with pytest.raises(Refusal):
        found(table_id=4711)


def test_direct_counters(world: World) -> None:
    counted = entry("heartbeat", (1, MAC), action("replicate", 7), counter_data=count(3, 300))
    world.write(INSERT, table_entry=counted)
    (read,) = world.read(table_entry=entry("heartbeat", counter_data=count(0, 0)))
    assert read.table_entry == counted
    assert not world.read(table_entry=entry("heartbeat"))[0].table_entry.HasField("counter_data")
    cell = p4runtime_pb2.DirectCounterEntry(table_entry=entry("heartbeat", (1, MAC)), data=count(5, 500))
    world.write(MODIFY, direct_counter_entry=cell)
    world.write(MODIFY, table_entry=entry("heartbeat", (1, MAC), action("replicate", 8)))
    for query in (cell.table_entry, entry("heartbeat"), p4runtime_pb2.TableEntry()):
        (read,) = world.read(direct_counter_entry=p4runtime_pb2.DirectCounterEntry(table_entry=query))
        assert read.direct_counter_entry == cell
    world.refuses("INVALID_ARGUMENT", INSERT, direct_counter_entry=cell)
    world.write(DELETE, table_entry=counted)
    world.refuses("NOT_FOUND", MODIFY, direct_counter_entry=cell)
    with pytest.raises(Refusal, match="no such"):
        world.read(direct_counter_entry=cell)
    with pytest.raises(Refusal, match="no direct counter"):
        world.read(direct_counter_entry=p4runtime_pb2.DirectCounterEntry(table_entry=entry("l2_forward")))


def count(packets: int, size: int) -> Any:
    return p4runtime_pb2.CounterData(packet_count=packets, byte_count=size)


def cell(name: str, index: int | None = None, data: Any = None) -> Any:
    result = p4runtime_pb2.CounterEntry(counter_id=COUNTERS[name], data=data)
    if index is not None:
        result.index.index = index
    return result


def test_indirect_counters(world: World) -> None:
    world.write(MODIFY, counter_entry=cell("tagged_in", 4, count(2, 200)))
    assert world.datapath.counts == {(Counter.TAGGED_IN, 4): Count(2, 200)}
    (read,) = world.read(counter_entry=cell("tagged_in", 4))
    assert read.counter_entry == cell("tagged_in", 4, count(2, 200))
    values = [entity.counter_entry.data.packet_count for entity in world.read(counter_entry=cell("tagged_in"))]
    assert values == [2 if index == 4 else 0 for index in range(512)]
    assert len(world.read(counter_entry=p4runtime_pb2.CounterEntry())) == 512 * len(Counter)
    world.write(MODIFY, counter_entry=cell("tagged_in", None, count(1, 1)))
    assert world.datapath.counts[Counter.TAGGED_IN, 511] == Count(1, 1)
    world.refuses("INVALID_ARGUMENT", MODIFY, counter_entry=cell("tagged_in", -1))
    world.refuses("OUT_OF_RANGE", MODIFY, counter_entry=cell("tagged_in", 512))
    world.refuses("INVALID_ARGUMENT", INSERT, counter_entry=cell("tagged_in", 1))
    world.refuses("INVALID_ARGUMENT", MODIFY, counter_entry=p4runtime_pb2.CounterEntry(counter_id=4711))


def test_multicast_groups(world: World) -> None:
    first = group(7, (2, 0), (3, 1))
    first.multicast_group_entry.metadata = b"m"
    world.write(INSERT, packet_replication_engine_entry=first)
    assert world.datapath.groups == {7: (Replica(2, 0), Replica(3, 1))}
    world.refuses("ALREADY_EXISTS", INSERT, packet_replication_engine_entry=first)
    (read,) = world.read(packet_replication_engine_entry=group(0))
    assert read.packet_replication_engine_entry == first
    assert len(world.read(packet_replication_engine_entry=group(7))) == 1
    world.write(MODIFY, packet_replication_engine_entry=group(7, (2, 0)))
    assert world.datapath.groups == {7: (Replica(2, 0),)}
    world.write(DELETE, packet_replication_engine_entry=group(7))
    assert world.datapath.groups == {}
    world.refuses("NOT_FOUND", DELETE, packet_replication_engine_entry=group(7))
    with pytest.raises(Refusal, match="no such"):
        world.read(packet_replication_engine_entry=group(7))


def test_ports_of_replicas_may_be_byte_strings(world: World) -> None:
    entry_ = p4runtime_pb2.PacketReplicationEngineEntry()
    entry_.multicast_group_entry.multicast_group_id = 1
    entry_.multicast_group_entry.replicas.add(port=b"\5", instance=2)
    world.write(INSERT, packet_replication_engine_entry=entry_)
    assert world.datapath.groups == {1: (Replica(5, 2),)}
    assert world.read(packet_replication_engine_entry=entry_)[0].packet_replication_engine_entry == entry_


BAD_GROUPS = {
    "number 0": group(0, (1, 0)),
    "number too large": group(1 << 16, (1, 0)),
    "the same port twice": group(1, (2, 0), (2, 1)),
    "a port without interface": group(1, (100, 0)),
    "an instance too large": group(1, (1, 1 << 16)),
}


@pytest.mark.parametrize("case", BAD_GROUPS)
def test_bad_groups_are_refused(world: World, case: str) -> None:
    world.refuses("INVALID_ARGUMENT", INSERT, packet_replication_engine_entry=BAD_GROUPS[case])


def test_a_full_replication_engine() -> None:
    world = World(max_groups=1)
    world.write(INSERT, packet_replication_engine_entry=group(1, (1, 0)))
    with pytest.raises(Refusal) as refusal:
        world.write(INSERT, packet_replication_engine_entry=group(2, (1, 0)))
    assert refusal.value.code == code_pb2.RESOURCE_EXHAUSTED
    assert len(world.read(packet_replication_engine_entry=group(0))) == 1


def test_groups_that_entries_need_and_that_are_not_there(world: World) -> None:
    assert world.store.dangling_groups() == set()
    world.write(INSERT, table_entry=HEARTBEAT)
    world.write(MODIFY, table_entry=entry("l2_forward", (), action("flood", 1), is_default_action=True))
    assert world.store.dangling_groups() == {1, 7}
    world.write(INSERT, packet_replication_engine_entry=group(7, (2, 0)))
    world.write(INSERT, packet_replication_engine_entry=group(1))
    assert world.store.dangling_groups() == {1}, "an empty group is as good as none"


def test_clear(world: World) -> None:
    world.write(INSERT, table_entry=HEARTBEAT)
    world.write(MODIFY, table_entry=entry("l2_forward", (), action("flood", 1), is_default_action=True))
    world.write(INSERT, packet_replication_engine_entry=group(7, (2, 0)))
    world.write(MODIFY, counter_entry=cell("dropped", 1, count(1, 1)))
    world.store.clear()
    path = world.datapath
    assert not (path.heartbeats or path.groups)
    assert path.l2_default == Drop()
    assert path.counts[Counter.DROPPED, 1] == Count()
    assert world.read(table_entry=p4runtime_pb2.TableEntry()) == []


@pytest.mark.parametrize("kind", ["meter_entry", "action_profile_member", "register_entry", "digest_entry"])
def test_entities_that_the_program_does_not_have(world: World, kind: str) -> None:
    entity = p4runtime_pb2.Entity()
    getattr(entity, kind).SetInParent()
    with pytest.raises(Refusal) as refusal:
        world.store.read(entity)
    assert refusal.value.code == code_pb2.UNIMPLEMENTED
    with pytest.raises(Refusal) as refusal:
        world.store.write(p4runtime_pb2.Update(type=INSERT, entity=entity))
    assert refusal.value.code == code_pb2.UNIMPLEMENTED


def test_updates_without_type_or_entity(world: World) -> None:
    world.refuses("INVALID_ARGUMENT", p4runtime_pb2.Update.UNSPECIFIED, table_entry=FORWARD)
    world.refuses("INVALID_ARGUMENT", INSERT)
    with pytest.raises(Refusal):
        world.read()
