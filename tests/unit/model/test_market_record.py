"""What a run records of its offers, its progress and its starts."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from spotfit.core.ids import AgentId, Token
from spotfit.model.events import (
    FailureCause,
    FitStarted,
    GroupPlanned,
    GroupRefused,
    GroupsReleased,
    GroupWaiting,
    JournalEvent,
    MachinesChosen,
    NodeLost,
    RoundClosed,
    RoundOpened,
    TrainingFunctionStarted,
)
from spotfit.model.group import GroupPlan, GroupRequest
from spotfit.model.market_record import (
    MarketRecord,
    MeasuredSpeed,
    OfferRecord,
    UnusableNetwork,
    fold_market,
)
from spotfit.model.offer import Market, Offer
from spotfit.model.spec import CostSpec
from spotfit.model.topology import SnapshotId
from spotfit.model.view import JournalView, View, fold
from spotfit.testing.builders import TOKEN, a_committed_checkpoint, a_round, a_spec, an_entry

SPOT = Offer(name="spot", provisioner="sim", market=Market.SPOT)


def planned(token: Token = TOKEN, offer: Offer | None = SPOT) -> GroupPlanned:
    request = GroupRequest(token=token, num_workers=2, total_workers=2, offer=offer)
    plan = GroupPlan(token=token, provisioner="sim", num_nodes=2, slots_per_node=1)
    return GroupPlanned(request=request, plan=plan)


def closed(cause: FailureCause, duration_s: float | None = None) -> RoundClosed:
    return RoundClosed(round_number=1, cause=cause, reason="", duration_s=duration_s)


def fold_all(
    *entries: tuple[float, JournalEvent], record: MarketRecord | None = None
) -> MarketRecord:
    record = record or MarketRecord()
    for elapsed_s, event in entries:
        record = fold_market(record, event, elapsed_s)
    return record


TRAINING = fold_all(
    (10.0, planned()),
    (60.0, RoundOpened(round=a_round())),
    (70.0, TrainingFunctionStarted(round_number=1, startup_s=10.0)),
)


def test_the_last_choice_is_kept() -> None:
    first, second = MachinesChosen(workers={"spot": 2}), MachinesChosen(workers={})
    assert fold_all((1.0, first), (2.0, second)).choice == second


def test_refusals_of_an_offer_are_counted_since_the_first_one() -> None:
    record = fold_all(
        (1.0, planned(Token("t-1"))),
        (2.0, GroupRefused(token=Token("t-1"), reason="no capacity")),
        (7.0, planned(Token("t-2"))),
        (8.0, GroupRefused(token=Token("t-2"), reason="no quota", is_final=True)),
    )
    expected = OfferRecord(
        refusals=2, refused_since_s=2.0, refused_at_s=8.0, final_refusal="no quota"
    )
    assert (record.record_of("spot"), record.requests) == (expected, {})


def test_a_withdrawn_machine_counts_as_a_refusal() -> None:
    lost = NodeLost(
        token=TOKEN, node=0, agent=None, reason="withdrawn", cause=FailureCause.PREEMPTION
    )
    assert fold_all((1.0, planned()), (5.0, lost)).record_of("spot").refused_since_s == 5.0


def started(*events: tuple[float, JournalEvent]) -> tuple[float, ...]:
    """The measured starts of a round whose function was called at 300 s."""
    called = TrainingFunctionStarted(round_number=1, startup_s=10.0)
    entries = [*events, (290.0, RoundOpened(round=a_round())), (300.0, called)]
    return fold_all((10.0, planned()), *entries).start_durations_s


def test_a_start_does_not_contain_the_wait_for_capacity() -> None:
    waiting = (20.0, GroupWaiting(token=TOKEN, reason="no capacity"))
    assert started() == (290.0,)
    assert started(waiting, (240.0, GroupWaiting(token=TOKEN, reason=""))) == (60.0,)


def test_a_start_is_not_measured_while_a_part_of_the_group_waits() -> None:
    assert started((20.0, GroupWaiting(token=TOKEN, reason="no capacity"))) == ()


def unusable(token: Token, node: int = 0) -> NodeLost:
    return NodeLost(token=token, node=node, agent=None, reason="no torch", is_unusable=True)


FAR = replace(SPOT, network="far")
FIRST, SECOND = Token("t-1"), Token("t-2")
UNUSABLE = fold_all(
    (1.0, planned(FIRST, FAR)),
    (5.0, unusable(FIRST)),
    (6.0, unusable(FIRST, 1)),
    (20.0, planned(SECOND, replace(FAR, name="other"))),
    (25.0, unusable(SECOND)),
)


def test_groups_that_can_train_nothing_count_for_their_network() -> None:
    expected = UnusableNetwork(starts=2, since_s=5.0, last_at_s=25.0)
    assert UNUSABLE.unusable_networks == {"far": expected}
    assert UNUSABLE.record_of("spot").refusals == 2


def test_an_offer_without_a_network_is_one() -> None:
    record = fold_all((1.0, planned()), (5.0, unusable(TOKEN)))
    assert record.unusable_networks["spot"].starts == 1
    assert fold_all((1.0, planned(offer=None)), (5.0, unusable(TOKEN))).unusable_networks == {}


def test_a_round_shows_that_a_network_is_usable() -> None:
    record = fold_all((30.0, planned(offer=FAR)), record=UNUSABLE)
    assert fold_all((40.0, RoundOpened(round=a_round())), record=record).unusable_networks == {}
    near = fold_all((30.0, planned()), record=UNUSABLE)
    assert fold_all((40.0, RoundOpened(round=a_round())), record=near).unusable_networks


def test_a_round_ends_the_refusals() -> None:
    record = fold_all(
        (1.0, planned(Token("t-0"))),
        (2.0, GroupRefused(token=Token("t-0"), reason="no capacity")),
        (3.0, planned()),
        (9.0, RoundOpened(round=a_round())),
    )
    assert record.record_of("spot") == OfferRecord(refused_at_s=2.0)


def test_requests_without_an_offer_have_no_record() -> None:
    record = fold_all(
        (1.0, planned(offer=None)), (2.0, GroupRefused(token=TOKEN, reason="no capacity"))
    )
    assert record.offers == {}


def test_a_start_lasts_from_the_request_to_the_training_function() -> None:
    assert TRAINING.start_durations_s == (60.0,)


@pytest.mark.parametrize(("deadline_ms", "expected_s"), [(1, 400.0), (None, 10.0)])
def test_with_a_deadline_a_start_includes_the_boot_that_no_leader_has_seen(
    deadline_ms: int | None, expected_s: float
) -> None:
    """The time between two leaders is not in `elapsed_s`; all clocks are those of the storage."""
    cost = CostSpec(offers=(SPOT,), machines={"spot": 2}, deadline_ms=deadline_ms)
    spec = a_spec(cost=cost)
    view: JournalView = JournalView()
    for written_s, elapsed_s, event in (
        (0, 0.0, FitStarted(spec=spec)),
        (5, 5.0, planned()),
        (404, 14.0, RoundOpened(round=a_round())),
        (405, 15.0, TrainingFunctionStarted(round_number=1, startup_s=1.0)),
    ):
        entry = an_entry(event, written_at_ms=1000 * written_s, elapsed_s=elapsed_s)
        view = fold(view, entry)
    assert isinstance(view, View)
    assert view.market.start_durations_s == (expected_s,)


def test_a_restart_on_the_same_machines_is_no_start() -> None:
    record = fold_all(
        (90.0, closed(FailureCause.WORKER, 30.0)),
        (91.0, RoundOpened(round=a_round(2))),
        (92.0, TrainingFunctionStarted(round_number=2, startup_s=0.5)),
        record=TRAINING,
    )
    assert record.start_durations_s == (60.0,)


def test_speed_is_measured_between_commits() -> None:
    record = fold_all(
        (100.0, a_committed_checkpoint("a", progress=0.2, round_age_s=40.0)),
        (200.0, a_committed_checkpoint("b", progress=0.5, round_age_s=140.0)),
        record=TRAINING,
    )
    assert record.speeds.keys() == {2}
    assert record.speeds[2].complete_s == pytest.approx(100.0 / 0.3)
    assert record.progress == 0.5
    # From the call of the training function, 10 s after the round was opened.
    assert (record.first_gaps_s, record.commit_gaps_s) == ((30.0,), (100.0,))


@pytest.mark.parametrize(
    ("memory_snapshot", "measured_s", "share"),
    [(None, 30.0 + 60.0, 0.2 + 0.3), (SnapshotId(round=1, step=7), 30.0, 0.2)],
)
def test_before_two_commits_of_a_round_speed_is_measured_from_its_start(
    memory_snapshot: SnapshotId | None, measured_s: float, share: float
) -> None:
    resumed = a_round(2, checkpoint_name="a", memory_snapshot=memory_snapshot)
    record = fold_all(
        (100.0, a_committed_checkpoint("a", progress=0.2, round_age_s=40.0)),
        (110.0, closed(FailureCause.PREEMPTION, 50.0)),
        (120.0, RoundOpened(round=resumed)),
        (121.0, TrainingFunctionStarted(round_number=2, startup_s=1.0)),
        (200.0, a_committed_checkpoint("b", progress=0.5, round_age_s=61.0)),
        record=TRAINING,
    )
    assert record.speeds == {}
    assert record.first_speeds[2].complete_s == pytest.approx(measured_s / share)


def test_a_checkpoint_without_progress_makes_it_unknown() -> None:
    record = fold_all(
        (100.0, a_committed_checkpoint("a", progress=0.2, round_age_s=40.0)),
        (200.0, a_committed_checkpoint("b", round_age_s=140.0)),
        record=TRAINING,
    )
    assert record.progress is None
    assert record.first_speeds == {2: MeasuredSpeed(share=0.2, measured_s=30.0)}


@pytest.mark.parametrize(
    ("cause", "losses"),
    [(FailureCause.PREEMPTION, 1), (FailureCause.PLATFORM, 1), (FailureCause.RESIZE, 0)],
)
def test_lifetimes_of_an_offer_are_those_of_its_rounds(cause: FailureCause, losses: int) -> None:
    record = fold_all((400.0, closed(cause, 340.0)), record=TRAINING).record_of("spot")
    assert (record.running_s, record.losses) == (340.0, losses)


def test_a_round_that_another_leader_closed_has_lasted_to_its_last_commit() -> None:
    record = fold_all(
        (100.0, a_committed_checkpoint("a", round_age_s=40.0)),
        (400.0, closed(FailureCause.PREEMPTION)),
        record=TRAINING,
    )
    assert record.record_of("spot").running_s == 40.0


def test_released_requests_are_forgotten() -> None:
    released = GroupsReleased(token=TOKEN, other_tokens=(Token("t-9"),))
    assert fold_all((500.0, released), record=TRAINING).requests == {}


def test_the_next_fit_keeps_speed_starts_and_lifetimes() -> None:
    record = fold_all(
        (100.0, a_committed_checkpoint("a", progress=0.2, round_age_s=40.0)),
        (110.0, NodeLost(token=TOKEN, node=0, agent=AgentId("a0"), reason="gone")),
        (200.0, closed(FailureCause.PREEMPTION, 140.0)),
        record=TRAINING,
    ).after_fit()
    assert (record.progress, record.start_durations_s, record.requests) == (0.2, (60.0,), {})
    assert record.offers == {"spot": OfferRecord(running_s=140.0, losses=1)}
