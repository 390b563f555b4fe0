"""Arbitration: who is primary, and who is told, for every order of coming and going."""

from typing import Any

import pytest
from google.protobuf import any_pb2
from hypothesis import given
from hypothesis import strategies as st

from checkmate.p4.ebpf.arbitration import Arbitration
from checkmate.p4.ebpf.refusal import Refusal
from checkmate.p4.shared.messages import code_pb2, p4runtime_pb2

DEVICE = 3


def update(election: int | None, role: str = "", device: int = DEVICE) -> Any:
    message = p4runtime_pb2.MasterArbitrationUpdate(device_id=device)
    if role:
        message.role.name = role
    if election is not None:
        message.election_id.high, message.election_id.low = election >> 64, election & (1 << 64) - 1
    return message


def told(notes: Any) -> list[tuple[Any, str, int]]:
    """(stream, status, election id) of each note."""
    return [
        (
            stream,
            code_pb2.Code.Name(note.arbitration.status.code),
            note.arbitration.election_id.high << 64 | note.arbitration.election_id.low,
        )
        for stream, note in notes
    ]


def may_write(arbitration: Arbitration, election: int | None, role: str = "", device: int = DEVICE) -> str:
    request = p4runtime_pb2.WriteRequest(device_id=device, role=role)
    if election is not None:
        request.election_id.CopyFrom(update(election).election_id)
    try:
        arbitration.check_primary(request)
    except Refusal as refusal:
        return str(code_pb2.Code.Name(refusal.code))
    return "OK"


def test_the_highest_election_id_is_primary() -> None:
    arbitration = Arbitration(DEVICE)
    assert may_write(arbitration, 5) == "PERMISSION_DENIED"
    assert told(arbitration.update("a", update(5))) == [("a", "OK", 5)]
    assert told(arbitration.update("b", update(4))) == [("b", "ALREADY_EXISTS", 5)]
    assert told(arbitration.update("c", update(1 << 64))) == [
        ("a", "ALREADY_EXISTS", 1 << 64),
        ("b", "ALREADY_EXISTS", 1 << 64),
        ("c", "OK", 1 << 64),
    ]
    assert [may_write(arbitration, e) for e in (5, 1 << 64, 0, None)] == [
        "PERMISSION_DENIED",
        "OK",
        "PERMISSION_DENIED",
        "PERMISSION_DENIED",
    ]


def test_nobody_inherits_from_a_primary_that_left() -> None:
    arbitration = Arbitration(DEVICE)
    arbitration.update("a", update(5))
    arbitration.update("b", update(4))
    assert told(arbitration.leave("a")) == [("b", "NOT_FOUND", 5)]
    assert may_write(arbitration, 5) == "PERMISSION_DENIED"
    assert may_write(arbitration, 4) == "PERMISSION_DENIED"
    assert told(arbitration.update("b", update(4))) == [("b", "NOT_FOUND", 5)]
    assert told(arbitration.update("b", update(5))) == [("b", "OK", 5)]
    assert may_write(arbitration, 5) == "OK"
    assert arbitration.leave("never came") == []


def test_a_backup_that_leaves_is_not_announced() -> None:
    arbitration = Arbitration(DEVICE)
    arbitration.update("a", update(5))
    arbitration.update("b", update(4))
    assert arbitration.leave("b") == []


def test_a_primary_can_step_down() -> None:
    arbitration = Arbitration(DEVICE)
    arbitration.update("a", update(5))
    arbitration.update("b", update(4))
    assert told(arbitration.update("a", update(3))) == [("a", "NOT_FOUND", 5), ("b", "NOT_FOUND", 5)]


def test_without_an_election_id_nobody_is_primary() -> None:
    arbitration = Arbitration(DEVICE)
    (note,) = arbitration.update("a", update(None))
    assert not note[1].arbitration.HasField("election_id")
    assert told([note]) == [("a", "NOT_FOUND", 0)]
    assert told(arbitration.update("b", update(0))) == [("a", "ALREADY_EXISTS", 0), ("b", "OK", 0)]


def test_roles_are_apart() -> None:
    arbitration = Arbitration(DEVICE)
    arbitration.update("a", update(5))
    assert told(arbitration.update("b", update(5, role="r"))) == [("b", "OK", 5)]
    assert arbitration.update("b", update(6, role="r"))[0][1].arbitration.role.name == "r"
    assert may_write(arbitration, 6) == "PERMISSION_DENIED"
    assert may_write(arbitration, 6, role="r") == "OK"
    assert may_write(arbitration, 6, role="unknown") == "NOT_FOUND"


@pytest.mark.parametrize(
    ("stream", "message", "code"),
    [
        ("new", update(9, device=4), "NOT_FOUND"),
        ("new", update(5), "INVALID_ARGUMENT"),
        ("a", update(9, device=4), "FAILED_PRECONDITION"),
        ("a", update(9, role="r"), "FAILED_PRECONDITION"),
        ("b", update(5), "INVALID_ARGUMENT"),
    ],
)
def test_updates_that_end_the_stream(stream: str, message: Any, code: str) -> None:
    arbitration = Arbitration(DEVICE)
    arbitration.update("a", update(5))
    arbitration.update("b", update(4))
    with pytest.raises(Refusal) as refusal:
        arbitration.update(stream, message)
    assert code_pb2.Code.Name(refusal.value.code) == code
    assert may_write(arbitration, 5) == "OK"


def test_role_configurations_are_refused() -> None:
    message = update(1, role="r")
    message.role.config.CopyFrom(any_pb2.Any(type_url="x"))
    with pytest.raises(Refusal, match="configuration"):
        Arbitration(DEVICE).update("a", message)


def test_another_device_is_not_found() -> None:
    arbitration = Arbitration(DEVICE)
    arbitration.update("a", update(5))
    assert may_write(arbitration, 5, device=4) == "NOT_FOUND"


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.one_of(st.none(), st.integers(0, 4), st.just("leave")))))
def test_at_most_one_primary_and_it_has_the_highest_id(steps: list[tuple[str, Any]]) -> None:
    arbitration = Arbitration(DEVICE)
    live: dict[str, int | None] = {}
    highest = -1
    for stream, step in steps:
        if step == "leave":
            arbitration.leave(stream)
            live.pop(stream, None)
        else:
            try:
                arbitration.update(stream, update(step))
            except Refusal:
                assert step in [election for other, election in live.items() if other != stream]
                continue
            live[stream] = step
            highest = max(highest, -1 if step is None else step)
        for election in range(5):
            wanted = election == highest and election in live.values()
            assert (may_write(arbitration, election) == "OK") is wanted
