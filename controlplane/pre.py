"""Multicast groups of the packet replication engine between the plan's words and P4Runtime's."""

from typing import Any

from checkmate.p4.shared.messages import p4runtime_pb2
from checkmate.plan import Multicast, Replica


def encode(group: Multicast) -> Any:
    """A P4Runtime PacketReplicationEngineEntry."""
    message = p4runtime_pb2.PacketReplicationEngineEntry()
    message.multicast_group_entry.multicast_group_id = group.id
    for port, rid in group.replicas:
        message.multicast_group_entry.replicas.add(egress_port=port, instance=rid)
    return message


def decode(message: Any) -> Multicast:
    """The inverse; a port may come as a number or as bytes, as P4Runtime 1.4 and later have it."""
    entry = message.multicast_group_entry
    replicas = (
        Replica(
            int.from_bytes(replica.port, "big") if replica.WhichOneof("port_kind") == "port" else replica.egress_port,
            replica.instance,
        )
        for replica in entry.replicas
    )
    return Multicast(entry.multicast_group_id, tuple(sorted(replicas)))


def read_all() -> Any:
    """The entity that asks for every group."""
    entity = p4runtime_pb2.Entity()
    entity.packet_replication_engine_entry.multicast_group_entry.SetInParent()
    return entity
