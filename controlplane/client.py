"""A P4Runtime client: arbitration, pipeline, batched writes, reads. Every call has a deadline."""

import contextlib
import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import grpc

from checkmate.controlplane.target import TargetError, UnreachableError
from checkmate.p4.shared.messages import code_pb2, p4runtime_pb2, p4runtime_pb2_grpc, status_pb2

_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),  # a new channel tries at once instead of sitting out an old one's back-off
    ("grpc.enable_retries", 0),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_metadata_size", 1 << 20),  # where a refused batch tells of each update
]
_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


class Client:
    """One connection to one device. Not thread-safe: one thread calls, an own one listens to the stream."""

    def __init__(self, address: str, device_id: int, election_id: int = 1, timeout_s: float = 5.0) -> None:
        self.address = address
        self._device_id = device_id
        self._election_id = p4runtime_pb2.Uint128(low=election_id)
        self._timeout_s = timeout_s
        self._session: _Session | None = None

    @property
    def connected(self) -> bool:
        """Whether the switch still holds us for its primary controller."""
        return self._session is not None and self._session.primary

    def connect(self) -> None:
        """Become the primary controller; raises UnreachableError, or TargetError when another one is."""
        self.close()
        self._session = _Session(self.address, self._arbitration())
        try:
            self._session.wait_for_primary(self._timeout_s)
        except TargetError:
            self.close()
            raise

    def close(self) -> None:
        """End the connection; can be called again."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def pipeline(self) -> tuple[Any, int]:
        """P4Info and cookie of the pipeline that runs; an empty P4Info when there is none."""
        request = p4runtime_pb2.GetForwardingPipelineConfigRequest(
            device_id=self._device_id,
            response_type=p4runtime_pb2.GetForwardingPipelineConfigRequest.P4INFO_AND_COOKIE,
        )
        try:
            config = self._call("GetForwardingPipelineConfig", request).config
        except _Refused as refused:
            if refused.code != grpc.StatusCode.FAILED_PRECONDITION:
                raise
            config = p4runtime_pb2.ForwardingPipelineConfig()
        return config.p4info, config.cookie.cookie

    def set_pipeline(self, info: Any, device_config: bytes, cookie: int) -> None:
        """Load and start a pipeline; the switch forgets all entries."""
        request = p4runtime_pb2.SetForwardingPipelineConfigRequest(
            device_id=self._device_id,
            election_id=self._election_id,
            action=p4runtime_pb2.SetForwardingPipelineConfigRequest.VERIFY_AND_COMMIT,
        )
        request.config.p4info.CopyFrom(info)
        request.config.p4_device_config = device_config
        request.config.cookie.cookie = cookie
        self._call("SetForwardingPipelineConfig", request)

    def write(self, updates: Sequence[tuple[str, Any]]) -> None:
        """Write one batch of (description, P4Runtime Update); a TargetError names each update that was refused."""
        request = p4runtime_pb2.WriteRequest(
            device_id=self._device_id,
            election_id=self._election_id,
            atomicity=p4runtime_pb2.WriteRequest.CONTINUE_ON_ERROR,
            updates=[update for _, update in updates],
        )
        try:
            self._call("Write", request)
        except _Refused as refused:
            lines = _refused_updates(refused.error, [text for text, _ in updates])
            if not lines:
                raise
            raise TargetError("\n".join([f"switch {self.address} refused:", *lines])) from None

    def read(self, entities: Sequence[Any]) -> list[Any]:
        """All entities that match any of ``entities``."""
        request = p4runtime_pb2.ReadRequest(device_id=self._device_id, entities=entities)
        return [entity for response in self._call("Read", request) for entity in response.entities]

    def _arbitration(self) -> Any:
        message = p4runtime_pb2.StreamMessageRequest()
        message.arbitration.device_id = self._device_id
        message.arbitration.election_id.CopyFrom(self._election_id)
        return message

    def _call(self, method: str, request: Any) -> Any:
        if self._session is None:
            raise UnreachableError(f"switch {self.address}: not connected")
        try:
            answer = getattr(self._session.stub, method)(request, timeout=self._timeout_s)
            return list(answer) if method == "Read" else answer
        except grpc.RpcError as error:
            if error.code() in _GONE:
                self.close()
            raise _error(self.address, method, error) from None


class _Refused(TargetError):
    """The switch answered a call with an error."""

    def __init__(self, text: str, error: grpc.RpcError) -> None:
        super().__init__(text)
        self.error = error
        self.code = error.code()


class _Session:
    """A channel and its arbitration stream, whose end is the end of the session."""

    def __init__(self, address: str, arbitration: Any) -> None:
        self._address = address
        self._channel = grpc.insecure_channel(address, options=_OPTIONS)
        self.stub = p4runtime_pb2_grpc.P4RuntimeStub(self._channel)
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._requests.put(arbitration)
        self._changed = threading.Condition()
        self._status: Any = None
        self._ended: TargetError | None = None
        self._stream = self.stub.StreamChannel(iter(self._requests.get, None))
        self._listener = threading.Thread(target=self._listen, name="p4runtime-stream", daemon=True)
        self._listener.start()

    @property
    def primary(self) -> bool:
        with self._changed:
            return self._ended is None and self._status is not None and self._status.code == code_pb2.OK

    def wait_for_primary(self, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._ended is not None or self._status is not None, timeout_s)
            if self._ended is not None:
                raise self._ended
            if self._status is None:
                raise UnreachableError(f"switch {self._address}: no answer within {timeout_s:g} s")
            if self._status.code != code_pb2.OK:
                raise TargetError(
                    f"switch {self._address} has another primary controller ({self._status.message or 'no reason'}); "
                    "stop that one"
                )

    def close(self) -> None:
        self._requests.put(None)
        self._listener.join(timeout=1)  # the switch has let go of our election id once it ends the stream
        self._stream.cancel()
        self._channel.close()
        self._listener.join(timeout=5)

    def _listen(self) -> None:
        ended: TargetError = UnreachableError(f"switch {self._address}: it ended the connection")
        try:
            for message in self._arbitrations():
                with self._changed:
                    self._status = message.status
                    self._changed.notify_all()
        except grpc.RpcError as error:
            ended = _error(self._address, "StreamChannel", error)
        with self._changed:
            self._ended = ended
            self._changed.notify_all()

    def _arbitrations(self) -> Iterator[Any]:
        return (message.arbitration for message in self._stream if message.WhichOneof("update") == "arbitration")


def _error(address: str, method: str, error: grpc.RpcError) -> TargetError:
    text = f"switch {address}: {method}: {error.code().name}: {error.details()}"
    return UnreachableError(text) if error.code() in _GONE else _Refused(text, error)


def _refused_updates(error: grpc.RpcError, texts: list[str]) -> list[str]:
    """One line for each update that failed, from the details that P4Runtime attaches to the status."""
    packed = dict(error.trailing_metadata() or ()).get("grpc-status-details-bin", b"")
    status, lines = status_pb2.Status(), []
    with contextlib.suppress(Exception):
        status.ParseFromString(packed)
    for text, detail in zip(texts, status.details, strict=False):
        update = p4runtime_pb2.Error()
        if detail.Unpack(update) and update.canonical_code != code_pb2.OK:
            lines.append(f"  {text}: {code_pb2.Code.Name(update.canonical_code)}: {update.message}")
    return lines
