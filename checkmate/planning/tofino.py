"""Set-up of a Tofino 1 that P4Runtime does not cover, as a script for the SDE's own shell.

Names and ranges are those of the SDE's fixed tables ``$PORT``, ``$pre.port`` and ``tf1.tm.*`` (open-p4studio,
``bf_rt_port_tf1.json``, ``bf_rt_pre_tf1.json``, ``bf_rt_tm_tf1.json``).
"""

import textwrap
from collections import Counter
from collections.abc import Iterator

from checkmate import config
from checkmate.config import CheckmateError
from checkmate.plan import FLOOD_GROUP, Plan
from checkmate.queues import CABLE_M, Queue
from checkmate.rack import Link
from checkmate.rack_checks import PIPE_PORTS
from checkmate.topology import Topology

CELL_BYTES = 80
"""Tofino 1 keeps frames in cells of this size."""

SPARE_CELLS = 160 * 1024
"""The smallest Tofino 1 has 260 Ki cells, of which the SDE shares out 100 Ki at start."""

MAX_FRAME_BYTES = 10240
"""The SDE's default, above the largest frame (9216 bytes) that the switch program must pass."""

PORTS_PER_GROUP = 4
QUEUES_PER_PORT = 8
"""How the SDE divides the 32 queues of a group of four lanes at start."""

_FEC = {"rs": "BF_FEC_TYP_RS", "fc": "BF_FEC_TYP_FC", "none": "BF_FEC_TYP_NONE"}
_AUTONEG = {None: "PM_AN_DEFAULT", True: "PM_AN_FORCE_ENABLE", False: "PM_AN_FORCE_DISABLE"}

_HEAD = """\
# Ports, replication and queues of a Tofino 1 for the job {job!r}.
# Written by `checkmate plan --tofino-setup`: change the inventory instead of this file.
#
# Tables and multicast groups come over P4Runtime from `checkmate controller`; this is what P4Runtime does not cover.
# Run it once after each start of bf_switchd, before the controller:  bfshell -b THIS_FILE
# bfshell goes on after an error that it prints: look at its output and at the tables printed last.


def checkmate_setup():
    # All is in one function: bfshell does not show a script's own names to the functions in it. `bfrt` is its root.
    port, tm = bfrt.port.port, bfrt.tf1.tm

    # 1. Ports, in the inventory's order of numbers.
    # dev_port: the number that P4, P4Runtime and the inventory use, 128 x pipe + lane. Which socket of the front panel
    # that is (1/0, 2/0, ...) depends on the board: the table printed last has both; compare it with the cables.
    # group, queue: where queue {tc} of the port is, the one for tagged frames. Four lanes share a group of 32
    # queues, of which the SDE gives each lane 8 at start: queue Q of lane L is number 8 x (L % 4) + Q of group L // 4.
    # speed, fec, autoneg: `link` of the switch or the NIC. lanes: 4 for 100G and 40G, 2 for 50G, 1 for 25G and 10G.
    # fec: 100G over copper or SR4 needs RS (IEEE 802.3 clause 91), 25G RS or FC (clause 74), 10G usually none; both
    # ends must agree. autoneg: PM_AN_DEFAULT lets the SDE choose by the plugged-in medium (on for copper).
    ports = (
        # dev_port, pipe, group, queue, speed, fec, lanes, autoneg
"""

_PORTS_DONE = """\
    )
    # RX_MTU, TX_MTU: largest frame in bytes; frames of up to 9216 bytes must pass.
    for dev_port, pipe, group, queue, speed, fec, lanes, autoneg in ports:
        port.add(
            DEV_PORT=dev_port,
            SPEED=speed,
            FEC=fec,
            N_LANES=lanes,
            AUTO_NEGOTIATION=autoneg,
            RX_MTU={frame},
            TX_MTU={frame},
            PORT_ENABLE=True,
        )

    # 2. Replication: the engine may send copies to each of these ports. There are no backup ports: a copy for a port
    # that is down is lost, it must not reach another rank.
    for dev_port, *_ in ports:
        bfrt.pre.port.mod(DEV_PORT=dev_port, MULTICAST_FORWARD_STATE=True)

    # 3. Classes. The switch program puts frames with the DSCP bit 0x{tag:02x} into ingress class and queue {tc}, all
    # others into 0: there is nothing to set here. NICs that trust the DSCP give 0x20 the same priority by themselves
    # (DSCP >> 3), and the same VLAN priority (PCP) where there is a VLAN tag.

    # 4. Queues and flow control of class {tc}. Buffers are counted in cells of 80 bytes.
"""

_ISOLATE = """\
    # Policy isolate: nobody is ever paused. A copy that finds its shadow's queue full is dropped, and repaired later.
    # The copies' own pool: what all shadow queues hold at most, so that they never take buffer from training.
    tm.pool.cfg.mod(pool="EG_APP_POOL_2", size_cells={pool})
    shadow_ports = {{
{shadow_ports}
    }}
    for dev_port, pipe, group, queue, *_ in ports:
        if dev_port in shadow_ports:
            # pool_max_cells: {limit_bytes} bytes; dynamic_baf DISABLE: that limit is fixed, not a part of what is free.
            # tail_drop_enable: drop what does not fit. hysteresis_cells: room that must be free again before more.
            tm.queue.buffer.mod_with_shared_pool(
                pipe=pipe,
                pg_id=group,
                pg_queue=queue,
                hysteresis_cells=32,
                tail_drop_enable=True,
                pool_id="EG_APP_POOL_2",
                pool_max_cells={limit},
                dynamic_baf="DISABLE",
            )
        # No pauses are sent or obeyed; PFC priorities map to classes of the same number.
        tm.port.flowcontrol.mod(dev_port=dev_port, mode_tx="NONE", mode_rx="NONE", cos_to_icos=[0, 1, 2, 3, 4, 5, 6, 7])
        port.mod(DEV_PORT=dev_port, TX_PFC_EN_MAP=0, RX_PFC_EN_MAP=0)
"""

_LOSSLESS = """\
    # Policy lossless: PFC (IEEE 802.1Qbb). A sender whose frames wait too long is paused, so that no copy is dropped.
    # Its NIC must map the tag to priority {tc} and obey pauses there, and the shadows' must send them. ConnectX:
    #   mlnx_qos -i IFACE --trust dscp --dscp2prio set,{tag},{tc} --pfc {pfc_list}
    # {share_bytes} bytes may wait of one sender before it is paused. headroom: cells for what still arrives after that:
    # a frame begun at each end, 394 pause quanta of reaction, {cable} m of cable both ways.
    senders = {{
        # dev_port: (number of its priority group in the pipe, headroom)
"""

_LOSSLESS_DONE = """\
    }}
    # What all senders together may have waiting, before and after the pause; and where it waits on its way out: as
    # much for each of the {copies} copies of a frame, so that nothing that was let in is dropped.
    tm.pool.cfg.mod(pool="IG_APP_POOL_1", size_cells={shares})
    tm.pool.cfg.mod(pool="IG_SKID_POOL", size_cells={headrooms})
    tm.pool.cfg.mod(pool="EG_APP_POOL_2", size_cells={pool})
    # The pool as a whole pauses nobody before it is full: each sender's share does.
    tm.pool.app_pfc.mod(pool="IG_APP_POOL_1", cos={tc}, pfc_limit_cells={shares})
    for dev_port, pipe, group, queue, *_ in ports:
        # pool_max_cells: all that may be let in; tail_drop_enable False: what finds it full waits in the senders.
        # hysteresis_cells: room that must be free again before more.
        tm.queue.buffer.mod_with_shared_pool(
            pipe=pipe,
            pg_id=group,
            pg_queue=queue,
            hysteresis_cells=32,
            tail_drop_enable=False,
            pool_id="EG_APP_POOL_2",
            pool_max_cells={admitted},
            dynamic_baf="DISABLE",
        )
        # pfc_cos: a pause of priority {tc} from the receiver stops this queue.
        tm.queue.cfg.mod(pipe=pipe, pg_id=group, pg_queue=queue, pfc_cos={tc})
        # Every port obeys pauses; only senders are sent them. Bit {tc} of the maps is the class's priority.
        sends = dev_port in senders
        tm.port.flowcontrol.mod(
            dev_port=dev_port,
            mode_tx="PFC" if sends else "NONE",
            mode_rx="PFC",
            cos_to_icos=[0, 1, 2, 3, 4, 5, 6, 7],
        )
        port.mod(DEV_PORT=dev_port, TX_PFC_EN_MAP={mask} if sends else 0, RX_PFC_EN_MAP={mask})
        if sends:
            # The class's own priority group on this port. guaranteed_cells: 1600 bytes, what the SDE gives a port.
            # hysteresis_cells: how far its use must fall before the sender may go on.
            ppg_id, headroom = senders[dev_port]
            tm.ppg.cfg.add_with_dev_port(
                pipe=pipe,
                ppg_id=ppg_id,
                dev_port=dev_port,
                icos_{tc}=True,
                guaranteed_cells=20,
                hysteresis_cells=128,
                pool_id="IG_APP_POOL_1",
                pool_max_cells={share},
                dynamic_baf="DISABLE",
                pfc_enable=True,
                pfc_skid_max_cells=headroom,
            )
"""

_TAIL = """\

    # 5. What the switch holds now: ports with their front-panel names, and the buffer pools.
    port.dump(table=True)
    tm.pool.cfg.dump(table=True)


checkmate_setup()
"""


def setup_script(topology: Topology, plan: Plan) -> str:
    """The script; the same topology gives the same text.

    Raises CheckmateError when the switch is no Tofino, or when the queues need more buffer than it has to spare.
    """
    if topology.switch.target != "tofino":
        raise CheckmateError(f"switch.target is {topology.switch.target!r}: only 'tofino' has a set-up script")
    links = {nic.port: topology.switch.link_of(nic) for node in topology.nodes for nic in node.nics}
    values = {
        "job": topology.job,
        "tag": topology.dscp_tag,
        "tc": config.TAGGED_CLASS,
        "frame": MAX_FRAME_BYTES,
    }
    rows = "".join(_port_row(queue, links[queue.port]) for queue in plan.queues)
    queues = _lossless if topology.policy == "lossless" else _isolate
    return "".join([_HEAD.format(**values), rows, _PORTS_DONE.format(**values), *queues(plan, values), _TAIL])


def cells(count: int) -> int:
    """Cells that hold ``count`` bytes."""
    return -(-count // CELL_BYTES)


def _port_row(queue: Queue, link: Link) -> str:
    pipe, lane = divmod(queue.port, PIPE_PORTS)
    group, number = divmod(lane, PORTS_PER_GROUP)
    place = f"{queue.port}, {pipe}, {group}, {QUEUES_PER_PORT * number + queue.traffic_class}"
    runs = f'"BF_SPEED_{link.speed}", "{_FEC[link.fec]}", {link.lanes}, "{_AUTONEG[link.autoneg]}"'
    return f"        ({place}, {runs}),  # {queue.port_of}\n"


def _isolate(plan: Plan, values: dict[str, object]) -> Iterator[str]:
    limits = {queue.port: queue.limit_bytes for queue in plan.queues if queue.limit_bytes is not None}
    limit_bytes = next(iter(limits.values()), 0)
    limit = limit_bytes // CELL_BYTES
    pool = _affordable(limit * len(limits))
    ports = textwrap.indent(textwrap.fill(" ".join(f"{port}," for port in limits), 100), " " * 8)
    yield _ISOLATE.format(**values, pool=pool, limit=limit, limit_bytes=limit_bytes, shadow_ports=ports)


def _lossless(plan: Plan, values: dict[str, object]) -> Iterator[str]:
    senders = [queue for queue in plan.queues if queue.sends_pause]
    share = max(cells(queue.share_bytes) for queue in senders)
    shares, headrooms = share * len(senders), sum(cells(queue.headroom_bytes) for queue in senders)
    copies = max((len(group.replicas) for group in plan.rules.groups if group.id != FLOOD_GROUP), default=1)
    traffic_class = config.TAGGED_CLASS
    yield _LOSSLESS.format(
        **values,
        share_bytes=senders[0].share_bytes,
        cable=CABLE_M,
        pfc_list=",".join("1" if priority == traffic_class else "0" for priority in range(8)),
    )
    in_pipe: Counter[int] = Counter()
    for queue in senders:
        pipe = queue.port // PIPE_PORTS
        in_pipe[pipe] += 1
        yield f"        {queue.port}: ({in_pipe[pipe]}, {cells(queue.headroom_bytes)}),  # {queue.port_of}\n"
    yield _LOSSLESS_DONE.format(
        **values,
        share=share,
        shares=shares,
        headrooms=headrooms,
        copies=copies,
        admitted=shares + headrooms,
        pool=_affordable(copies * (shares + headrooms)),
        mask=1 << traffic_class,
    )


def _affordable(needed: int) -> int:
    if needed > SPARE_CELLS:
        raise CheckmateError(
            f"the queues need {needed} cells of buffer, a Tofino 1 has {SPARE_CELLS} to spare; use policy isolate, "
            "fewer hosts or another switch"
        )
    return needed
