"""BMv2's ``simple_switch_grpc`` on a set of interfaces: started, watched and, in the end, removed without trace."""

import contextlib
import logging
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from importlib import resources
from pathlib import Path
from types import TracebackType
from typing import Self

from checkmate.config import CheckmateError

from ..ebpf import netdev

_log = logging.getLogger(__name__)

BINARY = "simple_switch_grpc"
_OFFLOADS = ("tx", "rx", "tso", "gso", "gro")
_START_SECONDS = 30.0
_STOP_SECONDS = 5.0
_POLL_SECONDS = 0.02
_WATCH_SECONDS = 0.5
_CONNECT_SECONDS = 2.0
_LOG_LINES = 15
_UNIX = "unix:"


def pipeline() -> bytes:
    """Our program as BMv2 takes it from P4Runtime; raises CheckmateError when it was not compiled."""
    path = resources.files(__package__).joinpath("checkmate.json")
    if not path.is_file():
        raise CheckmateError(f"{path} is missing: compile p4/v1model with p4c-bm2-ss and reinstall")
    return path.read_bytes()


def find_binary() -> str:
    """Path of ``simple_switch_grpc``; raises CheckmateError when there is none."""
    binary = shutil.which(BINARY)
    if binary is None:
        raise CheckmateError(
            f"{BINARY} is not on PATH: install p4lang's package p4lang-bmv2, or build p4lang's behavioral-model "
            "with P4Runtime (PI), and add it to PATH"
        )
    return binary


class Bmv2:
    """``simple_switch_grpc`` on ``ports`` (port number → interface); a context manager.

    Entering starts it without a pipeline, which the controller loads, and waits until it listens; leaving ends it and
    puts the interfaces' offloads back. ``address``: of its P4Runtime server, ``HOST:PORT`` in ``netns``, or
    ``unix:PATH``. ``netns``: namespace of interfaces and server by its ``ip netns`` name, None for this thread's.

    BMv2 reads and writes whole frames: offloads of the interfaces are off while it runs. What sends to it must finish
    its frames too (on the far end of a veth: ``ethtool -K X tx off``).
    """

    def __init__(self, ports: Mapping[int, str], address: str, device_id: int = 1, netns: str | None = None) -> None:
        self._ports = dict(ports)
        self._address = address
        self._device_id = device_id
        self._netns = netns
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        binary = find_binary()
        with ExitStack() as stack:
            namespace = stack.enter_context(contextlib.closing(netdev.Namespace(self._netns)))
            for name in self._ports.values():
                stack.enter_context(_without_offloads(namespace, name))
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ckmbmv2")))
            with namespace.entered():
                if _listens(self._address):
                    raise CheckmateError(f"something listens on {self._address} already: choose a free address")
                self._start(binary, folder)
                stack.callback(self._end)
                self._wait()
            self._stack = stack.pop_all()
        _log.info("BMv2 on %s", ", ".join(f"{port}={name}" for port, name in sorted(self._ports.items())))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def check(self) -> None:
        """Raise CheckmateError with its last words when the process has ended."""
        if (status := self._process.poll()) is not None:
            lines = self._output.read_text(errors="replace").splitlines()[-_LOG_LINES:]
            raise CheckmateError("\n".join([f"{BINARY} ended with status {status}; it said:", *lines]))

    def _start(self, binary: str, folder: Path) -> None:
        self._output = folder / "output"
        interfaces = [part for port, name in self._ports.items() for part in ("-i", f"{port}@{name}")]
        command = [
            *("setpriv", "--pdeathsig", "KILL", binary, "--no-p4", *interfaces, "--device-id", str(self._device_id)),
            *("--notifications-addr", f"ipc://{folder}/notifications", "--", "--grpc-server-addr", self._address),
        ]
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                start_new_session=True,  # Ctrl-C is for its owner, who ends it
            )

    def _wait(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while not _listens(self._address):
            self.check()
            if time.monotonic() > deadline:
                raise CheckmateError(f"{BINARY} does not listen on {self._address} after {_START_SECONDS:g} s")
            time.sleep(_POLL_SECONDS)

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve(ports: Mapping[int, str], address: str, device_id: int = 1, netns: str | None = None) -> None:
    """Run BMv2 as ``Bmv2`` does until SIGTERM or SIGINT, then end it. Call it on the main thread.

    Raises CheckmateError when it cannot start or ends by itself.
    """
    stop = threading.Event()
    previous = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with Bmv2(ports, address, device_id, netns) as switch:
            _log.info("P4Runtime on %s, device %d", address, device_id)
            while not stop.wait(_WATCH_SECONDS):
                switch.check()
            _log.info("stopping")
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _listens(address: str) -> bool:
    """Whether a connection is accepted, from this thread's namespace."""
    try:
        if address.startswith(_UNIX):
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(_CONNECT_SECONDS)
                probe.connect(address.removeprefix(_UNIX))
        else:
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _without_offloads(namespace: netdev.Namespace, name: str) -> Iterator[None]:
    """Frames that were merged or lack checksums would be forwarded as they are, and be wrong on the wire."""
    with namespace.entered():
        netdev.interface_index(name)
        on = netdev.enabled_offloads(name, _OFFLOADS)
        _set_offloads(name, on, "off")
    try:
        yield
    finally:
        with namespace.entered(), contextlib.suppress(CheckmateError):  # the interface may be gone
            _set_offloads(name, on, "on")


def _set_offloads(name: str, offloads: Sequence[str], setting: str) -> None:
    if not offloads:
        return
    command = ["ethtool", "-K", name, *(word for offload in offloads for word in (offload, setting))]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_STOP_SECONDS)
    except FileNotFoundError:
        raise CheckmateError("ethtool is missing: install Debian's package ethtool") from None
    except subprocess.SubprocessError as error:
        reason = getattr(error, "stderr", None) or error
        raise CheckmateError(f"`{' '.join(command)}` failed: {reason}") from None
