"""Readers of the committed state never see it change, and never hold up a step for long."""

import threading
import time

import pytest

from checkmate.shadow.gate import Gate


def test_readers_share_and_a_writer_waits_for_them() -> None:
    gate, order = Gate(grace_s=5.0), []
    with gate.reading(lambda: None), gate.reading(lambda: None):

        def write() -> None:
            with gate.writing():
                order.append("written")

        writer = threading.Thread(target=write)
        writer.start()
        time.sleep(0.05)
        order.append("read")
    writer.join(5)
    assert order == ["read", "written"]


def test_a_slow_reader_is_cancelled_after_the_grace_time() -> None:
    gate, cancelled, left = Gate(grace_s=0.05), threading.Event(), threading.Event()

    def read() -> None:
        with gate.reading(cancelled.set):
            cancelled.wait(5)
        left.set()

    reader = threading.Thread(target=read)
    reader.start()
    time.sleep(0.02)
    begun = time.monotonic()
    with gate.writing():
        assert cancelled.is_set()
        assert 0.04 < time.monotonic() - begun < 3
    reader.join(5)
    assert left.is_set()


def test_waits_end() -> None:
    gate = Gate(grace_s=0.01, limit_s=0.1)
    with gate.reading(lambda: None), pytest.raises(TimeoutError, match="1 readers did not end"), gate.writing():
        pass
    with gate.writing(), pytest.raises(TimeoutError, match="being stepped"), gate.reading(lambda: None):
        pass
    with gate.writing():
        pass
    with gate.reading(lambda: None):
        pass


def test_a_waiting_writer_holds_off_new_readers() -> None:
    gate, events = Gate(grace_s=5.0), []
    first = gate.reading(lambda: None)
    first.__enter__()

    def write() -> None:
        with gate.writing():
            events.append("writer")

    def read() -> None:
        with gate.reading(lambda: None):
            events.append("reader")

    threads = [threading.Thread(target=write), threading.Thread(target=read)]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    first.__exit__(None, None, None)
    for thread in threads:
        thread.join(5)
    assert events == ["writer", "reader"]
