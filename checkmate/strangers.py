"""Connections to a server that have not proved yet who they are: a bounded number, which no single peer can fill."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Strangers(Generic[T]):
    """At most ``most`` connections, each with its peer's address. Not thread-safe.

    One more ends, by ``end``, the oldest of the address that has most of them: who opens many loses their own, and a
    peer that can prove itself gets in however many there are.
    """

    def __init__(self, most: int, end: Callable[[T], None], log: logging.Logger) -> None:
        self._most = most
        self._end = end
        self._log = log
        self._hosts: dict[T, str] = {}
        self._flooded = False

    def __iter__(self) -> Iterator[T]:
        return iter(self._hosts)

    def __len__(self) -> int:
        return len(self._hosts)

    def enter(self, connection: T, host: str) -> T | None:
        """One more; returns the one that had to make room for it. A flood is logged once."""
        if len(self._hosts) < self._most:
            self._flooded = self._flooded and len(self._hosts) > self._most // 2
            oldest = None
        else:
            oldest = self._make_room()
        self._hosts[connection] = host
        return oldest

    def leave(self, connection: T) -> bool:
        """It is known now, or gone; False when it had to make room before."""
        return self._hosts.pop(connection, None) is not None

    def _make_room(self) -> T:
        ((host, _),) = Counter(self._hosts.values()).most_common(1)
        oldest = next(connection for connection, its in self._hosts.items() if its == host)
        del self._hosts[oldest]
        self._end(oldest)
        if not self._flooded:
            self._log.warning("%s: too many connections that do not prove who they are; the oldest are closed", host)
        self._flooded = True
        return oldest
