"""The local status socket: bad answers, bad requests, and what became of a socket's process."""

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkmate.config import CheckmateError
from checkmate.status import StatusServer, export, query, status_sockets

BAD_ANSWERS = [
    b"", b"\n", b"garbage\n", b"[1]\n", b"5\n", b"null\n", b"{}\n", b'{"ok": 3}\n', b'{"error": 3}\n',
    b"\xff\xfe\n", b"1" * 5000 + b"\n", b"[" * 100_000 + b"\n", b"x" * (2 << 20),
]  # fmt: skip
BAD_REQUESTS = [b"", b"\n", b"garbage\n", b"5\n", b"[]\n", b'{"command": []}\n', b"[" * 8000 + b"\n", b"x" * 9000]


def test_a_shadow_of_several_groups_answers_for_each() -> None:
    path = Path("/run/shadow.sock")
    assert status_sockets(path, ["dp0"]) == [path]
    assert status_sockets(path, ["dp0", "dp1"]) == [Path("/run/shadow.dp0.sock"), Path("/run/shadow.dp1.sock")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


@pytest.fixture
def server(path: Path) -> Iterator[StatusServer]:
    server = StatusServer(path, {"status": lambda _: {"state": "fine"}})
    server.start()
    yield server
    server.close()
    assert not path.exists()


@pytest.mark.parametrize("answer", BAD_ANSWERS, ids=lambda answer: repr(answer[:10]))
def test_bad_answers_are_errors_that_name_the_socket(answer: bytes, path: Path) -> None:
    def serve(listener: socket.socket) -> None:
        with listener.accept()[0] as peer:
            peer.recv(4096)
            with contextlib.suppress(BrokenPipeError):  # it may have had enough
                peer.sendall(answer)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        with pytest.raises(CheckmateError, match=str(path)):
            query(path)
        thread.join()


@pytest.mark.parametrize("request_line", BAD_REQUESTS, ids=lambda line: repr(line[:10]))
def test_bad_requests_harm_nobody_else(request_line: bytes, path: Path, server: StatusServer) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.sendall(request_line)
        client.shutdown(socket.SHUT_WR)
        answer = client.makefile("rb").readline()
        assert "error" in json.loads(answer)
    assert query(path) == {"state": "fine"}


def test_a_file_a_folder_and_a_dead_socket_are_named(path: Path, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    plain = tmp_path / "plain"
    plain.touch()
    for wrong in (path, plain, tmp_path, tmp_path / "missing", Path("x" * 300)):
        with pytest.raises(CheckmateError, match=f"{wrong}.*name the socket"):
            query(wrong)
    with pytest.raises(CheckmateError, match="there is a file of that name"):
        StatusServer(plain, {})
    StatusServer(path, {}).close()  # a dead process's is replaced


def test_a_command_that_it_has_not_is_refused(path: Path, server: StatusServer) -> None:
    with pytest.raises(CheckmateError, match="commands are status"):
        export(path, "state.pt")


@pytest.mark.parametrize("folder", ["/", ".", "", "/tmp/"])
def test_a_folder_is_no_socket(folder: str) -> None:
    with pytest.raises(CheckmateError, match=r"that is a folder; name a socket in it, .*shadow\.sock"):
        status_sockets(Path(folder), ["part0", "part1"])
