"""The smallest topology that has all: some ranks and one shadow at a switch that is reached over P4Runtime."""

from collections.abc import Sequence

from checkmate.topology import Topology


def topology_of(port: int, ranks: int, shadow_ports: Sequence[int]) -> Topology:
    """Job "test": ``ranks`` hosts node1 … at the switch's ports 1 …, and shadow "s". ``port``: of P4Runtime."""

    def nic(name: str, number: int) -> dict[str, object]:
        return {"name": name, "mac": f"02:00:00:00:00:{number:02x}", "ip": f"10.1.0.{number}", "port": number}

    hosts = range(1, ranks + 1)
    return Topology.from_dict(
        {
            "job": "test",
            "mtu": 1500,
            "token_file": "/nowhere/token",
            "registrar": "127.0.0.1:7702",
            "switch": {
                "target": "ebpf",
                "p4runtime": f"127.0.0.1:{port}",
                "interfaces": {number: f"p{number}" for number in (*hosts, *shadow_ports)},
            },
            "hosts": [{"name": f"node{i}", "management_ip": f"10.255.0.{i}", "nics": [nic("eth0", i)]} for i in hosts],
            "shadows": [
                {
                    "name": "s",
                    "management_ip": "10.255.1.1",
                    "nics": [nic(f"eth{i}", number) for i, number in enumerate(shadow_ports)],
                }
            ],
            "groups": [{"name": "dp", "ranks": [f"node{i}" for i in hosts], "shadows": ["s"]}],
        }
    )
