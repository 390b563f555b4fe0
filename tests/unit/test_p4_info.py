"""The P4Info is what p4c makes of a v1model program with these names, and agrees with the maps and the wire format."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkmate import config
from checkmate.p4.ebpf.datapath import Counter
from checkmate.p4.ebpf.libbpf import constants
from checkmate.p4.shared import p4info

_PREFIX = {"actions": 0x01, "tables": 0x02, "counters": 0x12, "direct_counters": 0x13}


def jenkins(name: str) -> int:
    """The one-at-a-time hash, of which p4c makes ids."""
    value = 0
    for byte in name.encode():
        value = (value + byte) & 0xFFFFFFFF
        value = (value + (value << 10)) & 0xFFFFFFFF
        value ^= value >> 6
    value = (value + (value << 3)) & 0xFFFFFFFF
    value ^= value >> 11
    return (value + (value << 15)) & 0xFFFFFFFF


@pytest.mark.parametrize("kind", _PREFIX)
def test_ids_are_those_of_p4c(kind: str) -> None:
    objects = getattr(p4info.load(), kind)
    assert objects
    for item in objects:
        assert item.preamble.id == _PREFIX[kind] << 24 | jenkins(item.preamble.name) & 0xFFFFFF
        assert item.preamble.alias == item.preamble.name.rpartition(".")[2]


def test_references_resolve() -> None:
    info = p4info.load()
    actions = {action.preamble.id for action in info.actions}
    direct = {counter.preamble.id: counter.direct_table_id for counter in info.direct_counters}
    for table in info.tables:
        assert {reference.id for reference in table.action_refs} <= actions
        assert table.initial_default_action.action_id in {reference.id for reference in table.action_refs}
        for number in table.direct_resource_ids:
            assert direct.pop(number) == table.preamble.id
    assert not direct


def test_sizes_and_counters_are_those_of_the_data_path() -> None:
    info = p4info.load()
    sizes = {table.preamble.alias: table.size for table in info.tables}
    assert sizes["heartbeat"] == constants.CKM_HEARTBEATS
    assert sizes["l2_forward"] == constants.CKM_L2_ENTRIES
    assert sizes["rewrite"] == constants.CKM_REWRITES
    assert {counter.preamble.name for counter in info.counters} == {counter.value for counter in Counter}
    assert {counter.size for counter in info.counters} == {constants.CKM_PORTS}
    assert len(Counter) == constants.CKM_COUNTERS
    assert 0 < config.SHADOW_RID <= constants.CKM_MARK_RID_MASK


@given(st.integers(0, 2**64))
def test_byte_strings_are_canonical(value: int) -> None:
    data = p4info.encode(value)
    assert p4info.decode(data, 65) == value
    assert p4info.decode(b"\0" + data, 65) == value
    assert len(data) == 1 or data[0] != 0


@pytest.mark.parametrize(("data", "width"), [(b"", 8), (b"\x01\x63", 8), (b"\x10\x63", 12), (b"\x02\x00", 9)])
def test_byte_strings_that_do_not_fit(data: bytes, width: int) -> None:
    with pytest.raises(ValueError, match=r"fit|empty"):
        p4info.decode(data, width)
