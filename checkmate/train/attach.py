"""``checkmate.attach``: makes a shadow follow a replicated model and its optimizer."""

import functools
from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from checkmate.config import CheckmateError
from checkmate.train import arithmetic, checks, registry
from checkmate.train.boundary import RankState, Stateful
from checkmate.train.checkpoint import Checkpoint
from checkmate.train.client import Client
from checkmate.train.data import TRACKER
from checkmate.train.digests import DigestSender
from checkmate.train.fleet import Fleet
from checkmate.train.hsdp import replicated
from checkmate.train.masters import Masters
from checkmate.train.peers import Peers
from checkmate.train.reductions import TagPlugin
from checkmate.train.rings import probe_rings
from checkmate.train.settings import Settings
from checkmate.train.shards import Shard, cut

ATTACHED: "WeakSet[nn.Module]" = WeakSet()
"""Modules that a shadow follows: what attaches by itself leaves them alone."""


def attach(
    ddp: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    stateful: Mapping[str, Stateful] | None = None,
    masters: Mapping[str, Tensor] | None = None,
) -> Checkpoint:
    """Let the job's shadow follow every optimizer step of ``ddp``; all ranks call it, before the first backward.

    ``ddp``: a DistributedDataParallel, or what ``fully_shard`` made with a mesh of two dimensions (HSDP).
    ``stateful``: further objects with state_dict() and load_state_dict() to restore, by name; learning-rate schedulers
    made after this call are found without. ``masters``: where the optimizer holds copies of more bits instead of the
    module's parameters, each copy by its parameter's name. The script gives a copy the parameter's gradient, converted,
    before the step, and copies it into the parameter before the next forward. Raises CheckmateError on all ranks when
    something cannot be followed or the environment that the launcher sets is incomplete. A shadow that cannot be
    reached is a warning: training goes on and is followed from when it can be.
    """
    return attach_unless(None, ddp, optimizer, stateful or {}, masters or {})


def attach_unless(
    problem: str | None,
    ddp: nn.Module,
    optimizer: torch.optim.Optimizer,
    stateful: Mapping[str, Stateful],
    masters: Mapping[str, Tensor],
) -> Checkpoint:
    """``attach``, unless a rank knows a ``problem``: then CheckmateError on all."""
    if ddp in ATTACHED:
        problem = problem or (
            "attach was called for this module before, and torch can't take back its communication hook: use the "
            "Checkpoint that the first call returned, or wrap the model in a new DistributedDataParallel"
        )
    problem = problem or checks.refusal(ddp, optimizer, stateful, masters)
    if not dist.is_initialized():
        raise CheckmateError(problem or "torch.distributed is not initialised")
    registry.install()
    TRACKER.install()
    model = replicated(ddp) if problem is None else None
    peers = Peers(getattr(model, "process_group", None), getattr(model, "device", torch.device("cpu")))
    parts: tuple[Settings, list[Shard], TagPlugin, RankState, Masters, dict[str, Any] | None] | None = None
    if model is not None:
        try:
            state = RankState(model.module, optimizer, stateful, peers.rank, peers.world)
            state.check()
            settings = Settings.from_environment()
            settings.check_members(peers.members, peers.job)
            shards = cut(model.module, len(settings.shadows))
            copies = Masters(model.module, masters)
            parts = settings, shards, load_plugin(), state, copies, arithmetic.measure(optimizer)
        except (CheckmateError, OSError) as error:
            problem = str(error)
    refusing = peers.find(problem is not None)
    if model is None or parts is None or refusing or (problem := _other_steps(parts[-1], peers)) is not None:
        TRACKER.remove()
        raise CheckmateError(problem or f"rank(s) {refusing} cannot attach: see their messages")
    settings, shards, plugin, state, copies, measured = parts
    probe_rings(model, plugin)
    ATTACHED.add(ddp)
    client = functools.partial(Client, settings, rank=peers.rank, world=peers.world, arithmetic=measured)
    fleet = Fleet(list(map(client, settings.shadows)), shards)
    everybody = list(map(client, settings.job_shadows))
    digests = DigestSender(settings.verify, model.module, optimizer, copies)
    return Checkpoint(model, optimizer, state, fleet, everybody, plugin, peers, copies, digests)


def _other_steps(measured: dict[str, Any] | None, peers: Peers) -> str | None:
    """Why a group's parameters would drift apart, of which a shadow has one state; the same on all ranks or None."""
    digests = peers.gather(measured["digest"] if measured else 0)
    others = peers.find(digests[peers.number] != digests[peers.members[0]])
    if not others:
        return None
    of = measured["of"] if measured else "a GPU"
    return (
        f"the optimizers of rank(s) {others} make other steps of the same numbers than that of the first rank of their "
        f"group (here: {of}): use the same torch, the same options and the same ATEN_CPU_CAPABILITY on all"
    )


def load_plugin() -> TagPlugin:
    """The plugin's library in this process: the one that NCCL or our back end uses."""
    from checkmate.nccl_plugin.binding import Plugin  # noqa: PLC0415 - loads a compiled part

    plugin: TagPlugin = Plugin()
    return plugin
