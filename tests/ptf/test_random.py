"""Random frames on random ports: what leaves, and what is counted, is what the reference model says."""

import random
from collections.abc import Callable

import pytest
from ptf import frames
from ptf.frames import NOP, REGISTRAR_TCP, TIMESTAMP, counter, tcp
from ptf.rules import rules
from ptf.target import BURST, PORTS, SwitchUnderTest

pytestmark = pytest.mark.root

FRAMES = 10_000
SEED = 20
LEAST = 20
"""Linux drops a VLAN-tagged frame shorter than this, as on Ethernet there is none, before any program sees it."""


def _options(rng: random.Random) -> list[object]:
    before: list[object] = rng.choice(
        [[], [], [NOP, NOP, TIMESTAMP], [NOP, NOP, ("SAck", (1, 2))], [NOP] * rng.randrange(8)]
    )
    return [*before, *([counter(rng.getrandbits(32))] if rng.random() < 0.8 else [])]


def _plausible(rng: random.Random) -> bytes:
    """A frame as hosts send it, mostly tagged."""
    return tcp(
        rng.choice(PORTS),
        rng.choice([*PORTS, 77]),
        _options(rng),
        rng.randbytes(rng.choice([0, 1, 2, 100, 1448, 8000])),
        tos=rng.choice([frames.TOS, frames.TOS, frames.TOS | 3, 0xFF, 0, rng.getrandbits(8)]),
        vlans=[rng.getrandbits(12)] * rng.choices([0, 1, 2], [8, 2, 1])[0],
        seq=rng.choice([rng.getrandbits(32), 0xFFFFFFFF - rng.randrange(9)]),
        ip_fields={"options": "\x01" * 4 * rng.choices([0, 1, 10], [8, 1, 1])[0], "flags": rng.choice(["", "DF"])},
        flags=rng.choice(["A", "PA", "FA", "S", "R"]),
        dport=rng.choice([50000, REGISTRAR_TCP]),
    )


def _damaged(rng: random.Random) -> bytes:
    """A plausible frame with some bytes of its headers changed, or cut, or padded."""
    frame = bytearray(_plausible(rng))
    for _ in range(rng.randrange(1, 4)):
        frame[rng.randrange(min(len(frame), 90))] = rng.getrandbits(8)
    if rng.random() < 0.3:
        del frame[rng.randrange(LEAST, len(frame)) :]
    return bytes(frame).ljust(rng.choice([0, 60, 120]), b"\0")


def _noise(rng: random.Random) -> bytes:
    """Random bytes behind an Ethernet header, IPv4 by its type more often than not."""
    kind = rng.choice([b"\x08\0", b"\x08\0", b"\x81\0\0\5\x08\0", b"\x86\xdd", rng.randbytes(2)])
    return rng.randbytes(6) + frames.mac_number(1).to_bytes(6, "big") + kind + rng.randbytes(rng.randrange(2, 70))


MAKERS: list[Callable[[random.Random], bytes]] = [_plausible, _plausible, _damaged, _damaged, _noise]


def test_random_frames(running_switch: SwitchUnderTest) -> None:
    running_switch.program(rules())
    rng = random.Random(SEED)
    copies = leaving = 0
    for _ in range(FRAMES // BURST):
        source = rng.choice(PORTS)
        out = running_switch.expect(*((source, rng.choice(MAKERS)(rng)) for _ in range(BURST)))
        copies += sum(len(out[port]) for port in (5, 6))
        leaving += sum(len(got) for got in out.values())
    assert copies > FRAMES // 20, "hardly any frame took the path that matters"
    assert leaving > FRAMES // 2
