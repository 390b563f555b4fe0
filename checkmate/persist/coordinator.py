"""Agreement of all ranks on one step, over the job's store: to commit it, or to restore it.

Each save has a number, the same on all ranks, and one key in the store holds its outcome: the first to set it decides
for all. The last rank to hold the step durable sets "commit"; one that fails, or waits too long, sets why not. So no
rank commits what another has given up. Every wait is bounded. A store that fails leaves the outcome open: the
checkpoint stays prepared, and recovery decides.
"""

import contextlib
import json
import time
import uuid
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Self

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from checkmate.config import CheckmateError
from checkmate.persist.file import require_seconds

_COMMIT = "commit"
_POLL_S = 0.02
_REMEMBERED = 64
"""Saves whose keys are kept: many more than are ever in flight."""

Identity = tuple[int, str]
"""Step, and the save that it is of: a step saved again after a restart is another checkpoint."""


class AgreementError(CheckmateError):
    """The ranks could not agree; the text names the ranks that failed or were silent."""


class StoreError(AgreementError):
    """The store failed: it is unknown whether the others have committed."""


class _SilenceError(AgreementError):
    """Nobody has said it in time."""


class Coordinator:
    """One rank's part. All ranks make theirs at the same point, and save and load in the same order.

    ``name`` keeps several checkpointers apart. ``timeout_s`` bounds every wait for the others and for the store. Raises
    AgreementError when the others don't come within it, PersistError when it is no time.
    """

    def __init__(self, store: Store, rank: int, world: int, name: str, timeout_s: float) -> None:
        require_seconds("timeout_s", timeout_s)
        self.rank, self.world = rank, world
        # A call that waits holds up all others on its connection, those of the job, too: ours is another.
        own: Store = store.clone()  # type: ignore[attr-defined]
        own.set_timeout(timedelta(seconds=timeout_s))
        self._store = PrefixStore(f"checkmate.persist/{name}", own)
        self._timeout_s = timeout_s
        self._saves = self._loads = 0
        if rank == 0:
            self._set("run", uuid.uuid4().hex)
        self.run = self._get("run", "rank 0 has not made its checkpointer")
        """Names this run of all ranks."""

    @classmethod
    def of_job(cls, name: str = "checkpoints", timeout_s: float = 600.0) -> Self:
        """Of the ranks of the default process group, over its store."""
        if not dist.is_initialized():
            raise AgreementError("torch.distributed is not initialised: call init_process_group() first")
        return cls(dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size(), name, timeout_s)

    def next_save(self) -> int:
        """Number of a save."""
        self._saves += 1
        return self._saves

    def commit(self, save: int, step: int) -> None:
        """This rank holds the step durable: return when all do. Raises AgreementError when it must not be committed."""
        self._set(f"save/{save}/{self.rank}", str(step))
        if self._add(f"save/{save}/held") == self.world:
            strangers = self._without(save, step)
            self._decide(save, f"not all ranks saved it, such as {strangers}" if strangers else _COMMIT)
        try:
            outcome = self._get(f"save/{save}/outcome", "not all ranks hold it")
        except _SilenceError as silence:  # the last to hold it may have died before it said so: it is held all the same
            strangers = self._without(save, step)
            outcome = self._decide(save, f"{silence}: {strangers} do not" if strangers else _COMMIT)
        self._forget(save - _REMEMBERED)
        if outcome != _COMMIT:
            raise AgreementError(f"step {step} was not committed: {outcome}")

    def fail(self, save: int, reason: str) -> None:
        """This rank will not hold the step: nobody shall wait for it. Never raises."""
        with contextlib.suppress(AgreementError):  # the store is gone: the others' waits are bounded
            self._decide(save, f"rank {self.rank} failed: {reason}")

    def settle(self, save: int) -> bool:
        """Whether all ranks commit a save whose outcome the store did not tell; if it has none yet, none does.

        Raises StoreError.
        """
        if save <= self._saves - _REMEMBERED:
            raise StoreError(f"the job's store failed for {_REMEMBERED} saves, their outcome is lost: restart the job")
        return self._decide(save, f"rank {self.rank} lost the store") == _COMMIT

    def choose(self, held: Sequence[Identity]) -> Identity | None:
        """The newest checkpoint that all ranks hold, of those that each holds, newest first; None: there is none."""
        self._loads += 1
        everyones = [
            [(step, save) for step, save in json.loads(text)]
            for text in self._exchange(f"load/{self._loads}", json.dumps(held))
        ]
        return next((one for one in everyones[0] if all(one in theirs for theirs in everyones)), None)

    def all_well(self, well: bool) -> bool:
        """True on every rank when it is so on every rank."""
        self._loads += 1
        return all(text == "1" for text in self._exchange(f"load/{self._loads}", "1" if well else "0"))

    def _exchange(self, key: str, text: str) -> list[str]:
        self._set(f"{key}/{self.rank}", text)
        return [self._get(f"{key}/{rank}", f"rank {rank} does not take part") for rank in range(self.world)]

    def _decide(self, save: int, outcome: str) -> str:
        """What the first to decide has decided."""
        with _store_errors():
            return self._store.compare_set(f"save/{save}/outcome", "", outcome).decode()

    def _without(self, save: int, step: int) -> str:
        """Ranks that have not said that they hold the step."""
        ranks = [rank for rank in range(self.world) if not self._said(f"save/{save}/{rank}", str(step))]
        more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
        return f"ranks {', '.join(map(str, ranks[:4]))}{more}" if ranks else ""

    def _said(self, key: str, text: str) -> bool:
        with _store_errors():
            return self._store.check([key]) and self._store.get(key).decode() == text

    def _forget(self, save: int) -> None:
        """The store does not grow with the run. Nobody looks at a save that is so many back."""
        if save > 0:
            with contextlib.suppress(RuntimeError):
                for key in (self.rank, "outcome", "held"):
                    self._store.delete_key(f"save/{save}/{key}")

    def _set(self, key: str, text: str) -> None:
        with _store_errors():
            self._store.set(key, text)

    def _add(self, key: str) -> int:
        with _store_errors():
            return self._store.add(key, 1)

    def _get(self, key: str, silence: str) -> str:
        deadline = time.monotonic() + self._timeout_s
        with _store_errors():
            while not self._store.check([key]):  # not store.wait(): other saves' threads use this connection, too
                if time.monotonic() >= deadline:
                    raise _SilenceError(f"{silence} within {self._timeout_s:g} s")
                time.sleep(_POLL_S)
            return self._store.get(key).decode()


@contextlib.contextmanager
def _store_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise StoreError(f"the job's store failed: {error}") from error
