"""From any state that an interrupted controller may have left, reconciling ends at the plan, and is safe on the way."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkmate import config
from checkmate.controlplane.ownership import scope
from checkmate.controlplane.reconcile import BATCH, batches, reconcile
from checkmate.controlplane.target import Kind, TargetError, Update
from checkmate.controlplane.targets.fake import FakeTarget
from checkmate.plan import (
    FLOOD,
    FLOOD_GROUP,
    HEARTBEAT,
    L2_FORWARD,
    LIVE_GROUP,
    Entry,
    Item,
    Multicast,
    Plan,
    Replica,
    Rules,
    Ternary,
    make_plan,
)
from checkmate.topology import Topology

SHADOWS = ("shadow0", "shadow1")


def topology(ranks: int, offset: int = 0, tag: int = config.DSCP_TAG, shadow_port: int = 100) -> Topology:
    """One group of ``ranks`` hosts on ports from ``offset`` on, and two shadows behind them."""

    def nic(name: str, port: int) -> dict[str, object]:
        return {
            "name": name,
            "mac": f"02:00:00:00:{port >> 8:02x}:{port & 0xFF:02x}",
            "ip": f"10.1.{port >> 8}.{port & 0xFF}",
            "port": port,
        }

    ports = range(offset + 1, offset + ranks + 1)
    return Topology.from_dict(
        {
            "job": "test",
            "mtu": 1500,
            "dscp_tag": tag,
            "token_file": "/nowhere/token",
            "registrar": "10.255.0.1:7702",
            "switch": {"target": "bmv2", "p4runtime": "127.0.0.1:9559"},
            "hosts": [
                {"name": f"node{i}", "management_ip": f"10.255.0.{port}", "nics": [nic("eth0", port)]}
                for i, port in enumerate(ports)
            ],
            "shadows": [
                {
                    "name": name,
                    "management_ip": f"10.255.1.{i}",
                    "nics": [nic("eth0", shadow_port + 2 * i), nic("eth1", shadow_port + 1 + 2 * i)],
                }
                for i, name in enumerate(SHADOWS, 1)
            ],
            "groups": [{"name": "dp0", "ranks": [f"node{i}" for i in range(ranks)], "shadows": list(SHADOWS)}],
        }
    )


plans = st.builds(
    lambda ranks, offset, tag, live: make_plan(topology(ranks, offset, tag), live),
    st.integers(2, 4),
    st.integers(0, 2),
    st.sampled_from([0x20, 0x10]),
    st.sets(st.sampled_from(SHADOWS)),
)


def delivered(rules: Rules, ingress: int, mac: int | Ternary) -> set[int]:
    """Ports that a tagged packet reaches unchanged, as the P4 targets do it: blind for a group that is not there."""
    groups = {group.id: set(group.forwarding) for group in rules.groups}
    entries = {entry.key: entry for entry in rules.entries}
    hit = entries.get((HEARTBEAT, (("ingress_port", ingress), ("ethernet.dst_addr", mac)), 0))
    if hit and hit.group is not None and (LIVE_GROUP, (("group", hit.group),), 0) in entries:
        return groups.get(hit.group, set())
    hit = entries.get((L2_FORWARD, (("ethernet.dst_addr", mac),), 0)) or entries.get((L2_FORWARD, (), 0))
    if hit is None:
        return set()
    if hit.group is not None:
        return groups.get(hit.group, set()) - {ingress}
    return {dict(hit.params)["port"]}


def assert_forwards(rules: Rules, plan: Plan) -> None:
    """Every flow between ranks of ``plan`` reaches its destination under ``rules``."""
    assert not lost(rules, plan)


def lost(rules: Rules, plan: Plan) -> set[tuple[int, int]]:
    """Flows between ranks of ``plan``, by their two ports, that do not reach their destination under ``rules``."""
    forward = {
        dict(entry.match)["ethernet.dst_addr"]: dict(entry.params)["port"]
        for entry in plan.rules.entries
        if entry.table == L2_FORWARD and entry.match
    }
    return {
        (ingress, port)
        for mac, port in forward.items()
        for ingress in forward.values()
        if ingress != port and port not in delivered(rules, ingress, mac)
    }


def interrupted(target: FakeTarget, wanted: Rules, stop_after: int, seed: int) -> None:
    """Apply at most ``stop_after`` updates one by one, each batch in a random order, and check every state."""
    apply_some(target, target.read(), wanted, stop_after, seed)


def apply_some(target: FakeTarget, current: Rules, wanted: Rules, stop_after: int, seed: int) -> None:
    """The same from what ``current`` says is held."""
    shuffle = random.Random(seed).shuffle
    for batch in batches(current, wanted):
        shuffle(batch)
        for update in batch:
            if stop_after == 0:
                return
            stop_after -= 1
            target.apply([update])
            assert not target.read().dangling()


@settings(max_examples=150)
@given(first=plans, second=plans, stop=st.integers(0, 60), seed=st.integers(0, 1000))
def test_any_interrupted_plan_then_another_ends_exactly_there(first: Plan, second: Plan, stop: int, seed: int) -> None:
    target = FakeTarget()
    interrupted(target, first.rules, stop, seed)
    interrupted(target, second.rules, -1, seed)
    assert target.read() == second.rules
    assert reconcile(target, second.rules).written == 0


@settings(max_examples=60)
@given(
    ranks=st.integers(2, 4),
    before=st.sets(st.sampled_from(SHADOWS)),
    after=st.sets(st.sampled_from(SHADOWS)),
    seed=st.integers(0, 1000),
)
def test_training_traffic_flows_while_shadows_come_and_go(
    ranks: int, before: set[str], after: set[str], seed: int
) -> None:
    target = FakeTarget()
    old, new = (make_plan(topology(ranks), live) for live in (before, after))
    reconcile(target, old.rules)
    assert_forwards(target.read(), old)
    shuffle = random.Random(seed).shuffle
    for batch in batches(target.read(), new.rules):
        shuffle(batch)
        for update in batch:
            target.apply([update])
            assert_forwards(target.read(), new)


@settings(max_examples=60)
@given(seed=st.integers(0, 1000))
def test_no_flow_is_led_astray_when_group_numbers_change_meaning(seed: int) -> None:
    old, new = make_plan(topology(4), set(SHADOWS)), make_plan(topology(3, offset=1), set(SHADOWS))
    target = FakeTarget()
    reconcile(target, renumbered(old.rules))
    shuffle = random.Random(seed).shuffle
    for batch in batches(target.read(), new.rules):
        shuffle(batch)
        for update in batch:
            target.apply([update])
            assert_forwards(target.read(), new)
    assert target.read() == new.rules


@settings(max_examples=150)
@given(
    plans=st.tuples(plans, plans),
    stop=st.integers(0, 60),
    damage=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    seed=st.integers(0, 1000),
)
def test_no_write_costs_a_flow_whatever_the_switch_had_lost(
    plans: tuple[Plan, Plan], stop: int, damage: float, seed: int
) -> None:
    """From what a dead controller and somebody else left, with entries or groups gone, tables or groups cleared.

    Each update is a prefix of the writes: none of them, in any order within its batch, may cost a frame.
    """
    target, (first, second) = Damaged(), plans
    apply_some(target, target.read(), first.rules, stop, seed)
    target.damage(random.Random(seed), damage)
    shuffle, missing = random.Random(seed).shuffle, lost(target.read(), second)
    for batch in batches(target.read(), second.rules):
        shuffle(batch)
        for update in batch:
            target.apply([update])
            before, missing = missing, lost(target.read(), second)
            assert missing <= before
    assert not missing and target.read() == second.rules


class Damaged(FakeTarget):
    """A switch that loses things behind its controller's back."""

    def damage(self, rng: random.Random, part: float) -> None:
        """Lose this part of the entries, of the groups, or of both; groups may lose their members instead."""
        kinds: tuple[type[Item], ...] = rng.choice([(Entry,), (Multicast,), (Entry, Multicast)])
        for key, item in list(self._items.items()):
            if isinstance(item, kinds) and rng.random() < part:
                del self._items[key]
                if isinstance(item, Multicast) and rng.random() < 0.3:
                    self._items[key] = replace(item, replicas=())


def test_the_first_writes_end_the_loss_of_frames() -> None:
    """A P4 switch that kept its tables and not its groups: nothing in it can tell before the next pass."""
    plan = make_plan(topology(4), set(SHADOWS))
    held = replace(plan.rules, groups=())
    assert lost(held, plan)
    first = next(batch for batch in batches(held, plan.rules) if batch)
    gone = {update.item.key for update in first}
    assert not lost(Rules.of([entry for entry in held.entries if entry.key not in gone], []), plan)


def test_a_group_is_there_before_it_is_declared_and_declared_before_it_is_used() -> None:
    """So that a frame is never lost, and none counts as ``group_missing`` while shadows come and go."""
    plan, none = (make_plan(topology(4), live).rules for live in (set(SHADOWS), set[str]()))
    order = ["group", LIVE_GROUP, HEARTBEAT]
    for old, new, kinds in ((none, plan, order), (plan, none, order[::-1])):
        steps = [
            {update.item.table if isinstance(update.item, Entry) else "group" for update in batch}
            for batch in batches(old, new)
        ]
        assert steps == [{kind} for kind in kinds]


def renumbered(rules: Rules) -> Rules:
    """The same with numbers one higher, as another version might have chosen them."""

    def moved(entry: Entry) -> Entry:
        if entry.table not in (HEARTBEAT, LIVE_GROUP) or entry.group is None:
            return entry
        number = (("group", entry.group + 1),)
        return replace(entry, match=number) if entry.table == LIVE_GROUP else replace(entry, params=number)

    groups = [group if group.id == FLOOD_GROUP else replace(group, id=group.id + 1) for group in rules.groups]
    return Rules.of(map(moved, rules.entries), groups)


@settings(max_examples=60)
@given(
    steps=st.lists(st.tuples(st.integers(0, 1), st.sets(st.sampled_from(SHADOWS)), st.integers(0, 60)), max_size=6),
    seed=st.integers(0, 1000),
)
def test_two_jobs_on_one_switch_never_touch_each_other(steps: list[tuple[int, set[str], int]], seed: int) -> None:
    """Whatever one does, and wherever it dies, the other one's entries, groups and part of the flooding stay."""
    targets = [FakeTarget("one")]
    targets.append(FakeTarget("two", targets[0]))
    jobs = [topology(3, shadow_port=300), topology(2, offset=10)]
    wanted = [make_plan(job, set()).rules for job in jobs]
    for number in (0, 1):
        reconcile(targets[number], wanted[number], ["one", "two"][number])
    for number, live, stop in steps:
        name, other = ("one", "two") if number == 0 else ("two", "one")
        theirs = share(wanted[1 - number], wanted[1 - number])
        wanted[number] = make_plan(jobs[number], live).rules
        current, goal = scope(targets[number].read(), wanted[number], name)
        apply_some(targets[number], current, goal, stop, seed)
        assert share(targets[number].read(), wanted[1 - number]) == theirs
        reconcile(targets[number], wanted[number], name)
        assert reconcile(targets[1 - number], wanted[1 - number], other).written == 0


def share(held: Rules, wanted: Rules) -> Rules:
    """What of ``held`` a job with the plan ``wanted`` is about."""
    keys = {item.key for item in wanted.items}
    ports = {replica.port for group in wanted.groups if group.id == FLOOD_GROUP for replica in group.replicas}
    flood = [
        replace(group, replicas=tuple(replica for replica in group.replicas if replica.port in ports))
        for group in held.groups
        if group.id == FLOOD_GROUP
    ]
    groups = [group for group in held.groups if group.id in keys - {FLOOD_GROUP}]
    return Rules.of([entry for entry in held.entries if entry.key in keys], flood + groups)


def test_restart_of_the_switch_is_repaired() -> None:
    plan, target = make_plan(topology(4), {"shadow0"}), FakeTarget()
    written = reconcile(target, plan.rules).written
    assert written == len(plan.rules.entries) + len(plan.rules.groups)
    target.restart()
    assert reconcile(target, plan.rules).written == written
    assert target.read() == plan.rules


def test_only_the_difference_is_written() -> None:
    target = FakeTarget()
    reconcile(target, make_plan(topology(4), {"shadow0"}).rules)
    # Each of the 4 · 2 used groups but one side for rank 0's own port gains a member: 3 of rank 0 and 4 of the others.
    assert reconcile(target, make_plan(topology(4), {"shadow0", "shadow1"}).rules).written == 3 + 4


class Broken(FakeTarget):
    """A switch with an entry for a group that it does not have, as some software switches allow."""

    def read(self) -> Rules:
        held = super().read()
        missing = () if self.repaired else (Entry(HEARTBEAT, MATCH, "CheckmateIngress.replicate", (("group", 9),)),)
        return Rules.of([*held.entries, *missing], held.groups)

    repaired = False

    def apply(self, updates: Sequence[Update]) -> None:
        self.repaired |= any(update.kind is Kind.DELETE and update.item.key[0] == HEARTBEAT for update in updates)  # type: ignore[index]
        super().apply([update for update in updates if update.kind is not Kind.DELETE])


MATCH = (("ingress_port", 7), ("ethernet.dst_addr", 0x02_00_00_00_00_07))


def test_an_entry_for_a_missing_group_raises_the_alarm_and_is_removed(caplog: pytest.LogCaptureFixture) -> None:
    target, plan = Broken(), make_plan(topology(2), {"shadow0"})
    outcome = reconcile(target, plan.rules)
    assert [entry.match for entry in outcome.dangling] == [MATCH]
    assert "multicast group that does not exist" in caplog.text
    assert target.read() == plan.rules


class Picky(FakeTarget):
    """A switch that refuses shadow ports, as ours does when a checksum offload is left on."""

    def apply(self, updates: Sequence[Update]) -> None:
        refused = [update for update in updates if "shadow_port" in str(update)]
        super().apply([update for update in updates if update not in refused])
        if refused:
            raise TargetError(f"refused: {refused[0]}")


def test_training_is_forwarded_and_nothing_copied_when_shadow_ports_are_refused() -> None:
    target, plan = Picky(), make_plan(topology(3), set(SHADOWS))
    with pytest.raises(TargetError, match="shadow_port"):
        reconcile(target, plan.rules)
    held = target.read()
    assert_forwards(held, plan)
    assert {entry.table for entry in held.entries if entry.group} == {L2_FORWARD}
    assert Entry(L2_FORWARD, (), FLOOD, (("group", FLOOD_GROUP),)) in held.entries


class Forgetful(FakeTarget):
    """A switch that accepts everything and loses groups."""

    def read(self) -> Rules:
        return Rules.of(super().read().entries, ())


def test_a_switch_that_does_not_hold_what_it_accepted_is_an_error() -> None:
    with pytest.raises(TargetError, match=r"holds something else[\s\S]*group 1"):
        reconcile(Forgetful(), make_plan(topology(2), set()).rules)


def test_batches_are_bounded() -> None:
    groups = [Multicast(number, (Replica(1, 0),)) for number in range(1, 2 * BATCH)]
    assert [len(batch) for batch in batches(Rules(), Rules.of([], groups))] == [BATCH, BATCH - 1]
