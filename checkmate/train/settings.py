"""What the launcher tells a training process through the environment."""

import os
from dataclasses import dataclass
from pathlib import Path

from checkmate.config import CheckmateError
from checkmate.topology import read_token

SHADOWS = "CHECKMATE_SHADOWS"
TOKEN_FILE = "CHECKMATE_TOKEN_FILE"
JOB = "CHECKMATE_JOB"


@dataclass(frozen=True)
class Settings:
    """Where the job's shadow listens and how to prove membership of the job."""

    host: str
    port: int
    token: bytes
    job: str

    @classmethod
    def from_environment(cls) -> "Settings":
        """Read the CHECKMATE_* variables; raises CheckmateError naming the one to fix."""
        host, port = _address(_required(SHADOWS, "the shadow's control address, ip:port"))
        token = read_token(Path(_required(TOKEN_FILE, "the file that holds the job's token")))
        return cls(host, port, token, _required(JOB, "the job's name"))

    @property
    def address(self) -> str:
        """For messages: ``host:port``."""
        return f"{self.host}:{self.port}"


def _required(name: str, meaning: str) -> str:
    value = os.environ.get(name, "").strip()
    if not value:
        raise CheckmateError(f"{name} is not set: it must be {meaning}; `checkmate run` sets it, or set it yourself")
    return value


def _address(value: str) -> tuple[str, int]:
    if "," in value:
        raise CheckmateError(f"{SHADOWS}={value} names several shadows: one is supported for now")
    host, _, port = value.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise CheckmateError(f"{SHADOWS}={value} is not ip:port, for example 10.0.0.9:7701")
    return host.strip("[]"), int(port)
