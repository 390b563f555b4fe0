"""A P4Runtime client: arbitration, pipeline, batched writes, reads. Every call has a deadline."""

import contextlib
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import grpc

from checkmate.controlplane.target import NotPrimaryError, TargetError, UnreachableError
from checkmate.p4.shared.messages import code_pb2, p4runtime_pb2, p4runtime_pb2_grpc, status_pb2

_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),  # a new channel tries at once instead of sitting out an old one's back-off
    ("grpc.enable_retries", 0),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_metadata_size", 1 << 20),  # where a refused batch tells of each update
]
_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


class Client:
    """One connection to one device. Not thread-safe: one thread calls, an own one listens to the stream.

    ``role``: several controllers write at the same time if each has a role of its own and the switch knows roles.
    ``election_id``: first bid for being primary; None takes over only when nobody is.
    """

    def __init__(
        self, address: str, device_id: int, role: str = "", election_id: int | None = None, timeout_s: float = 5.0
    ) -> None:
        self.address = address
        self._device_id = device_id
        self._role = role
        self._election_id = election_id
        self._timeout_s = timeout_s
        self._session: _Session | None = None

    @property
    def primary(self) -> bool:
        """Whether the switch still holds us for its primary controller."""
        return self._session is not None and self._session.primary

    def connect(self) -> None:
        """Become the primary controller, which we stay until the connection ends or another one outbids us.

        Raises NotPrimaryError while another controller is; call again, since its end is noticed on the stream that
        stays open. Raises UnreachableError when the switch does not answer, TargetError when it refuses.
        """
        session = self._open()
        try:
            session.become_primary(self._election_id, self._timeout_s)
        except NotPrimaryError:
            self._call("Capabilities", p4runtime_pb2.CapabilitiesRequest())  # does it still answer?
            raise
        except TargetError as error:
            self.close()
            if isinstance(error, _Refused) and error.code == grpc.StatusCode.INVALID_ARGUMENT:
                raise NotPrimaryError(f"{error}; another controller was faster") from None
            raise

    def has_primary(self) -> bool:
        """Whether a controller of our role is primary now, without becoming it; the errors are those of ``connect``."""
        session = self._open()
        try:
            return session.ask(self._timeout_s)
        finally:
            self.close()

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
            action=p4runtime_pb2.SetForwardingPipelineConfigRequest.VERIFY_AND_COMMIT
        )
        request.config.p4info.CopyFrom(info)
        request.config.p4_device_config = device_config
        request.config.cookie.cookie = cookie
        self._call("SetForwardingPipelineConfig", self._signed(request))

    def write(self, updates: Sequence[tuple[str, Any]]) -> None:
        """Write one batch of (description, P4Runtime Update); a TargetError names each update that was refused.

        Raises NotPrimaryError, and writes nothing, when another controller has become the primary.
        """
        request = p4runtime_pb2.WriteRequest(
            atomicity=p4runtime_pb2.WriteRequest.CONTINUE_ON_ERROR,
            updates=[update for _, update in updates],
        )
        try:
            self._call("Write", self._signed(request))
        except _Refused as refused:
            lines = _refused_updates(refused.error, [text for text, _ in updates])
            if not lines:
                raise
            raise TargetError("\n".join([f"switch {self.address} refused:", *lines])) from None

    def read(self, entities: Sequence[Any]) -> list[Any]:
        """All entities that match any of ``entities``; needs no primary."""
        request = p4runtime_pb2.ReadRequest(device_id=self._device_id, entities=entities)
        return [entity for response in self._call("Read", request) for entity in response.entities]

    def _open(self) -> "_Session":
        if self._session is not None and self._session.ended:
            self.close()
        if self._session is None:
            self._session = _Session(self.address, self._device_id, self._role)
        return self._session

    def _signed(self, request: Any) -> Any:
        """The request as the primary's."""
        if self._session is None:
            raise UnreachableError(f"switch {self.address}: not connected")
        request.device_id = self._device_id
        request.role = self._role
        request.election_id.CopyFrom(_uint128(self._session.election_id()))
        return request

    def _call(self, method: str, request: Any) -> Any:
        try:
            answer = getattr(self._open().stub, method)(request, timeout=self._timeout_s)
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
    """A channel and, from the first bid on, its arbitration stream, whose end is the end of the session.

    Bids go up: whoever takes over bids more than any controller before, so that one that comes back, with whatever
    bid it had, is not primary. P4Runtime leaves a device without a primary until somebody bids at least the highest
    id that was ever seen; PI, the server of BMv2, promotes the highest one that is left. Both end the same way here.
    """

    def __init__(self, address: str, device_id: int, role: str) -> None:
        self._address = address
        self._device_id = device_id
        self._role = role
        self._channel = grpc.insecure_channel(address, options=_OPTIONS)
        self.stub = p4runtime_pb2_grpc.P4RuntimeStub(self._channel)
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._bid: int | None = None
        self._highest = 0
        self._answers = 0
        self._code = code_pb2.UNKNOWN
        self._ended: TargetError | None = None
        self._stream: Any = None
        self._listener: threading.Thread | None = None

    @property
    def ended(self) -> bool:
        """Whether the switch has ended the stream."""
        return self._ended is not None

    @property
    def primary(self) -> bool:
        """Whether we are, and nobody has bid more than we have."""
        with self._changed:
            return self._ended is None and self._code == code_pb2.OK and self._bid == self._highest

    def election_id(self) -> int:
        """Of the primary, which we are; raises NotPrimaryError or UnreachableError when we are not."""
        with self._changed:
            if self._ended is not None:
                raise self._ended
            if self._bid is None or not self.primary:
                raise self._not_primary()
            return self._bid

    def become_primary(self, first_bid: int | None, timeout_s: float) -> None:
        """See ``Client.connect``."""
        deadline = time.monotonic() + timeout_s
        if self._stream is None:
            self._send(first_bid)
            self._await_answer(0, deadline)
        while not self.primary:
            if self._code == code_pb2.ALREADY_EXISTS:
                raise self._not_primary()
            answers = self._answers
            self._send(self._highest + 1)
            self._await_answer(answers, deadline)

    def ask(self, timeout_s: float) -> bool:
        """See ``Client.has_primary``: who listens without a bid is told."""
        self._send(None)
        self._await_answer(0, time.monotonic() + timeout_s)
        return bool(self._code == code_pb2.ALREADY_EXISTS)

    def close(self) -> None:
        """End stream and channel."""
        self._requests.put(None)
        if self._listener is not None:
            self._listener.join(timeout=1)  # the switch has let go of our election id once it ends the stream
            self._stream.cancel()
        self._channel.close()
        if self._listener is not None:
            self._listener.join(timeout=5)

    def _send(self, bid: int | None) -> None:
        message = p4runtime_pb2.StreamMessageRequest()
        message.arbitration.device_id = self._device_id
        if self._role:
            message.arbitration.role.name = self._role
        if bid is not None:
            message.arbitration.election_id.CopyFrom(_uint128(bid))
        with self._changed:
            self._bid = bid
        self._requests.put(message)
        if self._stream is None:
            self._stream = self.stub.StreamChannel(iter(self._requests.get, None))
            self._listener = threading.Thread(target=self._listen, name="p4runtime-stream", daemon=True)
            self._listener.start()

    def _await_answer(self, answers: int, deadline: float) -> None:
        """Wait for one more than ``answers``; raises what ended the stream, UnreachableError when none comes."""
        with self._changed:
            left = deadline - time.monotonic()
            answered = self._changed.wait_for(lambda: self._ended is not None or self._answers > answers, left)
            if self._ended is not None:
                raise self._ended
            if not answered or left <= 0:
                raise UnreachableError(f"switch {self._address}: no answer in time")

    def _not_primary(self) -> NotPrimaryError:
        return NotPrimaryError(
            f"switch {self._address} has another primary controller (election id {self._highest}); waiting for its end"
        )

    def _listen(self) -> None:
        ended: TargetError = UnreachableError(f"switch {self._address}: it ended the connection")
        try:
            for update in self._updates():
                with self._changed:
                    self._code = update.status.code
                    said = update.election_id.high << 64 | update.election_id.low
                    if update.status.code == code_pb2.OK and not update.HasField("election_id"):
                        said = self._bid or 0
                    self._highest = max(self._highest, said)
                    self._answers += 1
                    self._changed.notify_all()
        except grpc.RpcError as error:
            ended = _error(self._address, "StreamChannel", error)
        with self._changed:
            self._ended = ended
            self._changed.notify_all()

    def _updates(self) -> Iterator[Any]:
        return (message.arbitration for message in self._stream if message.WhichOneof("update") == "arbitration")


def _uint128(value: int) -> Any:
    return p4runtime_pb2.Uint128(high=value >> 64, low=value & (1 << 64) - 1)


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
