"""What the ranks of a DDP module tell each other before training."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Peers:
    """Collective calls: every rank makes the same ones in the same order."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._group = ddp.process_group
        self._device = ddp.device
        self.rank = dist.get_rank(self._group)
        self.world = dist.get_world_size(self._group)

    def gather(self, value: int) -> list[int]:
        """One whole number of every rank."""
        values = torch.zeros(self.world, dtype=torch.int64, device=self._device)
        values[self.rank] = value
        torch.distributed.all_reduce(values, group=self._group)
        gathered: list[int] = values.tolist()
        return gathered

    def find(self, mine: bool) -> list[int]:
        """Ranks on which ``mine`` is true."""
        return [rank for rank, value in enumerate(self.gather(int(mine))) if value]
