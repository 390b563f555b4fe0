"""The kinds of switches, all of them behind ``target.Target``."""

from checkmate.controlplane.targets.p4runtime import P4RuntimeTarget
from checkmate.p4.v1model import bmv2
from checkmate.topology import Topology


def target_of(topology: Topology) -> P4RuntimeTarget:
    """The switch of a topology, for its job's controller; raises CheckmateError when its program was not compiled."""
    switch = topology.switch
    return P4RuntimeTarget(switch.p4runtime, switch.device_id, device_config(switch.target), topology.job)


def device_config(kind: str) -> bytes | None:
    """What has to be loaded with the pipeline: the eBPF switch has its program built in, a Tofino's SDE loads it."""
    if kind == "tofino":
        return None
    return bmv2.pipeline() if kind == "bmv2" else b""
