"""``checkmate run``: start a training script on every rank of a topology and restart all ranks when one dies.

Restarts are torch's own elastic agent (the machinery behind ``torchrun``): one agent here when all hosts are network
namespaces of this machine, else one agent on each host (``node``). Each worker is ``checkmate.rank``, which becomes the
script in the rank's own namespace. Ranks are numbered as ``Topology.places`` says.
"""

import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from checkmate import native
from checkmate.config import CheckmateError
from checkmate.nccl_plugin.bpf.loader import CounterProgram
from checkmate.topology import Topology, load_topology

RENDEZVOUS_PORT = 29400
_RENDEZVOUS_SECONDS = 300
_SHUTDOWN_SECONDS = 5


@dataclass(frozen=True)
class Job:
    """What to run: ``script`` with ``args``, ``channels`` rings, at most ``max_restarts`` restarts of all ranks.

    ``bpf``: directory on a BPF file system where the counter map is pinned, None: nothing is tagged.
    ``attach``: False runs the script on the same transport without any checkpointing.
    """

    topology_file: Path
    script: Path
    args: Sequence[str] = ()
    channels: int = 2
    max_restarts: int = 3
    bpf: Path | None = None
    attach: bool = True
    node: str | None = None
    logs: Path | None = None


def run_job(job: Job) -> None:
    """Run to the end; raises CheckmateError when the script fails for good."""
    topology = load_topology(job.topology_file)
    names = _hosts(topology)
    if job.attach:
        _check_shadows(topology)
    if not job.script.is_file():
        raise CheckmateError(f"script {job.script} does not exist or is not a file")
    local = all(topology.host(name).netns for name in names)
    if not local and job.node not in names:
        raise CheckmateError(f"--node {job.node!r} is not a host with ranks: use one of {names}")
    if job.logs is not None:
        try:
            job.logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckmateError(f"--logs {job.logs}: {error.strerror}; name a directory of yours") from None
    launch_config = _launch_config(topology, names, job, local)
    _require_own_address(launch_config.local_addr, "registrar" if local else f"management_ip of {job.node}")
    worker = ["-P", "-m", "checkmate.rank", str(job.topology_file), str(job.script), *job.args]
    here = {} if local or job.node is None else {"CHECKMATE_NODE": job.node}
    with _counter_map(job) as counter_map, _environment(job_environment(topology, job, counter_map) | here):
        try:
            elastic_launch(launch_config, sys.executable)("-u", *worker)
        except ChildFailedError as error:
            raise CheckmateError(_describe_failure(error)) from None
        except RendezvousError as error:
            raise CheckmateError(
                f"the ranks' meeting point {launch_config.rdzv_endpoint} cannot be used ({error}); "
                "is the port free, and is the first host's `checkmate run` there?"
            ) from None


def job_environment(topology: Topology, job: Job, counter_map: Path | None) -> dict[str, str]:
    """What all ranks of the job find in their environment; ``counter_map``: where the map is pinned."""
    plugin = str(native.library("libcheckmate_net.so"))
    values = {
        "NCCL_NET_PLUGIN": plugin,
        "NCCL_PROFILER_PLUGIN": plugin,
        "NCCL_ALGO": "Ring",
        "NCCL_PROTO": "Simple",
        "NCCL_PXN_DISABLE": "1",  # else another rank's process may send
        "CHECKMATE_BACKEND": "checkmate",
        "CHECKMATE_CHANNELS": str(job.channels),
        "CHECKMATE_DSCP": str(topology.dscp_tag),
    }
    if job.attach:
        values["CHECKMATE_JOB"] = topology.job
        values["CHECKMATE_TOKEN_FILE"] = str(topology.token_file)
        values["CHECKMATE_JOB_SHADOWS"] = topology.controls(*topology.groups)
    if counter_map is not None:
        values["CHECKMATE_COUNTER_MAP"] = str(counter_map)
    return values


def _launch_config(topology: Topology, names: Sequence[str], job: Job, local: bool) -> LaunchConfig:
    nodes = 1 if local else len(names)
    first = topology.registrar.host if local else topology.host(names[0]).management_ip
    here = first if local or job.node is None else topology.host(job.node).management_ip
    redirect = Std.ALL if job.logs else Std.NONE
    return LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=len(topology.places) if local or job.node is None else topology.host(job.node).ranks,
        run_id=topology.job,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{first}:{RENDEZVOUS_PORT}",
        rdzv_configs={"timeout": _RENDEZVOUS_SECONDS, "is_host": here == first},
        local_addr=here,
        max_restarts=job.max_restarts,
        shutdown_timeout=_SHUTDOWN_SECONDS,
        logs_specs=DefaultLogsSpecs(log_dir=str(job.logs) if job.logs else None, redirects=redirect, tee=redirect),
    )


def _require_own_address(address: str | None, field: str) -> None:
    """Elsewhere the ranks would look for each other in vain, for minutes."""
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            raise CheckmateError(
                f"{field}: {address} is not an address of this machine (or network namespace); start `checkmate run` "
                "there, in a lab with `nsenter --net=/run/netns/NAME-mgmt`"
            ) from None


def _hosts(topology: Topology) -> list[str]:
    """Hosts that run ranks, in the order of their ranks; CheckmateError where a job cannot number its ranks so."""
    for index, group in enumerate(topology.groups):
        members = topology.members(group)
        if members != sorted(members):
            in_order = [topology.places[rank].host.name for rank in sorted(members)]
            raise CheckmateError(
                f"groups[{index}].ranks: {list(group.ranks)} cannot be used by a job, which numbers its ranks in the "
                f"order of hosts, as torch does in {group.name}; write {in_order}, or change the order of hosts"
            )
    return [host.name for host in topology.rank_hosts]


def _check_shadows(topology: Topology) -> None:
    without = [group.name for group in topology.groups if not group.shadows]
    if without and len(without) < len(topology.groups):
        raise CheckmateError(
            f"groups: {', '.join(without)} has no shadow, others have; what one group lost the others could not go on "
            "without: give every group a shadow, or none"
        )


@contextmanager
def _counter_map(job: Job) -> Iterator[Path | None]:
    if job.bpf is None:
        yield None
        return
    with CounterProgram.load(job.bpf) as program:
        yield program.map_path


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _describe_failure(error: ChildFailedError) -> str:
    lines = [f"the script failed on {len(error.failures)} rank(s) and no restart is left:"]
    for rank, failure in sorted(error.failures.items()):
        reason = failure.signal_name() if failure.exitcode < 0 else f"exit code {failure.exitcode}"
        lines.append(f"  rank {rank}: {reason}")
    return "\n".join(lines)
