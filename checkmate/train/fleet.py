"""All shadows of a data-parallel group at once: what one is asked, all are, each in a thread of its own."""

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import Tensor

from checkmate.config import CheckmateError
from checkmate.protocol import Begun, Message, Seed, State
from checkmate.train.agreement import Position, Span, common_spans, newest_position
from checkmate.train.client import ShadowError, Unfollowable
from checkmate.train.shards import Packed, Shard, join

T = TypeVar("T")


class ShadowClient(Protocol):
    """``checkmate.train.client.Client``, as far as it is used here."""

    @property
    def address(self) -> str:
        """For messages."""

    def begin(self, proposed: int, call_s: float) -> Begun:
        """Open an incarnation."""

    def send_seed(
        self, incarnation: int, seed: Seed, tensors: Sequence[Tensor], on_open: Callable[[socket.socket], None]
    ) -> int | None:
        """Send a state."""

    def restore(self, incarnation: int, step: int, history: int) -> tuple[State, list[Tensor]]:
        """Fetch a state."""

    def records(self, incarnation: int) -> socket.socket:
        """A records connection."""


_ANEW = "or, to give up what is held and begin anew, restart all shadows of the job"


class Unrestorable(CheckmateError):
    """Shadows hold state, but no step that all of them can be at; the text says which lacks it and what to do."""


@dataclass(frozen=True)
class Beginning:
    """An incarnation that all shadows opened. ``begun``: what each said, by its address."""

    incarnation: int
    begun: dict[str, Begun]

    @property
    def newest(self) -> int | None:
        """Newest step that any shadow holds something of; None: none holds any."""
        return max((span[2] for begun in self.begun.values() for span in begun.spans), default=None)

    def position(self) -> Position | None:
        """The newest that all can go on from; None: no shadow holds anything. Raises Unrestorable."""
        return agree(self.begun, {})

    def spans(self) -> list[Span]:
        """All that all can go on from; none: no shadow holds anything. Raises Unrestorable."""
        self.position()
        return common_spans([[tuple(span) for span in one.spans] for one in self.begun.values()])


class Fleet:
    """The shadows of a group, ``clients``, and their ``shards`` of its parameters."""

    def __init__(self, clients: Sequence[ShadowClient], shards: Sequence[Shard]) -> None:
        self.clients = clients
        self.shards = shards

    def begin(self, call_s: float, proposed: int = 0) -> Beginning:
        """Open one incarnation, at least ``proposed``, on all.

        Raises ShadowError when one can't, Unfollowable when one refuses; Unrestorable when state is held then.
        """
        outcomes = self._try_each(lambda client, _: client.begin(proposed, call_s))
        if refused := [outcome for outcome in outcomes.values() if isinstance(outcome, Unfollowable)]:
            held = [outcome.holds for outcome in refused if outcome.holds is not None]
            held += [one.spans[-1][2] for one in outcomes.values() if isinstance(one, Begun) and one.spans]
            if held:
                raise Unrestorable(
                    f"{refused[0]}; but step {max(held)} of this job is held, and a run that begins anew would give it "
                    f"up: set right what is refused, {_ANEW}"
                ) from refused[0]
            raise refused[0]
        begun = {address: outcome for address, outcome in outcomes.items() if isinstance(outcome, Begun)}
        if failed := {address: outcome for address, outcome in outcomes.items() if isinstance(outcome, ShadowError)}:
            first = next(iter(failed.values()))
            try:
                agree(begun, failed)
            except Unrestorable as error:
                raise error from first.__cause__
            raise first
        incarnation = max(one.incarnation for one in begun.values())

        def follow(client: ShadowClient, _: Shard) -> Begun:
            ours = begun[client.address]
            return ours if ours.incarnation == incarnation else client.begin(incarnation, call_s)

        begun = dict(zip(begun, self._each(follow), strict=True))
        return Beginning(incarnation, begun)

    def send_seed(
        self, incarnation: int, seed: Seed, tensors: Sequence[Tensor], on_open: Callable[[socket.socket], None]
    ) -> None:
        """Send each its part of a full state; ``on_open`` gets the sockets to abort it. Raises ShadowError."""
        self._each(lambda client, shard: client.send_seed(incarnation, *shard.seed(seed, tensors), on_open))

    def restore(self, incarnation: int, position: Position) -> tuple[Packed, dict[str, Any]]:
        """The whole state of a step and this rank's boundary; raises ShadowError or CheckmateError."""
        history, step = position
        parts = self._each(lambda client, _: client.restore(incarnation, step, history))
        for client, (state, _) in zip(self.clients, parts, strict=True):
            if state.step != step:
                raise CheckmateError(f"shadow {client.address} sent the state of step {state.step} instead")
        packed = join([(state.optimizer, state.manifest, tensors) for state, tensors in parts])
        return packed, parts[0][0].boundary

    def _each(self, ask: Callable[[ShadowClient, Shard], T]) -> list[T]:
        """Everybody's answers; raises the first error when all have answered."""
        answers = []
        for outcome in self._try_each(ask).values():
            if isinstance(outcome, CheckmateError):
                raise outcome
            answers.append(outcome)
        return answers

    def _try_each(self, ask: Callable[[ShadowClient, Shard], T]) -> dict[str, T | CheckmateError]:
        def attempt(client: ShadowClient, shard: Shard) -> T | CheckmateError:
            try:
                return ask(client, shard)
            except CheckmateError as error:
                return error

        if len(self.clients) == 1:
            return {self.clients[0].address: attempt(self.clients[0], self.shards[0])}
        with ThreadPoolExecutor(len(self.clients), "checkmate-shadow") as pool:
            outcomes = list(pool.map(attempt, self.clients, self.shards))
        return {client.address: outcome for client, outcome in zip(self.clients, outcomes, strict=True)}


class Link(Protocol):
    """``checkmate.train.link.RecordsLink``, as far as it is used here."""

    dropped: int
    refused: str | None

    @property
    def committed(self) -> Position | None:
        """History and newest step that the shadow acknowledged."""

    @property
    def connected(self) -> bool:
        """Messages are sent."""

    def open(self, incarnation: int) -> None:
        """Connect in the background."""

    def wait(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Wait for a change of any of the links that share a condition."""

    def send(self, message: Message) -> bool:
        """Never waits."""

    def close(self, timeout: float) -> None:
        """Let out what was sent, and end."""


class Links:
    """A rank's records connections to all shadows of its group: each is sent its part."""

    def __init__(self, links: Sequence[Link], shards: Sequence[Shard]) -> None:
        self._links = links
        self._shards = shards

    @property
    def connected(self) -> bool:
        """Some shadow is sent messages."""
        return any(link.connected for link in self._links)

    @property
    def complete(self) -> bool:
        """All shadows are."""
        return all(link.connected for link in self._links)

    @property
    def settled(self) -> bool:
        """All are, or have refused to be."""
        return all(link.connected or link.refused is not None for link in self._links)

    def committed(self, history: int) -> int | None:
        """Newest step of this history that all shadows acknowledged; None: not all have one."""
        steps = [link.committed[1] for link in self._links if link.committed and link.committed[0] == history]
        return min(steps) if len(steps) == len(self._links) else None

    @property
    def dropped(self) -> int:
        """Messages that were dropped."""
        return sum(link.dropped for link in self._links)

    def open(self, incarnation: int) -> None:
        """Connect in the background as this incarnation; once."""
        for link in self._links:
            link.open(incarnation)

    def send(self, message: Message) -> None:
        """Never waits."""
        for link, shard in zip(self._links, self._shards, strict=True):
            if (part := shard.part(message)) is not None:
                link.send(part)

    def wait(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Wait until the condition holds; it is looked at whenever a connection or ``committed`` changes, or a seed is
        asked for."""
        return self._links[0].wait(condition, timeout)

    def close(self, timeout: float) -> None:
        """Let what was sent get out, then end all."""
        for link in self._links:
            link.close(timeout)


def agree(begun: dict[str, Begun], failed: dict[str, ShadowError]) -> Position | None:
    """Where a job goes on whose shadows said this, or could not be reached; None: nowhere, all are empty."""
    held = {address: one.spans for address, one in begun.items() if one.spans}
    if not held:
        return None
    has = "; ".join(f"{address} holds step {spans[-1][2]}" for address, spans in held.items())
    if failed:
        raise Unrestorable(
            f"{has}, but {' and '.join(failed)} can't be reached ({next(iter(failed.values()))}): make it reachable "
            f"again, {_ANEW}"
        )
    if empty := [address for address in begun if address not in held]:
        raise Unrestorable(
            f"{has}, but {' and '.join(empty)} holds no state, because it was started anew, and without its part no "
            "step can be restored: restart all shadows of the job and begin from a saved state, or anew"
        )
    if (position := newest_position([[tuple(span) for span in spans] for spans in held.values()])) is None:
        spans = "; ".join(f"{address}: {one.spans}" for address, one in begun.items())
        raise Unrestorable(f"no step can be restored from all shadows ({spans}): restart all shadows of the job")
    return position
