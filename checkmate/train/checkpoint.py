"""A followed training run: from the incarnation that it opens, through each step, to the last boundary."""

import atexit
import functools
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.optim.optimizer import register_optimizer_step_post_hook

from checkmate import metrics, plain
from checkmate.config import CheckmateError
from checkmate.protocol import Boundary, Layout, Message, StepRecord
from checkmate.tensors import named_state, pack_group, rounds_by_place, unpack_state
from checkmate.train.admission import Admission
from checkmate.train.agreement import Position, Span, newest_position
from checkmate.train.boundary import RankState
from checkmate.train.client import ShadowError, Unfollowable
from checkmate.train.coordinator import Connector, Coordinator
from checkmate.train.data import TRACKER
from checkmate.train.digests import DigestSender
from checkmate.train.fleet import Beginning, Fleet, Links, Unrestorable
from checkmate.train.gradients import around_scaled_step
from checkmate.train.hook import GradientHook
from checkmate.train.hsdp import Replicated, Sharded, ShardReductions
from checkmate.train.interchange import Start, state_dict
from checkmate.train.link import RecordsLink
from checkmate.train.masters import Masters
from checkmate.train.peers import Peers
from checkmate.train.reductions import Owner, Reductions, TagPlugin
from checkmate.train.seeder import Seeder
from checkmate.train.shards import Shard
from checkmate.train.watch import Watch

log = logging.getLogger("checkmate")

BEGIN_S = 10.0
"""How long attach waits for a shadow, and one attempt to open an incarnation may take."""
_RETRY_S = 0.5
SEED_S = 30.0
"""How long the first step waits until the shadow holds the initial state."""
CLOSE_S = 5.0
"""How long close waits until the shadow has committed the last step."""
LAST_S = 30.0
"""As long where a job has several groups, of which one may end later than another."""


class Checkpoint:
    """A followed training run; made by ``checkmate.attach``.

    Inside, ``_step`` counts iterations, which are sets of all-reduced gradients. A set that no optimizer step used,
    because a GradScaler skipped it or another backward pass followed, is an iteration that the shadow skips.
    """

    def __init__(
        self,
        ddp: Replicated,
        optimizer: torch.optim.Optimizer,
        state: RankState,
        fleet: Fleet,
        everybody: Sequence[Connector],
        plugin: TagPlugin,
        peers: Peers,
        masters: Masters,
        digests: DigestSender,
    ) -> None:
        self._ddp, self._optimizer, self._state, self._fleet = ddp, optimizer, state, fleet
        self._everybody = everybody
        self._plugin, self._peers, self._masters, self._digests = plugin, peers, masters, digests
        self._step = 0
        self._superseded = 0
        self._newest_state: dict[str, Any] = {}
        self._stepping = False
        self._compiled = False
        self._followed = True
        self._started = False
        self._training = False
        self._closed = False
        self._layout: Layout | None = None
        self._ready_order: list[int] | None = None
        self._incarnation = 0
        self._history: int | None = None
        self._declined: Position | None = None
        self._boundary_at = time.monotonic()
        self._step_s = 1.0
        self._adopting = threading.Lock()
        self._seeder = Seeder(fleet, ddp.module, optimizer, masters)
        self._links = self._make_links()
        self._coordinator: Coordinator | None = None
        self._admission: Admission | None = None
        self._watch = Watch(ddp.module, optimizer, masters)
        copied = masters.sources
        stepped = [param for param in ddp.module.parameters() if param.requires_grad and id(param) not in copied]
        self._threads_show = any(map(rounds_by_place, stepped + [copy for _, copy in masters.named]))
        self._changed_before = False
        owner = Owner(plugin, lambda: self._step + 1, self._guard, self._supersede, masters)
        self._hook: Reductions = ShardReductions(ddp, owner) if isinstance(ddp, Sharded) else GradientHook(ddp, owner)
        self._step_hook = optimizer.register_step_pre_hook(self._before_step)
        self._undo = self._install()
        self._held = self._begin()

    def _make_links(self) -> Links:
        changed = threading.Condition()
        links = [
            RecordsLink(client, functools.partial(self._greeting, shard), self._seeder.request, changed)
            for client, shard in zip(self._fleet.clients, self._fleet.shards, strict=True)
        ]
        return Links(links, self._fleet.shards)

    @property
    def committed(self) -> int | None:
        """Newest step of this run that the shadows hold completely, as far as this rank was told; None: none.

        Backward passes whose gradients were reduced again before a step are not counted.
        """
        held = self._links.committed(self._lineage)
        return None if held is None else max(0, held - self._superseded)

    @property
    def _lineage(self) -> int:
        """The history that this run is of: it began in the incarnation of this number."""
        return self._incarnation if self._history is None else self._history

    @property
    def dropped(self) -> int:
        """Messages to the shadow that had to be dropped; each makes it ask for a seed."""
        return self._links.dropped

    def resume(self, *, from_the_top: bool = True) -> int | None:
        """Restore the step that the shadow holds, into model, optimizer, schedulers, random numbers and data order.

        Returns that step, or None for a fresh start. All ranks call it, once, before the first forward. Afterwards
        the script's loops over DataLoaders run from the top and continue where they stopped; ``from_the_top`` False:
        they begin with the epoch that was under way, because ``stateful`` restores their counters. Raises
        CheckmateError on all ranks if one could not restore.
        """
        if self._started:
            raise CheckmateError("resume() must be called once, before the first forward")
        self._started = True
        if self._held is None:
            return None
        TRACKER.from_the_top = from_the_top
        self._restore(self._held)
        self._guard(self._watch.seal)
        return self._step - self._superseded

    def state_dict(self) -> dict[str, Any]:
        """``{"model", "optimizer", "step"}`` as plain PyTorch has them, live: what ``checkmate export`` writes.

        With ``"masters"``, by parameter, where ``attach`` was given some.
        """
        return state_dict(self._ddp.module, self._optimizer, self._masters, self._step - self._superseded)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin from what ``state_dict`` gave, ``checkmate export`` wrote or plain PyTorch saved so, not anew.

        All ranks call it, before the first forward, unless ``resume`` restored a step: what the shadow holds is newer.
        ``"step"`` may be missing: then it is 0. Other keys are left alone. Raises CheckmateError on all ranks, with
        nothing changed, when the state does not fit on one.
        """
        if self._training or (self._started and self._held is not None):
            raise CheckmateError(
                f"load_state_dict() after step {self._step}: call it before the first forward, and only where resume() "
                "gave None; to begin from another state than the shadow's, restart the shadow"
            )
        start, problem = None, None
        try:
            start = Start(state, self._ddp.module, self._optimizer, self._masters)
        except CheckmateError as error:
            problem = error
        steps = self._peers.gather(-1 if start is None else start.step)
        if start is None or len(set(steps)) > 1:
            raise problem or CheckmateError(f"the ranks load states of the steps {steps} (-1: that does not fit)")
        start.apply()
        self._step = start.step

    def close(self, finished: bool = True) -> None:
        """Hand over the last step, wait shortly for its commit, end all connections and threads. May be repeated.

        ``finished`` False: the script broke off between two forwards; the last step is not handed over, because what
        the script still had to do after it (``scheduler.step()``) is unknown.
        """
        if self._closed:
            return
        if finished:
            self._guard(lambda: self._send_boundary(at_forward=False))
            self._await_commit()
        with self._adopting:
            self._closed = True
        self._hook.close()
        self._plugin.set_incarnation(0)
        for undo in self._undo:
            undo()
        if self._admission is not None:
            self._admission.close(CLOSE_S)
        self._seeder.close(CLOSE_S)
        if self._coordinator is not None:
            self._coordinator.close(CLOSE_S)
        self._links.close(CLOSE_S)
        if self._links.dropped:
            log.warning("rank %d: %d message(s) to the shadow were dropped", self._peers.number, self._links.dropped)

    # Start

    def _begin(self) -> Position | None:
        """Open an incarnation on rank 0 and tell the others; returns what the shadows hold, None: nothing.

        Raises CheckmateError on all ranks when they hold state that can't be restored, or can't follow this job.
        """
        begun, spans = None, list[Span]()
        problem: CheckmateError | None = None
        if self._peers.rank == 0:
            try:
                begun = self._try_begin()
            except (Unrestorable, Unfollowable) as error:
                problem = error
        incarnation = max(self._peers.gather(begun.incarnation if begun else 0))
        if begun is not None:
            try:
                if begun.incarnation != incarnation:
                    begun = self._fleet.begin(BEGIN_S, incarnation)
                spans = begun.spans()
            except (ShadowError, Unrestorable, Unfollowable) as error:
                problem = error
        if failed := self._peers.find(problem is not None):
            # One kind on all ranks: some of them alone can neither stop nor go on.
            lost = self._peers.find(bool(spans) or not isinstance(problem, Unfollowable | None))
            self.close(finished=False)
            kind = Unrestorable if lost else Unfollowable
            raise kind(
                str(problem or f"the job's shadows can't be used: see the message of rank(s) {failed}")
            ) from problem
        held = self._agree(spans)
        found = self._peers.find(begun is not None)
        if found == self._peers.leaders:
            self._adopt(incarnation, None)
            if not self._links.wait(lambda: self._links.settled, BEGIN_S):
                log.warning("rank %d has no records connection to a shadow yet", self._peers.number)
        else:
            self._admission = self._search()
        return held

    def _agree(self, spans: Sequence[Span]) -> Position | None:
        """Where the whole job goes on, of what each group's first rank knows that its shadows can be at; None: all are
        empty.

        Raises CheckmateError on all ranks when they can't be at one step.
        """
        groups: dict[int, list[Span]] = {leader: [] for leader in self._peers.leaders}
        for index in range(max(self._peers.gather(len(spans)))):
            mine = spans[index] if index < len(spans) else (-1, -1, -1)
            said = list(zip(*(self._peers.gather(value) for value in mine), strict=True))
            for leader in groups:
                groups[leader] += [said[leader]] if said[leader][0] >= 0 else []
        if not any(groups.values()):
            return None
        if (position := newest_position(list(groups.values()))) is None:
            self.close(finished=False)
            has = "; ".join(f"rank {rank}'s: {known[-1][2] if known else -1}" for rank, known in groups.items())
            raise Unrestorable(
                f"the shadows of the job's groups hold no common step (by group: {has}; -1: none, or not reached): no "
                "rank goes on, so that states are never mixed; make all reachable, or restart all shadows of the job"
            )
        return position

    def _try_begin(self) -> Beginning | None:
        """A shadow that is just starting is given some time, one that refuses is not."""
        end = time.monotonic() + BEGIN_S
        while True:
            try:
                return self._fleet.begin(BEGIN_S)
            except (ShadowError, Unrestorable) as error:
                if time.monotonic() > end or not isinstance(error.__cause__, OSError):
                    if isinstance(error, Unrestorable):
                        raise
                    log.warning("%s; training goes on without checkpoints until it can be reached", error)
                    return None
            time.sleep(_RETRY_S)

    def _adopt(self, incarnation: int, held: int | None) -> None:
        """From now on this rank belongs to the incarnation; ``held``: what the shadow holds of an earlier run."""
        with self._adopting:
            if self._closed:  # meanwhile, by another thread: nobody would end what is opened now
                return
            if held is not None and held > self._step:
                self._seeder.floor = held
            self._incarnation = incarnation
            self._plugin.set_incarnation(incarnation)
            self._links.open(incarnation)
            if self._peers.number == 0 and len(self._everybody) > 1:
                self._coordinator = Coordinator(self._everybody, incarnation, lambda: (self._step, self._step_s))

    def _search(self) -> Admission:
        """Look for the shadows in the background."""
        store: Any = dist.distributed_c10d._get_default_store()
        begin = functools.partial(self._fleet.begin, BEGIN_S) if self._peers.rank == 0 else None
        of_job = PrefixStore(f"checkmate/{self._peers.attempt}", store.clone())
        return Admission(of_job, self._peers, begin, self._adopt, self._request_seed)

    def _request_seed(self, reason: str) -> None:
        """From the background; of several groups all are to be at one step."""
        if len(self._peers.leaders) == 1:
            self._seeder.request(reason)
        elif self._coordinator is not None:
            self._coordinator.order()

    def _greeting(self, shard: Shard) -> Sequence[Message]:
        layout = shard.part(self._layout) if self._layout is not None else None
        return [layout] if layout is not None else []

    def _seed_start(self) -> None:
        """The shadow has no state: give it the initial one, before gradients flow."""
        self._watch.seal()
        if self._peers.rank == 0 and self._incarnation:
            self._seeder.take(self._step, self._incarnation, self._lineage, self._declined)
            if not self._seeder.wait(SEED_S):
                log.warning("the shadow did not acknowledge the initial state within %g s; training goes on", SEED_S)

    def _restore(self, held: Position) -> None:
        problem: Exception | None = None
        start = time.monotonic()
        try:
            self._load(held)
        except Exception as error:  # whatever it is, the other ranks must hear of it
            problem = error
        failed = self._peers.find(problem is not None)
        if failed:
            self.close(finished=False)
            reason = f": {problem}" if problem is not None else ", see their messages"
            raise CheckmateError(
                f"the state of step {held[1]} could not be restored on rank(s) {failed}{reason}; no rank goes on, so "
                "that states are never mixed; if this is another job than the shadow's, restart the shadow first"
            ) from problem
        self._hook.restore_order(self._ready_order)
        self._history, self._step = held
        metrics.note("restore", **self._where(), seconds=time.monotonic() - start)
        log.info("rank %d restored step %d", self._peers.number, self._step)

    def _load(self, held: Position) -> None:
        packed, boundary = self._fleet.restore(self._incarnation, held)
        ours = self._peers.part
        if (part := boundary.get("part", ours)) != ours:
            raise CheckmateError(
                f"it is of group {part[0] + 1} of {part[1]} in the order of their first ranks, which is group "
                f"{ours[0] + 1} of {ours[1]} now: give each group of the topology the place that it had"
            )
        params, buffers = named_state(self._ddp.module)
        params += self._masters.named
        unpack_state(params, buffers, self._optimizer, *packed)
        self._state.restore(boundary)
        self._newest_state = boundary
        self._ready_order = boundary.get("ready_order")
        self._superseded = boundary.get("superseded", 0)

    # Every iteration

    def before_forward(self) -> None:
        """At the first forward after a step, all that the script does between two steps is done."""
        if self._closed:
            return
        self._hook.before_forward()
        if not self._started:
            log.warning("resume() was not called: training starts anew, whatever the shadow holds")
            self._started, self._declined, self._held = True, self._held, None
        if not self._training:
            self._training = True
            if self._held is None:
                self._guard(self._seed_start)
        if self._is_evaluation_of_others():
            return
        self._state.first_forward()
        self._guard(lambda: self._send_boundary(at_forward=True))
        self._step_hook.remove()  # register again: after hooks of the user's that may change gradients
        self._step_hook = self._optimizer.register_step_pre_hook(self._before_step)

    def _is_evaluation_of_others(self) -> bool:
        """A forward that trains nothing, of other weights than the step's: of an average that is swapped in, say. The
        script gives the weights back before it trains, so this is not yet what it goes on from."""
        return not torch.is_grad_enabled() and self._state.awaits_forward and self._watch.changed() is not None

    def _before_step(
        self, _optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Where a closure computes the gradients, the step's record is due after it: the followed optimizers call it
        once, before all else."""
        self._compiled = torch.compiler.is_compiling()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer
        if closure is None:
            self._announce_step()
            return None

        def announced() -> Any:
            result = closure()
            self._announce_step()
            return result

        return args[:1], {**kwargs, "closure": announced}

    def _announce_step(self) -> None:
        unfinished, self._stepping = self._stepping, True
        self._guard(lambda: self._record_step(unfinished))

    def _record_step(self, unfinished: bool) -> None:
        skipped = self._is_skipped_inside()
        unfollowed = "the last step did not finish" if unfinished else self._unfollowed(skipped)
        self._send_record(unfollowed, skipped)

    def _unfollowed(self, skipped: bool) -> str | None:
        if self._compiled:
            return "the step is compiled (torch.compile): its arithmetic is not that of torch's optimizer"
        if skipped and self._lacks_momentum():
            return "torch's fused SGD makes momentum of uninitialised memory when a GradScaler skips its first step"
        return self._hook.unfollowed(self._optimizer) or self._watch.changed()

    def _is_skipped_inside(self) -> bool:
        """A GradScaler lets a fused optimizer skip the step by itself."""
        found_inf = getattr(self._optimizer, "found_inf", None)
        return found_inf is not None and bool(found_inf)

    def _lacks_momentum(self) -> bool:
        state = self._optimizer.state
        return any(
            param.grad is not None and group.get("momentum") and state[param].get("momentum_buffer") is None
            for group in self._optimizer.param_groups
            for param in group["params"]
        )

    def _send_record(self, unfollowed: str | None, skipped: bool) -> None:
        if unfollowed is not None and self._followed:
            log.warning("step %d is not followed: %s; the shadow goes on from a seed", self._step + 1, unfollowed)
        self._followed = unfollowed is None
        layout = self._hook.layout
        if layout is not self._layout and layout is not None:
            self._layout = layout
            self._links.send(layout)
        scaler = self._scaler()
        is_used = not skipped or scaler is not None  # of others the ranks may see different halves
        record = StepRecord(
            self._step + 1,
            layout.digest if layout is not None else "",
            [pack_group(group) for group in self._optimizer.param_groups],
            skipped,
            unfollowed,
            self._hook.absent() if is_used else [],
            self._hook.changes() if is_used else [],
            scaler,
            torch.get_num_threads() if self._threads_show else 0,
        )
        self._links.send(record)

    def _scaler(self) -> dict[str, Any] | None:
        values = {name: getattr(self._optimizer, name, None) for name in ("grad_scale", "found_inf")}
        if not any(isinstance(value, torch.Tensor) for value in values.values()):
            return None
        return {name: plain.encode(value) for name, value in values.items()}

    def _after_step(self, _optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self._stepping = False
        self._end_iteration()

    def _after_any_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if optimizer is not self._optimizer:
            self._guard(lambda: self._refuse_other(optimizer))

    def _refuse_other(self, optimizer: torch.optim.Optimizer) -> None:
        """A second optimizer of the model, or one made anew: no shadow has its state."""
        names = {id(param): name for name, param in self._ddp.module.named_parameters()}
        trained = [names[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in names]
        if trained and self._watch.changed() is not None:
            raise CheckmateError(
                f"another optimizer ({type(optimizer).__name__}) than the one that was attached stepped parameter "
                f"{trained[0]}: one optimizer must hold all that are trained, from the first step to the last; to "
                "begin anew, change its param_groups, or clear its state"
            )

    def _end_iteration(self) -> None:
        self._step += 1
        self._hook.next_step()
        self._guard(self._settle)

    def _settle(self) -> None:
        self._watch.seal()
        if self._links.connected:
            self._state.after_step()
            if self._peers.rank == 0 and self._followed:
                self._digests.send(self._step, self._links.send)

    def _scaled_step(self, step: Callable[[], Any]) -> Any:
        """Around a GradScaler's decision whether the optimizer steps."""
        before = self._step
        result = step()
        if self._step == before and not self._stepping:
            self._guard(lambda: self._send_record(self._watch.changed(), skipped=True))
            self._end_iteration()
        return result

    def _supersede(self) -> None:
        """Gradients are reduced again before any step: the shadow skips those before, and what it would restore after
        them is still the state before them."""
        self._send_record(None, skipped=True)
        self._step += 1
        self._superseded += 1
        state = {**self._newest_state, "superseded": self._superseded}
        self._links.send(Boundary(self._step, state))

    def _send_boundary(self, at_forward: bool) -> None:
        state = self._state.take(at_forward)
        if state is None:
            return
        tagged = self._plugin.counters().tagged_bytes
        metrics.note("step", **self._where(), tagged_bytes=tagged)
        state |= {"ready_order": self._hook.order, "superseded": self._superseded, "part": self._peers.part}
        self._newest_state = state
        self._links.send(Boundary(self._step, state, self._outside_change()))
        now = time.monotonic()
        self._boundary_at, self._step_s = now, now - self._boundary_at
        self._seed_if_wanted(is_last=not at_forward)

    def _seed_if_wanted(self, is_last: bool) -> None:
        if self._peers.rank == 0 and self._incarnation and self._links.complete:
            self._seeder.take_if_wanted(self._step, self._incarnation, self._lineage, is_last)

    def _outside_change(self) -> str | None:
        """What was changed since the step; a seed tells the shadow, at once if that is not what every step needs."""
        reason = self._watch.changed()
        if reason is not None:
            self._watch.seal()
            if not self._changed_before:
                log.warning("after step %d %s: the shadow needs a seed", self._step, reason)
                self._seeder.request(reason)
        self._changed_before = reason is not None
        return reason

    def _where(self) -> dict[str, int]:
        return {"rank": self._peers.number, "incarnation": self._incarnation, "step": self._step}

    def _guard(self, work: Callable[[], None]) -> None:
        """Nothing of ours may kill training: on an error, stop following it, loudly."""
        if self._closed:
            return
        try:
            work()
        except CheckmateError as error:
            log.error("Checkmate stops following this run at step %d: %s", self._step, error)
            self.close(finished=False)
        except Exception:
            log.exception("Checkmate stops following this run at step %d because of an error of its own", self._step)
            self.close(finished=False)

    # Installation and end

    def _install(self) -> list[Callable[[], object]]:
        """Hooks into torch; returns what undoes them."""
        forward = self._ddp.register_forward_pre_hook(ForwardHook(self.before_forward), prepend=True)
        after = self._optimizer.register_step_post_hook(self._after_step)
        hooks: Any = self._optimizer._optimizer_step_post_hooks
        hooks.move_to_end(after.id, last=False)  # before what hooks of others change
        atexit.register(self._at_exit)
        around_scaled_step(self._optimizer, self._scaled_step)
        return [
            lambda: around_scaled_step(self._optimizer, None),
            forward.remove,
            after.remove,
            register_optimizer_step_post_hook(self._after_any_step).remove,
            lambda: self._step_hook.remove(),  # noqa: PLW0108 - the newest one
            lambda: atexit.unregister(self._at_exit),
            TRACKER.remove,
            _before_group_goes(lambda: self.close(finished=sys.exc_info()[0] is None)),
        ]

    def _at_exit(self) -> None:
        uncaught = getattr(sys, "last_value", None)
        self.close(finished=uncaught is None)

    def _await_commit(self) -> None:
        """A seed that is asked for meanwhile is of the last step, too."""

        def is_settled() -> bool:
            return not self._links.complete or self._links.committed(self._lineage) == self._step

        if not (self._training and self._followed):
            return
        end = time.monotonic() + (CLOSE_S if len(self._peers.leaders) == 1 else LAST_S)
        while self._links.wait(lambda: is_settled() or self._seeder.is_due, end - time.monotonic()):
            if is_settled():
                return
            self._guard(lambda: self._seed_if_wanted(is_last=True))
        log.warning(
            "rank %d: the shadow committed step %s, the last step is %d",
            self._peers.number,
            self._links.committed(self._lineage),
            self._step,
        )


class ForwardHook:
    """Calls ``work`` before each forward of a module, but not of the module's copies, by deepcopy or torch.save."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    def __call__(self, _module: object, _args: object) -> None:
        self._work()

    def __reduce__(self) -> tuple[Any, ...]:
        # {}.get(module, args) leaves the arguments as they are, and a file needs nothing of ours.
        return getattr, ({}, "get")


def _before_group_goes(work: Callable[[], None]) -> Callable[[], None]:
    """Call ``work`` before the process group is destroyed; returns what undoes this."""
    original = dist.destroy_process_group

    @functools.wraps(original)
    def destroy_process_group(*args: Any, **kwargs: Any) -> None:
        work()
        original(*args, **kwargs)

    modules: list[Any] = [dist, dist.distributed_c10d]
    for module in modules:
        module.destroy_process_group = destroy_process_group

    def undo() -> None:
        for module in modules:
            module.destroy_process_group = original

    return undo
