"""Seeds: the full state of rank 0 after a step, copied between two steps and sent in the background, to each shadow its
part."""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from checkmate.protocol import Seed
from checkmate.tensors import named_state, pack_state
from checkmate.train.agreement import Position
from checkmate.train.client import ShadowError
from checkmate.train.fleet import Fleet
from checkmate.train.masters import Masters

log = logging.getLogger("checkmate")

RETRY_S = (1.0, 60.0)
"""First and longest pause after a seed that could not be sent."""


@dataclass(frozen=True)
class _Job:
    incarnation: int
    seed: Seed
    reason: str


class Seeder:
    """Sends seeds, one at a time; ``floor``: the shadow holds this step of an earlier run, never replace it by less."""

    def __init__(self, fleet: Fleet, module: nn.Module, optimizer: torch.optim.Optimizer, masters: Masters) -> None:
        self.floor: int | None = None
        self._fleet = fleet
        self._module = module
        self._optimizer = optimizer
        self._masters = masters
        self._copies: list[Tensor] = []
        self._changed = threading.Condition()
        self._wanted: str | None = None
        self._at = 0
        self._not_before = 0.0
        self._pause = RETRY_S[0]
        self._job: _Job | None = None
        self._socks: list[socket.socket] = []
        self._stopping = False
        self._thread: threading.Thread | None = None

    def request(self, reason: str, at: int | None = None) -> None:
        """Take a seed at the next step boundary, or at that of step ``at``; may be called from any thread.

        While one is on its way nothing is noted: the shadow asks again if that one does not help.
        """
        with self._changed:
            if self._job is None:
                self._wanted, self._at = reason, at or 0

    @property
    def is_due(self) -> bool:
        """A seed is wanted and can be taken."""
        return self._wanted is not None and self._job is None and time.monotonic() >= self._not_before

    def take_if_wanted(self, step: int, incarnation: int, history: int, is_last: bool = False) -> None:
        """At a step boundary, by the training thread: copy the state if a seed is wanted and none is on its way.

        ``is_last``: no boundary follows.
        """
        if not self.is_due or (step < self._at and not is_last):
            return
        if self.floor is not None and step <= self.floor:
            log.warning(
                "not seeding: the shadow holds step %d of this job, training is only at step %d because the shadow was "
                "not reachable when it started; restart the job to resume from there",
                self.floor,
                step,
            )
            self._wanted = None
            return
        self.take(step, incarnation, history)

    def take(self, step: int, incarnation: int, history: int, agreed: Position | None = None) -> None:
        """Copy the state after ``step`` and hand it to the sending thread: all shadows get it of the same step.

        ``agreed``: where the job could have gone on, but begins anew.
        """
        params, buffers = named_state(self._module)
        description, manifest, tensors = pack_state(params + self._masters.named, buffers, self._optimizer)
        self._copies = _copy(tensors, self._copies)
        with self._changed:
            reason, self._wanted = self._wanted or "the initial state", None
            seed = Seed(step, description, manifest, history, None if agreed is None else list(agreed))
            self._job = _Job(incarnation, seed, reason)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="checkmate-seeds", daemon=True)
                self._thread.start()

    def wait(self, timeout: float) -> bool:
        """Within ``timeout`` seconds: True when the last seed was acknowledged and none is on its way or wanted."""
        with self._changed:
            return self._changed.wait_for(lambda: self._job is None, timeout) and self._wanted is None

    def close(self, timeout: float) -> None:
        """Give up what is on its way and end the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            for sock in self._socks:
                _abort(sock)
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or self._job is not None)
                job = self._job
            if self._stopping or job is None:
                return
            error = self._send(job)
            with self._changed:
                self._job = None
                self._socks.clear()
                if error is None:
                    log.info("sent a seed of step %d: %s", job.seed.step, job.reason)
                    self._pause = RETRY_S[0]
                elif not self._stopping:
                    self._wanted = self._wanted or "the last seed did not arrive"
                    self._not_before = time.monotonic() + self._pause
                    self._pause = min(2 * self._pause, RETRY_S[1])
                    log.warning("%s; trying again at a later step", error)
                self._changed.notify_all()

    def _send(self, job: _Job) -> Exception | None:
        try:
            self._fleet.send_seed(job.incarnation, job.seed, self._copies, self._opened)
        except ShadowError as error:
            return error
        except Exception as error:  # this thread must go on: without seeds nothing would be covered any more
            log.exception("a seed could not be sent because of an error of Checkmate's own")
            return error
        return None

    def _opened(self, sock: socket.socket) -> None:
        with self._changed:
            self._socks.append(sock)
            if self._stopping:
                _abort(sock)


def _copy(tensors: Sequence[Tensor], copies: list[Tensor]) -> list[Tensor]:
    """Copies in CPU memory, in the memory of earlier copies where they fit."""
    if [(t.shape, t.dtype, t.stride()) for t in tensors] != [(c.shape, c.dtype, c.stride()) for c in copies]:
        copies = [torch.empty_like(tensor, device="cpu") for tensor in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor)
    return copies


def _abort(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # not connected any more
        sock.shutdown(socket.SHUT_RDWR)
