"""What the launcher tells a training process through the environment."""

import os
from dataclasses import dataclass
from pathlib import Path

from checkmate.config import CheckmateError
from checkmate.topology import read_token

SHADOWS = "CHECKMATE_SHADOWS"
TOKEN_FILE = "CHECKMATE_TOKEN_FILE"
JOB = "CHECKMATE_JOB"
VERIFY = "CHECKMATE_VERIFY"
VERIFY_SHARE = 0.0005
"""Of rank 0's training time that goes into digests, unless CHECKMATE_VERIFY says otherwise."""


@dataclass(frozen=True)
class Settings:
    """Where the job's shadow listens, how to prove membership of the job, and how much time digests may take."""

    host: str
    port: int
    token: bytes
    job: str
    verify: float = VERIFY_SHARE

    @classmethod
    def from_environment(cls) -> "Settings":
        """Read the CHECKMATE_* variables; raises CheckmateError naming the one to fix."""
        host, port = _address(_required(SHADOWS, "the shadow's control address, ip:port"))
        token = read_token(Path(_required(TOKEN_FILE, "the file that holds the job's token")))
        return cls(host, port, token, _required(JOB, "the job's name"), _share(os.environ.get(VERIFY, "").strip()))

    @property
    def address(self) -> str:
        """For messages: ``host:port``."""
        return f"{self.host}:{self.port}"


def _required(name: str, meaning: str) -> str:
    value = os.environ.get(name, "").strip()
    if not value:
        raise CheckmateError(f"{name} is not set: it must be {meaning}; `checkmate run` sets it, or set it yourself")
    return value


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


def _address(value: str) -> tuple[str, int]:
    if "," in value:
        raise CheckmateError(f"{SHADOWS}={value} names several shadows: one is supported for now")
    host, _, port = value.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise CheckmateError(f"{SHADOWS}={value} is not ip:port, for example 10.0.0.9:7701")
    return host.strip("[]"), int(port)
