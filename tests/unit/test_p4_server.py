"""The P4Runtime server over gRPC, on a data path in memory."""

import queue
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from checkmate.config import CheckmateError
from checkmate.p4.ebpf.fake import FakeDatapath
from checkmate.p4.ebpf.p4runtime_server import API_VERSION, Server
from checkmate.p4.shared import p4info
from checkmate.p4.shared.messages import code_pb2, p4runtime_pb2, p4runtime_pb2_grpc, status_pb2

DEVICE = 7
TIMEOUT_S = 10
Pipeline = p4runtime_pb2.SetForwardingPipelineConfigRequest
L2_FORWARD = next(table for table in p4info.load().tables if table.preamble.alias == "l2_forward")
DROP = next(action for action in p4info.load().actions if action.preamble.alias == "drop")


class Controller:
    """One client and its stream."""

    def __init__(self, port: int, election: int) -> None:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_metadata_size", 1 << 20)]
        self.channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=options)
        self.stub = p4runtime_pb2_grpc.P4RuntimeStub(self.channel)
        self.election = p4runtime_pb2.Uint128(low=election)
        self.requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.stream = self.stub.StreamChannel(iter(self.requests.get, None), timeout=60)

    def arbitrate(self, device: int = DEVICE) -> Any:
        request = p4runtime_pb2.StreamMessageRequest()
        request.arbitration.device_id = device
        request.arbitration.election_id.CopyFrom(self.election)
        self.requests.put(request)
        return self.next()

    def next(self) -> Any:
        return next(self.stream)

    def set_pipeline(self, action: int = Pipeline.VERIFY_AND_COMMIT, info: Any = None, cookie: int = 1) -> None:
        request = Pipeline(device_id=DEVICE, election_id=self.election, action=action)
        request.config.p4info.CopyFrom(info or p4info.load())
        request.config.cookie.cookie = cookie
        request.config.p4_device_config = b"program"
        self.stub.SetForwardingPipelineConfig(request, timeout=TIMEOUT_S)

    def write(self, *updates: Any, **fields: Any) -> None:
        fields = {"device_id": DEVICE, "election_id": self.election} | fields
        self.stub.Write(p4runtime_pb2.WriteRequest(updates=updates, **fields), timeout=TIMEOUT_S)

    def read(self, *entities: Any, device: int = DEVICE) -> list[Any]:
        request = p4runtime_pb2.ReadRequest(device_id=device, entities=entities)
        return [e for response in self.stub.Read(request, timeout=TIMEOUT_S) for e in response.entities]

    def close(self) -> None:
        self.requests.put(None)
        self.channel.close()


@pytest.fixture
def port() -> Iterator[int]:
    with Server(FakeDatapath(), "127.0.0.1:0", DEVICE) as server:
        yield server.port


@pytest.fixture
def controller(port: int) -> Iterator[Controller]:
    client = Controller(port, election=5)
    assert client.arbitrate().arbitration.status.code == code_pb2.OK
    yield client
    client.close()


def drop(mac: int, kind: int = p4runtime_pb2.Update.INSERT) -> Any:
    update = p4runtime_pb2.Update(type=kind)
    entry = update.entity.table_entry
    entry.table_id = L2_FORWARD.preamble.id
    entry.match.add(field_id=1).exact.value = p4info.encode(mac)
    entry.action.action.action_id = DROP.preamble.id
    return update


ALL_ENTRIES = p4runtime_pb2.Entity(table_entry=p4runtime_pb2.TableEntry())


def code_of(error: pytest.ExceptionInfo[grpc.RpcError]) -> str:
    name: str = error.value.code().name
    return name


def details_of(error: pytest.ExceptionInfo[grpc.RpcError]) -> list[str]:
    status = status_pb2.Status()
    status.ParseFromString(dict(error.value.trailing_metadata())["grpc-status-details-bin"])
    assert status.code == code_pb2.UNKNOWN
    codes = []
    for detail in status.details:
        element = p4runtime_pb2.Error()
        assert detail.Unpack(element)
        codes.append(code_pb2.Code.Name(element.canonical_code))
    return codes


def test_capabilities(controller: Controller) -> None:
    request = p4runtime_pb2.CapabilitiesRequest()
    assert controller.stub.Capabilities(request, timeout=TIMEOUT_S).p4runtime_api_version == API_VERSION


def test_before_the_pipeline_is_set(controller: Controller) -> None:
    with pytest.raises(grpc.RpcError) as error:
        controller.write(drop(1))
    assert code_of(error) == "FAILED_PRECONDITION"
    with pytest.raises(grpc.RpcError) as error:
        controller.read(ALL_ENTRIES)
    assert code_of(error) == "FAILED_PRECONDITION"
    request = p4runtime_pb2.GetForwardingPipelineConfigRequest(device_id=DEVICE)
    assert not controller.stub.GetForwardingPipelineConfig(request, timeout=TIMEOUT_S).HasField("config")


def test_the_pipeline_is_checked_and_returned(controller: Controller) -> None:
    controller.set_pipeline(Pipeline.VERIFY)
    request = p4runtime_pb2.GetForwardingPipelineConfigRequest
    assert not controller.stub.GetForwardingPipelineConfig(request(device_id=DEVICE)).HasField("config")
    controller.set_pipeline(cookie=77)
    fields = {
        request.ALL: (True, True),
        request.COOKIE_ONLY: (False, False),
        request.P4INFO_AND_COOKIE: (True, False),
        request.DEVICE_CONFIG_AND_COOKIE: (False, True),
    }
    for kind, (has_info, has_program) in fields.items():
        answer = controller.stub.GetForwardingPipelineConfig(request(device_id=DEVICE, response_type=kind)).config
        assert answer.cookie.cookie == 77
        assert (answer.p4info == p4info.load()) is has_info
        assert (answer.p4_device_config == b"program") is has_program
    with pytest.raises(grpc.RpcError) as error:
        controller.stub.GetForwardingPipelineConfig(request(device_id=1))
    assert code_of(error) == "NOT_FOUND"


def test_another_p4info_is_refused(controller: Controller) -> None:
    other = type(p4info.load())()
    other.CopyFrom(p4info.load())
    other.tables[0].size += 1
    with pytest.raises(grpc.RpcError, match="same version") as error:
        controller.set_pipeline(info=other)
    assert code_of(error) == "INVALID_ARGUMENT"
    for action in (Pipeline.VERIFY_AND_SAVE, Pipeline.COMMIT):
        with pytest.raises(grpc.RpcError) as error:
            controller.set_pipeline(action)
        assert code_of(error) == "UNIMPLEMENTED"
    with pytest.raises(grpc.RpcError) as error:
        controller.set_pipeline(Pipeline.UNSPECIFIED)
    assert code_of(error) == "INVALID_ARGUMENT"


def test_commit_clears_and_reconcile_keeps(controller: Controller) -> None:
    controller.set_pipeline()
    controller.write(drop(1))
    controller.set_pipeline(Pipeline.RECONCILE_AND_COMMIT)
    assert len(controller.read(ALL_ENTRIES)) == 1
    controller.set_pipeline()
    assert controller.read(ALL_ENTRIES) == []


def test_a_batch_goes_on_after_an_error_and_tells_all(controller: Controller) -> None:
    controller.set_pipeline()
    with pytest.raises(grpc.RpcError) as error:
        controller.write(drop(1), drop(1), drop(2, p4runtime_pb2.Update.DELETE), drop(3))
    assert code_of(error) == "UNKNOWN"
    assert details_of(error) == ["OK", "ALREADY_EXISTS", "NOT_FOUND", "OK"]
    assert len(controller.read(ALL_ENTRIES)) == 2


def test_a_large_batch_tells_all_too(controller: Controller) -> None:
    controller.set_pipeline()
    batch = [drop(mac) for mac in range(500)]
    controller.write(*batch)
    with pytest.raises(grpc.RpcError) as error:
        controller.write(*batch)
    assert details_of(error) == ["ALREADY_EXISTS"] * 500


def test_a_read_answers_what_it_can(controller: Controller) -> None:
    controller.set_pipeline()
    controller.write(*(drop(mac) for mac in range(300)))
    bad = p4runtime_pb2.Entity(table_entry=p4runtime_pb2.TableEntry(table_id=1))
    request = p4runtime_pb2.ReadRequest(device_id=DEVICE, entities=[ALL_ENTRIES, bad])
    found = 0
    with pytest.raises(grpc.RpcError) as error:
        for response in controller.stub.Read(request, timeout=TIMEOUT_S):
            found += len(response.entities)
    assert found == 300
    assert details_of(error) == ["OK", "INVALID_ARGUMENT"]
    with pytest.raises(grpc.RpcError) as error:
        controller.read(ALL_ENTRIES, device=1)
    assert code_of(error) == "NOT_FOUND"


def test_atomic_batches_are_not_promised(controller: Controller) -> None:
    controller.set_pipeline()
    for atomicity in (p4runtime_pb2.WriteRequest.ROLLBACK_ON_ERROR, p4runtime_pb2.WriteRequest.DATAPLANE_ATOMIC):
        with pytest.raises(grpc.RpcError) as error:
            controller.write(drop(1), atomicity=atomicity)
        assert code_of(error) == "UNIMPLEMENTED"
    assert controller.read(ALL_ENTRIES) == []


def test_only_the_primary_writes(controller: Controller, port: int) -> None:
    controller.set_pipeline()
    backup = Controller(port, election=4)
    assert backup.arbitrate().arbitration.status.code == code_pb2.ALREADY_EXISTS
    for attempt in (backup.write, backup.set_pipeline):
        with pytest.raises(grpc.RpcError) as error:
            attempt()
        assert code_of(error) == "PERMISSION_DENIED"
    assert backup.read(ALL_ENTRIES) == []
    with pytest.raises(grpc.RpcError) as error:
        controller.write(drop(1), device_id=1)
    assert code_of(error) == "NOT_FOUND"
    controller.close()
    assert backup.next().arbitration.status.code == code_pb2.NOT_FOUND
    backup.election.low = 6
    assert backup.arbitrate().arbitration.status.code == code_pb2.OK
    backup.write(drop(1))
    assert len(backup.read(ALL_ENTRIES)) == 1
    backup.close()


def test_a_new_primary_displaces_the_old(controller: Controller, port: int) -> None:
    newer = Controller(port, election=9)
    assert newer.arbitrate().arbitration.status.code == code_pb2.OK
    note = controller.next().arbitration
    assert (note.status.code, note.election_id.low) == (code_pb2.ALREADY_EXISTS, 9)
    newer.close()
    assert controller.next().arbitration.status.code == code_pb2.NOT_FOUND


def test_streams_that_are_refused(controller: Controller, port: int) -> None:
    stranger = Controller(port, election=1)
    with pytest.raises(grpc.RpcError) as error:
        stranger.arbitrate(device=1)
    assert code_of(error) == "NOT_FOUND"
    twin = Controller(port, election=5)
    with pytest.raises(grpc.RpcError) as error:
        twin.arbitrate()
    assert code_of(error) == "INVALID_ARGUMENT"
    stranger.close()
    twin.close()


def test_packet_out_is_answered_with_an_error(controller: Controller) -> None:
    request = p4runtime_pb2.StreamMessageRequest()
    request.packet.payload = b"x"
    controller.requests.put(request)
    answer = controller.next().error
    assert answer.canonical_code == code_pb2.UNIMPLEMENTED
    assert answer.WhichOneof("details") == "packet_out"


def test_too_many_streams(port: int) -> None:
    clients = [Controller(port, election) for election in range(17)]
    refused = 0
    for client in clients:
        try:
            client.arbitrate()
        except grpc.RpcError as error:
            assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            refused += 1
    assert refused == 1
    for client in clients:
        client.close()


def test_a_missing_group_is_logged_once(controller: Controller, caplog: pytest.LogCaptureFixture) -> None:
    controller.set_pipeline()
    flood = next(action for action in p4info.load().actions if action.preamble.alias == "flood")
    for mac in (1, 2):
        update = drop(mac)
        update.entity.table_entry.action.action.action_id = flood.preamble.id
        update.entity.table_entry.action.action.params.add(param_id=1, value=b"\x63")
        controller.write(update)
    assert [record.getMessage() for record in caplog.records if "multicast" in record.getMessage()] == [
        "multicast group 99 is used but not configured: its traffic is forwarded, not copied"
    ]


def test_the_server_ends_with_streams_open() -> None:
    with Server(FakeDatapath(), "127.0.0.1:0", DEVICE) as server:
        client = Controller(server.port, election=1)
        client.arbitrate()
        begin = time.monotonic()
    assert time.monotonic() - begin < TIMEOUT_S / 2
    with pytest.raises(grpc.RpcError):
        client.next()
    client.close()


def test_an_address_in_use(port: int) -> None:
    with pytest.raises(CheckmateError, match="choose a free address"):
        Server(FakeDatapath(), f"127.0.0.1:{port}")
