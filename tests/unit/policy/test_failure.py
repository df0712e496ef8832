"""Failure: where the blame belongs, and whether there may be another try."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from spotfit.core.errors import (
    ConfigError,
    EnvironmentMismatchError,
    IntegrityError,
    MachineError,
    MissingExtraError,
    NotFoundError,
    ShippingError,
    TransientStoreError,
)
from spotfit.model.events import Blame, LeaderElected, RankFailure, RoundClosed, Taken
from spotfit.model.group import NodeState
from spotfit.model.spec import Limits
from spotfit.policy.failure import closing, ends_the_same_way, taken, verdict, while_preparing
from spotfit.testing.builders import (
    TOKEN,
    a_notice,
    a_round,
    a_seat,
    a_spec,
    a_status,
    a_view,
    a_watch,
    an_agent,
    seats,
)

VIEW = a_view(round=a_round())
RAISED = RankFailure(0, "raised", "Traceback\nValueError: no")
GONE = {TOKEN: a_status(NodeState.RUNNING, NodeState.GONE)}
DIED = RankFailure(1, "died", "The worker of rank 1 was killed by SIGABRT.")
RECLAIMED = Taken({"t-1/1": (1,)})


def test_the_users_own_error_is_the_users() -> None:
    closed = closing(VIEW, a_watch(failures={0: RAISED}), a_round())
    assert closed == RoundClosed(1, Blame.WORKER, "rank 0 raised: ValueError: no", (RAISED,))


def test_a_process_that_died_without_a_word_is_the_cause_and_its_peers_the_echo() -> None:
    closed = closing(VIEW, a_watch(failures={0: RAISED, 1: DIED}), a_round())
    assert closed.failures == (DIED, RAISED)
    assert closed.why.startswith("rank 1 died: The worker of rank 1 was killed")


def test_a_silent_death_is_told_by_its_kind() -> None:
    watch = a_watch(failures={0: RankFailure(0, "died", "  ")})
    assert closing(VIEW, watch, a_round()).why == "rank 0 died: died"


def test_what_happened_is_told_in_a_line_and_not_what_to_do_about_it() -> None:
    told = "Traceback\n  File\nConfigError: The node has no GPU.\n  What to do: Ask for one."
    watch = a_watch(failures={0: RankFailure(0, "raised", told)})
    assert closing(VIEW, watch, a_round()).why == "rank 0 raised: ConfigError: The node has no GPU."


@pytest.mark.parametrize(
    "how",
    ["its agent is gone", "the journal gave it up", "it led before"],
)
def test_a_lost_machine_outweighs_the_errors_of_its_peers(how: str) -> None:
    view, watch = VIEW, a_watch(seats=seats(a_seat(0)), failures={0: RAISED}, statuses=GONE)
    if how == "its agent is gone":
        watch = replace(watch, gone={an_agent(1): 3.0})
    elif how == "the journal gave it up":
        view = replace(view, lost_agents=frozenset({an_agent(1)}))
    else:
        view = replace(view, leader=LeaderElected(an_agent(0), 2, "h:1", "", lost=an_agent(1)))
    closed = closing(view, watch, a_round())
    assert (closed.blame, closed.why) == (Blame.PREEMPTION, "lost 1 machine (t-1/1)")
    assert [(one.rank, one.kind) for one in closed.failures] == [(1, "lost"), (0, "raised")]
    assert closed.taken == Taken({"t-1/1": (1,)})


def test_a_rank_that_is_lost_is_not_told_twice() -> None:
    watch = a_watch(
        seats=seats(a_seat(0)), gone={an_agent(1): 3.0}, failures={1: DIED}, statuses=GONE
    )
    closed = closing(VIEW, watch, a_round())
    assert [(one.rank, one.kind) for one in closed.failures] == [(1, "lost")]


def test_errors_on_machines_that_announced_their_end_are_part_of_it() -> None:
    view = replace(VIEW, notices={an_agent(1): a_notice()})
    closed = closing(view, a_watch(failures={1: DIED}), a_round())
    assert closed.blame is Blame.PREEMPTION
    assert closed.why == "lost 1 machine (t-1/1) as announced"
    assert closed.taken == Taken({"t-1/1": (1,)})


def test_a_worker_that_dies_where_the_end_was_announced_outweighs_the_errors_of_its_peers() -> None:
    view = replace(VIEW, notices={an_agent(1): a_notice(deadline_ms=77)})
    closed = closing(view, a_watch(failures={0: RAISED, 1: DIED}), a_round())
    assert (closed.blame, closed.taken) == (Blame.PREEMPTION, Taken({"t-1/1": (1,)}, 77))


@pytest.mark.parametrize("ranks", [(0,), (0, 1)])
def test_a_notice_excuses_no_errors_of_others(ranks: tuple[int, ...]) -> None:
    view = replace(VIEW, notices={an_agent(1): a_notice()})
    raised = {rank: replace(RAISED, rank=rank) for rank in ranks}
    closed = closing(view, a_watch(failures=raised), a_round())
    assert (closed.blame, closed.taken) == (Blame.WORKER, None)


def test_the_first_end_that_was_announced_is_the_one_that_counts() -> None:
    notices = {an_agent(0): a_notice(deadline_ms=900), an_agent(1): a_notice(deadline_ms=0)}
    both = taken(a_round().places, replace(VIEW, notices=notices), timed_out=True)
    assert both == Taken({"t-1/0": (0,), "t-1/1": (1,)}, 900, timed_out=True)


def test_a_connection_that_broke_is_nobodys_fault_once_its_agent_is_back() -> None:
    watch = a_watch(broken=frozenset({an_agent(1)}), failures={0: RAISED})
    closed = closing(VIEW, watch, a_round())
    assert (closed.blame, closed.why) == (Blame.NETWORK, "the connection to t-1/1 broke")
    assert closed.failures == (RAISED,)


@pytest.mark.parametrize("seen", [0.0, 3.0], ids=["nobody said", "the backend says it runs"])
def test_nor_while_nobody_says_that_its_machine_is_lost(seen: float) -> None:
    watch = a_watch(
        seats=seats(a_seat(0)),
        gone={an_agent(1): 3.0},
        broken=frozenset({an_agent(1)}),
        failures={0: RAISED},
        statuses={TOKEN: a_status()},
        seen={TOKEN: seen},
    )
    closed = closing(VIEW, watch, a_round())
    assert (closed.blame, closed.why) == (Blame.NETWORK, "the connection to t-1/1 broke")
    assert [(one.rank, one.kind) for one in closed.failures] == [(1, "lost"), (0, "raised")]


def test_a_machine_that_runs_without_an_agent_is_the_platforms_trouble() -> None:
    lost = frozenset({an_agent(1)})
    view = replace(VIEW, lost_agents=lost, outages=lost)
    closed = closing(view, a_watch(seats=seats(a_seat(0)), failures={0: RAISED}), a_round())
    assert (closed.blame, closed.why) == (Blame.PLATFORM, "no agent on t-1/1")


def test_where_nothing_failed_it_was_the_change_of_leaders() -> None:
    assert closing(VIEW, a_watch(), a_round()).blame is Blame.SUCCESSION


@pytest.mark.parametrize(
    ("limits", "blame", "count", "ends"),
    [
        (Limits(worker=0), Blame.WORKER, 1, True),
        (Limits(worker=1), Blame.WORKER, 1, False),
        (Limits(worker=1), Blame.WORKER, 2, True),
        (Limits(worker=-1), Blame.WORKER, 999, False),
        (Limits(preemption=2), Blame.PREEMPTION, 2, False),
        (Limits(preemption=2), Blame.PREEMPTION, 3, True),
        (Limits(platform=0), Blame.PLATFORM, 1, True),
        (Limits(), Blame.PREEMPTION, 999, False),
        (Limits(worker=0, preemption=0), Blame.NETWORK, 999, False),
        (Limits(worker=0), Blame.RESIZE, 999, False),
        (Limits(worker=0), Blame.SUCCESSION, 999, False),
    ],
)
def test_each_kind_has_its_own_budget(limits: Limits, blame: Blame, count: int, ends: bool) -> None:
    view = a_view(
        spec=a_spec(limits=limits),
        failures={**dict.fromkeys(Blame, 0), blame: count},
        last_closed=RoundClosed(count, blame, "rank 0 raised: no", (RAISED,), RECLAIMED),
    )
    ended = verdict(view)
    assert (ended is not None) == ends
    if ended is not None:
        assert (ended.outcome, ended.blame, ended.failures) == ("failed", blame, (RAISED,))
        assert ended.taken == RECLAIMED
        assert ended.why.startswith(f"failure {count} of kind '{blame.value}'")


def test_before_anything_failed_there_is_nothing_to_judge() -> None:
    assert verdict(a_view()) is None


def test_a_budget_broken_by_another_kind_does_not_end_it() -> None:
    view = a_view(
        failures={Blame.WORKER: 0, Blame.PREEMPTION: 50},
        last_closed=RoundClosed(50, Blame.PREEMPTION, "lost"),
    )
    assert verdict(view) is None


# --- while a worker is prepared ------------------------------------------------------------------

UNREACHABLE = RankFailure(1, "raised", "the index did not answer", blame=Blame.PLATFORM)
NO_SUCH = RankFailure(0, "raised", "no such package", blame=Blame.WORKER, final=True)
OURS = RankFailure(0, "raised", "KeyError: 3", blame=Blame.PLATFORM, final=True)


@pytest.mark.parametrize(
    ("error", "blame", "final"),
    [
        (TransientStoreError("no answer"), Blame.PLATFORM, False),
        (MachineError("no process could be started"), Blame.PLATFORM, False),
        (OSError(28, "No space left on device"), Blame.PLATFORM, False),
        (MemoryError(), Blame.PLATFORM, False),
        (ShippingError("there is no module 'his'"), Blame.WORKER, True),
        (ShippingError("his module raised", may_pass=True), Blame.WORKER, False),
        (EnvironmentMismatchError("Python differs"), Blame.WORKER, True),
        (IntegrityError("it was changed"), Blame.WORKER, True),
        (MissingExtraError("no torch"), Blame.WORKER, True),
        (NotFoundError("the luggage is gone"), Blame.WORKER, True),
        (KeyError("a mistake of ours"), Blame.PLATFORM, True),
        (SystemExit(3), Blame.WORKER, False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_what_keeps_a_worker_from_being_prepared(
    error: BaseException, blame: Blame, final: bool
) -> None:
    assert while_preparing(error) == (blame, final)


@pytest.mark.parametrize(
    ("error", "ends_so_again"),
    [
        (ConfigError("own= is each rank's own", may_pass=False), True),
        (ConfigError("a metric cannot be told"), False),
        (ConfigError("his load_state_dict raised", may_pass=True), False),
        (ValueError("his own"), False),
    ],
)
def test_of_what_the_function_raised_only_what_says_so_would_come_again(
    error: BaseException, *, ends_so_again: bool
) -> None:
    assert ends_the_same_way(error) is ends_so_again


@pytest.mark.parametrize(
    ("failures", "blame", "why"),
    [
        ([UNREACHABLE], Blame.PLATFORM, "rank 1 raised: the index did not answer"),
        ([RAISED, UNREACHABLE], Blame.PLATFORM, "rank 1 raised: the index did not answer"),
        ([UNREACHABLE, NO_SUCH], Blame.WORKER, "rank 0 raised: no such package"),
        ([OURS, UNREACHABLE], Blame.PLATFORM, "rank 0 raised: KeyError: 3"),
    ],
    ids=["alone", "its peers echo", "what no try will change", "a mistake of ours"],
)
def test_a_round_is_charged_to_whoever_kept_it_from_beginning(
    failures: list[RankFailure], blame: Blame, why: str
) -> None:
    watch = a_watch(failures={one.rank: one for one in failures})
    closed = closing(VIEW, watch, a_round())
    assert (closed.blame, closed.why) == (blame, why)


@pytest.mark.parametrize(
    ("failure", "blame", "ends"),
    [
        (NO_SUCH, Blame.WORKER, True),
        (OURS, Blame.PLATFORM, True),
        (UNREACHABLE, Blame.PLATFORM, False),
        (NO_SUCH, Blame.PREEMPTION, False),
    ],
    ids=["his mistake", "our mistake", "what may pass", "his mistake on a machine that is gone"],
)
def test_what_no_try_will_change_is_not_tried_again_whatever_the_budget(
    failure: RankFailure, blame: Blame, ends: bool
) -> None:
    view = a_view(
        spec=a_spec(limits=Limits(worker=-1, platform=-1)),
        failures={blame: 1},
        last_closed=RoundClosed(1, blame, f"rank {failure.rank} raised", (failure,)),
    )
    ended = verdict(view)
    assert (ended is not None) == ends
    if ended is not None:
        assert (ended.blame, ended.failures) == (blame, (failure,))
        assert "another try would end the same way" in ended.why
