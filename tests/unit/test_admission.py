"""Joining shadows late, in the background."""

import threading

import pytest

from checkmate.train import admission
from checkmate.train.admission import Admission
from checkmate.train.fleet import Beginning


def test_an_incarnation_that_opens_after_close_is_not_adopted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "BACK_OFF_S", (0.01, 0.01))
    asked, answer = threading.Event(), threading.Event()
    adopted: list[int] = []

    def begin() -> Beginning:
        asked.set()
        answer.wait(30)
        return Beginning(7, {})

    search = Admission(None, 1, begin, lambda incarnation, _: adopted.append(incarnation), lambda _: None)
    assert asked.wait(30)
    search.close(0)
    answer.set()
    search.close(30)
    assert adopted == []
