"""The persistence engine through its binding, on real files: back ends, refusals, damage, locks, closing."""

import errno
import os
import random
import resource
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from checkmate.crc32c import crc32c
from checkmate.persist import engine as persist
from checkmate.persist.engine import Backend, Checkpoint, Code, Engine, Options, PersistError, State

BLOCK = 4096
CHUNK = 2 * BLOCK
SIZE = 5 * CHUNK + 12
"""Three floats more than whole chunks."""
OPTIONS = Options(backend=Backend.PWRITE, writers=2, pool_chunks=4, chunk_bytes=CHUNK)
WAIT_S = 60.0


def data_of(step: int, size: int = SIZE) -> bytes:
    return random.Random(step).randbytes(size)


def save(engine: Engine, step: int, size: int = SIZE) -> int:
    ticket = engine.begin(step, size, 16, timeout_s=WAIT_S)
    ticket.write(0, data_of(step, size))
    ticket.finish(f"step {step}".encode())
    assert ticket.wait(WAIT_S) is State.COMMITTED
    return ticket.counter


def assert_intact(engine: Engine, checkpoint: Checkpoint) -> None:
    read = bytearray(checkpoint.data_bytes)
    engine.read(checkpoint.counter, 0, read)
    assert read == data_of(checkpoint.step, checkpoint.data_bytes)
    assert engine.metadata(checkpoint.counter) == f"step {checkpoint.step}".encode()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "run.ckpt"
    persist.create(made, slots=3, data_bytes=SIZE, meta_bytes=16)
    return made


@pytest.fixture
def saved(path: Path) -> Path:
    """Steps 1, 2 and 3."""
    with Engine(path, OPTIONS) as engine:
        for step in (1, 2, 3):
            save(engine, step)
    return path


@pytest.fixture
def refuses(path: Path) -> Iterator[Callable[[int, str], None]]:
    """Opening fails with a code and a text, and leaves the file as it was."""

    def check(code: int, text: str) -> None:
        before = path.read_bytes()
        for options in (OPTIONS, Options(read_only=True)):
            with pytest.raises(PersistError, match=text) as caught:
                Engine(path, options)
            assert caught.value.code == code
            assert str(path) in str(caught.value)
        assert path.read_bytes() == before

    yield check


@pytest.mark.parametrize("backend", [Backend.AUTO, Backend.PWRITE, Backend.URING, Backend.PMEM])
def test_back_ends_write_the_same_format(path: Path, backend: Backend) -> None:
    try:
        engine = Engine(path, Options(backend=backend, chunk_bytes=CHUNK))
    except PersistError as error:
        assert backend is Backend.URING, error
        pytest.skip(f"no io_uring here: {error}")
    with engine:
        assert engine.about().options.backend in ({backend} if backend else set(Backend) - {Backend.AUTO})
        save(engine, 7)
    with Engine(path, Options(read_only=True)) as reader:
        newest = reader.newest()
        assert newest is not None and newest.step == 7
        assert_intact(reader, newest)


def test_chunk_sizes_side_by_side(path: Path) -> None:
    for step, chunk in enumerate((BLOCK, CHUNK, 64 * BLOCK)):
        with Engine(path, Options(chunk_bytes=chunk)) as engine:
            save(engine, step)
    with Engine(path) as engine:
        found = engine.list()
        assert [(one.step, one.chunk_bytes) for one in found] == [(2, 64 * BLOCK), (1, CHUNK), (0, BLOCK)]
        for one in found:
            assert_intact(engine, one)


def test_the_source_may_change_once_it_is_copied(path: Path) -> None:
    with Engine(path, OPTIONS) as engine:
        ticket = engine.begin(4, SIZE, 16, timeout_s=WAIT_S)
        source = bytearray(data_of(4))
        ticket.write(0, source)
        ticket.wait_copied(WAIT_S)
        source[:] = bytes(SIZE)
        ticket.finish(b"step 4")
        ticket.wait(WAIT_S)
        assert_intact(engine, engine.list()[0])


def test_lent_buffers_and_addresses(path: Path) -> None:
    with Engine(path, OPTIONS) as engine:
        data = data_of(5)
        ticket = engine.begin(5, SIZE, 16, timeout_s=WAIT_S)
        for chunk in range(6):
            with ticket.lease(chunk, WAIT_S) as buffer:
                buffer[:] = data[chunk * CHUNK : (chunk + 1) * CHUNK]
            ticket.submit(chunk)
        ticket.finish(b"step 5")
        ticket.wait(WAIT_S)
        assert_intact(engine, engine.list()[0])
        address, nbytes = engine.about().pool
        assert address % BLOCK == 0 and nbytes == 4 * CHUNK


def test_n_is_a_bound(path: Path) -> None:
    with Engine(path, OPTIONS) as engine:
        tickets = [engine.begin(step, 12, timeout_s=WAIT_S) for step in (1, 2)]
        with pytest.raises(TimeoutError):
            engine.begin(3, 12, timeout_s=0.05)
        tickets[0].abort()
        engine.begin(3, 12, timeout_s=WAIT_S).abort()


def test_a_kill_before_the_end_leaves_the_previous_one(saved: Path) -> None:
    script = f"""
import os, pathlib, signal
from checkmate.persist.engine import Engine, Options
engine = Engine(pathlib.Path({str(saved)!r}), Options(chunk_bytes={CHUNK}))
ticket = engine.begin(4, {SIZE}, timeout_s=10)
ticket.write(0, bytes({SIZE - 1}))
ticket.wait_copied(10, 0, {CHUNK})
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-P", "-c", script], check=False, timeout=WAIT_S)
    with Engine(saved, OPTIONS) as engine:
        newest = engine.newest()
        assert newest is not None and newest.step == 3
        assert_intact(engine, newest)
        assert [one.step for one in engine.list()] in ([3, 2], [3, 2, 1])
        save(engine, 5)


# Files that are refused.


@pytest.mark.parametrize("slots", [0, 1, 1025])
def test_slots_out_of_range(tmp_path: Path, slots: int) -> None:
    with pytest.raises(PersistError, match=f"slots is {slots}: it must be 2 to 1024") as caught:
        persist.create(tmp_path / "new", slots=slots, data_bytes=1, meta_bytes=0)
    assert caught.value.code == errno.EINVAL
    assert not list(tmp_path.iterdir())


def test_create_never_overwrites(path: Path, tmp_path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(PersistError, match="exists already") as caught:
        persist.create(path, slots=3, data_bytes=1, meta_bytes=0)
    assert caught.value.code == errno.EEXIST
    assert path.read_bytes() == before
    with pytest.raises(PersistError, match="is a directory") as caught:
        persist.create(tmp_path, slots=3, data_bytes=1, meta_bytes=0)
    assert caught.value.code == errno.EISDIR
    with pytest.raises(PersistError, match="No such file or directory"):
        persist.create(tmp_path / "none" / "new", slots=3, data_bytes=1, meta_bytes=0)


def test_too_little_space(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    with pytest.raises(PersistError, match="the file needs") as caught:
        persist.create(tmp_path / "new", slots=3, data_bytes=free, meta_bytes=0)
    assert caught.value.code in (errno.ENOSPC, errno.EFBIG)
    assert not list(tmp_path.iterdir())


def test_directory_and_missing_file(tmp_path: Path) -> None:
    with pytest.raises(PersistError, match="is a directory") as caught:
        Engine(tmp_path)
    assert caught.value.code == errno.EISDIR
    with pytest.raises(PersistError, match="No such file or directory"):
        Engine(tmp_path / "none")
    with pytest.raises(PersistError, match="not a regular file"):
        Engine(Path("/dev/null"))


@pytest.mark.root
def test_read_only_place(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    script = f"""
set -e
mount -t tmpfs none {tmp_path}
{sys.executable} -P - <<'END'
from checkmate.persist.engine import *
create(Path('{tmp_path}/a'), slots=2, data_bytes=1, meta_bytes=0)
END
mount -o remount,ro {tmp_path}
{sys.executable} -P - <<'END'
from checkmate.persist.engine import *
place = Path('{tmp_path}')
for call in (lambda: create(place / 'b', slots=2, data_bytes=1, meta_bytes=0), lambda: Engine(place / 'a')):
    try:
        call()
    except PersistError as error:
        assert error.code == 30, error
        print(error)
    else:
        raise SystemExit("not refused")
Engine(place / 'a', Options(read_only=True)).close()
END
"""
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Read-only file system") == 2


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04" + bytes(100), b"x" * 100_000, bytes(100_000)])
def test_a_file_of_another_program(path: Path, refuses: Callable[[int, str], None], content: bytes) -> None:
    path.write_bytes(content)
    refuses(Code.FOREIGN, "not a checkpoint file")


@pytest.mark.parametrize("cut", [1, BLOCK, 5 * BLOCK])
def test_a_truncated_file(saved: Path, refuses: Callable[[int, str], None], cut: int) -> None:
    os.truncate(saved, saved.stat().st_size - cut)
    refuses(Code.TRUNCATED, "bytes and should have")
    os.truncate(saved, BLOCK)
    refuses(Code.TRUNCATED, "bytes and should have")


def change(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def test_a_newer_version(path: Path, refuses: Callable[[int, str], None]) -> None:
    block = bytearray(path.read_bytes()[:BLOCK])
    block[8:16] = struct.pack("<II", 2, 0)
    block[12:16] = struct.pack("<I", crc32c(block))
    for copy in (0, 1):
        change(path, copy * BLOCK, bytes(block))
    refuses(Code.VERSION, "format version 2, this Checkmate knows 1 to 1")


def test_superblocks(saved: Path, refuses: Callable[[int, str], None]) -> None:
    for offset in (8, 40):  # the version, the sizes
        change(saved, offset, b"\xff")
        with Engine(saved, OPTIONS) as engine:
            assert "superblock 1 of 2 is damaged" in engine.about().warning
            assert_intact(engine, engine.list()[0])
    change(saved, BLOCK + 40, b"\xff")
    refuses(Code.DAMAGED, "superblock and its copy")


def test_parts_of_different_files(saved: Path, tmp_path: Path, refuses: Callable[[int, str], None]) -> None:
    other = tmp_path / "other"
    persist.create(other, slots=3, data_bytes=SIZE, meta_bytes=16)
    with Engine(other, OPTIONS) as engine:
        save(engine, 9)
    theirs, ours = other.read_bytes(), saved.read_bytes()
    for block, what in ((1, "superblocks differ"), (2, "commit record 0"), (4, "slot 0")):
        saved.write_bytes(ours)
        change(saved, block * BLOCK, theirs[block * BLOCK : (block + 1) * BLOCK])
        refuses(Code.FOREIGN, what)


# Damage.


def slot_offset(engine: Engine, slot: int) -> int:
    about = engine.about()
    return 4 * BLOCK + slot * ((about.file_bytes - 4 * BLOCK) // about.slots)


def test_one_byte_flipped(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Engine(saved, OPTIONS) as engine:
        newest = engine.list()[0]
        at = slot_offset(engine, newest.slot + 1) - engine.about().data_bytes + 3 * CHUNK + 5
    change(saved, at, bytes([data_of(3)[3 * CHUNK + 5] ^ 1]))
    with Engine(saved, OPTIONS) as engine:
        with pytest.raises(PersistError, match=f"chunk 3 .*from offset {3 * CHUNK}") as caught:
            engine.verify(newest.counter)
        assert caught.value.code == Code.DAMAGED
        with pytest.raises(PersistError, match="chunk 3 "):
            engine.read(newest.counter, 3 * CHUNK, bytearray(8))
        engine.read(newest.counter, 0, bytearray(3 * CHUNK))
        chosen = engine.newest()
        assert chosen is not None and chosen.step == 2
        assert "step 3 is damaged" in caplog.text and "falling back" in caplog.text


@pytest.mark.parametrize("what", ["header", "checksums", "metadata", "zeros"])
def test_a_damaged_newest_checkpoint_is_passed_over(saved: Path, what: str) -> None:
    with Engine(saved, OPTIONS) as engine:
        start = slot_offset(engine, engine.list()[0].slot)
    offset, content = {
        "header": (start + 40, b"\x55"),
        "checksums": (start + BLOCK, b"\x55\x55"),
        "metadata": (start + 2 * BLOCK, b"\x55"),
        "zeros": (start, bytes(BLOCK + CHUNK)),
    }[what]
    change(saved, offset, content)
    with Engine(saved, OPTIONS) as engine:
        assert engine.about().warnings
        newest = engine.newest()
        assert newest is not None and newest.step == 2
        assert_intact(engine, newest)
        save(engine, 4)
        assert [one.step for one in engine.list()] == [4, 2, 1]


def test_a_damaged_commit_record(saved: Path) -> None:
    """The newest of the two is not readable: what it named is complete, and is found."""
    change(saved, 2 * BLOCK + 40, b"\x55")
    with Engine(saved, OPTIONS) as engine:
        assert "commit record 0 is damaged" in engine.about().warning
        newest = engine.newest()
        assert newest is not None and newest.step == 3


def test_any_byte_flipped(saved: Path) -> None:
    """Whatever byte it is: what is found is right."""
    chance = random.Random(3)
    content = saved.read_bytes()
    for offset in [*range(0, 160, 7), *(chance.randrange(len(content)) for _ in range(150))]:
        change(saved, offset, bytes([content[offset] ^ (1 << chance.randrange(8))]))
        with Engine(saved, Options(read_only=True)) as engine:
            newest = engine.newest()
            assert newest is not None
            assert_intact(engine, newest)
        change(saved, offset, content[offset : offset + 1])


# One process at a time.


def test_one_at_a_time(path: Path) -> None:
    with Engine(path, OPTIONS):
        for options in (OPTIONS, Options(read_only=True)):
            with pytest.raises(PersistError, match="is in use") as caught:
                Engine(path, options)
            assert caught.value.code == Code.LOCKED
    read_only = Options(read_only=True)
    with (
        Engine(path, read_only),
        Engine(path, read_only) as reader,
        pytest.raises(PersistError, match="for reading only"),
    ):
        reader.begin(1, 1, timeout_s=0)


@pytest.mark.parametrize("backend", [Backend.PWRITE, Backend.PMEM])
def test_a_forked_child_neither_holds_nor_uses_it(path: Path, backend: Backend) -> None:
    script = f"""
import os, pathlib, sys
from checkmate.persist.engine import Code, Engine, Options, PersistError
path = pathlib.Path({str(path)!r})
engine = Engine(path, Options(backend={int(backend)}))
wait_child, tell_child = os.pipe()
if os.fork() == 0:
    os.close(tell_child)
    try:
        engine.begin(1, 1, timeout_s=0)
    except PersistError as error:
        os.read(wait_child, 1)  # until the parent has opened it again
        os._exit(0 if error.code == Code.CLOSED else 3)
    os._exit(4)
engine.close()
Engine(path).close()  # although the child lives
os.close(tell_child)
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""
    done = subprocess.run([sys.executable, "-P", "-W", "ignore", "-c", script], check=False, timeout=WAIT_S)
    assert done.returncode == 0


def test_close(path: Path) -> None:
    engine = Engine(path, OPTIONS)
    ticket = engine.begin(1, SIZE, 16, timeout_s=WAIT_S)
    ticket.write(0, data_of(1))
    ticket.finish(b"step 1")
    engine.begin(2, SIZE, timeout_s=WAIT_S)  # never finished: given up
    engine.close()
    engine.close()
    for call in (engine.list, engine.about, lambda: ticket.wait(0)):
        with pytest.raises(PersistError) as caught:
            call()
        assert caught.value.code == Code.CLOSED
    with Engine(path, OPTIONS) as again:
        assert [one.step for one in again.list()] == [1]


def test_close_ends_waits(path: Path) -> None:
    engine = Engine(path, OPTIONS)
    tickets = [engine.begin(step, SIZE, timeout_s=WAIT_S) for step in (1, 2)]
    ended: list[BaseException] = []

    def note(call: Callable[[], object]) -> None:
        try:
            call()
        except (PersistError, TimeoutError) as error:
            ended.append(error)

    calls: list[Callable[[], object]] = [
        lambda: tickets[0].wait_copied(WAIT_S),
        lambda: tickets[1].wait(WAIT_S),
        lambda: engine.begin(3, SIZE, timeout_s=WAIT_S),
    ]
    threads = [threading.Thread(target=note, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    engine.close()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert len(ended) == 3 and all(isinstance(error, PersistError) for error in ended)


def test_nothing_is_left_open(path: Path) -> None:
    def counts() -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))

    with Engine(path, OPTIONS):
        pass
    before = counts()
    for _ in range(5):
        with Engine(path, Options(chunk_bytes=CHUNK)) as engine:
            save(engine, 1)
    assert counts() == before


def test_an_idle_engine_uses_no_processor(path: Path) -> None:
    with Engine(path, Options(chunk_bytes=CHUNK)) as engine:
        save(engine, 1)
        before = resource.getrusage(resource.RUSAGE_SELF)
        threading.Event().wait(0.5)
        after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.1


def test_bad_options(path: Path, tmp_path: Path) -> None:
    for options, text in (
        (Options(writers=65), "writers is 65: it must be 1 to 64"),
        (Options(writers=-1), "writers is -1"),
        (Options(chunk_bytes=1000), "chunk_bytes is 1000: it must be a multiple of 4096"),
        (Options(pool_chunks=1 << 21), "pool_chunks is 2097152"),
    ):
        with pytest.raises(PersistError, match=text) as caught:
            Engine(path, options)
        assert caught.value.code == errno.EINVAL
    assert persist.probe(tmp_path, OPTIONS, 1 << 20) > 0
    with pytest.raises(PersistError, match="No such file"):
        persist.probe(tmp_path / "none", OPTIONS, 1 << 20)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
