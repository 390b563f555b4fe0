"""A picture of the rack as SVG: hosts left, the switch and its ports in the middle, shadows right, groups by colour."""

import colorsys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from checkmate.plan import Plan
from checkmate.topology import Group, Host, Nic, Shadow, Topology

_MARGIN = 24
_NODE_WIDTH = 300
_CABLE = 90
_SWITCH_WIDTH = 170
_ROW = 22
_GAP = 10
_TITLE = 64
_PORT = 34
_CHIP = 13
_LEGEND_WIDTH = 290
_MAX_NAMED = 2
"""Groups that are written out at a node; of more there are the colours, the first and the last."""

_HOST_X = _MARGIN
_SWITCH_X = _HOST_X + _NODE_WIDTH + _CABLE
_SHADOW_X = _SWITCH_X + _SWITCH_WIDTH + _CABLE
_WIDTH = _SHADOW_X + _NODE_WIDTH + _MARGIN

_INK, _PALE, _CABLE_INK = "#1f2933", "#f5f7fa", "#9aa5b1"
_STYLE = (
    "text{font-family:'DejaVu Sans',Helvetica,Arial,sans-serif;font-size:12px;fill:#1f2933}"
    ".title{font-size:18px;font-weight:bold}.name{font-weight:bold}.small{font-size:10.5px;fill:#52606d}"
)


@dataclass(frozen=True)
class _Box:
    """A node where it is drawn; ``nic_y``: middle of each NIC's row."""

    node: Host | Shadow
    x: int
    y: int
    height: int
    nic_y: tuple[int, ...]


def draw(topology: Topology, plan: Plan) -> str:
    """The picture; the same topology and plan give the same text."""
    colours = {group.name: _colour(i) for i, group in enumerate(topology.groups)}
    hosts, shadows = _stack(topology.hosts, _HOST_X), _stack(topology.shadows, _SHADOW_X)
    bottom = max(box.y + box.height for box in (*hosts, *shadows))
    legend_y = bottom + 48
    columns = max(1, (_WIDTH - 2 * _MARGIN) // _LEGEND_WIDTH)
    height = legend_y + -(-len(topology.groups) // columns) * _ROW + _MARGIN
    parts = [
        _tag("rect", x=0, y=0, width=_WIDTH, height=height, fill="white"),
        _text(_MARGIN, 32, f"Job {topology.job}", css="title"),
        _text(_MARGIN, 52, _summary(topology, plan), css="small"),
        *_switch(topology, bottom),
        *(part for box in hosts for part in _host(box, topology, colours)),
        *(part for box in shadows for part in _shadow(box, topology, plan, colours)),
        _text(_MARGIN, legend_y - 12, "Data-parallel groups", css="name"),
        *_legend(topology, colours, legend_y, columns),
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}">'
    )
    return "\n".join([head, f"<style>{_STYLE}</style>", *parts, "</svg>"]) + "\n"


def _summary(topology: Topology, plan: Plan) -> str:
    used = {use.what: use.used for use in plan.usage}
    return (
        f"{topology.switch.target} at {topology.switch.p4runtime}, policy {topology.policy}, MTU {topology.mtu}: "
        f"{used['multicast groups']} multicast groups, {used['heartbeat entries']} heartbeat and "
        f"{used['rewrite entries']} rewrite entries; shadows alive: {len(plan.live)} of {len(topology.shadows)}"
    )


def _stack(nodes: Sequence[Host | Shadow], x: int) -> list[_Box]:
    boxes, y = [], _TITLE + _ROW
    for node in nodes:
        rows = tuple(y + _ROW * (i + 1) + _ROW // 2 for i in range(len(node.nics)))
        boxes.append(_Box(node, x, y, _ROW * (len(node.nics) + 1) + 4, rows))
        y += boxes[-1].height + _GAP
    return boxes


def _switch(topology: Topology, bottom: int) -> Iterator[str]:
    y = _TITLE
    yield _tag("rect", x=_SWITCH_X, y=y, width=_SWITCH_WIDTH, height=bottom - y + 12, rx=6, fill="#e4e7eb", stroke=_INK)
    middle = _SWITCH_X + _SWITCH_WIDTH // 2
    yield _text(middle, y + 17, f"switch ({topology.switch.target})", css="name", anchor="middle")


def _host(box: _Box, topology: Topology, colours: dict[str, str]) -> Iterator[str]:
    groups = [group for group in topology.groups if box.node.name in group.ranks]
    labels = [(group.name, f"{group.name} {_ranks(group, box.node.name)}") for group in groups]
    yield from _node(box, labels, colours)
    cable = colours[groups[0].name] if len(groups) == 1 else _CABLE_INK
    for nic, y in zip(box.node.nics, box.nic_y, strict=True):
        yield from _nic(box, nic, y)
        yield _line(box.x + _NODE_WIDTH, _SWITCH_X, y, cable)
        yield from _port(_SWITCH_X, nic, y, topology)


def _ranks(group: Group, host: str) -> str:
    numbers = [rank for rank, name in enumerate(group.ranks) if name == host]
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {numbers[0]} to {numbers[-1]}"


def _shadow(box: _Box, topology: Topology, plan: Plan, colours: dict[str, str]) -> Iterator[str]:
    groups = [group for group in topology.groups if box.node.name in group.shadows]
    yield from _node(box, [(group.name, group.name) for group in groups], colours)
    dash = "" if box.node.name in plan.live else "4 4"
    for nic, y, source in zip(box.node.nics, box.nic_y, ("rank 0", "other ranks"), strict=True):
        yield from _nic(box, nic, y)
        cable = colours[groups[0].name] if len(groups) == 1 else _CABLE_INK
        yield _line(_SWITCH_X + _SWITCH_WIDTH, box.x, y, cable, dash)
        yield _text(box.x - _CABLE // 2, y - 4, source, css="small", anchor="middle")
        yield from _port(_SWITCH_X + _SWITCH_WIDTH - _PORT, nic, y, topology)


def _node(box: _Box, labels: list[tuple[str, str]], colours: dict[str, str]) -> Iterator[str]:
    """The box, its name, and the groups (name, text) that it is in."""
    yield _tag("rect", x=box.x, y=box.y, width=_NODE_WIDTH, height=box.height, rx=4, fill=_PALE, stroke=_INK)
    yield _text(box.x + 8, box.y + 16, box.node.name, css="name")
    right = box.x + _NODE_WIDTH - 8
    few = len(labels) <= _MAX_NAMED
    text = ", ".join(text for _, text in labels) if few else f"{labels[0][0]} … {labels[-1][0]}"
    yield _text(right, box.y + 16, text, css="small", anchor="end")
    x = right - int(6.2 * len(text)) - 6
    for name, text in reversed(labels):
        x -= _CHIP
        if x < box.x + 8 + 9 * len(box.node.name):
            break  # the legend has them all
        title = f"<title>{escape(text)}</title>"
        yield _tag("rect", title, x=x, y=box.y + 6, width=_CHIP - 3, height=_CHIP - 2, fill=colours[name])


def _nic(box: _Box, nic: Nic, y: int) -> Iterator[str]:
    yield _text(box.x + 8, y + 4, nic.name, css="small")
    yield _text(box.x + 84, y + 4, nic.ip, css="small")
    yield _text(box.x + _NODE_WIDTH - 8, y + 4, nic.mac, css="small", anchor="end")


def _port(x: int, nic: Nic, y: int, topology: Topology) -> Iterator[str]:
    speed = f"port {nic.port}" + (f", {topology.switch.link_of(nic).speed}" if _is_hardware(topology) else "")
    title = f"<title>{escape(speed)}</title>"
    yield _tag("rect", title, x=x, y=y - 8, width=_PORT, height=16, fill="white", stroke=_INK)
    yield _text(x + _PORT // 2, y + 4, str(nic.port), css="small", anchor="middle")


def _is_hardware(topology: Topology) -> bool:
    return topology.switch.target == "tofino"


def _legend(topology: Topology, colours: dict[str, str], y: int, columns: int) -> Iterator[str]:
    rows = -(-len(topology.groups) // columns)
    for i, group in enumerate(topology.groups):
        x, row = _MARGIN + i // rows * _LEGEND_WIDTH, y + i % rows * _ROW
        text = f"{group.name}: {len(group.ranks)} ranks, {_shadows(group.shadows)}"
        yield _tag("rect", x=x, y=row - 2, width=_CHIP, height=_CHIP, fill=colours[group.name])
        yield _text(x + _CHIP + 6, row + 9, text, css="small")


def _shadows(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "no shadow" if len(names) <= _MAX_NAMED else f"{names[0]} … {names[-1]} ({len(names)})"


def _colour(index: int) -> str:
    """Neighbours differ in hue by the golden angle; every other round of the circle is darker."""
    lightness = (0.45, 0.62, 0.3)[index // 12 % 3]
    red, green, blue = colorsys.hls_to_rgb(index * 137.508 % 360 / 360, lightness, 0.65)
    return "#" + bytes(round(255 * part) for part in (red, green, blue)).hex()


def _line(x1: int, x2: int, y: int, stroke: str, dash: str = "") -> str:
    return _tag("line", x1=x1, y1=y, x2=x2, y2=y, stroke=stroke, stroke_width=2, stroke_dasharray=dash or "none")


def _text(x: int, y: int, text: str, css: str, anchor: str = "start") -> str:
    return _tag("text", escape(text), x=x, y=y, class_=css, text_anchor=anchor)


def _tag(name: str, content: str = "", **attributes: Any) -> str:
    """An element; an attribute's underscores are hyphens, a last one is left out."""
    written = "".join(_attributes(attributes.items()))
    return f"<{name}{written}>{content}</{name}>" if content else f"<{name}{written}/>"


def _attributes(items: Iterable[tuple[str, Any]]) -> Iterator[str]:
    return (f" {key.rstrip('_').replace('_', '-')}={quoteattr(str(value))}" for key, value in items)
