"""What the entries of our tables mean: each becomes a call of the data path."""

from collections.abc import Iterable, Mapping

from .datapath import Datapath, Drop, Flood, Forward, L2Action, Registrar, Rewrite
from .refusal import invalid
from .schema import Call, FieldValue

_DSCPS = range(64)
_PORT_FIELDS = ("ingress_port", "egress_port", "port")
_MAC_BYTES = 6


def _mac(value: int) -> bytes:
    return value.to_bytes(_MAC_BYTES, "big")


class Tables:
    """Carries table entries to a data path; ``Call`` None removes one."""

    def __init__(self, datapath: Datapath) -> None:
        self._datapath = datapath
        self._classifiers: set[tuple[FieldValue, int]] = set()
        self._setters = {
            "CheckmateIngress.classify": self._classify,
            "CheckmateIngress.port_role": self._port_role,
            "CheckmateIngress.heartbeat": self._heartbeat,
            "CheckmateIngress.live_group": self._live_group,
            "CheckmateIngress.l2_forward": self._l2_forward,
            "CheckmateEgress.rewrite": self._rewrite,
        }

    def set_entry(self, table: str, match: Mapping[str, FieldValue], priority: int, call: Call | None) -> None:
        """Put an entry into the data path, in the place of one with the same match and priority."""
        if call:
            numbers = {name: value.value for name, value in match.items()} | call.arguments
            self.check_ports(numbers[name] for name in _PORT_FIELDS if name in numbers)
        self._setters[table](match, priority, call)

    def set_default(self, table: str, call: Call) -> None:
        """Set a table's default action; only l2_forward has one that can change."""
        if table != "CheckmateIngress.l2_forward":
            invalid(f"the default action of {table} is constant")
        self.check_ports(value for name, value in call.arguments.items() if name in _PORT_FIELDS)
        self._datapath.set_l2_default(_l2_action(call))

    def check_ports(self, numbers: Iterable[int]) -> None:
        """Refuse port numbers that have no interface."""
        ports = self._datapath.ports
        for number in numbers:
            if number not in ports:
                invalid(f"port {number} has no interface; ports are {', '.join(map(str, sorted(ports)))}")

    def _classify(self, match: Mapping[str, FieldValue], priority: int, call: Call | None) -> None:
        # The only action is mark_tagged, so that the order of entries does not matter.
        classifiers = set(self._classifiers)
        if call:
            classifiers.add((match["ipv4.dscp"], priority))
        else:
            classifiers.discard((match["ipv4.dscp"], priority))
        tagged = (dscp for dscp in _DSCPS if any(dscp & field.mask == field.value for field, _ in classifiers))
        self._datapath.set_tagged_dscps(frozenset(tagged))
        self._classifiers = classifiers

    def _port_role(self, match: Mapping[str, FieldValue], _: int, call: Call | None) -> None:
        registrar = None
        if call and call.action == "CheckmateIngress.shadow_port":
            registrar = Registrar(call.arguments["registrar_ip"], call.arguments["registrar_port"])
        self._datapath.set_shadow_port(match["ingress_port"].value, registrar)

    def _heartbeat(self, match: Mapping[str, FieldValue], _: int, call: Call | None) -> None:
        group = call.arguments["group"] if call else None
        self._datapath.set_heartbeat(match["ingress_port"].value, _mac(match["ethernet.dst_addr"].value), group)

    def _live_group(self, match: Mapping[str, FieldValue], _: int, call: Call | None) -> None:
        self._datapath.set_live_group(match["group"].value, call is not None)

    def _l2_forward(self, match: Mapping[str, FieldValue], _: int, call: Call | None) -> None:
        self._datapath.set_l2(_mac(match["ethernet.dst_addr"].value), _l2_action(call) if call else None)

    def _rewrite(self, match: Mapping[str, FieldValue], _: int, call: Call | None) -> None:
        rewrite = None
        if call:
            arguments = call.arguments
            rewrite = Rewrite(_mac(arguments["src_mac"]), _mac(arguments["dst_mac"]), arguments["dst_ip"])
        self._datapath.set_rewrite(match["egress_port"].value, match["egress_rid"].value, rewrite)


def _l2_action(call: Call) -> L2Action:
    match call.action:
        case "CheckmateIngress.forward":
            return Forward(call.arguments["port"])
        case "CheckmateIngress.flood":
            return Flood(call.arguments["group"])
        case _:
            return Drop()
