"""The plan as tables for a terminal."""

from collections.abc import Iterable

from rich.console import Group as Lines
from rich.table import Column, Table

from checkmate.plan import CLASSIFY, HEARTBEAT, L2_FORWARD, PORT_ROLE, REWRITE, Entry, Plan, show
from checkmate.queues import Queue


def tables(plan: Plan) -> Lines:
    """All of the plan; queues only where the switch has any."""
    parts = [_groups(plan), _heartbeats(plan), _rewrites(plan), _forwarding(plan), _roles(plan)]
    return Lines(*parts, *([_queues(plan)] if plan.queues else []), _usage(plan))


def _groups(plan: Plan) -> Table:
    table = _table("group", "for", "copies to", title=f"{plan.job}: multicast groups")
    for group in plan.rules.groups:
        members = ", ".join(f"{plan.ports[port]} (port {port}, rid {rid})" for port, rid in group.replicas)
        table.add_row(str(group.id), plan.group_names[group.id], members)
    return table


def _heartbeats(plan: Plan) -> Table:
    table = _table("from", "to address", "group", title=f"{plan.job}: heartbeat entries")
    for entry in _entries(plan, HEARTBEAT):
        port, address = entry.match
        table.add_row(_port(plan, port[1]), str(show(*address)), str(entry.group))
    return table


def _rewrites(plan: Plan) -> Table:
    table = _table("copies to", "rid", "new addresses", title=f"{plan.job}: rewrite entries")
    for entry in _entries(plan, REWRITE):
        (_, port), (_, rid) = entry.match
        addresses = ", ".join(f"{name} {show(name, value)}" for name, value in entry.params)
        table.add_row(_port(plan, port), str(rid), addresses)
    return table


def _forwarding(plan: Plan) -> Table:
    table = _table("address", "to", title=f"{plan.job}: forwarding")
    for entry in _entries(plan, L2_FORWARD):
        address = str(show(*entry.match[0])) if entry.match else "any other, and broadcast"
        port = dict(entry.params).get("port")
        table.add_row(address, f"group {entry.group}" if port is None else _port(plan, port))
    return table


def _roles(plan: Plan) -> Table:
    table = _table("of", "value", title=f"{plan.job}: roles of ports, and the tag")
    for entry in (*_entries(plan, PORT_ROLE), *_entries(plan, CLASSIFY)):
        name, value = entry.match[0]
        params = " ".join(f"{key}={show(key, number)}" for key, number in entry.params)
        of = _port(plan, value) if isinstance(value, int) else f"{name} {show(name, value)}"
        table.add_row(of, f"{entry.action.rpartition('.')[2]} {params}".strip())
    return table


def _queues(plan: Plan) -> Table:
    title = f"{plan.job}: queues of tagged frames, policy {plan.policy}"
    table = _table("port", "class", "when full", "sends pauses", "obeys pauses", "bytes", title=title)
    for queue in plan.queues:
        table.add_row(_port(plan, queue.port), str(queue.traffic_class), *_queue_cells(queue))
    return table


def _queue_cells(queue: Queue) -> Iterable[str]:
    yield "drop" if queue.drops else "wait"
    yield "yes" if queue.sends_pause else "no"
    yield "yes" if queue.obeys_pause else "no"
    if queue.sends_pause:
        yield f"pause at {queue.share_bytes:,}, head room {queue.headroom_bytes:,}"
    else:
        yield "" if queue.limit_bytes is None else f"at most {queue.limit_bytes:,}"


def _usage(plan: Plan) -> Table:
    table = _table("resource", "used", "limit", title=f"{plan.job}: what the target {plan.target} must hold")
    for use in plan.usage:
        table.add_row(use.what, f"{use.used:,}", f"{use.limit:,}")
    return table


def _entries(plan: Plan, table: str) -> Iterable[Entry]:
    return (entry for entry in plan.rules.entries if entry.table == table)


def _port(plan: Plan, port: object) -> str:
    return f"{plan.ports[port]} (port {port})" if isinstance(port, int) else str(port)


def _table(*headers: str, title: str) -> Table:
    """In a narrow window values are folded: a cut address says nothing."""
    return Table(*(Column(header, overflow="fold") for header in headers), title=title, title_justify="left")
