"""One rank of ``checkmate run``: ``python -m checkmate.rank TOPOLOGY SCRIPT ARGS…``, started by the elastic agent.

Enters the rank's network namespace, then becomes the script with Checkmate attached.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path

from checkmate.topology import load_topology

_CLONE_NEWNET = 0x40000000  # linux/sched.h
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Replace this process by the training script."""
    topology_file, script, *args = sys.argv[1:]
    topology = load_topology(Path(topology_file))
    host = topology.host(topology.groups[0].ranks[int(os.environ["RANK"])])
    libc = ctypes.CDLL(None, use_errno=True)
    # An agent that is killed can't stop its ranks: they must not outlive it.
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if host.netns is not None:
        with Path("/run/netns", host.netns).open() as netns:
            if libc.setns(netns.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter network namespace {host.netns}")
    os.environ["CHECKMATE_IFNAME"] = "=" + ",".join(nic.name for nic in host.nics)
    os.execv(sys.executable, [sys.executable, "-P", "-u", "-m", "checkmate.train.bootstrap", script, *args])


if __name__ == "__main__":
    main()
