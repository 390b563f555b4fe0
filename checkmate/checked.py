"""Reading a YAML file with checks: a problem is a line with the field, its value, what is allowed and what to do.

Values are taken out of their map by name and parsed; what is wrong is noted, and reading goes on, so that all problems
are reported at once.
"""

import difflib
import ipaddress
import re
import reprlib
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from checkmate import config

_MAX_INTERFACE_NAME = 15

_SHORT = reprlib.Repr()
"""Shows a value; what is long or deep is cut."""
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 100


class Endpoint(NamedTuple):
    """A TCP address, usable wherever ``socket`` takes one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def mac_to_int(mac: str) -> int:
    """48-bit value of a MAC address in colon notation."""
    return int(mac.replace(":", ""), 16)


class Wrong(Exception):
    """A value that cannot be accepted: the text says what is allowed and what to do."""


_REQUIRED = object()


class Map:
    """A mapping of the file at ``path``; ``take`` removes keys, ``finish`` complains about what is left."""

    def __init__(self, problems: list[str], path: str, value: Any) -> None:
        self.problems = problems
        self.path = path
        self._known: list[str] = []
        self._left: dict[Any, Any] = {}
        self.usable = isinstance(value, Mapping)
        if isinstance(value, Mapping):
            self._left = dict(value)
        else:
            self.complain("", value, "allowed: a map of keys and values")

    def complain(self, key: str, value: Any, advice: str) -> None:
        """Note that ``value`` cannot stand at ``key`` (of this map when empty) and what to do."""
        self.problems.append(f"{self.at(key) or 'the file'}: {_SHORT.repr(value)} cannot be used; {advice}")

    def take(self, key: str, parse: Callable[[Any], Any], default: Any = _REQUIRED) -> Any:
        """The parsed value, ``default`` when the key is absent, None when the value is wrong."""
        self._known.append(key)
        value = self._left.pop(key, None)
        if value is None:
            if default is _REQUIRED and self.usable:
                self.problems.append(f"{self.at(key)}: missing; {parse.__doc__}")
            return None if default is _REQUIRED else default
        try:
            return parse(value)
        except Wrong as wrong:
            self.complain(key, value, str(wrong))
            return None

    def take_maps(self, key: str, read: Callable[["Map"], Any], allow_empty: bool = False) -> tuple[Any, ...]:
        """The list of maps under ``key``, each read by ``read``."""
        items = self.take(key, list_of, default=[] if allow_empty else _REQUIRED)
        if items == [] and not allow_empty:
            self.complain(key, items, "allowed: a list with at least one entry; add one")
        path = self.at(key)
        return tuple(read(Map(self.problems, f"{path}[{i}]", item)) for i, item in enumerate(items or ()))

    def take_map(self, key: str, read: Callable[["Map"], Any], default: Any = _REQUIRED) -> Any:
        """The map under ``key``, read by ``read``; None when there is none."""
        value = self.take(key, anything, default)
        return None if value is None else read(Map(self.problems, self.at(key), value))

    def finish(self) -> None:
        """Note the keys that nothing asked for."""
        for key in self._left:
            self.problems.append(f"{self.at(key)}: unknown key; {choices(str(key), self._known)}")

    def at(self, key: Any) -> str:
        """Path of ``key`` of this map in the file."""
        return f"{self.path}.{key}" if self.path and key != "" else self.path or str(key)


# Parsers: the docstring is what the user is told is allowed.


def anything(value: Any) -> Any:
    """allowed: a map of keys and values"""
    return value


def list_of(value: Any) -> list[Any]:
    """allowed: a list"""
    if not isinstance(value, list):
        raise Wrong(f"{list_of.__doc__}; write its entries with a leading dash")
    return value


def name(value: Any) -> str:
    """allowed: a name of letters, digits, '.', '_' and '-'"""
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value):
        raise Wrong(f'{name.__doc__}; write for example "node0"')
    return value


def names(value: Any) -> tuple[str, ...]:
    """allowed: a list of names"""
    return tuple(name(item) for item in list_of(value))


def interface(value: Any) -> str:
    """allowed: a network interface name of at most 15 characters"""
    if not isinstance(value, str) or not re.fullmatch(rf"[^\s/:]{{1,{_MAX_INTERFACE_NAME}}}", value):
        raise Wrong(f'{interface.__doc__}; write for example "eth0"')
    return value


def mac(value: Any) -> str:
    """allowed: a unicast MAC address, six hexadecimal pairs"""
    if not isinstance(value, str) or not re.fullmatch(r"([0-9A-Fa-f]{2}:){5}[0-9A-Fa-f]{2}", value):
        raise Wrong(f'{mac.__doc__}; write for example "02:00:00:00:01:01", with the quotes')
    number = mac_to_int(value)
    if number == 0 or number >> 40 & 1:
        raise Wrong(f"{mac.__doc__}; this one is multicast or zero: make the first byte even, for example 02")
    return value.lower()


def ipv4(value: Any) -> str:
    """allowed: an IPv4 address of one machine"""
    try:
        address = ipaddress.IPv4Address(value if isinstance(value, str) else "")
    except ValueError:
        raise Wrong(f"{ipv4.__doc__}; write for example 10.1.0.1") from None
    if address.is_multicast or address.is_unspecified or int(address) == 0xFFFFFFFF:
        raise Wrong(f"{ipv4.__doc__}, neither multicast nor broadcast nor 0.0.0.0; take another")
    return str(address)


def integer(value: Any, low: int, high: int, allowed: str | None) -> int:
    """``value`` when it is a whole number from ``low`` to ``high``; raises Wrong with what is ``allowed``."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise Wrong(f"{allowed}; write a number in that range")
    return value


def one_of(value: Any, known: Iterable[str]) -> str:
    """``value`` when it is one of ``known``; raises Wrong with the nearest one and all others."""
    if value not in list(known):
        raise Wrong(choices(str(value), known))
    return str(value)


def boolean(value: Any) -> bool:
    """allowed: true or false"""
    if not isinstance(value, bool):
        raise Wrong(f"{boolean.__doc__}; write one of these, without quotes")
    return value


def tcp_port(value: Any) -> int:
    """allowed: a TCP port, 1 to 65535"""
    return integer(value, 1, 0xFFFF, tcp_port.__doc__)


def path(value: Any) -> Path:
    """allowed: an absolute path"""
    if not isinstance(value, str) or not value.startswith("/"):
        raise Wrong(f"{path.__doc__}; write for example /etc/checkmate/token")
    return Path(value)


def endpoint(value: Any) -> Endpoint:
    """allowed: host:port"""
    host, _, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*", host) or not re.fullmatch(r"[0-9]{1,5}", port):
        raise Wrong(f'{endpoint.__doc__}; write for example "10.255.0.1:{config.REGISTRATION_PORT}"')
    return Endpoint(host, tcp_port(int(port)))


def address(value: Any) -> Endpoint:
    """allowed: IPv4 address:port"""
    parsed = endpoint(value)
    ipv4(parsed.host)
    return parsed


def choices(given: str, known: Iterable[str]) -> str:
    """What is allowed instead of ``given``, the nearest one first in words."""
    names = list(known)
    near = difflib.get_close_matches(given, names, n=1)
    guess = f"did you mean {near[0]!r}? " if near else ""
    return f"{guess}allowed: {', '.join(names) or 'nothing'}; write one of these"


def line_of(root: yaml.Node, path: str) -> int:
    """Line (from 1) at which what ``path`` names begins, or the innermost part of it that the file has."""
    node, mark = root, root.start_mark
    for step in re.findall(r"[^.\[\]]+", path):
        if isinstance(node, yaml.MappingNode):
            found = next(((key, value) for key, value in node.value if key.value == step), None)
            if found is None:
                break
            mark, node = found[0].start_mark, found[1]
        elif isinstance(node, yaml.SequenceNode) and step.isdecimal() and int(step) < len(node.value):
            node = node.value[int(step)]
            mark = node.start_mark
        else:
            break
    return mark.line + 1


class UniqueKeys(yaml.SafeLoader):
    """YAML silently keeps the last of two equal keys: that would hide a port given twice.

    Aliases are refused: a few lines of them stand for values without end.
    """

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, "aliases are not allowed; write it out", event.start_mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice; remove one", node.start_mark
                )
        return super().construct_mapping(node, deep)


def read_yaml(text: str) -> tuple[yaml.Node | None, Any]:
    """The root of a YAML document, for ``line_of``, and its content; raises yaml.YAMLError or ValueError."""
    loader = UniqueKeys(text)
    try:
        root: yaml.Node | None = loader.get_single_node()
        return root, None if root is None else loader.construct_document(root)
    finally:
        loader.dispose()
