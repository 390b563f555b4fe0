"""One rank of ``checkmate run``: ``python -m checkmate.rank TOPOLOGY SCRIPT ARGS…``, started by the elastic agent.

Enters the rank's network namespace, then becomes the script with Checkmate attached.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path

from checkmate.topology import Topology, load_topology

_CLONE_NEWNET = 0x40000000  # linux/sched.h
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Replace this process by the training script."""
    topology_file, script, *args = sys.argv[1:]
    topology = load_topology(Path(topology_file))
    rank = _rank(topology)
    host = topology.places[rank].host
    libc = ctypes.CDLL(None, use_errno=True)
    # An agent that is killed can't stop its ranks: they must not outlive it.
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if host.netns is not None:
        with Path("/run/netns", host.netns).open() as netns:
            if libc.setns(netns.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter network namespace {host.netns}")
    os.environ.update(rank_environment(topology, rank, attach="CHECKMATE_JOB" in os.environ))
    os.execv(sys.executable, [sys.executable, "-P", "-u", "-m", "checkmate.train.bootstrap", script, *args])


def _rank(topology: Topology) -> int:
    """The agent's number; on a machine of its own that of the topology: agents are numbered by address, not by host."""
    node = os.environ.get("CHECKMATE_NODE")
    if node is None:
        return int(os.environ["RANK"])
    return [place.host.name for place in topology.places].index(node) + int(os.environ["LOCAL_RANK"])


def rank_environment(topology: Topology, rank: int, attach: bool = False) -> dict[str, str]:
    """What this rank alone finds in its environment: its place (scripts may look, too), its group's shadows, its NICs,
    and who shares a host with whom.

    What is local stays as the agent says: ranks in namespaces share one machine's processors, and are told so.
    """
    place = topology.places[rank]
    group, host = place.group, place.host
    local = [other.host.name for other in topology.places[:rank]].count(host.name)
    # NCCL finds out itself which NIC is nearest to a GPU, and must see the same ones on all ranks of a machine.
    nics = host.nics_of(local) if host.netns else host.nics
    values = {
        "RANK": str(rank),
        "CHECKMATE_GROUP": group.name,
        "CHECKMATE_GROUP_INDEX": str(topology.groups.index(group)),
        "CHECKMATE_GROUP_COUNT": str(len(topology.groups)),
        "CHECKMATE_GROUP_RANKS": ",".join(map(str, topology.members(group))),
        "CHECKMATE_IFNAME": "=" + ",".join(nic.name for nic in nics),
    }
    if host.netns is None:
        values["GROUP_RANK"] = str(topology.rank_hosts.index(host))  # torchrun's name for the number of the machine
    if max(group.host_ranks) > 1:
        values["CHECKMATE_HOST_RANKS"] = ",".join(map(str, group.host_ranks))
    if attach:
        values["CHECKMATE_SHADOWS"] = topology.controls(group)
    return values


if __name__ == "__main__":
    main()
