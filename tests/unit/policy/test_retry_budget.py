"""Failure causes and retry budgets."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from spotfit.core.errors import (
    ConfigError,
    EnvironmentMismatchError,
    InfrastructureError,
    IntegrityError,
    MissingExtraError,
    NotFoundError,
    ShippingError,
    TransientStoreError,
)
from spotfit.model.events import (
    FailureCause,
    LeaderElected,
    NodeLost,
    PreemptedNodes,
    RankFailure,
    RoundClosed,
)
from spotfit.model.group import GroupStatus, NodeState, NodeStatus, Unreachable
from spotfit.model.spec import FailureLimits
from spotfit.model.view import AgentCrashes, View
from spotfit.policy.retry_budget import (
    diagnose_setup_failure,
    fit_ended_by_budget,
    fit_ended_by_crashes,
    fit_ended_by_failed_starts,
    fit_ended_by_unreachable,
    is_permanent_error,
    preempted_nodes,
    round_closed_by_failure,
    unreachable_remedy,
)
from spotfit.testing.builders import (
    TOKEN,
    a_group_status,
    a_leader_state,
    a_member,
    a_member_status,
    a_notice,
    a_round,
    a_spec,
    a_view,
    an_agent_crash,
    an_agent_id,
    member_statuses,
)

VIEW = a_view(round=a_round())
RAISED = RankFailure(rank=0, kind="raised", message="Traceback\nValueError: no")
GONE = {TOKEN: a_group_status(NodeState.RUNNING, NodeState.GONE)}
KILLED = RankFailure(rank=1, kind="died", message="The worker of rank 1 was killed by SIGABRT.")
RECLAIMED = PreemptedNodes(node_to_ranks={"t-1/1": (1,)})


def test_an_exception_of_user_code_is_charged_to_the_worker() -> None:
    closed = round_closed_by_failure(VIEW, a_leader_state(), a_round(), [RAISED])
    assert closed == RoundClosed(
        round_number=1,
        cause=FailureCause.WORKER,
        reason="rank 0 raised: ValueError: no",
        failures=(RAISED,),
    )


def test_a_process_death_is_the_cause_of_its_peers_exceptions() -> None:
    closed = round_closed_by_failure(VIEW, a_leader_state(), a_round(), [RAISED, KILLED])
    assert closed.failures == (KILLED, RAISED)
    assert closed.reason.startswith("rank 1 died: The worker of rank 1 was killed")


LOST_PEER = "lightgbm.basic.LightGBMError: Socket recv error, code: 104"
PEER_GONE = RankFailure(rank=0, kind="raised", message=LOST_PEER)


@pytest.mark.parametrize(
    ("later", "reason"),
    [
        (replace(RAISED, rank=3), "rank 3 raised: ValueError: no"),
        (
            RankFailure(rank=3, kind="died", message="The worker was killed by SIGKILL."),
            "rank 3 died: The worker was killed by SIGKILL.",
        ),
    ],
)
def test_an_exception_about_a_lost_peer_follows_from_other_failures(
    later: RankFailure, reason: str
) -> None:
    closed = round_closed_by_failure(VIEW, a_leader_state(), a_round(), [PEER_GONE, later])
    assert closed.reason == reason


def test_an_abort_follows_from_the_death_of_another_rank() -> None:
    killed = RankFailure(rank=3, kind="died", message="The worker was killed by SIGKILL.")
    closed = round_closed_by_failure(VIEW, a_leader_state(), a_round(), [KILLED, killed])
    assert closed.failures == (killed, KILLED)


def test_an_exception_about_a_lost_peer_without_other_failure_is_charged_to_the_worker() -> None:
    closed = round_closed_by_failure(VIEW, a_leader_state(), a_round(), [PEER_GONE])
    assert (closed.cause, closed.reason) == (FailureCause.WORKER, f"rank 0 raised: {LOST_PEER}")


def test_a_death_without_message_is_described_by_its_kind() -> None:
    failures = [RankFailure(rank=0, kind="died", message="  ")]
    assert (
        round_closed_by_failure(VIEW, a_leader_state(), a_round(), failures).reason
        == "rank 0 died: died"
    )


def test_the_reason_is_the_last_line_of_the_traceback() -> None:
    message = "Traceback\n  File\nConfigError: The node has no GPU.\n  What to do: Ask for one."
    failures = [RankFailure(rank=0, kind="raised", message=message)]
    closed = round_closed_by_failure(VIEW, a_leader_state(), a_round(), failures)
    assert closed.reason == "rank 0 raised: ConfigError: The node has no GPU."


@pytest.mark.parametrize(
    "how",
    ["its agent is gone", "the journal gave it up", "it led before"],
)
def test_a_lost_node_takes_precedence_over_errors_of_peers(how: str) -> None:
    view, state = (
        VIEW,
        a_leader_state(
            members=member_statuses(a_member_status(0)),
            group_statuses=GONE,
        ),
    )
    if how == "its agent is gone":
        state = replace(state, disconnected_since={an_agent_id(1): 3.0})
    elif how == "the journal gave it up":
        view = replace(view, lost_agents=frozenset({an_agent_id(1)}))
    else:
        view = replace(
            view,
            leader=LeaderElected(
                leader=an_agent_id(0),
                epoch=2,
                coordinator_address="h:1",
                reason="",
                lost_leader=an_agent_id(1),
            ),
        )
    closed = round_closed_by_failure(view, state, a_round(), [RAISED])
    assert (closed.cause, closed.reason) == (FailureCause.PREEMPTION, "lost 1 machine (t-1/1)")
    assert [(one.rank, one.kind) for one in closed.failures] == [(1, "lost"), (0, "raised")]
    assert closed.preempted == PreemptedNodes(node_to_ranks={"t-1/1": (1,)})


KILLED_FOR_MEMORY = NodeStatus(state=NodeState.FAILED, reason="OOMKilled", out_of_memory=True)


def test_machines_that_exceeded_their_memory_limit_are_charged_to_the_worker() -> None:
    status = GroupStatus(nodes=(NodeStatus(state=NodeState.RUNNING), KILLED_FOR_MEMORY))
    state = a_leader_state(
        members=member_statuses(a_member_status(0)),
        disconnected_since={an_agent_id(1): 3.0},
        group_statuses={TOKEN: status},
    )
    closed = round_closed_by_failure(VIEW, state, a_round(), [RAISED])
    assert closed.cause is FailureCause.WORKER
    assert "t-1/1 ended: its processes exceeded the memory limit" in closed.reason
    assert [(one.rank, one.kind) for one in closed.failures] == [(1, "died")]
    assert "OOMKilled" in closed.failures[0].message


def test_a_preempted_machine_takes_precedence_over_a_memory_limit() -> None:
    gone = NodeStatus(state=NodeState.GONE)
    state = a_leader_state(
        members={},
        disconnected_since={an_agent_id(n): 3.0 for n in (0, 1)},
        group_statuses={TOKEN: GroupStatus(nodes=(gone, KILLED_FOR_MEMORY))},
    )
    closed = round_closed_by_failure(VIEW, state, a_round(), [])
    assert closed.cause is FailureCause.PREEMPTION


def test_a_lost_rank_is_reported_once() -> None:
    state = a_leader_state(
        members=member_statuses(a_member_status(0)),
        disconnected_since={an_agent_id(1): 3.0},
        group_statuses=GONE,
    )
    closed = round_closed_by_failure(VIEW, state, a_round(), [KILLED])
    assert [(one.rank, one.kind) for one in closed.failures] == [(1, "lost")]


def test_errors_on_nodes_with_a_notice_are_charged_to_preemption() -> None:
    view = replace(VIEW, notices={an_agent_id(1): a_notice()})
    closed = round_closed_by_failure(view, a_leader_state(), a_round(), [KILLED])
    assert closed.cause is FailureCause.PREEMPTION
    assert closed.reason == "lost 1 machine (t-1/1) after a preemption notice"
    assert closed.preempted == PreemptedNodes(node_to_ranks={"t-1/1": (1,)})


def test_a_death_on_a_node_with_a_notice_takes_precedence() -> None:
    view = replace(VIEW, notices={an_agent_id(1): a_notice(deadline_ms=77)})
    closed = round_closed_by_failure(view, a_leader_state(), a_round(), [RAISED, KILLED])
    assert (closed.cause, closed.preempted) == (
        FailureCause.PREEMPTION,
        PreemptedNodes(node_to_ranks={"t-1/1": (1,)}, deadline_ms=77),
    )


@pytest.mark.parametrize("ranks", [(0,), (0, 1)])
def test_a_notice_does_not_excuse_errors_of_other_nodes(ranks: tuple[int, ...]) -> None:
    view = replace(VIEW, notices={an_agent_id(1): a_notice()})
    raised = [replace(RAISED, rank=rank) for rank in ranks]
    closed = round_closed_by_failure(view, a_leader_state(), a_round(), raised)
    assert (closed.cause, closed.preempted) == (FailureCause.WORKER, None)


NOTICED = replace(VIEW, notices={an_agent_id(1): a_notice()})
ON_LEAVING = RankFailure(rank=1, kind="raised", message="Traceback\nRuntimeError: a bug on 1")
SAME = replace(ON_LEAVING, rank=0, message="Traceback\nRuntimeError: a bug on 0")
FOLLOWS = replace(SAME, message="Traceback\nRuntimeError: connection closed by peer")


@pytest.mark.parametrize(
    ("reported", "cause"),
    [
        ((ON_LEAVING,), FailureCause.PREEMPTION),
        ((ON_LEAVING, SAME), FailureCause.WORKER),
        ((ON_LEAVING, FOLLOWS), FailureCause.PREEMPTION),
        ((FOLLOWS, ON_LEAVING), FailureCause.WORKER),
        ((ON_LEAVING, replace(KILLED, rank=0)), FailureCause.WORKER),
        ((PEER_GONE, ON_LEAVING), FailureCause.PREEMPTION),
    ],
    ids=[
        "alone",
        "the same elsewhere",
        "a consequence",
        "raised before",
        "died elsewhere",
        "lost peer",
    ],
)
def test_an_exception_on_a_node_with_a_notice_is_compared_with_those_of_other_nodes(
    reported: tuple[RankFailure, ...], cause: FailureCause
) -> None:
    closed = round_closed_by_failure(NOTICED, a_leader_state(), a_round(), reported)
    assert closed.cause is cause


def test_an_exception_during_a_preemption_is_in_the_reason() -> None:
    closed = round_closed_by_failure(NOTICED, a_leader_state(), a_round(), [ON_LEAVING])
    assert closed.reason == (
        "lost 1 machine (t-1/1) after a preemption notice; rank 1 raised: RuntimeError: a bug on 1"
    )


def test_the_earliest_deadline_is_recorded() -> None:
    notices = {an_agent_id(0): a_notice(deadline_ms=900), an_agent_id(1): a_notice(deadline_ms=0)}
    both = preempted_nodes(
        a_round().assignments, replace(VIEW, notices=notices), drain_timed_out=True
    )
    assert both == PreemptedNodes(
        node_to_ranks={"t-1/0": (0,), "t-1/1": (1,)}, deadline_ms=900, drain_timed_out=True
    )


def test_a_broken_connection_of_a_returned_agent_is_network() -> None:
    state = a_leader_state(disconnected_in_round=frozenset({an_agent_id(1)}))
    closed = round_closed_by_failure(VIEW, state, a_round(), [RAISED])
    assert (closed.cause, closed.reason) == (FailureCause.NETWORK, "the connection to t-1/1 broke")
    assert closed.failures == (RAISED,)


@pytest.mark.parametrize("seen", [0.0, 3.0], ids=["no report", "reported as running"])
def test_a_broken_connection_without_a_report_is_network(seen: float) -> None:
    state = a_leader_state(
        members=member_statuses(a_member_status(0)),
        disconnected_since={an_agent_id(1): 3.0},
        disconnected_in_round=frozenset({an_agent_id(1)}),
        group_statuses={TOKEN: a_group_status()},
        status_as_of={TOKEN: seen},
    )
    closed = round_closed_by_failure(VIEW, state, a_round(), [RAISED])
    assert (closed.cause, closed.reason) == (FailureCause.NETWORK, "the connection to t-1/1 broke")
    assert [(one.rank, one.kind) for one in closed.failures] == [(1, "lost"), (0, "raised")]


def test_a_running_machine_without_an_agent_is_platform() -> None:
    lost = frozenset({an_agent_id(1)})
    view = replace(VIEW, lost_agents=lost, platform_outages=lost)
    closed = round_closed_by_failure(
        view,
        a_leader_state(members=member_statuses(a_member_status(0))),
        a_round(),
        [RAISED],
    )
    assert (closed.cause, closed.reason) == (
        FailureCause.PLATFORM,
        "the agent on t-1/1 is unreachable",
    )


def test_without_failures_the_cause_is_a_leader_change() -> None:
    assert (
        round_closed_by_failure(VIEW, a_leader_state(), a_round()).cause
        is FailureCause.LEADER_CHANGE
    )


@pytest.mark.parametrize(
    ("limits", "cause", "count", "ends"),
    [
        (FailureLimits(worker=0), FailureCause.WORKER, 1, True),
        (FailureLimits(worker=1), FailureCause.WORKER, 1, False),
        (FailureLimits(worker=1), FailureCause.WORKER, 2, True),
        (FailureLimits(worker=-1), FailureCause.WORKER, 999, False),
        (FailureLimits(preemption=2), FailureCause.PREEMPTION, 2, False),
        (FailureLimits(preemption=2), FailureCause.PREEMPTION, 3, True),
        (FailureLimits(platform=0), FailureCause.PLATFORM, 1, True),
        (FailureLimits(), FailureCause.PREEMPTION, 999, False),
        (FailureLimits(worker=0, preemption=0), FailureCause.NETWORK, 999, False),
        (FailureLimits(worker=0), FailureCause.RESIZE, 999, False),
        (FailureLimits(worker=0), FailureCause.LEADER_CHANGE, 999, False),
    ],
)
def test_each_cause_has_its_own_limit(
    limits: FailureLimits, cause: FailureCause, count: int, ends: bool
) -> None:
    view = a_view(
        spec=a_spec(failure_limits=limits),
        failure_counts={**dict.fromkeys(FailureCause, 0), cause: count},
        last_round_closed=RoundClosed(
            round_number=count,
            cause=cause,
            reason="rank 0 raised: no",
            failures=(RAISED,),
            preempted=RECLAIMED,
        ),
    )
    ended = fit_ended_by_budget(view)
    assert (ended is not None) == ends
    if ended is not None:
        assert (ended.outcome, ended.cause, ended.failures) == ("failed", cause, (RAISED,))
        assert ended.preempted == RECLAIMED
        assert ended.reason.startswith(f"failure {count} with cause '{cause.value}'")


def test_without_failures_no_fit_is_ended() -> None:
    assert fit_ended_by_budget(a_view()) is None


def test_a_limit_exceeded_by_another_cause_does_not_end_the_fit() -> None:
    view = a_view(
        failure_counts={FailureCause.WORKER: 0, FailureCause.PREEMPTION: 50},
        last_round_closed=RoundClosed(
            round_number=50, cause=FailureCause.PREEMPTION, reason="lost"
        ),
    )
    assert fit_ended_by_budget(view) is None


# --- setup failures ------------------------------------------------------------------------------

UNREACHABLE = RankFailure(
    rank=1, kind="raised", message="the index did not answer", cause=FailureCause.PLATFORM
)
NO_SUCH = RankFailure(
    rank=0, kind="raised", message="no such package", cause=FailureCause.WORKER, is_permanent=True
)
SETUP_FAILURE = RankFailure(
    rank=0, kind="raised", message="KeyError: 3", cause=FailureCause.PLATFORM, is_permanent=True
)


@pytest.mark.parametrize(
    ("error", "cause", "final"),
    [
        (TransientStoreError("no answer"), FailureCause.PLATFORM, False),
        (InfrastructureError("no process could be started"), FailureCause.PLATFORM, False),
        (OSError(28, "No space left on device"), FailureCause.PLATFORM, False),
        (MemoryError(), FailureCause.PLATFORM, False),
        (ShippingError("there is no module 'user_module'"), FailureCause.WORKER, True),
        (ShippingError("the user's module raised", retryable=True), FailureCause.WORKER, False),
        (EnvironmentMismatchError("Python differs"), FailureCause.WORKER, True),
        (IntegrityError("it was changed"), FailureCause.WORKER, True),
        (MissingExtraError("no torch"), FailureCause.WORKER, True),
        (NotFoundError("the code bundle is missing"), FailureCause.WORKER, True),
        (KeyError("a mistake of ours"), FailureCause.PLATFORM, True),
        (SystemExit(3), FailureCause.WORKER, False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_setup_failures_are_classified(
    error: BaseException, cause: FailureCause, final: bool
) -> None:
    assert diagnose_setup_failure(error) == (cause, final)


@pytest.mark.parametrize(
    ("error", "is_permanent"),
    [
        (ConfigError("per-rank state", retryable=False), True),
        (ConfigError("a metric cannot be encoded"), False),
        (ConfigError("load_state_dict raised", retryable=True), False),
        (ValueError("user error"), False),
    ],
)
def test_only_errors_marked_as_not_retryable_are_permanent(
    error: BaseException, *, is_permanent: bool
) -> None:
    assert is_permanent_error(error) is is_permanent


@pytest.mark.parametrize(
    ("failures", "cause", "why"),
    [
        ([UNREACHABLE], FailureCause.PLATFORM, "rank 1 raised: the index did not answer"),
        ([RAISED, UNREACHABLE], FailureCause.PLATFORM, "rank 1 raised: the index did not answer"),
        ([UNREACHABLE, NO_SUCH], FailureCause.WORKER, "rank 0 raised: no such package"),
        ([SETUP_FAILURE, UNREACHABLE], FailureCause.PLATFORM, "rank 0 raised: KeyError: 3"),
    ],
    ids=["one rank", "error of a peer", "permanent error", "error in spotfit"],
)
def test_a_setup_failure_is_charged_to_its_diagnosed_cause(
    failures: list[RankFailure], cause: FailureCause, why: str
) -> None:
    closed = round_closed_by_failure(VIEW, a_leader_state(), a_round(), failures)
    assert (closed.cause, closed.reason) == (cause, why)


@pytest.mark.parametrize(
    ("failure", "cause", "ends"),
    [
        (NO_SUCH, FailureCause.WORKER, True),
        (SETUP_FAILURE, FailureCause.PLATFORM, True),
        (UNREACHABLE, FailureCause.PLATFORM, False),
        (NO_SUCH, FailureCause.PREEMPTION, False),
    ],
    ids=["user error", "error in spotfit", "temporary error", "user error on a lost machine"],
)
def test_a_permanent_failure_ends_the_fit_whatever_the_limit(
    failure: RankFailure, cause: FailureCause, ends: bool
) -> None:
    view = a_view(
        spec=a_spec(failure_limits=FailureLimits(worker=-1, platform=-1)),
        failure_counts={cause: 1},
        last_round_closed=RoundClosed(
            round_number=1, cause=cause, reason=f"rank {failure.rank} raised", failures=(failure,)
        ),
    )
    ended = fit_ended_by_budget(view)
    assert (ended is not None) == ends
    if ended is not None:
        assert (ended.cause, ended.failures) == (cause, (failure,))
        assert "not retried, the failure is permanent" in ended.reason


# --- crashes of agents and failed starts ---------------------------------------------------------


def view_with_crashes(incidents: int, *signatures: str, platform: int = -1) -> View:
    counts = {signature: signatures.count(signature) for signature in signatures}
    crashes = AgentCrashes(
        incidents=incidents,
        by_signature=counts,
        machine_names=("t-1/0",),
        latest=an_agent_crash(0, signature=signatures[-1]),
    )
    spec = a_spec(failure_limits=FailureLimits(platform=platform))
    return a_view(spec=spec, agent_crashes=crashes)


def test_a_first_crash_is_retried() -> None:
    assert fit_ended_by_crashes(view_with_crashes(1, "a")) is None
    assert fit_ended_by_budget(view_with_crashes(1, "a")) is None


def test_a_second_crash_with_the_same_traceback_ends_the_run_with_it() -> None:
    ended = fit_ended_by_budget(view_with_crashes(2, "a", "a"))
    assert ended is not None
    assert (ended.outcome, ended.cause) == ("failed", FailureCause.PLATFORM)
    assert ended.reason == (
        "the agent on t-1/0 crashed: ValueError: no; crash 2 with this traceback, limit 1"
    )
    assert ended.failures[0].message == an_agent_crash().traceback_text


def test_crashes_with_different_tracebacks_end_the_run_at_the_third() -> None:
    assert fit_ended_by_crashes(view_with_crashes(2, "a", "b")) is None
    ended = fit_ended_by_crashes(view_with_crashes(3, "a", "b", "c"))
    assert ended is not None
    assert ended.reason.endswith("crash 3 of agents, limit 2")


@pytest.mark.parametrize(("platform", "is_over"), [(-1, False), (0, True), (1, False), (9, False)])
def test_a_smaller_limit_of_the_user_applies_to_crashes(platform: int, is_over: bool) -> None:
    ended = fit_ended_by_crashes(view_with_crashes(1, "a", platform=platform))
    assert (ended is not None) == is_over


def test_a_larger_limit_of_the_user_does_not_apply_to_crashes() -> None:
    assert fit_ended_by_crashes(view_with_crashes(2, "a", "a", platform=9)) is not None


def test_a_crash_of_the_last_agent_is_named_when_its_round_is_closed() -> None:
    view = replace(
        view_with_crashes(1, "a"),
        lost_agents=frozenset({an_agent_id(0)}),
        platform_outages=frozenset({an_agent_id(0)}),
    )
    closed = round_closed_by_failure(view, a_leader_state(members={}), a_round())
    assert (closed.cause, closed.reason) == (FailureCause.PLATFORM, "the agent on t-1/0 crashed")


def view_with_failed_starts(count: int, *, platform: int = -1) -> View:
    lost = NodeLost(token=TOKEN, node=1, agent=None, reason="exit code 127", is_failed_start=True)
    spec = a_spec(failure_limits=FailureLimits(platform=platform))
    return a_view(spec=spec, groups={}, failed_starts=count, last_failed_start=lost)


@pytest.mark.parametrize(
    ("count", "platform", "is_over"),
    [(2, -1, False), (3, -1, True), (1, 0, True), (2, 1, True), (3, 9, True)],
)
def test_machines_that_start_no_agent_end_the_run_at_a_limit(
    count: int, platform: int, is_over: bool
) -> None:
    ended = fit_ended_by_failed_starts(view_with_failed_starts(count, platform=platform))
    assert (ended is not None) == is_over


def test_the_reason_of_a_failed_start_names_the_machine() -> None:
    ended = fit_ended_by_failed_starts(view_with_failed_starts(3))
    assert ended is not None
    assert ended.reason == (
        "no machine has started an agent, the last is t-1/1: exit code 127; failed start 3, limit 2"
    )


def test_the_output_of_a_machine_that_started_no_agent_is_in_the_failure() -> None:
    view = view_with_failed_starts(3)
    assert view.last_failed_start is not None
    printed = replace(view.last_failed_start, output=("a", "b"))
    ended = fit_ended_by_failed_starts(replace(view, last_failed_start=printed))
    assert ended is not None
    assert (ended.failures[0].message, ended.failed_machine) == ("a\nb", "t-1/1")


NOW = 1000.0
LEADING = a_leader_state(members=member_statuses(a_member_status(0)))


def view_with_unreachable(*kinds: Unreachable, platform: int = -1) -> View:
    losses = tuple(
        NodeLost(token=TOKEN, node=n, agent=None, reason="no answer", unreachable=kind)
        for n, kind in enumerate(kinds)
    )
    spec = a_spec(failure_limits=FailureLimits(platform=platform))
    return a_view(spec=spec, groups={}, unreachable_machines=losses)


@pytest.mark.parametrize("what", list(Unreachable))
def test_two_machines_that_reach_nothing_end_the_run_with_the_remedy(what: Unreachable) -> None:
    assert fit_ended_by_unreachable(view_with_unreachable(what), LEADING, NOW) is None
    ended = fit_ended_by_unreachable(view_with_unreachable(what, what), LEADING, NOW)
    assert ended is not None
    assert (ended.cause, ended.failed_machine) == (FailureCause.PLATFORM, "t-1/1")
    assert ended.remedy == unreachable_remedy(what)
    assert ended.reason.startswith("2 machines (t-1/0, t-1/1) could not reach the ")
    assert ended.reason.endswith(": no answer")


def test_machines_that_do_not_reach_a_leader_with_other_members_do_not_end_the_run() -> None:
    """Their network was interrupted."""
    view = view_with_unreachable(Unreachable.LEADER, Unreachable.LEADER)
    both = replace(LEADING, members=member_statuses(a_member_status(0), a_member_status(1)))
    assert fit_ended_by_unreachable(view, both, NOW) is None


@pytest.mark.parametrize("what", [one for one in Unreachable if one is not Unreachable.LEADER])
def test_more_machines_must_fail_to_reach_the_storage_than_are_connected(what: Unreachable) -> None:
    both = replace(LEADING, members=member_statuses(a_member_status(0), a_member_status(1)))
    assert fit_ended_by_unreachable(view_with_unreachable(what, what), both, NOW) is None
    assert fit_ended_by_unreachable(view_with_unreachable(what, what, what), both, NOW) is not None


def test_a_fit_that_has_trained_outlives_five_machines_that_do_not_reach_the_storage() -> None:
    def ended(count: int) -> bool:
        view = view_with_unreachable(*[Unreachable.STORAGE] * count)
        trained = replace(view, last_round=a_round(), round_opened_slot=5)
        return fit_ended_by_unreachable(trained, LEADING, NOW) is not None

    assert [ended(5), ended(6)] == [False, True]


def test_containers_on_the_instance_of_the_leader_show_nothing_about_the_network() -> None:
    view = view_with_unreachable(Unreachable.LEADER, Unreachable.LEADER)
    members = [a_member_status(n, member=replace(a_member(n), instance="i-1")) for n in range(2)]
    state = replace(LEADING, members=member_statuses(*members))
    assert fit_ended_by_unreachable(view, state, NOW) is not None


def test_an_interruption_of_the_network_does_not_end_a_run_that_has_trained_over_it() -> None:
    view = view_with_unreachable(Unreachable.LEADER, Unreachable.LEADER)
    trained = replace(view, last_round=a_round(), round_opened_slot=5)
    assert fit_ended_by_unreachable(trained, LEADING, NOW) is None
    earlier = replace(trained, round_opened_slot=-1)
    assert fit_ended_by_unreachable(earlier, LEADING, NOW) is not None, "in an earlier fit"


def test_a_leader_without_a_machine_does_not_judge_the_network_between_machines() -> None:
    view = view_with_unreachable(Unreachable.LEADER, Unreachable.LEADER)
    headless = a_leader_state(members={}, is_headless=True)
    assert fit_ended_by_unreachable(view, headless, NOW) is None


def test_a_new_leader_waits_for_machines_that_did_not_reach_the_previous_one() -> None:
    view = view_with_unreachable(Unreachable.LEADER, Unreachable.LEADER)
    elected = replace(LEADING, leading_since=NOW - 29.0)
    assert fit_ended_by_unreachable(view, elected, NOW) is None
    assert fit_ended_by_unreachable(view, elected, NOW + 1.0) is not None


def test_one_unreachable_machine_ends_a_run_without_retries() -> None:
    view = view_with_unreachable(Unreachable.LEADER, platform=0)
    assert fit_ended_by_unreachable(view, LEADING, NOW) is not None


def test_the_output_of_an_unreachable_machine_is_in_the_failure() -> None:
    view = view_with_unreachable(Unreachable.ACCESS, Unreachable.ACCESS)
    first, last = view.unreachable_machines
    printed = replace(first, output=("AuthorizationHeaderMalformed",))
    ended = fit_ended_by_unreachable(
        replace(view, unreachable_machines=(printed, last)), LEADING, NOW
    )
    assert ended is not None
    assert ended.failures[0].message == "AuthorizationHeaderMalformed"


def test_a_changed_leader_leaves_the_agents_missing_that_do_not_connect() -> None:
    state = a_leader_state(members=member_statuses(a_member_status(0)))
    closed = round_closed_by_failure(VIEW, state, a_round())
    assert closed.cause is FailureCause.LEADER_CHANGE
    assert closed.missing_agents == (an_agent_id(1),)


def test_a_leader_whose_lease_expired_is_lost_with_its_round() -> None:
    view = replace(VIEW, former_leader=an_agent_id(1))
    state = a_leader_state(members=member_statuses(a_member_status(0)), group_statuses=GONE)
    closed = round_closed_by_failure(view, state, a_round())
    assert (closed.cause, closed.preempted) == (FailureCause.PREEMPTION, RECLAIMED)
