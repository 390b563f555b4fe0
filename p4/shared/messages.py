"""P4Runtime's protobuf messages and service stubs: everything imports them from here.

The `p4runtime` package (1.6.0) ships code of a protobuf compiler so old that today's protobuf refuses to run it.
What that code carries, the serialized description of each .proto file, is as good as ever: the message classes are
built from it, the way that current generated code does. https://protobuf.dev/news/2022-05-06/ has the background.
"""

import ast
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from google.protobuf import descriptor_pool
from google.protobuf.internal import builder
from google.rpc import code_pb2, status_pb2

from checkmate.config import CheckmateError

_DESCRIPTION = re.compile(r"\bserialized_pb=(b'(?:[^'\\]|\\.)*')")


def _build(name: str) -> ModuleType:
    """Put a module of message classes in the place of the one that cannot be run."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise CheckmateError(f"{name} is missing; run `pip install p4runtime==1.6.0`")
    found = _DESCRIPTION.search(Path(spec.origin).read_text())
    if found is None:
        raise CheckmateError(f"{spec.origin} is of an unknown version; run `pip install p4runtime==1.6.0`")
    module = ModuleType(name)
    descriptor = descriptor_pool.Default().AddSerializedFile(ast.literal_eval(found[1]))
    builder.BuildMessageAndEnumDescriptors(descriptor, vars(module))
    builder.BuildTopDescriptorsAndMessages(descriptor, name, vars(module))
    sys.modules[name] = module
    return module


if TYPE_CHECKING:
    from p4.config.v1 import p4info_pb2
    from p4.v1 import p4runtime_pb2
else:
    _build("p4.config.v1.p4types_pb2")
    p4info_pb2 = _build("p4.config.v1.p4info_pb2")
    _build("p4.v1.p4data_pb2")
    p4runtime_pb2 = _build("p4.v1.p4runtime_pb2")

from p4.v1 import p4runtime_pb2_grpc  # noqa: E402 - it looks for the modules above

__all__ = ["code_pb2", "p4info_pb2", "p4runtime_pb2", "p4runtime_pb2_grpc", "status_pb2"]
