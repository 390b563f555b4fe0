"""A job of several groups and shadows in a storm: ranks, shadows and the whole job are killed at random moments.

What is struck, and when, follows from a seed. Meanwhile this module does what an operator's machines would do: shadows
that died are started again, a job that died whole is, too, and where a refusal says that all shadows must be restarted,
they are. What the documentation promises is checked: a state is refused only when a shadow lost its part while the job
was down, or the other way round; no committed step is ever lost; training that runs is never held up.

Shadows that groups share hold a part of each: what is struck is a shadow, what is lost are its parts.
"""

import itertools
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkmate import metrics
from support.training import Rack

PACED = Path(__file__).parents[1] / "e2e/scripts/paced.py"
RUN_S = 400.0
"""For a whole run."""
STALL_S = 5.0
"""No step takes longer than its pause and this: nothing of ours waits in a run that is under way."""
_TICK_S = 0.05
_REFUSALS = ("so that states are never mixed", "restart all shadows of the job")


@dataclass(frozen=True)
class Strike:
    """What happens ``steps`` of the job, then ``seconds`` after the strike before.

    ``calm``: not before all shadows hold states again.
    ``kind``: "rank", "shadow" or "both" are killed, or the whole "job"; or a shadow stands still ("stop"). ``absent``:
    seconds until a shadow is there again.
    """

    kind: str
    calm: bool
    steps: int
    seconds: float
    rank: int
    shadow: int
    absent: float


@dataclass(frozen=True)
class Draw:
    """What a seed makes of a run. ``late``: a shadow that comes when ranks have made so many steps."""

    seed: int
    pause: float
    late: tuple[int, int] | None
    strikes: tuple[Strike, ...]

    @classmethod
    def of(cls, seed: int, ranks: int, shadows: int, most: int) -> "Draw":
        """Up to ``most`` strikes."""
        rng = random.Random(seed)
        kinds = ["rank", "shadow", "both", "stop", "job"]
        strikes = []
        for kind in rng.choices(kinds, [5, 3, 1, 3, 1], k=rng.randint(max(1, most - 2), most)):
            early = rng.random() < 0.35  # while the job starts or restores, most of the time
            strikes.append(
                Strike(
                    kind,
                    not early and rng.random() < 0.6,
                    0 if early else rng.randint(1, 8),
                    rng.uniform(0, 10) if early else rng.uniform(0, 0.3),
                    rng.randrange(ranks),
                    rng.randrange(shadows),
                    rng.uniform(1, 6) if kind == "stop" else rng.uniform(0, 2),
                )
            )
        late = (rng.randrange(shadows), rng.randint(0, 20)) if rng.random() < 0.2 else None
        return cls(seed, rng.choice((0.05, 0.1, 0.25)), late, tuple(strikes))


class Storm:
    """One run. ``name``: of its files in the lab; ``command``: a script that saves its parts as OUT.g, with options."""

    def __init__(self, rack: Rack, name: str, draw: Draw, command: Sequence[str]) -> None:
        self.rack, self.name, self.draw = rack, name, draw
        self.out = self._file("pt")
        self._command = [*command, f"--out={self.out}"]
        shadows = rack.lab.topology.shadows
        self._shadows = range(len(shadows))
        self._owners = [n for n in self._shadows for _ in rack.lab.topology.followed(shadows[n])]
        self._due: list[tuple[float, str, int]] = []
        self.lost: set[int] = set()
        self.whole = False
        self.excused = False
        self.anew = 0
        self._told = 0
        self._looked = 0.0
        self._ended = (0, 0)
        self._floors: list[tuple[int, int]] = []
        self.log: list[str] = []
        self._began = time.monotonic()
        self._late = draw.late
        if self._late is not None:
            self._kill(self._late[0])
        self._job = self._start()

    def run(self) -> None:
        """To its end."""
        for strike in self.draw.strikes:
            if not self._wait(strike):
                break
            self._strike(strike)
        while not self._is_over():
            self._tick()
        self._look()
        self.whole = not self.lost and not self._due
        while self._due:
            self._tick()
        self._check_floors()
        self._check_stalls()
        assert not any(self._pids(host.netns) for host in self.rack.lab.topology.hosts), "ranks are left"

    def notes(self) -> list[dict[str, Any]]:
        """What Checkmate noted."""
        return metrics.read(self._file("metrics"))

    def story(self) -> str:
        """For messages."""
        names = [self.name, *(f"shadow{number or ''}" for number in self._shadows)]
        tails = [f"== {name}\n{self.rack.lab.log_tail(f'{name}.log', 60)}" for name in names]
        return "\n".join([f"seed {self.draw.seed}: {self.draw}", *self.log, *tails])

    # Strikes

    def _wait(self, strike: Strike) -> bool:
        """Until the moment; False: the run is over before."""
        goal = self._steps() + strike.steps
        while self._steps() < goal or (strike.calm and self.lost):
            if self._is_over():
                return False
            self._tick()
        end = time.monotonic() + strike.seconds
        while time.monotonic() < end:
            if self._is_over():
                return False
            self._tick()
        return True

    def _strike(self, strike: Strike) -> None:
        self._look()
        self._say(f"{strike.kind}: rank {strike.rank} or shadow {strike.shadow}")
        if strike.kind in ("rank", "both", "job"):
            self._note_floor()
        match strike.kind:
            case "stop":
                self._stop_shadow(strike)
            case "job":
                self._kill_job()
            case _:
                if strike.kind != "rank":
                    self._kill_shadow(strike)
                if strike.kind != "shadow":
                    self._kill_rank(strike.rank)

    def _kill_rank(self, rank: int) -> None:
        pids = [pid for pid in self._pids(self.rack.lab.topology.places[rank].host.netns) if _is_of(rank, pid)]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if pids:
            self._job_is_down()

    def _kill_job(self) -> None:
        self._job.kill()
        self._job.wait(10)
        self._job_is_down()
        self._due.append((time.monotonic() + 1.0, "job", 0))

    def _kill_shadow(self, strike: Strike) -> None:
        if self._is_away(strike.shadow):
            return
        self._kill(strike.shadow)
        self._due.append((time.monotonic() + strike.absent, "start", strike.shadow))

    def _stop_shadow(self, strike: Strike) -> None:
        if self._is_away(strike.shadow):
            return
        self._process(strike.shadow).send_signal(signal.SIGSTOP)
        self._due.append((time.monotonic() + strike.absent, "continue", strike.shadow))

    def _is_away(self, shadow: int) -> bool:
        late = self._late is not None and self._late[0] == shadow
        return late or any(number == shadow for _, what, number in self._due if what != "job")

    def _kill(self, shadow: int) -> None:
        process = self._process(shadow)
        process.kill()
        process.wait(10)
        self.lost.update(part for part, owner in enumerate(self._owners) if owner == shadow)
        if not self._is_settled():
            self._excuse("a shadow's part is lost while the job is down")

    def _job_is_down(self) -> None:
        notes = self.notes()
        self._ended = len(notes), notes[-1]["incarnation"] if notes else 0
        if self.lost:
            self._excuse(f"the job is down while the parts {self.lost} are lost")

    def _excuse(self, why: str) -> None:
        self._say(f"a refusal is allowed: {why}")
        self.excused = True
        self._floors = [(index, step) for index, step in self._floors if self._next(index) is not None]

    # Operator

    def _tick(self) -> None:
        time.sleep(_TICK_S)
        assert time.monotonic() - self._began < RUN_S, f"the run does not end:\n{self.story()}"
        now = time.monotonic()
        if self._late is not None and len(self._report()) >= self._late[1]:
            number, self._late = self._late[0], None
            self._due.append((now, "start", number))
        for item in [item for item in self._due if item[0] <= now]:
            self._due.remove(item)
            self._do(item[1], item[2])
        if now - self._looked > 0.2:
            self._look()
            self._heed_refusals()

    def _do(self, what: str, number: int) -> None:
        self._say(f"{what} {number}")
        match what:
            case "job":
                self._job = self._start()
            case "start":
                self.rack.services.start_shadow(number)
            case "continue":
                self._process(number).send_signal(signal.SIGCONT)

    def _look(self) -> None:
        """Which parts are held again."""
        self._looked = time.monotonic()
        for part in list(self.lost):
            status = self._status(part)
            if status and status["committed"] is not None and status["state"] == "following":
                self._say(f"shadow {self._owners[part]} holds step {status['committed']} of {status['group']} again")
                self.lost.remove(part)
        if self.excused and not self.lost and self._is_settled() and self._is_held():
            self._say("all hold states again")
            self.excused = False

    def _heed_refusals(self) -> None:
        """Where a refusal says so and everybody is there, give up what is held."""
        said = self._file("log").read_text(errors="replace") if self._file("log").exists() else ""
        fresh, self._told = said[self._told :], len(said)
        if not any(text in fresh for text in _REFUSALS):
            return
        if self._late or any(what != "job" for _, what, _ in self._due) or None in self._statuses():
            return
        assert self.excused, f"a state was refused that nobody lost:\n{self.story()}"
        self._say("all shadows are restarted, as the refusal says")
        for number in self._shadows:
            self._kill(number)
            self.rack.services.start_shadow(number)
        self.anew += 1
        self.excused = False
        self._floors.clear()
        self._ended = len(self.notes()), 0
        self._told = len(self._file("log").read_text(errors="replace"))

    def _is_over(self) -> bool:
        code = self._job.poll()
        if code is None or any(what == "job" for _, what, _ in self._due):
            return False
        assert code == 0, f"the job ended with {code}:\n{self.story()}"
        return True

    def _is_held(self) -> bool:
        """All parts of a step of the run that is under way are held."""
        incarnation = self.notes()[-1]["incarnation"]
        held = [status and status["incarnation"] == incarnation and status["committed"] for status in self._statuses()]
        return all(step is not None and step is not False for step in held)

    def _is_settled(self) -> bool:
        """Ranks train, with checkpoints, since the last death."""
        notes, incarnation = self._ended  # others than the victim may end a step of theirs
        later = {note["incarnation"] for note in self.notes()[notes:] if note["kind"] == "step"}
        return bool(later - {0, incarnation})

    # Promises

    def _note_floor(self) -> None:
        """The next start must restore this step at least."""
        if self.lost or self.excused or not self._is_settled():
            return
        held = [status["committed"] for status in self._statuses() if status and status["committed"] is not None]
        if held and self.notes()[-1]["incarnation"]:
            self._floors.append((len(self.notes()), max(held)))
            self._say(f"step {max(held)} must come back")

    def _next(self, index: int) -> dict[str, Any] | None:
        """The first note of a later start."""
        notes = self.notes()
        before = notes[index - 1]["incarnation"]
        return next((note for note in notes[index:] if note["incarnation"] != before), None)

    def _check_floors(self) -> None:
        for index, step in self._floors:
            note = self._next(index)
            if note is not None:
                assert note["kind"] == "restore" and note["step"] >= step, f"{note}, not {step}:\n{self.story()}"

    def _check_stalls(self) -> None:
        lines = self._report()
        for pid in {line["pid"] for line in lines}:
            times = [line["time"] for line in lines if line["pid"] == pid]
            slowest = max((after - before for before, after in itertools.pairwise(times[1:])), default=0.0)
            assert slowest < self.draw.pause + STALL_S, f"a step took {slowest:.1f} s:\n{self.story()}"

    # Processes

    def _start(self) -> "subprocess.Popen[bytes]":
        arguments = [str(self.draw.pause), str(self._file("report")), *self._command]
        return self.rack.services.run(
            PACED,
            arguments,
            log=f"{self.name}.log",
            max_restarts=50,
            env={metrics.VARIABLE: str(self._file("metrics"))},
        )

    def _process(self, shadow: int) -> "subprocess.Popen[bytes]":
        return self.rack.services.process(f"shadow{shadow or ''}")

    def _pids(self, netns: str | None) -> list[int]:
        command = ["ip", "netns", "pids", str(netns)]
        return [int(pid) for pid in subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()]

    def _status(self, part: int) -> dict[str, Any] | None:
        """None while nobody answers. A shadow that stands still isn't asked: waiting for it would delay the strikes."""
        stands_still = any(what == "continue" and number == self._owners[part] for _, what, number in self._due)
        return None if stands_still else self.rack.services.shadow_status(part)

    def _statuses(self) -> list[dict[str, Any] | None]:
        return [self._status(part) for part in range(len(self._owners))]

    def _steps(self) -> int:
        return sum(note["kind"] == "step" and note["rank"] == 0 for note in self.notes())

    def _report(self) -> list[dict[str, Any]]:
        """A line for each step of each rank, with checkpoints or without."""
        path = self._file("report")
        return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []

    def _file(self, suffix: str) -> Path:
        return self.rack.lab.directory / f"{self.name}.{suffix}"

    def _say(self, text: str) -> None:
        self.log.append(f"{time.monotonic() - self._began:7.2f} s, {self._steps()} steps: {text}")


def _is_of(rank: int, pid: int) -> bool:
    """The process is this rank's, which may share a host with others."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False
