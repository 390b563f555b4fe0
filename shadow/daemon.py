"""A shadow as a process: receiver, engine, control server, registration and status, put together.

This is the only module of the shadow that knows other stages.
"""

import contextlib
import copy
import logging
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, Self

import torch

from checkmate import plain
from checkmate.config import CheckmateError
from checkmate.shadow.control import ControlServer, Limits
from checkmate.shadow.engine import Commit, Committed, Engine, EventSource, Tuning
from checkmate.shadow.optim.replica import warm_up
from checkmate.shadow.rx.receiver import Receiver, RxConfig, open_receivers
from checkmate.shadow.verify import Proof, Verification
from checkmate.status import StatusServer
from checkmate.tensors import set_group

log = logging.getLogger("checkmate.shadow")

_WATCH_S = 1.0


class Registration(Protocol):
    """What the daemon needs of the control plane's registration client."""

    @property
    def mirrored(self) -> bool:
        """The switch copies to this shadow."""

    def set_seeded(self, seeded: bool) -> None:
        """Tell whether a complete state is held and kept up to date."""

    def close(self) -> None:
        """Leave."""


class Rx(EventSource, Protocol):
    """A receiver that the daemon closes."""

    def close(self) -> None:
        """Stop the ports."""


@dataclass(frozen=True)
class ShadowConfig:
    """A shadow of one data-parallel group.

    ``control``: management address and port. ``status``: path of the local socket. ``threads``: of torch (None: all
    cores but one for the receive thread). ``group``: its name; empty: any. ``alone``: the process follows no other. All
    is opened in the network namespace that the process is in.
    """

    job: str
    token: bytes = field(repr=False)
    control: tuple[str, int]
    status: Path
    rx: RxConfig
    threads: int | None = None
    tuning: Tuning = field(default_factory=Tuning)
    limits: Limits = field(default_factory=Limits)
    group: str = ""
    alone: bool = True


class Shadow:
    """All of a shadow of one group, running inside ``with``.

    ``register`` connects to the control plane once the shadow can receive; None: nobody is told. Raises CheckmateError
    when an address, a port or the status socket can't be used.
    """

    def __init__(
        self,
        config: ShadowConfig,
        register: Callable[[], Registration] | None = None,
        make_receiver: Callable[[RxConfig], Rx] = Receiver,
    ) -> None:
        self._config = config
        self._register = register
        self._make_receiver = make_receiver
        self._registration: Registration | None = None
        self._started = time.monotonic()

    def __enter__(self) -> Self:
        config = self._config
        warm_up()
        with contextlib.ExitStack() as stack:  # closed in reverse: others wait for the engine, so it ends after them
            self._rx = self._make_receiver(config.rx)
            stack.callback(self._rx.close)
            tuning = replace(config.tuning, sets=config.rx.sets, threads=config.threads or _spare_cores())
            self._engine = Engine(self._rx, tuning)
            stack.callback(self._engine.stop)
            self._control = ControlServer(
                config.control, config.token, config.job, self._engine, config.limits, config.group, config.alone
            )
            stack.callback(self._control.close)
            status = StatusServer(
                config.status,
                {"status": lambda _: self.status(), "blocks": lambda _: self.blocks(), "export": self._export},
            )
            stack.callback(status.close)
            self._engine.start(_Listener(self._control, self._tell_registrar))
            self._control.start()
            status.start()
            if self._register is not None:
                self._registration = self._register()
                stack.callback(self._registration.close)
                self._registration.set_seeded(self._engine.snapshot.state == "following")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def alive(self) -> bool:
        """False when a thread that must not end did."""
        return self._engine.alive

    @property
    def control(self) -> tuple[str, int]:
        """Address of the control server."""
        return self._control.address

    def status(self) -> dict[str, Any]:
        """Everything about this shadow now, as plain values; times in seconds, sizes in bytes."""
        snapshot, now = self._engine.snapshot, time.monotonic()
        return {
            "job": self._config.job,
            "group": self._config.group,
            "pid": os.getpid(),
            "uptime_s": round(now - self._started, 3),
            "incarnation": snapshot.incarnation,
            "world": snapshot.world,
            "state": snapshot.state,
            "reason": snapshot.reason,
            "committed": snapshot.committed,
            "ready": snapshot.ready,
            "shadows": snapshot.shadows,
            "waits_for": list(snapshot.waits_for),
            "commits": snapshot.commit_count,
            "gap_count": snapshot.gap_count,
            "gaps": [asdict(gap) for gap in snapshot.gaps],
            "late": snapshot.late,
            "held_iterations": snapshot.held,
            "seeds": snapshot.seeds,
            "connections": dict(self._control.counters),
            "receiver": self._rx.counters(),
            "registered": self._registration is not None and self._registration.mirrored,
            "verification": _verification(snapshot.verification, now),
            "memory": {"process": _resident_bytes(), "state": snapshot.state_bytes},
            "rates": _rates(snapshot.commits, now),
            "newest_steps": [
                {"step": c.step, "wait_s": round(c.wait_s, 6), "step_s": round(c.step_s, 6)}
                for c in snapshot.commits
                if c.gradient_bytes
            ],
        }

    def blocks(self) -> dict[str, Any]:
        """``{"blocks": […]}``, when each was last proved equal; the longest ago first."""
        proofs, now = self._engine.proofs(), time.monotonic()
        return {"blocks": [_proof(proof, now) for proof in proofs]}

    def export(self, path: Path) -> int:
        """Write the committed state as ``{"model", "optimizer", "step"}`` for plain PyTorch; returns the step.

        Of one shadow of several with ``"shard"``, for ``checkmate.parts`` to join.
        The file appears whole or not at all. Raises CheckmateError when there is no state, OSError of the file system.
        """
        with self._engine.reading(lambda: None) as committed:
            if committed is None:
                raise CheckmateError("there is no committed state to export yet: the shadow waits for a seed")
            state = _checkpoint(committed, self._config.group)
        with _atomic_file(path) as file:
            torch.save(state, file)
        log.info("exported step %d to %s", state["step"], path)
        return int(state["step"])

    def _export(self, request: Mapping[str, Any]) -> dict[str, Any]:
        path = request.get("path")
        if not isinstance(path, str) or not Path(path).is_absolute():
            raise CheckmateError(f"export needs an absolute path, not {path!r}")
        try:
            return {"step": self.export(Path(path)), "path": path}
        except OSError as error:
            raise CheckmateError(f"cannot write {path}: {error.strerror}; name a file in a folder of yours") from None

    def _tell_registrar(self, seeded: bool) -> None:
        if self._registration is not None:
            self._registration.set_seeded(seeded)


def run_shadow(configs: Sequence[ShadowConfig], register: Callable[[], Registration] | None = None) -> None:
    """Run a shadow of these groups until SIGTERM or SIGINT, then shut down in order. Call it on the main thread.

    The groups share ports and gradient buffers, those of the first one's ``rx``, and processors. Raises CheckmateError
    when it can't start, or when one of its threads ended.
    """
    stop = threading.Event()
    handlers = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with running(configs, register) as shadows:
            for config, shadow in zip(configs, shadows, strict=True):
                log.info("shadow of job %s, group %s, listens on %s:%d", config.job, config.group, *shadow.control)
            while not stop.wait(_WATCH_S):
                if not all(shadow.alive for shadow in shadows):
                    raise CheckmateError("a thread of the shadow ended, see the log above; start the shadow again")
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def running(configs: Sequence[ShadowConfig], register: Callable[[], Registration] | None) -> Iterator[list[Shadow]]:
    """Run a shadow of these groups inside ``with``; gives each group's."""
    groups = [config.group for config in configs]
    with contextlib.ExitStack() as stack:
        receivers = open_receivers(configs[0].rx, groups)
        for receiver in receivers:
            stack.callback(receiver.close)
        node = None if register is None else _Node(register, len(groups))
        threads = max(1, (configs[0].threads or _spare_cores()) // len(groups))
        shadows = []
        for config, receiver in zip(configs, receivers, strict=True):
            join = None if node is None else node.join
            ours = replace(config, threads=threads, alone=len(groups) == 1)
            shadow = Shadow(ours, join, lambda _, receiver=receiver: receiver)  # type: ignore[misc]
            shadows.append(stack.enter_context(shadow))
        yield shadows


class _Node:
    """The one registration of a shadow of several groups, as each of them sees it.

    It is made when all have joined, because from then on the switch copies; and ended when the first leaves.
    """

    def __init__(self, register: Callable[[], Registration], groups: int) -> None:
        self._register = register
        self._registration: Registration | None = None
        self._lock = threading.Lock()
        self._seeded = [False] * groups
        self._joined = 0

    def join(self) -> Registration:
        """The registration as the next group's."""
        self._joined += 1
        if self._joined == len(self._seeded):
            self._registration = self._register()
        return _Member(self, self._joined - 1)

    @property
    def mirrored(self) -> bool:
        """The switch copies to this shadow."""
        return self._registration is not None and self._registration.mirrored

    def set_seeded(self, group: int, seeded: bool) -> None:
        """One group's; the shadow is when all are."""
        with self._lock:
            self._seeded[group] = seeded
            if self._registration is not None:
                self._registration.set_seeded(all(self._seeded))

    def close(self) -> None:
        """Leave; other groups' engines may still have something to tell, which is of no interest any more."""
        with self._lock:
            registration, self._registration = self._registration, None
        if registration is not None:
            registration.close()


class _Member:
    """A group's share in its node's registration."""

    def __init__(self, node: _Node, group: int) -> None:
        self._node = node
        self._group = group
        self.close = node.close

    @property
    def mirrored(self) -> bool:
        """The switch copies to this shadow."""
        return self._node.mirrored

    def set_seeded(self, seeded: bool) -> None:
        """Tell whether this group's state is complete and kept up to date."""
        self._node.set_seeded(self._group, seeded)


class _Listener:
    """The control server hears of everything; the registrar whether the shadow follows."""

    def __init__(self, control: ControlServer, following: Callable[[bool], None]) -> None:
        self.committed = control.committed
        self.ready = control.ready
        self.ask_for_seed = control.ask_for_seed
        self.incarnation = control.incarnation
        self.following = following


def _checkpoint(committed: Committed, group: str) -> dict[str, Any]:
    """A copy of the state, with the hyperparameters and buffers of rank 0 at the first forward after the step."""
    state: dict[str, Any] = copy.deepcopy(committed.replica.state_dicts())
    at_forward = committed.boundaries.get(0, {}).get("forward") or {}
    groups = at_forward.get("groups") or []
    for hyper, fields in zip(state["optimizer"]["param_groups"], groups, strict=False):
        set_group(hyper, fields)
    for name, stored in (at_forward.get("buffers") or {}).items():
        if name in state["model"]:
            state["model"][name].copy_(plain.decode(stored))
    shard = committed.replica.shard
    return state if shard is None else {**state, "shard": {**shard, "history": committed.history, "group": group}}


@contextlib.contextmanager
def _atomic_file(path: Path) -> Iterator[Any]:
    """A file that replaces ``path`` when it is complete and on disk."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            Path(file.name).rename(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _verification(verification: Verification, now: float) -> dict[str, Any]:
    """``oldest``: blocks that weren't proved equal for the longest time."""
    return {
        "blocks": verification.blocks,
        "proved": verification.proved,
        "compared": verification.compared,
        "mismatches": verification.mismatches,
        "last_mismatch": verification.last_mismatch,
        "oldest": [_proof(proof, now) for proof in verification.oldest],
    }


def _proof(proof: Proof, now: float) -> dict[str, Any]:
    """``step`` and ``age_s`` None: never."""
    name, kind, first = proof.block
    step, age_s = (proof.when[0], round(now - proof.when[1], 3)) if proof.when else (None, None)
    return {"name": name, "kind": kind, "first_byte": first, "step": step, "age_s": age_s}


def _spare_cores() -> int:
    """All but one, which receives."""
    return max(1, len(os.sched_getaffinity(0)) - 1)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _rates(commits: tuple[Commit, ...], now: float) -> dict[str, float]:
    """Over the newest commits, until now."""
    if len(commits) < 2:
        return {"commits_per_s": 0.0, "gradient_bytes_per_s": 0.0}
    span = max(now - commits[0].at, 1e-9)
    return {
        "commits_per_s": round((len(commits) - 1) / span, 3),
        "gradient_bytes_per_s": round(sum(commit.gradient_bytes for commit in commits[1:]) / span, 1),
    }
