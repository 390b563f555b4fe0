"""What the ranks of a job tell each other before training."""

import secrets

import torch
import torch.distributed as dist


class Peers:
    """Collective calls of all ranks of the job: every rank makes the same ones in the same order.

    ``rank`` and ``world``: of this rank in its data-parallel group; ``number``: in the job; ``members``: numbers of the
    group's ranks; ``leaders``: of each group's first rank. ``attempt``: a number that no other start of the job has; a
    launcher's store may outlive it.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._device = device
        self.rank = dist.get_rank(group)
        self.members = dist.get_process_group_ranks(group)
        self.world = len(self.members)
        self.number = dist.get_rank()
        self.job = dist.get_world_size()
        self.attempt = self.gather(secrets.randbits(62))[0]
        self.leaders = sorted(set(self.gather(self.members[0])))

    @property
    def part(self) -> list[int]:
        """Which of the job's groups this is, by the numbers of their ranks, and of how many: what a script cuts a model
        by, whatever the groups are named."""
        return [self.leaders.index(self.members[0]), len(self.leaders)]

    def gather(self, value: int) -> list[int]:
        """One whole number of every rank of the job."""
        values = torch.zeros(self.job, dtype=torch.int64, device=self._device)
        values[self.number] = value
        dist.all_reduce(values)
        gathered: list[int] = values.tolist()
        return gathered

    def find(self, mine: bool) -> list[int]:
        """Numbers of the ranks on which ``mine`` is true."""
        return [number for number, value in enumerate(self.gather(int(mine))) if value]
