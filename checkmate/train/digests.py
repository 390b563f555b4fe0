"""Rolling digests: a few blocks of parameters and optimizer state after a step, for the shadow to compare its own with.

Everything gets its turn, round after round. How much a step digests is what the share of training time that is allowed
for it has bought since the last digests: small models and quick steps are charged no more than large ones.
"""

import math
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from checkmate import blocks
from checkmate.protocol import Digests, Message
from checkmate.tensors import local
from checkmate.train.masters import Masters

QUANTUM_S = 0.001
"""Time that is saved up before a message: one is too dear for a few small tensors."""
BURST_S = 0.01
"""Most time that one step digests, however long nothing was."""
MOST_SKIPPED = 100
"""Steps without a look at the clock."""
_TICK_S = 1e-9
MOST_BLOCKS = 1024
"""Blocks in a message: it stays small where tensors are tiny."""


class DigestSender:
    """Digests of rank 0's parameters, master copies and their optimizer state, in CPU memory.

    ``share``: of the time between steps that digests may take, 0 for none. Parameters with a master copy are left out:
    the script sets them later. The first round begins anywhere, so that frequent restarts neglect nothing.
    """

    def __init__(
        self,
        share: float,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        masters: Masters,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        copied = masters.sources
        params: list[tuple[str, Tensor]] = [
            (name, param) for name, param in module.named_parameters() if id(param) not in copied
        ]
        params += masters.named
        start = random.SystemRandom().randrange(len(params)) if params else 0  # training's generators stay untouched
        self._params = params[start:] + params[:start]
        self._optimizer = optimizer
        self._share = share
        self._clock = clock
        self._last = clock()
        self._credit_s = 0.0
        self._steps = 1
        self._skip = 1 if share else math.inf
        self._round = self._blocks()

    def send(self, step: int, send: Callable[[Message], Any]) -> None:
        """Right after ``step``, on the training thread; sends nothing while there is no time to spend."""
        self._skip -= 1
        if self._skip > 0:  # quick steps can't afford even a look at the clock
            return
        start = self._clock()
        elapsed, self._last = max(start - self._last, _TICK_S), start
        self._credit_s = min(self._credit_s + self._share * elapsed, BURST_S)
        if self._credit_s >= QUANTUM_S:
            if taken := self._take(start + self._credit_s):
                send(Digests(step, taken))
            self._credit_s -= self._clock() - start
        saved = (QUANTUM_S - self._credit_s) / self._share * self._steps / elapsed
        self._skip = self._steps = math.ceil(max(1.0, min(saved, MOST_SKIPPED)))

    def _take(self, end: float) -> list[list[Any]]:
        """The next blocks of this round; none once where the last round ended just so."""
        taken: list[list[Any]] = []
        for block in self._round:
            taken.append(block)
            if len(taken) == MOST_BLOCKS or self._clock() >= end:
                return taken
        self._round = self._blocks()
        return taken

    def _blocks(self) -> Iterator[list[Any]]:
        """A round. Tensors are looked up when their turn comes, and not held: a script may replace them meanwhile."""
        for name, param in self._params:
            kinds = [f"state.{key}" for key in self._optimizer.state.get(param, {})]
            for kind in ["param", *kinds]:
                first = 0
                while (digest := self._digest(param, kind, first)) is not None:
                    yield [name, kind, first, *digest]
                    first += blocks.BLOCK_BYTES

    def _digest(self, param: Tensor, kind: str, first: int) -> blocks.Digest | None:
        state = self._optimizer.state.get(param, {})
        tensor = param if kind == "param" else state.get(kind.removeprefix("state."))
        return blocks.digest(local(tensor), first) if isinstance(tensor, Tensor) else None
