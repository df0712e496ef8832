"""What is known of a machine after each report of its backend, and what of it is recorded."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from spotfit.core.ids import Token
from spotfit.model.events import FitEnded, MachinesObserved, MachineTimes, RoundOpened
from spotfit.model.group import NodeState, NodeStatus
from spotfit.model.usage import GroupUsage, MachineUse, Usage
from spotfit.policy.actions import AppendEvent, ReleaseGroups
from spotfit.policy.machine_record import (
    ObservedMachine,
    after_status,
    release_times,
    seen_in_record,
    unrecorded_times,
)
from spotfit.policy.scheduler import next_action
from spotfit.testing.builders import TOKEN, a_leader_state, a_round, a_training, a_view

WAITING = NodeStatus(state=NodeState.WAITING)
RUNNING = NodeStatus(state=NodeState.RUNNING)
GONE = NodeStatus(state=NodeState.GONE)


def reports(
    *reported: tuple[int, NodeStatus], lag_s: float = 0.0, **before: Any
) -> ObservedMachine:
    """Return what is known after these reports; each call takes 10 ms."""
    seen = ObservedMachine(**before)
    for at_ms, status in reported:
        seen = after_status(seen, status, called_ms=at_ms - 10, now_ms=at_ms, status_lag_s=lag_s)
    return seen


def timed(
    state: NodeState, started_ms: int, ended_ms: int | None = None, **more: Any
) -> NodeStatus:
    return NodeStatus(state=state, started_at_ms=started_ms, ended_at_ms=ended_ms, **more)


def record(**use: Any) -> Usage:
    """Return the record of a group with one machine."""
    group = GroupUsage(planned_ms=0, provisioner="local", machines=(MachineUse(**use),))
    return Usage(groups={TOKEN: group})


def unrecorded(seen: ObservedMachine, usage: Usage | None = None) -> MachineTimes | None:
    times = unrecorded_times(usage or record(), {TOKEN: {0: seen}})
    return times[TOKEN][0] if times else None


# --- reports --------------------------------------------------------------------------------------


def test_a_start_is_between_the_last_report_as_waiting_and_the_first_as_running() -> None:
    seen = reports((1000, WAITING), (3000, WAITING), (5000, RUNNING), (7000, RUNNING))
    assert seen.started_ms == (2990, 5000)


def test_an_end_is_between_the_last_certain_report_as_running_and_the_first_as_gone() -> None:
    seen = reports((5000, RUNNING), (7000, RUNNING), (9000, GONE), (11000, GONE), lag_s=1.0)
    assert seen.ended_ms == (5990, 9000)


def test_reported_times_are_exact_also_while_the_machine_boots() -> None:
    booting = timed(NodeState.WAITING, 900)
    seen = reports((1000, booting), (5000, timed(NodeState.GONE, 900, 4000)))
    assert (seen.started_ms, seen.ended_ms) == ((900, 900), (4000, 4000))


def test_a_machine_that_waits_again_has_ended() -> None:
    seen = reports((5000, RUNNING), (7000, WAITING), (9000, RUNNING))
    assert (seen.started_ms, seen.ended_ms) == ((6990, 9000), None)


def test_a_later_reported_start_is_another_attempt() -> None:
    seen = reports((5000, timed(NodeState.RUNNING, 900)), (9000, timed(NodeState.RUNNING, 8000)))
    assert (seen.started_ms, seen.previous_ended_ms) == ((8000, 8000), (4990, 8000))


def test_a_start_right_after_the_end_is_another_attempt() -> None:
    seen = reports((1500, replace(GONE, started_at_ms=1000, ended_at_ms=1010)))
    assert (seen.started_ms, seen.ended_ms) == ((1000, 1000), (1010, 1010))
    restarted = reports(
        (1500, replace(GONE, started_at_ms=1000, ended_at_ms=1010)),
        (1600, replace(RUNNING, started_at_ms=1400)),
    )
    assert (restarted.started_ms, restarted.ended_ms) == ((1400, 1400), None)


def test_a_start_that_is_reported_with_rounding_is_the_same_attempt() -> None:
    seen = reports((5000, timed(NodeState.RUNNING, 900)), (9000, timed(NodeState.RUNNING, 1200)))
    assert (seen.started_ms, seen.previous_ended_ms) == ((900, 900), None)


def test_a_report_as_running_proves_nothing_about_an_attempt_that_may_have_been_replaced() -> None:
    seen = reports((5000, RUNNING), (7000, RUNNING), (9000, GONE), restarts=True)
    assert seen.ended_ms == (0, 9000)


def test_a_refused_machine_is_not_billed() -> None:
    seen = reports((5000, NodeStatus(state=NodeState.REFUSED)))
    assert unrecorded(seen) == MachineTimes(node=0, is_unbilled=True)


# --- what is recorded -----------------------------------------------------------------------------


def test_a_start_is_recorded_once() -> None:
    seen = reports((5000, timed(NodeState.RUNNING, 900)))
    assert unrecorded(seen) == MachineTimes(node=0, started_ms=(900, 900))
    assert unrecorded(seen, record(started_ms=(900, 900))) is None


def test_nothing_is_recorded_of_a_machine_that_waits_and_of_an_unknown_group() -> None:
    assert unrecorded(reports((5000, WAITING))) is None
    seen = reports((5000, RUNNING))
    assert unrecorded_times(Usage(), {TOKEN: {0: seen}}) == {}
    assert unrecorded_times(record(), {TOKEN: {7: seen}}) == {}


def test_a_start_and_an_end_between_two_observations_are_recorded_together() -> None:
    seen = reports((5000, timed(NodeState.GONE, 900, 4000)))
    times = MachineTimes(node=0, started_ms=(900, 900), ended_ms=(4000, 4000))
    assert unrecorded(seen) == times


def test_an_end_is_recorded_once() -> None:
    seen = reports((5000, timed(NodeState.RUNNING, 900)), (9000, timed(NodeState.GONE, 900, 8000)))
    end = MachineTimes(node=0, ended_ms=(8000, 8000))
    assert unrecorded(seen, record(started_ms=(900, 900))) == end
    ended = record(ended_ms=(8000, 8000), last_started_ms=900)
    assert unrecorded(seen, ended) is None


def test_a_bounded_start_is_replaced_by_a_reported_one() -> None:
    seen = reports((5000, RUNNING), (6000, timed(NodeState.RUNNING, 4500)))
    times = MachineTimes(node=0, started_ms=(4500, 4500))
    assert unrecorded(seen, record(started_ms=(2000, 5000))) == times


def test_another_attempt_is_recorded_with_the_bounds_of_the_end_before() -> None:
    seen = reports((5000, timed(NodeState.RUNNING, 900)), (9000, timed(NodeState.RUNNING, 8000)))
    times = MachineTimes(node=0, started_ms=(8000, 8000), ended_ms=(4990, 8000))
    assert unrecorded(seen, record(started_ms=(900, 900))) == times


def test_an_end_of_an_earlier_attempt_is_not_that_of_a_later_recorded_one() -> None:
    seen = reports((5000, RUNNING), (7000, GONE))
    assert unrecorded(seen, record(started_ms=(8000, 9000))) is None


def test_a_machine_that_ended_without_a_start_is_unbilled_if_its_backend_reports_starts() -> None:
    seen = reports((5000, WAITING), (7000, GONE))
    usage = Usage(groups=record().groups, timed_provisioners=("local",))
    assert unrecorded(seen, usage) == MachineTimes(node=0, is_unbilled=True)
    assert unrecorded(seen) == MachineTimes(node=0, ended_ms=(0, 7000))


def test_a_new_observer_starts_from_the_record() -> None:
    use = MachineUse(started_ms=(900, 900))
    seen = seen_in_record(use, restarts=False, watched_from_ms=4000)
    seen = after_status(seen, RUNNING, called_ms=5000, now_ms=5010, status_lag_s=0.0)
    assert unrecorded(seen, record(started_ms=(900, 900))) is None


def test_attempts_before_a_new_observer_are_unseen_unless_they_are_numbered() -> None:
    def seen(attempt: int | None, watched_from_ms: int = 4000) -> ObservedMachine:
        status = timed(NodeState.RUNNING, 4500, attempt=attempt)
        return reports((5000, status), restarts=True, watched_from_ms=watched_from_ms)

    def unseen_until_ms(seen: ObservedMachine) -> int | None:
        times = unrecorded(seen)
        assert times is not None
        return times.unseen_until_ms

    assert unseen_until_ms(seen(1)) is None
    assert unseen_until_ms(seen(2)) == 4500
    assert unseen_until_ms(seen(None)) == 4000
    assert unseen_until_ms(seen(None, watched_from_ms=0)) is None


ENDED: dict[str, Any] = {"ended_ms": (1900, 2000), "last_started_ms": 1000}


@pytest.mark.parametrize(("status", "until_ms"), [(GONE, 5000), (WAITING, 4000)])
def test_time_that_no_process_observed_since_an_end_is_recorded_once(
    status: NodeStatus, until_ms: int
) -> None:
    seen = reports((5000, status), (7000, GONE), restarts=True, watched_from_ms=4000)
    assert unrecorded(seen, record(**ENDED)) == MachineTimes(node=0, unseen_until_ms=until_ms)
    assert unrecorded(seen, record(**ENDED, waiting_ms=until_ms)) is None


def test_after_an_end_a_watched_machine_has_no_other_times() -> None:
    watched = reports((1000, RUNNING), (2000, WAITING), (5000, GONE), restarts=True)
    assert unrecorded(watched, record(**ENDED)) is None
    since_request = reports((5000, GONE), restarts=True)
    assert unrecorded(since_request, record(**ENDED)) is None
    before_its_end = reports((1800, WAITING), (5000, GONE), restarts=True, watched_from_ms=1790)
    assert unrecorded(before_its_end, record(**ENDED)) is None


def test_a_machine_that_is_not_restarted_has_no_times_after_its_end() -> None:
    seen = reports((5000, GONE), watched_from_ms=4000)
    assert unrecorded(seen, record(**ENDED)) is None
    seen = replace(seen, restarts=True)
    assert unrecorded(seen, record(**ENDED)) is not None
    assert unrecorded(seen, record(**ENDED, is_lost=True)) is None
    usage = record(**ENDED)
    released = replace(usage.groups[TOKEN], released_ms=3000)
    assert unrecorded(seen, replace(usage, groups={TOKEN: released})) is None
    assert unrecorded(seen, replace(usage, timed_provisioners=("local",))) is None


def test_an_unreported_start_on_a_backend_that_restarts_may_be_followed_by_others() -> None:
    def may_be_restarted(status: NodeStatus, *, restarts: bool) -> bool:
        times = unrecorded(reports((5000, status), restarts=restarts))
        assert times is not None
        return times.may_be_restarted

    assert may_be_restarted(RUNNING, restarts=True)
    assert not may_be_restarted(RUNNING, restarts=False)
    assert not may_be_restarted(timed(NodeState.RUNNING, 4500), restarts=True)


def test_a_release_records_until_when_a_machine_waited() -> None:
    seen = reports((5000, WAITING))
    times = MachineTimes(node=0, waiting_ms=4990)
    assert release_times(record(), TOKEN, {0: seen}) == (times,)
    assert release_times(record(started_ms=(900, 900)), TOKEN, {0: seen}) == ()
    assert release_times(record(), Token("other"), {0: seen}) == ()


# --- the rule of the scheduler --------------------------------------------------------------------


def test_observed_times_are_appended_after_a_round_was_opened() -> None:
    times: dict[Token, tuple[MachineTimes, ...]] = {
        TOKEN: (MachineTimes(node=0, started_ms=(900, 900)),)
    }
    state = a_leader_state(unrecorded_times=times)
    first = next_action(a_view(), state, 0.0)
    assert isinstance(first, AppendEvent)
    assert isinstance(first.event, RoundOpened)
    training = replace(state, phase=a_training(running_ranks=frozenset()))
    second = next_action(a_view(round=a_round()), training, 0.0)
    assert second == AppendEvent(MachinesObserved(times=times))


def test_the_end_of_a_fit_does_not_wait_for_the_record() -> None:
    times: dict[Token, tuple[MachineTimes, ...]] = {
        TOKEN: (MachineTimes(node=0, started_ms=(900, 900)),)
    }
    state = a_leader_state(unrecorded_times=times, members={}, is_headless=True)
    view = a_view(fit_end=FitEnded(outcome="finished"))
    assert next_action(view, state, 100.0) == ReleaseGroups(TOKEN)
