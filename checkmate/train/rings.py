"""Where this rank stands in its rings: the plugin finds out, from an all-reduce of known numbers."""

import os

import torch
import torch.distributed as dist

from checkmate.train.hsdp import Replicated
from checkmate.train.reductions import TagPlugin

HOST_RANKS = "CHECKMATE_HOST_RANKS"
_PROBE_ELEMENTS = 1 << 18
_PROBE_ELEMENTS_PER_RANK = 2048
"""So that all channels are used, of which NCCL has 64 at most, and none of their chunks is empty."""


def probe_rings(ddp: Replicated, plugin: TagPlugin) -> None:
    """Show the plugin this rank's position in the ring of each channel, if ranks share hosts. Collective.

    A chunk belongs where the position of its sender says, and nobody tells the position: NCCL's events name no ranks
    within a host. But rank 0 alone contributes 1s, so that what a rank sends is 0 until the chunks come that have
    passed rank 0 (``checkmate_register_probe``).
    """
    if not os.environ.get(HOST_RANKS):
        return
    group = ddp.process_group
    count = max(_PROBE_ELEMENTS, _PROBE_ELEMENTS_PER_RANK * dist.get_world_size(group))
    probe = torch.full((count,), float(dist.get_rank(group) == 0), device=ddp.device)
    plugin.register_probe(probe.data_ptr(), probe.nbytes)
    dist.all_reduce(probe, group=group)
    plugin.unregister_buckets()
    probe[0].item()  # waits: positions must be known before the first gradients are sent
