"""What the launcher tells a training process through the environment."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from checkmate.checked import Endpoint
from checkmate.config import CheckmateError
from checkmate.topology import read_token

SHADOWS = "CHECKMATE_SHADOWS"
JOB_SHADOWS = "CHECKMATE_JOB_SHADOWS"
TOKEN_FILE = "CHECKMATE_TOKEN_FILE"
JOB = "CHECKMATE_JOB"
GROUP = "CHECKMATE_GROUP"
GROUP_COUNT = "CHECKMATE_GROUP_COUNT"
GROUP_RANKS = "CHECKMATE_GROUP_RANKS"
VERIFY = "CHECKMATE_VERIFY"
VERIFY_SHARE = 0.0005
"""Of rank 0's training time that goes into digests, unless CHECKMATE_VERIFY says otherwise."""


@dataclass(frozen=True)
class Settings:
    """Where the shadows of this rank's group listen, how to prove membership of the job, and how much time digests may
    take.

    ``shadows``: each holds a shard of the group's parameters, in this order. ``job_shadows``: of all groups of the job.
    ``members``: which ranks of the job are in the group; None: all.
    """

    shadows: tuple[Endpoint, ...]
    token: bytes
    job: str
    verify: float = VERIFY_SHARE
    job_shadows: tuple[Endpoint, ...] = ()
    group: str = ""
    members: tuple[int, ...] | None = None

    @classmethod
    def from_environment(cls) -> "Settings":
        """Read the CHECKMATE_* variables; raises CheckmateError naming the one to fix."""
        shadows = _addresses(
            SHADOWS, _required(SHADOWS, "the control addresses of the group's shadows, ip:port,ip:port")
        )
        everybody = os.environ.get(JOB_SHADOWS, "").strip()
        return cls(
            shadows,
            read_token(Path(_required(TOKEN_FILE, "the file that holds the job's token"))),
            _required(JOB, "the job's name"),
            _share(os.environ.get(VERIFY, "").strip()),
            _addresses(JOB_SHADOWS, everybody) if everybody else shadows,
            os.environ.get(GROUP, ""),
            _numbers(os.environ.get(GROUP_RANKS, "")),
        )

    def check_members(self, members: Sequence[int], job: int) -> None:
        """Raise CheckmateError unless gradients are reduced over exactly the group's ranks; ``job``: number of all."""
        wanted = list(range(job) if self.members is None else self.members)
        if list(members) == wanted:
            return
        name = f"the topology's group {self.group}" if self.group else "this job, which has one group,"
        raise CheckmateError(
            f"the module's gradients are reduced over the ranks {list(members)}, but {name} consists of {wanted}: give "
            f"the module process_group=torch.distributed.new_group({wanted}) or the mesh's dimension with these ranks, "
            "or change the topology's groups"
        )


def _required(name: str, meaning: str) -> str:
    value = os.environ.get(name, "").strip()
    if not value:
        raise CheckmateError(f"{name} is not set: it must be {meaning}; `checkmate run` sets it, or set it yourself")
    return value


def _numbers(value: str) -> tuple[int, ...] | None:
    if not value.strip():
        return None
    try:
        return tuple(int(part) for part in value.split(","))
    except ValueError:
        raise CheckmateError(f"{GROUP_RANKS}={value} is not a list of rank numbers, for example 0,2") from None


def _share(value: str) -> float:
    try:
        share = float(value or VERIFY_SHARE)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise CheckmateError(
            f"{VERIFY}={value} is not a share of the training time: give a number from 0 (no digests) to 1, or leave "
            f"it unset for {VERIFY_SHARE}"
        )
    return share


def _addresses(variable: str, value: str) -> tuple[Endpoint, ...]:
    addresses = tuple(_address(variable, part.strip()) for part in value.split(","))
    if len(set(addresses)) < len(addresses):
        raise CheckmateError(f"{variable}={value} names a shadow twice: name each once")
    return addresses


def _address(variable: str, value: str) -> Endpoint:
    host, _, port = value.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise CheckmateError(f"{variable}={value} is not ip:port, for example 10.0.0.9:7701")
    return Endpoint(host.strip("[]"), int(port))
