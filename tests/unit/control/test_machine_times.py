"""The record of machine-hours that the leader appends: backends with billing times and without."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from spotfit.control.background_calls import SynchronousCalls
from spotfit.control.journal_writer import JournalWriter
from spotfit.control.machine_times import MachineTimesRecorder
from spotfit.control.reconciler import Reconciler
from spotfit.core.ids import Token
from spotfit.ledger.journal import Ledger
from spotfit.model.events import (
    FitEnded,
    FitStarted,
    GroupPlanned,
    GroupsReleased,
    GroupSubmitted,
    JournalEvent,
    LeaderElected,
    MachinesObserved,
    MachineTimes,
    NodeLost,
)
from spotfit.model.group import (
    GroupHandle,
    GroupStatus,
    NodeState,
    NodeStatus,
    missing_group_status,
)
from spotfit.model.leader_state import LeaderState, NoRound
from spotfit.model.usage import GroupUsage, MachineUse, Usage
from spotfit.provision.api import Traits
from spotfit.store.api import Store
from spotfit.store.local import MemoryStore
from spotfit.testing.builders import (
    RUN_ID,
    TOKEN,
    a_leader_state,
    a_member,
    a_request,
    a_spec,
    an_agent_id,
)
from tests.unit.control.fake_provisioner import LAUNCH, FakeProvisioner, token_factory

WAITING, RUNNING = NodeStatus(state=NodeState.WAITING), NodeStatus(state=NodeState.RUNNING)
START_MS = 1_000_000


class LeaderHarness:
    """A leader of a run with a group of two machines; its wall clock and `now` advance together."""

    def __init__(self, store: Store | None = None, *, cloud: FakeProvisioner | None = None) -> None:
        self.now = 0.0
        self.cloud = cloud or FakeProvisioner(status_lag_s=0.0)
        self.events: list[JournalEvent] = []
        self.store = store or MemoryStore()
        self.ledger = Ledger(self.store, RUN_ID, an_agent_id(0), wall_ms=self.wall_ms)
        self.ledger.set_entry_listener(lambda _slot, _body, entry: self.events.append(entry.event))
        if store is None:
            plan = self.cloud.plan(a_request())
            handle = self.cloud.submit(plan, LAUNCH)
            assert isinstance(handle, GroupHandle)
            for event in (
                FitStarted(spec=a_spec()),
                LeaderElected(leader=an_agent_id(0), epoch=1, coordinator_address="a0:1"),
                GroupPlanned(request=a_request(), plan=plan),
                GroupSubmitted(token=TOKEN, handle=handle),
            ):
                self.ledger.append(event, after=self.ledger.journal_view)
        self.ledger.catch_up()
        self.events.clear()
        writer = JournalWriter(self.ledger, SynchronousCalls())
        writer.advance(0.0)
        self.reconciler = Reconciler(
            writer, self.cloud, LAUNCH, SynchronousCalls(), token_factory()
        )

    def wall_ms(self) -> int:
        return START_MS + round(self.now * 1000)

    def reports(self, at_s: float, *nodes: NodeStatus) -> list[JournalEvent]:
        """Let the backend report these states, observe them, and return what is appended."""
        self.now, self.cloud.groups[TOKEN] = at_s, list(nodes)
        self.reconciler.observe(at_s, every_s=1.0)
        return self.act()

    def act(self, **state: Any) -> list[JournalEvent]:
        members = a_leader_state().members
        phase = NoRound(since=self.now, bucket_searched=False)
        observed = LeaderState(agent_id=an_agent_id(0), members=members, phase=phase)
        self.events.clear()
        facts = replace(observed, group_statuses=self.reconciler.group_statuses, **state)
        for _ in range(10):
            must_repeat, _ = self.reconciler.reconcile(facts, self.now)
            if not must_repeat:
                break
        return list(self.events)

    def end_fit(self) -> None:
        self.ledger.append(FitEnded(outcome="finished"), after=self.ledger.journal_view)


def timed(state: NodeState, started_s: float, ended_s: float | None = None) -> NodeStatus:
    return NodeStatus(
        state=state,
        started_at_ms=START_MS + round(started_s * 1000),
        ended_at_ms=None if ended_s is None else START_MS + round(ended_s * 1000),
    )


def ms(at_s: float) -> int:
    return START_MS + round(at_s * 1000)


def test_times_of_a_backend_are_recorded_in_one_entry_per_observation() -> None:
    harness = LeaderHarness()
    starting = [timed(NodeState.RUNNING, 1), timed(NodeState.RUNNING, 2)]
    times = tuple(MachineTimes(node=n, started_ms=(ms(n + 1), ms(n + 1))) for n in range(2))
    assert MachinesObserved(times={TOKEN: times}) in harness.reports(5, *starting)
    assert not [
        event for event in harness.reports(7, *starting) if isinstance(event, MachinesObserved)
    ]


def test_without_times_a_start_is_between_two_observations() -> None:
    harness = LeaderHarness()
    harness.reports(5, WAITING, WAITING)
    times = MachineTimes(node=1, started_ms=(ms(5), ms(7)))
    assert MachinesObserved(times={TOKEN: (times,)}) in harness.reports(7, WAITING, RUNNING)


def test_a_loss_has_the_time_of_the_end() -> None:
    harness = LeaderHarness()
    harness.reports(5, timed(NodeState.RUNNING, 1), timed(NodeState.RUNNING, 2))
    gone = timed(NodeState.GONE, 2, 6)
    harness.now, harness.cloud.groups[TOKEN] = 9, [timed(NodeState.RUNNING, 1), gone]
    harness.reconciler.observe(9, every_s=1.0)
    events = harness.act(members={}, disconnected_since={an_agent_id(1): 8.0})
    (lost,) = [one for one in events if isinstance(one, NodeLost) and one.node == 1]
    assert lost.times == MachineTimes(node=1, ended_ms=(ms(6), ms(6)))


def test_a_release_is_followed_by_the_record_of_the_end() -> None:
    harness = LeaderHarness()
    harness.reports(5, timed(NodeState.RUNNING, 1), timed(NodeState.RUNNING, 2))
    harness.end_fit()
    harness.now = 40.0
    cancelled = harness.act(members={}, is_headless=True)
    assert GroupsReleased(token=TOKEN) in cancelled
    ended = harness.reports(42, timed(NodeState.GONE, 1, 41), timed(NodeState.GONE, 2, 41))
    assert ended == []  # the leader is idle: a supervising process records the end
    assert harness.ledger.view.usage.ending_groups.keys() == {TOKEN}


def test_a_new_leader_bounds_a_start_by_the_request() -> None:
    first = LeaderHarness()
    second = LeaderHarness(first.store, cloud=first.cloud)
    times = tuple(MachineTimes(node=n, started_ms=(0, ms(9))) for n in range(2))
    (event,) = [
        one for one in second.reports(9, RUNNING, RUNNING) if isinstance(one, MachinesObserved)
    ]
    assert [one.started_ms for one in event.times[TOKEN]] == [one.started_ms for one in times]
    machines = second.ledger.view.usage.groups[TOKEN].machines
    assert [one.started_ms for one in machines] == [(ms(0), ms(9))] * 2


def test_a_new_leader_does_not_record_a_known_start_again() -> None:
    first = LeaderHarness()
    first.reports(5, RUNNING, RUNNING)
    second = LeaderHarness(first.store, cloud=first.cloud)
    second.now = 9.0
    second.reconciler.observe(9.0, every_s=1.0)
    assert not [one for one in second.act() if isinstance(one, MachinesObserved)]


# --- the recorder ---------------------------------------------------------------------------------


def usage_of(use: MachineUse, *, timed_provisioners: tuple[str, ...] = ()) -> Usage:
    group = GroupUsage(planned_ms=0, provisioner="local", machines=(use,))
    return Usage(groups={TOKEN: group}, timed_provisioners=timed_provisioners)


def observe(
    recorder: MachineTimesRecorder, usage: Usage, status: GroupStatus, at_ms: int, **traits: Any
) -> None:
    facts = Traits(status_lag_s=0.0, **traits)
    recorder.observe(TOKEN, status, facts, usage, called_ms=at_ms, now_ms=at_ms)


def test_machines_that_were_never_listed_may_run() -> None:
    recorder, usage = MachineTimesRecorder(), usage_of(MachineUse())
    observe(recorder, usage, missing_group_status(1), 500)
    assert recorder.unrecorded(usage) == {}


def test_machines_that_are_not_listed_any_more_have_ended() -> None:
    recorder, usage = MachineTimesRecorder(), usage_of(MachineUse(started_ms=(100, 200)))
    observe(recorder, usage, missing_group_status(1), 500)
    times = MachineTimes(node=0, ended_ms=(0, 500))
    assert recorder.unrecorded(usage) == {TOKEN: (times,)}


def a_return() -> NodeLost:
    return NodeLost(
        token=TOKEN, node=0, agent=a_member(0).agent, reason="restarted", machine_returned=True
    )


def test_a_restart_without_times_ends_an_attempt_and_starts_another() -> None:
    recorder, usage = MachineTimesRecorder(), usage_of(MachineUse(started_ms=(100, 200)))
    running = GroupStatus(nodes=(RUNNING,))
    observe(recorder, usage, running, 500, requeues_itself=True)
    lost = recorder.with_loss_times(usage, a_return(), 600)
    assert lost.times == MachineTimes(node=0, ended_ms=(0, 600))
    after = usage_of(MachineUse(ended_ms=(200, 600), last_started_ms=200))
    observe(recorder, after, running, 700, requeues_itself=True)
    times = MachineTimes(node=0, started_ms=(0, 700), may_be_restarted=True)
    assert recorder.unrecorded(after) == {TOKEN: (times,)}


def test_a_restart_is_not_bounded_by_its_loss_where_starts_are_reported() -> None:
    recorder = MachineTimesRecorder()
    usage = usage_of(MachineUse(started_ms=(100, 100)), timed_provisioners=("local",))
    assert recorder.with_loss_times(usage, a_return(), 600).times is None


def test_a_loss_and_a_release_have_the_time_in_which_no_leader_observed_the_machine() -> None:
    recorder = MachineTimesRecorder()
    usage = usage_of(MachineUse(ended_ms=(200, 300), last_started_ms=200))
    observe(recorder, usage, missing_group_status(1), 900, requeues_itself=True)
    times = MachineTimes(node=0, unseen_until_ms=900)
    loss = replace(a_return(), machine_returned=False)
    assert recorder.with_loss_times(usage, loss, 950).times == times
    release = GroupsReleased(token=TOKEN)
    assert recorder.with_release_times(usage, release).times == {TOKEN: (times,)}


def test_a_leader_that_requested_the_machine_records_no_time_without_observation() -> None:
    recorder = MachineTimesRecorder()
    recorder.watch_from_request(TOKEN)
    usage = usage_of(MachineUse(ended_ms=(200, 300), last_started_ms=200))
    observe(recorder, usage, missing_group_status(1), 900, requeues_itself=True)
    assert recorder.unrecorded(usage) == {}


def test_attempts_of_a_pause_of_the_observation_are_part_of_the_maximum() -> None:
    """A driver that requests machines does not observe them while an agent ends the run."""
    recorder, usage = MachineTimesRecorder(), usage_of(MachineUse())
    recorder.watch_from_request(TOKEN)
    observe(recorder, usage, GroupStatus(nodes=(WAITING,)), 500, requeues_itself=True)
    recorder.note_pause()
    assert recorder.unrecorded(usage) == {}
    restarted = replace(RUNNING, started_at_ms=88_000)
    observe(recorder, usage, GroupStatus(nodes=(restarted,)), 90_000, requeues_itself=True)
    ((times,),) = recorder.unrecorded(usage).values()
    assert (times.started_ms, times.unseen_until_ms) == ((88_000, 88_000), 88_000)


def test_groups_that_are_not_held_any_more_are_forgotten() -> None:
    recorder, usage = MachineTimesRecorder(), usage_of(MachineUse())
    observe(recorder, usage, GroupStatus(nodes=(RUNNING,)), 500)
    recorder.retain([Token("t-2")])
    observe(recorder, usage, GroupStatus(nodes=(WAITING,)), 600)
    assert recorder.unrecorded(usage) == {}
