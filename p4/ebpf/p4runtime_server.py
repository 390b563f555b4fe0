"""The P4Runtime service of the eBPF switch."""

import logging
import queue
import signal
import threading
from collections.abc import Iterator, Mapping
from concurrent import futures
from typing import Any

import grpc

from checkmate.config import CheckmateError

from ..shared import p4info
from ..shared.messages import code_pb2, p4runtime_pb2, p4runtime_pb2_grpc, status_pb2
from .arbitration import Arbitration
from .datapath import Datapath
from .loader import Switch
from .refusal import Refusal, invalid
from .store import Store

_log = logging.getLogger(__name__)

API_VERSION = "1.4.1"
_MAX_STREAMS = 16
_THREADS = _MAX_STREAMS + 8
"""A stream occupies a thread for as long as it lives; the others are for calls."""
_ENTITIES_PER_RESPONSE = 256
_STOP_SECONDS = 0.2
"""Calls end within this time of the server; streams, which never end by themselves, are cancelled."""

_OPTIONS = (
    ("grpc.so_reuseport", 0),
    # A controller whose host has died stays primary until its stream is found dead.
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

_Request = p4runtime_pb2.SetForwardingPipelineConfigRequest
_STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}


class _Stream:
    """One controller's stream: messages to it wait in ``outbox``; a Refusal ends it, None too, without error."""

    def __init__(self) -> None:
        self.outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()


class Servicer(p4runtime_pb2_grpc.P4RuntimeServicer):  # type: ignore[misc]
    """The service over a data path. One lock serialises all that reads or writes: calls are short."""

    def __init__(self, datapath: Datapath, device_id: int) -> None:
        self._info = p4info.load()
        self._device_id = device_id
        self._lock = threading.Lock()
        self._arbitration = Arbitration(device_id)
        self._store = Store(self._info, datapath)
        self._config: Any = None
        self._streams: set[_Stream] = set()
        self._dangling: set[int] = set()

    def Capabilities(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Version of the API."""
        return p4runtime_pb2.CapabilitiesResponse(p4runtime_api_version=API_VERSION)

    def StreamChannel(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        """Arbitration; there is no packet I/O."""
        stream = _Stream()
        with self._lock:
            full = len(self._streams) >= _MAX_STREAMS
            self._streams.add(stream)
        try:
            if full:
                _abort(context, Refusal(code_pb2.RESOURCE_EXHAUSTED, f"{_MAX_STREAMS} streams are open already"))
            context.add_callback(lambda: stream.outbox.put(None))
            threading.Thread(target=self._receive, args=(stream, requests), daemon=True).start()
            while (message := stream.outbox.get()) is not None:
                if isinstance(message, Refusal):
                    _abort(context, message)
                yield message
        finally:
            with self._lock:
                self._streams.discard(stream)
                self._send(self._arbitration.leave(stream))

    def _receive(self, stream: _Stream, requests: Iterator[Any]) -> None:
        end: Refusal | None = None
        try:
            for request in requests:
                if request.WhichOneof("update") == "arbitration":
                    with self._lock:
                        self._send(self._arbitration.update(stream, request.arbitration))
                else:
                    stream.outbox.put(_stream_error(request))
        except Refusal as refusal:
            end = refusal
        except grpc.RpcError:
            _log.debug("a controller's stream broke")
        except Exception as error:
            # grpcio raises a bare Exception when the call was cancelled under the iterator.
            _log.debug("a controller's stream ended: %s", error)
        stream.outbox.put(end)

    @staticmethod
    def _send(notes: list[tuple[Any, Any]]) -> None:
        for stream, message in notes:
            stream.outbox.put(message)

    def SetForwardingPipelineConfig(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Accepts our own P4Info only; the program itself is fixed."""
        try:
            with self._lock:
                self._arbitration.check_primary(request)
                self._set_config(request)
        except Refusal as refusal:
            _abort(context, refusal)
        return p4runtime_pb2.SetForwardingPipelineConfigResponse()

    def _set_config(self, request: Any) -> None:
        if request.action not in (_Request.VERIFY, _Request.VERIFY_AND_COMMIT, _Request.RECONCILE_AND_COMMIT):
            name = _Request.Action.Name(request.action) if request.action in _Request.Action.values() else "?"
            raise Refusal(
                code_pb2.INVALID_ARGUMENT if request.action == _Request.UNSPECIFIED else code_pb2.UNIMPLEMENTED,
                f"action {name} is not supported; use VERIFY, VERIFY_AND_COMMIT or RECONCILE_AND_COMMIT",
            )
        if not request.HasField("config"):
            invalid("the request has no config")
        if request.config.p4info != self._info:
            invalid("the P4Info is not this switch's (p4/shared/checkmate.p4info.txtpb): use the same version of both")
        if request.action == _Request.VERIFY:
            return
        if request.action == _Request.VERIFY_AND_COMMIT:
            self._store.clear()
        self._config = p4runtime_pb2.ForwardingPipelineConfig()
        self._config.CopyFrom(request.config)
        _log.info("pipeline set (%s)", _Request.Action.Name(request.action))

    def GetForwardingPipelineConfig(self, request: Any, context: grpc.ServicerContext) -> Any:
        """The config that was set, or no config."""
        response = p4runtime_pb2.GetForwardingPipelineConfigResponse()
        types = p4runtime_pb2.GetForwardingPipelineConfigRequest
        try:
            self._check_device(request)
        except Refusal as refusal:
            _abort(context, refusal)
        with self._lock:
            if self._config is None:
                return response
            response.config.CopyFrom(self._config)
        if request.response_type in (types.COOKIE_ONLY, types.DEVICE_CONFIG_AND_COOKIE):
            response.config.ClearField("p4info")
        if request.response_type in (types.COOKIE_ONLY, types.P4INFO_AND_COOKIE):
            response.config.ClearField("p4_device_config")
        return response

    def Write(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Updates in their order; each is attempted, whatever the others do."""
        try:
            with self._lock:
                self._arbitration.check_primary(request)
                self._check_configured()
                if request.atomicity != p4runtime_pb2.WriteRequest.CONTINUE_ON_ERROR:
                    raise Refusal(code_pb2.UNIMPLEMENTED, "batches are CONTINUE_ON_ERROR only")
                outcomes = [_outcome(self._store.write, update) for update in request.updates]
                self._report_dangling()
        except Refusal as refusal:
            _abort(context, refusal)
        _finish(context, outcomes, "write")
        return p4runtime_pb2.WriteResponse()

    def _report_dangling(self) -> None:
        dangling = self._store.dangling_groups()
        for group in sorted(dangling - self._dangling):
            _log.warning("multicast group %d is used but not configured: its traffic is forwarded, not copied", group)
        self._dangling = dangling

    def Read(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        """Entities, then the outcome of each request if one failed."""
        entities: list[Any] = []
        try:
            self._check_device(request)
            with self._lock:
                self._check_configured()
                outcomes = [
                    _outcome(lambda wanted: entities.extend(self._store.read(wanted)), wanted)
                    for wanted in request.entities
                ]
        except Refusal as refusal:
            _abort(context, refusal)
        for start in range(0, len(entities), _ENTITIES_PER_RESPONSE):
            yield p4runtime_pb2.ReadResponse(entities=entities[start : start + _ENTITIES_PER_RESPONSE])
        _finish(context, outcomes, "read")

    def _check_device(self, request: Any) -> None:
        if request.device_id != self._device_id:
            raise Refusal(code_pb2.NOT_FOUND, f"there is no device {request.device_id}; this one is {self._device_id}")

    def _check_configured(self) -> None:
        if self._config is None:
            raise Refusal(code_pb2.FAILED_PRECONDITION, "no pipeline is set: call SetForwardingPipelineConfig first")


def _stream_error(request: Any) -> Any:
    response = p4runtime_pb2.StreamMessageResponse()
    response.error.canonical_code = code_pb2.UNIMPLEMENTED
    response.error.message = "this switch has neither packet I/O nor digests"
    match request.WhichOneof("update"):
        case "packet":
            response.error.packet_out.SetInParent()
        case "digest_ack":
            response.error.digest_list_ack.SetInParent()
        case _:
            response.error.other.SetInParent()
    return response


def _outcome(call: Any, argument: Any) -> Any:
    """The p4.v1.Error of one element of a batch."""
    try:
        call(argument)
    except Refusal as refusal:
        return p4runtime_pb2.Error(canonical_code=refusal.code, message=refusal.message, space="checkmate-ebpf")
    return p4runtime_pb2.Error(canonical_code=code_pb2.OK)


def _finish(context: grpc.ServicerContext, outcomes: list[Any], what: str) -> None:
    """End a batch: with one p4.v1.Error for each element when any of them failed."""
    failed = [outcome for outcome in outcomes if outcome.canonical_code != code_pb2.OK]
    if not failed:
        return
    message = f"{len(failed)} of {len(outcomes)} {what}s failed, first: {failed[0].message}"
    _log.warning("%s", message)
    status = status_pb2.Status(code=code_pb2.UNKNOWN, message=message)
    for outcome in outcomes:
        status.details.add().Pack(outcome)
    context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
    context.abort(grpc.StatusCode.UNKNOWN, message)


def _abort(context: grpc.ServicerContext, refusal: Refusal) -> None:
    _log.warning("refused: %s", refusal)
    context.abort(_STATUS_CODES[refusal.code], refusal.message)


class Server:
    """The service on a TCP address; a context manager. ``port`` is the one in use, also when 0 was asked for."""

    def __init__(self, datapath: Datapath, address: str, device_id: int = 1) -> None:
        self._server = grpc.server(
            futures.ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="p4runtime"),
            options=_OPTIONS,
        )
        p4runtime_pb2_grpc.add_P4RuntimeServicer_to_server(Servicer(datapath, device_id), self._server)
        try:
            self.port: int = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise CheckmateError(f"the switch cannot listen on {address}: {error}; choose a free address") from error

    def __enter__(self) -> "Server":
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(_STOP_SECONDS).wait()


def serve(ports: Mapping[int, str], address: str, device_id: int = 1, netns: str | None = None) -> None:
    """Run the switch on ``ports`` (port number → interface) until SIGTERM or SIGINT, then remove it.

    ``address``: HOST:PORT of the P4Runtime server, in this process's own network namespace; ``netns``: the ``ip
    netns`` name of the interfaces' namespace, None for the same one. Call it on the main thread. Raises CheckmateError.
    """
    stop = threading.Event()
    previous = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with Switch(ports, netns) as switch, Server(switch, address, device_id):
            _log.info("P4Runtime %s on %s, device %d", API_VERSION, address, device_id)
            stop.wait()
            _log.info("stopping")
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
