"""P4Runtime's messages and service, from the definitions that the ``p4runtime`` package carries.

The package's generated modules cannot be imported: they are of a protoc older than 3.19, which the protobuf runtime of
today refuses. They hold the serialized file descriptors, and those are all that protobuf needs. The files
are found by distribution, so that a folder called ``p4`` on ``sys.path`` does not hide them.
"""

import ast
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import google.protobuf.any_pb2
import google.rpc.status_pb2  # noqa: F401  (both are dependencies of the descriptors below)
import grpc
from google.protobuf import descriptor_pool, message_factory

from checkmate.config import CheckmateError

SERVICE = "p4.v1.P4Runtime"
_FILES = ("config/v1/p4types", "config/v1/p4info", "v1/p4data", "v1/p4runtime")  # in order of dependency


def _serialized(name: str) -> bytes:
    """The serialized FileDescriptorProto inside the generated module ``name``."""
    try:
        path = metadata.distribution("p4runtime").locate_file(f"p4/{name}_pb2.py")
        tree = ast.parse(Path(str(path)).read_bytes())
    except (metadata.PackageNotFoundError, OSError) as error:
        raise CheckmateError(f"the Python package p4runtime is not usable ({error}); pip install p4runtime") from None
    found = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, bytes)]
    return max(found, key=len)


def _messages(name: str) -> SimpleNamespace:
    """The message classes of one file, which is added to the pool."""
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(_serialized(name))
    types = pool.FindFileByName(f"p4/{name}.proto").message_types_by_name
    return SimpleNamespace(**{key: message_factory.GetMessageClass(kind) for key, kind in types.items()})


_types, p4info, _data, p4runtime = (_messages(name) for name in _FILES)
"""Message classes by name: ``p4runtime.WriteRequest``, ``p4info.P4Info``; enumeration values are class attributes."""

METHODS: dict[str, tuple[str, Any, Any]] = {
    "Write": ("unary_unary", p4runtime.WriteRequest, p4runtime.WriteResponse),
    "Read": ("unary_stream", p4runtime.ReadRequest, p4runtime.ReadResponse),
    "SetForwardingPipelineConfig": (
        "unary_unary",
        p4runtime.SetForwardingPipelineConfigRequest,
        p4runtime.SetForwardingPipelineConfigResponse,
    ),
    "GetForwardingPipelineConfig": (
        "unary_unary",
        p4runtime.GetForwardingPipelineConfigRequest,
        p4runtime.GetForwardingPipelineConfigResponse,
    ),
    "StreamChannel": ("stream_stream", p4runtime.StreamMessageRequest, p4runtime.StreamMessageResponse),
    "Capabilities": ("unary_unary", p4runtime.CapabilitiesRequest, p4runtime.CapabilitiesResponse),
}


def stub(channel: grpc.Channel) -> SimpleNamespace:
    """Client calls by method name, as a generated stub has them."""
    return SimpleNamespace(
        **{
            name: getattr(channel, kind)(
                f"/{SERVICE}/{name}",
                request_serializer=request.SerializeToString,
                response_deserializer=response.FromString,
            )
            for name, (kind, request, response) in METHODS.items()
        }
    )


def add_servicer(server: grpc.Server, servicer: object) -> None:
    """Serve the methods of ``servicer`` that are named as those of the service."""
    handlers = {}
    for name, (kind, request, response) in METHODS.items():
        handler: Callable[..., Any] = getattr(grpc, f"{kind}_rpc_method_handler")
        handlers[name] = handler(
            getattr(servicer, name),
            request_deserializer=request.FromString,
            response_serializer=response.SerializeToString,
        )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
