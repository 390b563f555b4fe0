"""P4Runtime's protobuf messages and service stubs: everything imports them from here.

The `p4runtime` package (1.6.0) ships code of an old protobuf compiler that only protobuf's pure-Python
implementation accepts. The implementation is chosen once per process, when protobuf is first imported, so
this module chooses it and leaves the environment of child processes alone.
"""

import os

_CHOICE = "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"
_before = os.environ.get(_CHOICE)
os.environ[_CHOICE] = "python"
try:
    from google.rpc import code_pb2, status_pb2

    from p4.config.v1 import p4info_pb2
    from p4.v1 import p4runtime_pb2, p4runtime_pb2_grpc
finally:
    if _before is None:
        del os.environ[_CHOICE]
    else:
        os.environ[_CHOICE] = _before

__all__ = ["code_pb2", "p4info_pb2", "p4runtime_pb2", "p4runtime_pb2_grpc", "status_pb2"]
