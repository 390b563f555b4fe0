"""Two whole shadows of one job in this process: they commit together, whatever one of them lost, and whoever died."""

import dataclasses
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from support.shadow import JOB, TOKEN, FakeReceiver, Rank, wait
from support.trainer import Step, Trainer, differing, over_the_wire
from typer.testing import CliRunner

from checkmate import parts
from checkmate.checked import Endpoint
from checkmate.cli import app
from checkmate.config import CheckmateError
from checkmate.persist.interchange import read_safetensors
from checkmate.protocol import Boundary, Layout, SeedRequest
from checkmate.shadow.control import Limits
from checkmate.shadow.course import MOST_LINES
from checkmate.shadow.daemon import Shadow, ShadowConfig
from checkmate.shadow.engine import Tuning
from checkmate.shadow.rx.receiver import RxConfig
from checkmate.tensors import named_state, pack_state
from checkmate.train import coordinator
from checkmate.train.client import Client, ShadowError
from checkmate.train.coordinator import Coordinator
from checkmate.train.fleet import Beginning, Fleet, Unrestorable
from checkmate.train.settings import Settings
from checkmate.train.shards import cut

WORLD = 2
QUICK = Tuning(patience_s=0.5, quiet_s=0.05, fence_s=1.0, ask_s=(0.2, 5.0), grace_s=0.2)


class Team:
    """A job of two ranks and two shadows, each of which can be killed and started anew on its address."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stacks: list[ExitStack | None] = [None, None]
        self.shadows: list[Any] = [None, None]
        self.receivers: list[Any] = [None, None]
        self.ports = [0, 0]
        for number in range(2):
            self.start(number)
        self.trainer = Trainer()
        endpoints = tuple(Endpoint("127.0.0.1", port) for port in self.ports)
        self.settings = Settings(endpoints, TOKEN, JOB, job_shadows=endpoints)
        self.shards = cut(self.trainer.net, 2)
        self.ranks: list[list[Rank | None]] = [[None, None], [None, None]]
        self.coordinator: Coordinator | None = None
        self.begun: Beginning | None = None
        self.history = 0

    def start(self, number: int) -> None:
        self.receivers[number] = receiver = FakeReceiver()
        config = ShadowConfig(
            JOB, TOKEN, ("127.0.0.1", self.ports[number]), self.folder / f"status{number}", RxConfig(sets=8), 1, QUICK,
            Limits(handshake_s=2.0, stall_s=2.0),
        )  # fmt: skip
        stack = ExitStack()
        self.shadows[number] = stack.enter_context(Shadow(config, make_receiver=lambda _: receiver))
        self.stacks[number] = stack
        self.ports[number] = self.shadows[number].control[1]

    def kill(self, number: int) -> None:
        stack = self.stacks[number]
        assert stack is not None
        stack.close()
        self.stacks[number] = None
        for rank in self.ranks[number]:
            if rank is not None:
                rank.close()
        self.ranks[number] = [None, None]

    def clients(self, rank: int = 0) -> list[Client]:
        return [Client(self.settings, endpoint, rank, WORLD) for endpoint in self.settings.shadows]

    def fleet(self, rank: int = 0) -> Fleet:
        return Fleet(self.clients(rank), self.shards)

    def begin(self) -> tuple[int, int] | None:
        """As rank 0 and all others do: begin, restore on every rank if there is something, connect."""
        self.begun = begun = self.fleet().begin(10.0)
        position = begun.position()
        self.history = position[0] if position else begun.incarnation
        return position

    def connect(self, *numbers: int, coordinate: bool = True) -> None:
        """Records connections, and the coordinator."""
        assert self.begun is not None
        incarnation = self.begun.incarnation
        for number in numbers or (0, 1):
            self.ranks[number] = [
                Rank(self.clients(rank)[number].connect("records", incarnation)) for rank in range(WORLD)
            ]
        if coordinate:
            self.coordinator = Coordinator(self.clients(), incarnation, lambda: (self.trainer.step, 0.1))

    def follow(self) -> None:
        """A fresh start, followed from its first state on."""
        assert self.begin() is None
        self.connect()
        self.seed()
        self.committed(0)

    def seed(self, *numbers: int, agreed: list[int] | None = None) -> None:
        assert self.begun is not None
        seed, tensors = self.trainer.seed()
        seed = dataclasses.replace(seed, history=self.history, agreed=agreed)
        for number in numbers or (0, 1):
            part = self.shards[number].seed(seed, tensors)
            self.clients()[number].send_seed(self.begun.incarnation, *part, lambda _: None)

    def step(self, lost: tuple[int, ...] = (), unheard: tuple[int, ...] = ()) -> Step:
        """One step of the trainer. ``lost``: shadows that miss a bucket of theirs; ``unheard``: that hear nothing."""
        step = self.trainer.train()
        for number in {0, 1} - set(unheard):
            self.tell(number, step, number in lost)
        return step

    def tell(self, number: int, step: Step, loses: bool = False) -> None:
        assert self.begun is not None
        receiver, shard = self.receivers[number], self.shards[number]
        layout, record = shard.part(step.layout), shard.part(step.record)
        assert layout is not None and record is not None
        for bucket, data in step.buckets.items():
            if not loses:
                receiver.complete(self.begun.incarnation, step.record.step, bucket, data)
        if loses:
            receiver.damage(step.record.step, 0)
        for index, rank in enumerate(self.ranks[number]):
            assert rank is not None
            boundary = Boundary(step.record.step, {"rank": index, "step": step.record.step})
            rank.send(layout, record, over_the_wire(boundary))

    def committed(self, step: int, *numbers: int) -> None:
        for number in numbers or (0, 1):
            wait(lambda n=number: self.status(n)["committed"] == step, f"{step}, not {self.status(number)}")  # type: ignore[misc]

    def status(self, number: int) -> dict[str, Any]:
        status: dict[str, Any] = self.shadows[number].status()
        return status

    def die(self) -> None:
        """All ranks."""
        if self.coordinator is not None:
            self.coordinator.close(5)
            self.coordinator = None
        for ranks in self.ranks:
            for rank in ranks:
                if rank is not None:
                    rank.close()
        self.ranks = [[None, None], [None, None]]

    def restored(self, position: tuple[int, int], rank: int = 0) -> dict[Any, torch.Tensor]:
        assert self.begun is not None
        (_, manifest, tensors), boundary = self.fleet(rank).restore(self.begun.incarnation, position)
        assert boundary == ({"rank": rank, "step": position[1]} if position[1] else {})
        return {(line[0], line[1]): tensor for line, tensor in zip(manifest, tensors, strict=True)}

    def expected(self) -> dict[Any, torch.Tensor]:
        _, manifest, tensors = pack_state(*named_state(self.trainer.net), self.trainer.optimizer)
        return {(line[0], line[1]): t.detach().clone() for line, t in zip(manifest, tensors, strict=True)}

    def close(self) -> None:
        self.die()
        for number, stack in enumerate(self.stacks):
            if stack is not None:
                self.kill(number)


@pytest.fixture
def team(tmp_path: Path) -> Iterator[Team]:
    made = Team(tmp_path)
    yield made
    made.close()


def test_shards_are_committed_together_and_make_the_whole(team: Team) -> None:
    team.follow()
    for _ in range(5):
        team.step()
    team.committed(5)
    assert [team.status(number)["shadows"] for number in (0, 1)] == [2, 2]
    wait(lambda: not any(receiver.buffers for receiver in team.receivers), "all buffers to be given back")
    team.die()
    position = team.begin()
    assert position == (1, 5)
    for rank in range(WORLD):
        assert differing(team.expected(), team.restored(position, rank)) == []
    team.connect()
    team.step()
    team.committed(6)
    assert team.status(0)["seeds"]["adopted"] == 1


def test_the_coordinator_survives_an_error_of_its_own(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    decide, failed = coordinator.decide, threading.Event()

    def fail_once(heard: Any, *rest: Any) -> Any:
        if not failed.is_set() and any(shadow.spans for shadow in heard.values()):
            failed.set()
            raise RuntimeError("an error of Checkmate's own")
        return decide(heard, *rest)

    monkeypatch.setattr(coordinator, "decide", fail_once)
    team.follow()
    assert failed.is_set()
    team.step()
    team.committed(1)


def test_a_step_that_one_shadow_lacks_is_not_committed_by_the_other(team: Team) -> None:
    team.follow()
    team.step()
    team.committed(1)
    before = team.expected()
    team.step(lost=(1,))
    team.step()
    wait(lambda: team.status(0)["ready"] == 3, f"readiness, {team.status(0)}")
    wait(lambda: team.status(1)["state"] == "damaged", "the damage")
    time.sleep(0.2)
    assert [team.status(number)["committed"] for number in (0, 1)] == [1, 1]
    wait(lambda: team.status(0)["waits_for"] == [str(team.settings.shadows[1])], f"the name, {team.status(0)}")
    team.die()
    position = team.begin()
    assert position == (1, 1), "what the healthy one could have made alone would be lost to the job"
    assert differing(before, team.restored(position)) == []


def test_what_another_shadow_needs_alone_may_be_lost_here(team: Team) -> None:
    team.follow()
    step = team.step()
    team.committed(1)
    layout = team.shards[0].part(step.layout)
    assert isinstance(layout, Layout) and layout.elsewhere and layout.buckets
    step = team.trainer.train()
    team.receivers[0].damage(2, layout.elsewhere[0])
    for bucket in layout.elsewhere:
        step.buckets.pop(bucket)
    team.tell(0, step)
    wait(lambda: team.status(0)["ready"] == 2, f"readiness, {team.status(0)}")
    assert team.status(0)["gap_count"] == 0


def test_a_seed_of_all_heals_the_one_that_lost_a_step(team: Team) -> None:
    team.follow()
    team.step(lost=(0,))
    wait(lambda: team.ranks[0][0] is not None and team.ranks[0][0].requests(), "the request")
    team.step()
    team.seed(0)
    team.seed(1)
    team.committed(2)
    team.step()
    team.committed(3)
    assert [team.status(number)["seeds"]["adopted"] for number in (0, 1)] == [2, 1], "the healthy one needs none"
    team.die()
    position = team.begin()
    assert position == (1, 3)
    assert differing(team.expected(), team.restored(position)) == []


def test_what_was_complete_everywhere_is_restored_although_nobody_released_it(team: Team) -> None:
    """Rank 0, and with it the coordinator, dies between the last piece and the commit."""
    team.follow()
    team.step()
    team.committed(1)
    assert team.coordinator is not None
    team.coordinator.close(5)
    team.step()
    team.step()
    wait(lambda: [team.status(number)["ready"] for number in (0, 1)] == [3, 3], "readiness")
    assert [team.status(number)["committed"] for number in (0, 1)] == [1, 1]
    team.die()
    assert team.begin() == (1, 3)
    assert team.begin() == (1, 3), "rank 0 died again before it restored anything"
    assert team.status(0)["state"] == "waiting for restore"
    assert differing(team.expected(), team.restored((1, 3))) == []


def test_a_restore_that_reached_one_shadow_only_is_repeated(team: Team) -> None:
    team.follow()
    assert team.coordinator is not None
    team.coordinator.close(5)
    team.step()
    wait(lambda: [team.status(number)["ready"] for number in (0, 1)] == [1, 1], "readiness")
    team.step(unheard=(1,))
    wait(lambda: team.status(0)["ready"] == 2, "readiness")
    team.die()
    position = team.begin()
    assert position == (1, 1) and team.begun is not None
    team.clients()[0].restore(team.begun.incarnation, 1, 1)
    assert team.begin() == (1, 1)
    team.restored((1, 1))
    with pytest.raises(ShadowError, match="can't go on from step 2"):
        team.clients()[0].restore(team.begun.incarnation, 2, 1)


def test_a_shadow_that_dies_holds_up_commits_until_it_is_seeded(team: Team) -> None:
    team.follow()
    team.step()
    team.committed(1)
    team.kill(1)
    team.step(unheard=(1,))
    wait(lambda: team.status(0)["ready"] == 2, "readiness")
    wait(lambda: team.status(0)["waits_for"] == [str(team.settings.shadows[1])], "the name")
    team.start(1)
    team.connect(1, coordinate=False)
    wait(lambda: team.ranks[1][0] is not None and team.ranks[1][0].requests(), "the request")
    team.step()
    team.seed()
    team.committed(3)
    team.step()
    team.committed(4)
    wait(lambda: team.status(0)["waits_for"] == [], "nobody to be waited for")
    team.die()
    position = team.begin()
    assert position == (1, 4)
    assert differing(team.expected(), team.restored(position)) == []


def test_state_whose_other_half_is_lost_is_refused_by_name(team: Team) -> None:
    team.follow()
    team.kill(1)
    team.die()
    with pytest.raises(Unrestorable, match=f"{team.settings.shadows[1]} can't be reached"):
        team.fleet().begin(1.0)
    team.start(1)
    with pytest.raises(Unrestorable, match=f"{team.settings.shadows[1]} holds no state"):
        team.begin()


def test_a_run_that_begins_anew_never_goes_on_from_the_old_state(team: Team) -> None:
    team.follow()
    team.step()
    team.committed(1)
    team.die()
    assert team.begin() == (1, 1)
    assert team.begun is not None
    team.history = team.begun.incarnation
    team.connect()
    team.trainer = Trainer()
    assert team.status(0)["state"] == "waiting for restore"
    team.seed(0)
    time.sleep(0.2)
    assert team.status(0)["committed"] == 1, "the old state is kept until all have the new one"
    team.seed(1)
    team.committed(0)
    for _ in range(2):
        team.step()
    team.committed(2)
    team.die()
    position = team.begin()
    assert position == (2, 2)
    assert differing(team.expected(), team.restored(position)) == []


def test_starts_that_never_settle_are_seen_and_make_room(team: Team) -> None:
    """Each begins anew, and its state reaches one shadow only, until there is no room for another one."""

    def start_anew() -> None:
        team.die()
        assert team.begin() == (1, 1)
        assert team.begun is not None
        team.history = team.begun.incarnation
        team.connect()
        team.trainer = Trainer()

    team.follow()
    team.step()
    team.committed(1)
    for _ in range(MOST_LINES - 1):
        start_anew()
        team.seed(0)
        wait(lambda: team.status(0)["ready"] == 0, "the new state")
    start_anew()
    with pytest.raises(ShadowError, match="no room for a seed of step 0"):
        team.seed(0)
    status = team.status(0)
    assert status["state"] == "no room" and "states that can still be restored" in status["reason"]
    assert status["seeds"]["no_room"] == 1
    start_anew()
    team.seed(agreed=[1, 1])
    team.committed(0)
    assert [team.status(number)["state"] for number in (0, 1)] == ["following", "following"]
    team.step()
    team.committed(1)


def test_a_shadow_that_waits_for_another_has_room_for_what_follows_a_seed(team: Team) -> None:
    """Steps are made faster than seeds come: they must not find its gradient sets full of steps that nobody needs."""
    team.follow()
    team.step()
    team.committed(1)
    team.kill(1)
    for _ in range(12):  # of 8 sets
        team.step(unheard=(1,))
    wait(lambda: team.status(0)["state"] == "damaged", "the healthy one to be outrun")
    team.start(1)
    team.connect(1, coordinate=False)
    for number in (0, 1):
        wait(lambda n=number: requests(team, n), "the order of a seed")  # type: ignore[misc]
    assert requests(team, 0)[-1] == requests(team, 1)[-1], "both of one step"
    wait(lambda: not team.receivers[0].buffers, "the sets to be free")
    team.trainer.step = requests(team, 0)[-1]
    team.seed()
    for _ in range(6):
        team.step()
    team.committed(team.trainer.step)
    assert [team.status(number)["state"] for number in (0, 1)] == ["following", "following"]


def test_an_order_waits_for_rank_0(team: Team) -> None:
    """It came before rank 0's connection; the next one would be seconds later."""
    assert team.begin() is None and team.begun is not None
    team.coordinator = Coordinator(team.clients(), team.begun.incarnation, lambda: (team.trainer.step, 0.1))
    for shadow in team.shadows:
        wait(lambda one=shadow: one._engine._ordered is not None, "an order")  # type: ignore[misc]
    ordered = [shadow._engine._ordered for shadow in team.shadows]
    team.connect(coordinate=False)
    for number in (0, 1):
        wait(lambda n=number: requests(team, n) == [ordered[n]], "the order to be passed on", 3.0)  # type: ignore[misc]


def requests(team: Team, number: int) -> list[int]:
    """Steps of the seeds that a shadow asked rank 0 for."""
    rank = team.ranks[number][0]
    assert rank is not None
    return [message.at for message in rank.heard if isinstance(message, SeedRequest) and message.at is not None]


@pytest.mark.parametrize("form", ["torch", "safetensors"])
def test_exports_of_all_shadows_make_one_file(team: Team, tmp_path: Path, form: str) -> None:
    team.follow()
    team.step()
    team.committed(1)
    sockets = [str(team.folder / f"status{number}") for number in (0, 1)]
    out = tmp_path / "state"
    result = CliRunner().invoke(app, ["export", *sockets, str(out), "--format", form], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    state = torch.load(out, weights_only=True) if form == "torch" else read_safetensors(out)
    assert state.keys() == {"model", "optimizer", "step"} and state["step"] == 1
    expected = team.trainer.snapshot()
    assert differing(dict(expected["model"]), {name: state["model"][name] for name in expected["model"]}) == []
    fresh = Trainer()
    fresh.optimizer.load_state_dict(state["optimizer"])
    assert differing(expected["optimizer"]["state"], fresh.optimizer.state_dict()["state"]) == []


def test_shards_that_do_not_make_a_whole_are_not_joined(team: Team, tmp_path: Path) -> None:
    team.follow()
    team.step()
    team.committed(1)
    files = [tmp_path / "0", tmp_path / "1"]
    for shadow, file in zip(team.shadows, files, strict=True):
        shadow.export(file)
    first, second = (torch.load(file, weights_only=True) for file in files)
    assert first["model"].keys().isdisjoint(second["model"])
    with pytest.raises(CheckmateError, match=r"in none of these shards, for example .*: name the sockets of all"):
        parts.join([first])
    with pytest.raises(CheckmateError, match=r"of the steps \[1, 2\]"):
        parts.join([first, {**second, "step": 2}])
    with pytest.raises(CheckmateError, match="holds a whole state"):
        parts.join([first, {"model": {}, "optimizer": {}, "step": 1}])
    with pytest.raises(CheckmateError, match=r"of step 1, but of different runs, .* incarnations \[1, 4\]"):
        parts.join([first, {**second, "shard": {**second["shard"], "history": 4}}])
    with pytest.raises(CheckmateError, match=r"shards of several groups, .*part1: name the sockets of all"):
        parts.join([first, {**second, "shard": {**second["shard"], "group": "part1"}}])


def test_exports_are_repeated_with_pauses(team: Team, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    team.follow()
    team.step()
    team.committed(1)
    attempts = 0

    def of_different_steps(socket: Path, out: Path) -> int:
        nonlocal attempts
        attempts += 1
        number = int(socket.name[-1])
        team.shadows[number].export(out)
        torch.save({**torch.load(out, weights_only=True), "step": number}, out)
        return number

    monkeypatch.setattr(parts, "export", of_different_steps)
    monkeypatch.setattr(parts, "SAME_STEP_S", 1.0)
    sockets = [team.folder / f"status{number}" for number in (0, 1)]
    with pytest.raises(CheckmateError, match=r"of the steps \[0, 1\]"), parts.exported(sockets, tmp_path):
        pass
    assert 4 <= attempts <= 8 and not list(tmp_path.glob(".export*"))
