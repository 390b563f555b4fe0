"""The controller of one job: keeps the switch as the plan wants it for the shadows that are alive."""

import logging
import signal
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from checkmate.config import CheckmateError
from checkmate.controlplane.loop import LoopThread
from checkmate.controlplane.reconcile import Outcome, reconcile
from checkmate.controlplane.registration import RegistrationServer
from checkmate.controlplane.target import Counters, NotPrimaryError, Target
from checkmate.controlplane.targets import target_of
from checkmate.plan import Plan, make_plan, receivers, show
from checkmate.status import StatusServer
from checkmate.topology import Topology

_log = logging.getLogger("checkmate.controller")

INTERVAL_S = 2.0
"""Time between two readings of the switch: a switch that was restarted is restored within it."""

RETRY_S = 0.25
"""Time until the next try when the switch does not answer."""

GRACE_S = 10.0
"""How long a controller that finds copies being made waits for their shadows to register with it: longer than a
registered one takes to notice that the controller before is gone, and to come again."""

_MAX_SHARE = 0.05
"""Part of the time that may be spent on reading: a large switch is read less often."""

_KEPT_ALARMS = 16


@dataclass
class _State:
    """What the worker last saw; replaced, never changed, so that other threads can read it."""

    plan: Plan
    primary: bool = False
    in_sync: bool = False
    error: str = ""
    written: int = 0
    synchronised_at: float | None = None
    counters: Counters = field(default_factory=Counters)


class Controller:
    """Registers shadows and keeps the switch in step, between ``start`` and ``close`` (or as a context manager).

    ``status_socket``: Unix socket that serves ``status()`` as JSON. ``target``: None for the switch of the topology.
    ``standby``: leave the registrar's address alone until the switch has no other primary controller. A primary that
    is outbid leaves it again, so that shadows follow whoever serves the switch.
    """

    def __init__(
        self,
        topology: Topology,
        status_socket: Path | None = None,
        target: Target | None = None,
        interval_s: float = INTERVAL_S,
        standby: bool = False,
    ) -> None:
        token = topology.read_token()
        make_plan(topology, {shadow.name for shadow in topology.shadows})  # refuses now what could never be planned
        self._topology = topology
        self._target = target or target_of(topology)
        self._interval_s = interval_s
        self._standby = standby
        self._state = _State(make_plan(topology, frozenset()))
        self._alarms: deque[dict[str, Any]] = deque(maxlen=_KEPT_ALARMS)
        self._inherited: frozenset[str] | None = None
        self._grace_ends: float | None = None
        self._stopping = False
        self._wake = threading.Event()
        self._loop = LoopThread("control-plane")
        self._registration = RegistrationServer(topology, token, self._loop, self._wake.set)
        self._status_socket = status_socket
        self._status_server: StatusServer | None = None
        self._worker = threading.Thread(target=self._work, name="reconcile", daemon=True)

    def start(self) -> None:
        """Start; raises CheckmateError when an address cannot be used. The switch may come up later."""
        try:
            if not self._standby:
                self._registration.start()
            if self._status_socket is not None:
                self._status_server = StatusServer(self._status_socket, {"status": lambda _: self.status()})
                self._status_server.start()
        except BaseException:
            self._close_servers()
            raise
        self._worker.start()

    def close(self) -> None:
        """Stop; the switch keeps what it holds. Can be called again."""
        self._stopping = True
        self._wake.set()
        if self._worker.is_alive():
            self._worker.join()
        self._close_servers()

    def run(self) -> None:
        """Run until SIGTERM or SIGINT. Call it on the main thread."""
        stop = threading.Event()
        signals = (signal.SIGTERM, signal.SIGINT)
        previous = {number: signal.signal(number, lambda *_: stop.set()) for number in signals}
        try:
            with self:
                stop.wait()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def status(self) -> dict[str, Any]:
        """Plain values for JSON. ``in_sync``: the switch was last seen to hold the plan for the shadows alive now."""
        state, live = self._state, self._registration.live()
        shadows = self._registration.status()
        return {
            "job": self._topology.job,
            "primary": state.primary,
            "in_sync": state.in_sync and live == set(state.plan.live),
            "live_shadows": sorted(live),
            "switch": {
                "address": str(self._topology.switch.p4runtime),
                "error": state.error,
                "updates_written": state.written,
                "synchronised_at": state.synchronised_at,
                "entries": len(state.plan.rules.entries),
                "multicast_groups": len(state.plan.rules.groups),
            },
            "shadows": shadows,
            "groups": {group.name: _protection(group.shadows, shadows) for group in self._topology.groups},
            "alarms": list(self._alarms),
            **_counters(state),
        }

    def _close_servers(self) -> None:
        if self._status_server is not None:
            self._status_server.close()
            self._status_server = None
        self._registration.close()
        self._loop.close()
        self._target.close()

    def _work(self) -> None:
        while not self._stopping:
            self._wake.clear()
            start = time.monotonic()
            self._synchronise()
            pause = RETRY_S if self._state.error else self._interval_s
            self._wake.wait(max(pause, (time.monotonic() - start) / _MAX_SHARE))

    def _synchronise(self) -> None:
        before = self._state
        plan = make_plan(self._topology, self._registration.live())
        try:
            self._target.connect()
            plan = make_plan(self._topology, self._registration.live() | self._awaited())
            outcome = reconcile(self._target, plan.rules, self._topology.job)
            counters = self._target.counters(list(plan.ports))
        except NotPrimaryError as error:
            self._step_back(plan, str(error))
            return
        except CheckmateError as error:
            self._fail(plan, str(error))
            return
        except Exception as error:
            # Shadows must be followed and the switch repaired for as long as the job runs, whatever went wrong once.
            _log.exception("unexpected error")
            self._fail(plan, repr(error))
            return
        written = before.written + outcome.written
        self._state = _State(plan, True, True, "", written, time.time(), counters)
        self._registration.set_mirrored(frozenset(plan.live))
        self._report(before, outcome)

    def _awaited(self) -> frozenset[str]:
        """Shadows that the switch copied to when we came: no copy may be missing until they have registered here.

        Their time runs from when they can register.
        """
        if self._inherited is None:
            self._inherited = receivers(self._topology, self._target.read())
            self._grace_ends = None
        if self._grace_ends is None and self._registration_is_open():
            self._grace_ends = time.monotonic() + GRACE_S
        over = self._grace_ends is not None and time.monotonic() >= self._grace_ends
        return frozenset() if over else self._inherited

    def _registration_is_open(self) -> bool:
        """Open it if need be; the address may still be another controller's."""
        try:
            self._registration.start()
        except CheckmateError as error:
            self._alarm(str(error))
            return False
        return True

    def _report(self, before: _State, outcome: Outcome) -> None:
        for entry in outcome.dangling:
            self._alarm(f"entry for a missing multicast group: {entry}")
        if outcome.written or before.error:
            live = ", ".join(self._state.plan.live) or "none"
            _log.info("the switch holds the plan (%d updates); live shadows: %s", outcome.written, live)

    def _fail(self, plan: Plan, error: str) -> None:
        """Note why the switch could not be brought in step; say it once."""
        before = self._state
        self._registration.set_mirrored(frozenset())
        if error != before.error:
            _log.warning("%s; trying again", error)
            self._alarm(error)
        self._state = _State(plan, False, False, error, before.written, before.synchronised_at, before.counters)

    def _step_back(self, plan: Plan, reason: str) -> None:
        """Leave switch and shadows to the primary controller; whatever it did is read when we are it."""
        before = self._state
        self._registration.close()
        self._inherited = None
        if reason != before.error:
            _log.info("%s", reason)
        self._state = _State(plan, False, False, reason, before.written, before.synchronised_at, before.counters)

    def _alarm(self, text: str) -> None:
        """Note it for the status; an alarm that lasts is one."""
        if not self._alarms or self._alarms[-1]["text"] != text:
            self._alarms.append({"time": time.time(), "text": text})


def _protection(names: tuple[str, ...], shadows: dict[str, dict[str, object]]) -> dict[str, object]:
    """Which shadows of a group get its gradients, and whether one of them holds a complete state."""
    mirrored = [name for name in names if shadows[name]["mirrored"]]
    return {"mirrored": mirrored, "complete": any(shadows[name]["seeded"] for name in mirrored)}


def _counters(state: _State) -> dict[str, Any]:
    ports = {
        name.rpartition(".")[2]: {str(port): value._asdict() for port, value in cells.items()}
        for name, cells in state.counters.ports.items()
    }
    heartbeats = [
        {name: show(name, value) for name, value in match} | count._asdict()
        for (_, match, _), count in state.counters.entries.items()
    ]
    return {"counters": ports, "heartbeats": heartbeats}
