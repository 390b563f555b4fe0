"""Joining shadows late, in the background."""

import queue
import threading
from dataclasses import dataclass
from typing import Any

import pytest
from torch.distributed import HashStore

from checkmate.protocol import Begun
from checkmate.train import admission
from checkmate.train.admission import Admission
from checkmate.train.client import ShadowError, Unfollowable
from checkmate.train.fleet import Beginning, Unrestorable


@dataclass
class Place:
    """A rank of two groups of two, or of one."""

    number: int
    leaders: list[int]
    job: int


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "BACK_OFF_S", (0.01, 0.01))
    monkeypatch.setattr(admission, "POLL_S", 0.01)


def test_an_incarnation_that_opens_after_close_is_not_adopted() -> None:
    asked, answer = threading.Event(), threading.Event()
    adopted: list[int] = []

    def begin(_: int) -> Beginning:
        asked.set()
        answer.wait(30)
        return Beginning(7, {})

    store: Any = HashStore()
    search = Admission(store, Place(0, [0], 1), begin, lambda number, _: adopted.append(number), lambda _: None)
    assert asked.wait(30)
    search.close(0)
    answer.set()
    search.close(30)
    assert adopted == []


@pytest.mark.parametrize("holds", [None, 7])
def test_a_shadow_that_can_never_follow_is_given_up_loudly(holds: int | None, caplog: pytest.LogCaptureFixture) -> None:
    """Also one that holds a step of an earlier run: training began anew without it."""
    attempts: list[int] = []

    def begin(proposed: int) -> Beginning:
        attempts.append(proposed)
        refused = Unfollowable("shadow 1.2.3.4:7701 can't follow this job: other bits", holds)
        raise refused if holds is None else Unrestorable("held") from refused

    store: Any = HashStore()
    search = Admission(store, Place(0, [0], 1), begin, lambda *_: None, lambda _: None)
    search._thread.join(30)
    assert not search._thread.is_alive() and attempts == [0]
    assert "other bits" in caplog.text
    search.close(0)


class Shadows:
    """Those of one group: they can be reached from the second attempt on; the first one that they see counts up."""

    def __init__(self, incarnation: int, held: int) -> None:
        self.incarnation, self.held = incarnation, held
        self.attempts = 0

    def begin(self, proposed: int) -> Beginning:
        self.attempts += 1
        if self.attempts == 1:
            raise ShadowError("not there")
        self.incarnation = max(self.incarnation + 1, proposed)
        return Beginning(self.incarnation, {"s": Begun(self.incarnation, None, [[1, 0, self.held]])})


def test_all_ranks_of_all_groups_take_up_one_incarnation() -> None:
    store: Any = HashStore()
    groups = {0: Shadows(3, 8), 2: Shadows(11, 9)}
    adopted: dict[int, tuple[int, int | None]] = {}
    asked: queue.Queue[str] = queue.Queue()
    done = threading.Semaphore(0)
    searches = []
    for number in range(4):

        def adopt(incarnation: int, held: int | None, number: int = number) -> None:
            adopted[number] = incarnation, held
            done.release()

        begin = groups[number].begin if number in groups else None
        searches.append(Admission(store, Place(number, [0, 2], 4), begin, adopt, asked.put))
    assert all(done.acquire(timeout=30) for _ in range(4))
    reasons = [asked.get(timeout=30) for _ in groups]
    for search in searches:
        search.close(30)
    assert adopted == {0: (12, 8), 1: (12, None), 2: (12, 9), 3: (12, None)}
    assert [shadows.incarnation for shadows in groups.values()] == [12, 12]
    assert reasons == ["the shadow joined late"] * 2 and asked.empty(), "on each group's first rank"
