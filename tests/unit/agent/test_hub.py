"""The hub: the n-th report of every rank is one report, whatever the order they come in."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotfit.agent import hub as room
from spotfit.agent.collectives import Answer
from spotfit.agent.hub import Hub
from spotfit.core.codec import UNREADABLE, encode
from spotfit.model.events import ValidationAsked
from spotfit.model.watch import Progress
from spotfit.model.wire import (
    Damaged,
    Files,
    FromWorker,
    Gather,
    Gathered,
    Named,
    Overdue,
    Present,
    Raised,
    Report,
    Returned,
    Running,
    Saved,
    Uncarried,
    Unsaved,
)

Frame = TypeVar("Frame")


def a_hub(world_size: int = 2, **given: Any) -> Hub:
    return Hub(3, world_size, name_for=lambda n: f"made-{n}", **given)


def take(hub: Hub, rank: int, frame: FromWorker, now: float = 0.0) -> list[Answer]:
    return hub.take(rank, msgspec.Raw(encode(frame)), now)


def raw(**metrics: Any) -> msgspec.Raw:
    return msgspec.Raw(encode(metrics))


def report(n: int, name: str | None = None, **metrics: Any) -> Report:
    return Report(n, raw(**metrics), name)


def files(n: int, name: str | None = None, **metrics: Any) -> Files:
    return Files(n, raw(**metrics), name)


@pytest.mark.parametrize(
    ("wishes", "asked"),
    [
        ({1: ValidationAsked({"a": 1}), 2: None}, ValidationAsked({"a": 1})),
        ({2: ValidationAsked(), 1: None}, None),
    ],
)
def test_whether_it_is_validated_is_up_to_the_first_who_brings_files(
    wishes: dict[int, ValidationAsked | None], asked: ValidationAsked | None
) -> None:
    hub = a_hub(3)
    take(hub, 0, report(0))
    for rank, wish in wishes.items():
        take(hub, rank, Files(0, raw(), validation=wish))
    for rank in (2, 1):
        take(hub, rank, Saved(0, "made-0", 1))
    (ready,) = hub.ready
    assert (ready.ranks, ready.validation) == ((1, 2), asked)


def test_that_nothing_is_left_to_validate_is_a_step() -> None:
    hub = a_hub()
    hub.validate(pending=False, now=5.0)
    assert (hub.progress.moved_at, hub.progress.validating) == (0.0, False)
    hub.validate(pending=True, now=6.0)
    assert (hub.progress.moved_at, hub.progress.validating) == (0.0, True)
    hub.validate(pending=False, now=7.0)
    assert (hub.progress.moved_at, hub.progress.validating) == (7.0, False)


def the_only(answers: list[Answer]) -> tuple[int | None, Any]:
    assert len(answers) == 1
    return answers[0]


def only(kind: type[Frame], answers: list[Answer]) -> list[tuple[int | None, Frame]]:
    assert all(isinstance(frame, kind) for _, frame in answers)
    return [(rank, frame) for rank, frame in answers if isinstance(frame, kind)]


def refused(answers: list[Answer]) -> dict[int | None, str]:
    """Why nobody wants what those ranks bring; without a name they upload nothing."""
    words, names = answers[::2], answers[1::2]
    assert [(rank, one.name) for rank, one in only(Named, names)] == [
        (rank, "") for rank, _ in words
    ]
    return {rank: one.why for rank, one in only(Uncarried, words)}


# --- reports without files -----------------------------------------------------------------------


def test_a_report_counts_once_all_ranks_have_made_it() -> None:
    hub = a_hub()
    assert take(hub, 1, report(0, loss=9)) == []
    assert (list(hub.told), hub.metrics) == ([], None)
    assert take(hub, 0, report(0, loss=1)) == []
    assert [(one.n, one.checkpoint) for one in hub.told] == [(0, None)]
    assert hub.metrics == {"loss": 1}, "rank 0's count"


def test_a_fast_rank_runs_ahead_and_nothing_is_lost() -> None:
    hub = a_hub()
    for n in range(5):
        take(hub, 0, report(n, step=n))
    assert hub.metrics is None
    for n in range(3):
        take(hub, 1, report(n))
    assert [one.n for one in hub.told] == [0, 1, 2]
    assert hub.metrics == {"step": 2}


def test_everybodys_metrics_are_kept_only_where_callbacks_want_them() -> None:
    for keep_all, told in ((True, [{"r": 0}, {"r": 1}]), (False, [{"r": 0}])):
        hub = a_hub(keep_all=keep_all)
        take(hub, 1, report(0, r=1))
        take(hub, 0, report(0, r=0))
        assert [msgspec.json.decode(one) for one in hub.told[0].metrics] == told


def test_the_backlog_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "BACKLOG", 3)
    hub = a_hub()
    for n in range(10):
        take(hub, 0, report(n, step=n))
    for n in range(10):
        take(hub, 1, report(n))
    assert [one.n for one in hub.told] == list(range(10)), "no report is lost, only old metrics"
    assert [msgspec.json.decode(one.metrics[0]) for one in hub.told] == [
        *[{}] * 7,
        *[{"step": n} for n in (7, 8, 9)],
    ]


# --- reports with files --------------------------------------------------------------------------


def test_a_checkpoint_gets_its_name_when_all_have_reported() -> None:
    hub = a_hub()
    assert take(hub, 0, files(0, loss=1)) == []
    rank, named = the_only(take(hub, 1, report(0)))
    assert (rank, named) == (0, Named(0, "made-0", (0,), raw(loss=1)))
    assert not hub.settled


def test_rank_0_chooses_the_name_even_where_it_brings_no_files() -> None:
    hub = a_hub()
    take(hub, 1, files(0, "mine", loss=9))
    rank, named = the_only(take(hub, 0, report(0, "best", loss=1)))
    assert (rank, named.name, named.ranks) == (1, "best", (1,))
    assert msgspec.json.decode(named.metrics) == {"loss": 1}


def named_in_turn(hub: Hub, *names: str) -> list[Named]:
    """What the only rank's reports of files are called, when it chooses these names."""
    answers = [answer for n, name in enumerate(names) for answer in take(hub, 0, files(n, name))]
    return [named for _, named in only(Named, answers)]


def test_files_of_what_was_dropped_in_this_very_round_are_not_taken_over() -> None:
    """They are being deleted, though its manifest may still be there."""
    gone: dict[str, str] = {}
    hub = a_hub(world_size=1, last_called=gone.get)
    take(hub, 0, files(0, "last"))
    gone["last"] = ""
    _, named = the_only(take(hub, 0, files(1, "last")))
    assert (named.name, named.base) == ("last@3-1", "")


def test_a_name_is_used_once_and_who_uses_it_again_hears_of_what_it_was() -> None:
    hub = a_hub(world_size=1)
    told = named_in_turn(hub, "last", "other", "last", "last")
    assert [one.name for one in told] == ["last", "other", "last@3-2", "last@3-3"]
    assert [one.base for one in told] == ["", "", "last", "last@3-2"]
    assert [one.made for one in hub.given] == [False, False, True, True], "nobody chose that"
    assert hub.bases == {"last", "last@3-2"}, "they stay until what may share their files is saved"


def test_a_name_that_earlier_rounds_have_used_is_used_no_more() -> None:
    before: dict[str, str | None] = {"last": "last@2-7", "dropped": ""}
    hub = a_hub(world_size=1, last_called=lambda name: before.get(name))
    told = named_in_turn(hub, "last", "dropped", "new")
    assert [one.name for one in told] == ["last@3-0", "dropped@3-1", "new"]
    assert [one.base for one in told] == ["last@2-7", "", ""]


def test_not_even_a_name_like_ours_is_given_twice() -> None:
    told = named_in_turn(a_hub(world_size=1), "last", "last", "last@3-1")
    assert [one.name for one in told] == ["last", "last@3-1", "last@3-1@3-2"]


def test_it_is_ready_when_all_who_bring_files_have_saved_them() -> None:
    hub = a_hub(3)
    take(hub, 0, files(0, "c", loss=1))
    take(hub, 1, report(0))
    assert [rank for rank, _ in take(hub, 2, files(0))] == [0, 2]
    take(hub, 2, Saved(0, "c", 10))
    assert hub.ready == []
    take(hub, 0, Saved(0, "c", 5))
    ready = hub.ready[0]
    assert (ready.name, ready.round, ready.report, ready.ranks, ready.size_bytes) == (
        "c",
        3,
        0,
        (0, 2),
        15,
    )
    assert ready.metrics == {"loss": 1}
    assert hub.told[0].checkpoint == "c"


def test_where_a_user_has_put_it_is_what_the_first_of_its_ranks_says() -> None:
    hub = a_hub(3)
    take(hub, 0, report(0))
    for rank in (2, 1):
        take(hub, rank, files(0))
    for rank in (1, 2):
        take(hub, rank, Saved(0, "made-0", 1, at=f"mine/{rank}"))
    assert [(one.ranks, one.at) for one in hub.ready] == [((1, 2), "mine/1")]


def test_checkpoints_are_ready_in_the_order_of_their_reports() -> None:
    hub = a_hub()
    for n in (0, 1):
        take(hub, n, files(n, f"c{n}"))
        take(hub, 1 - n, report(n, f"c{n}"))
    # rank 0 saves the older, rank 1 the newer
    take(hub, 1, Saved(1, "c1"))
    assert hub.ready == [], "the last one committed is what the next round starts from"
    take(hub, 0, Saved(0, "c0"))
    assert [one.name for one in hub.ready] == ["c0", "c1"]


def test_what_is_still_being_saved_holds_up_the_reports_behind_it() -> None:
    hub = a_hub(1)
    take(hub, 0, report(0))
    take(hub, 0, files(1, "c"))
    take(hub, 0, report(2))
    assert [one.n for one in hub.told] == [0]
    take(hub, 0, Saved(1, "c"))
    assert [(one.n, one.checkpoint) for one in hub.told] == [(0, None), (1, "c"), (2, None)]


def test_a_name_is_in_use_until_its_entry_is_written() -> None:
    hub = a_hub(1)
    take(hub, 0, files(0, "c0"))
    take(hub, 0, files(1, "c1"))
    assert hub.saving == {"c0", "c1"}
    take(hub, 0, Saved(0, "c0"))
    assert hub.saving == {"c0", "c1"}, "its entry is still to come"
    hub.ready.clear()
    assert hub.saving == {"c1"}


def test_a_save_nobody_asked_for_is_no_checkpoint() -> None:
    hub = a_hub()
    assert take(hub, 0, Saved(7, "x")) == []
    assert hub.ready == []


def test_settled_means_told_saved_and_committed() -> None:
    hub = a_hub(1)
    settled = [hub.settled]
    take(hub, 0, files(0))
    take(hub, 0, Saved(0, "made-0"))
    settled.append(hub.settled)
    hub.ready.clear()
    settled.append(hub.settled)
    hub.told.clear()
    settled.append(hub.settled)
    assert settled == [True, False, False, True]


def test_the_end_of_each_rank_is_noted() -> None:
    hub = a_hub()
    assert take(hub, 1, Running()) == []
    assert take(hub, 1, Raised("Traceback")) == []
    assert hub.returned == set()
    take(hub, 1, Returned(0))
    assert hub.returned == {1}


@pytest.mark.parametrize(
    "frame", [b"{}", b'{"type":"dance"}', b'{"type":"saved","n":"\xff"}', b"["]
)
def test_what_is_no_frame_is_refused(frame: bytes) -> None:
    with pytest.raises(UNREADABLE):
        a_hub().take(0, msgspec.Raw(frame), 0.0)


# --- those who leave -----------------------------------------------------------------------------


LEAVES = frozenset({2})


def test_an_excused_rank_is_not_waited_for() -> None:
    hub = a_hub(3)
    assert hub.excuse(LEAVES) == []
    take(hub, 1, report(0))
    assert not hub.told
    take(hub, 0, report(0))
    assert len(hub.told) == 1


def test_where_rank_0_leaves_everybody_is_waited_for() -> None:
    hub = a_hub(3)
    hub.excuse(frozenset({0, 2}))
    take(hub, 0, report(0))
    take(hub, 1, report(0))
    assert not hub.told


def test_whoever_waits_already_goes_on_at_once() -> None:
    hub = a_hub(3)
    take(hub, 0, files(0, "c1"))
    take(hub, 1, report(0))
    take(hub, 0, Gather("preemption_info", 0, b"v"))
    take(hub, 1, Gather("preemption_info", 0))
    take(hub, 0, Gather("barrier", 0))
    take(hub, 1, Gather("barrier", 0))
    answers = hub.excuse(LEAVES)
    assert [rank for rank, _ in answers] == [0, 0, 1]
    assert isinstance(answers[0][1], Named)
    assert answers[0][1].ranks == (0,)
    assert {told for _, told in answers[1:]} == {Gathered("preemption_info", 0, b"v")}


def test_a_report_with_a_part_that_was_lost_on_a_broken_wire_is_never_complete() -> None:
    hub = a_hub(2)
    take(hub, 0, files(0, "c0"))
    hub.cut_off([1])  # and with it, say, what rank 1 brought to report 0
    assert take(hub, 1, files(1, "c1")) == take(hub, 0, files(1, "c1")) == []
    take(hub, 1, Returned(2))
    assert not hub.told
    assert not hub.saving
    assert hub.returned == set()


def test_what_was_matched_before_its_wire_broke_may_be_saved_yet() -> None:
    hub = a_hub(2)
    take(hub, 0, files(0, "c0"))
    take(hub, 1, files(0, "c0"))
    hub.cut_off([1])
    take(hub, 0, Saved(0, "c0", 1))
    take(hub, 1, Saved(0, "c0", 1))
    assert [one.name for one in hub.ready] == ["c0"]


def test_parts_of_different_steps_are_no_checkpoint() -> None:
    hub = a_hub(2)
    take(hub, 0, files(0, "c0"))
    take(hub, 1, files(0, "c0"))
    take(hub, 0, Saved(0, "c0", 1, step=4))
    answers = take(hub, 1, Saved(0, "c0", 1, step=5))
    assert [rank for rank, _ in only(Uncarried, answers)] == [0, 1]
    assert not hub.ready


def shared(n: int, name: str | None = None) -> Files:
    return Files(n, raw(), name, shares=True)


def test_who_leaves_is_waited_for_with_its_part_of_a_snapshot() -> None:
    """Though reports, and checkpoints of the user's own, may do without those who leave."""
    hub = a_hub(3)
    hub.excuse(LEAVES)
    assert [*take(hub, 0, shared(0, "c0")), *take(hub, 1, shared(0))] == []
    named = only(Named, take(hub, 2, shared(0)))
    assert [(rank, one.name, one.ranks) for rank, one in named] == [
        (rank, "c0", (0, 1, 2)) for rank in (0, 1, 2)
    ]


@pytest.mark.parametrize("goes", ["returns", "is cut off"])
def test_a_snapshot_of_fewer_than_all_is_told_to_be_lost_and_never_named(goes: str) -> None:
    hub = a_hub(3)
    hub.excuse(LEAVES)
    take(hub, 0, shared(0, "c0"))
    take(hub, 1, shared(0))
    answers = take(hub, 2, Returned(0)) if goes == "returns" else hub.cut_off(LEAVES)
    assert refused(answers) == dict.fromkeys(
        (0, 1), "ranks [2] left without their part of the snapshot"
    )
    assert [told.checkpoint for told in hub.told] == [None]
    assert not hub.given, "nobody uploads anything"
    take(hub, 0, Saved(0, "c0", 1))
    take(hub, 1, Saved(0, "c0", 1))
    assert not hub.ready


def left_with_a_part(hub: Hub, goes: str) -> list[Answer]:
    """Rank 2 is going to leave, and its connection breaks."""
    if goes == "once it may":
        return [*hub.excuse(LEAVES), *hub.cut_off(LEAVES)]
    return [*hub.cut_off(LEAVES), *hub.excuse(LEAVES)]


@pytest.mark.parametrize("goes", ["once it may", "before it may"])
@pytest.mark.parametrize("asked", [Files(0, raw()), Files(0, raw(), shares=True)])
def test_a_part_that_its_rank_left_without_saving_holds_up_no_later_save(
    goes: str, asked: Files
) -> None:
    hub = a_hub(3)
    for rank in range(3):
        take(hub, rank, asked)
    for rank in (0, 1):
        take(hub, rank, Saved(0, "made-0", 1))
    told = only(Uncarried, left_with_a_part(hub, goes))
    assert {rank: one.why for rank, one in told} == dict.fromkeys(
        (0, 1, 2), "ranks [2] left before their part was saved"
    )
    assert hub.given_up == {"made-0"}
    for frame in (files(1, "c1"), Saved(1, "c1", 1)):
        for rank in (0, 1):
            take(hub, rank, frame)
    take(hub, 2, Saved(0, "made-0", 1))
    assert [one.name for one in hub.ready] == ["c1"]
    assert [told.checkpoint for told in hub.told] == [None, "c1"]


@pytest.mark.parametrize("goes", ["once it may", "before it may"])
def test_what_its_rank_has_saved_before_it_left_counts(goes: str) -> None:
    hub = a_hub(3)
    for rank in range(3):
        take(hub, rank, files(0, "c0"))
    take(hub, 2, Saved(0, "c0", 1))
    assert left_with_a_part(hub, goes) == []
    for rank in (0, 1):
        take(hub, rank, Saved(0, "c0", 1))
    assert [one.ranks for one in hub.ready] == [(0, 1, 2)]


def test_who_left_before_its_files_had_a_name_is_not_waited_for() -> None:
    hub = a_hub(3)
    hub.excuse(LEAVES)
    for rank in (2, 1):
        take(hub, rank, files(0))
    hub.cut_off(LEAVES)
    named = only(Named, take(hub, 0, files(0, "c0")))
    assert [(rank, one.ranks) for rank, one in named] == [(0, (0, 1)), (1, (0, 1))]
    for rank in (0, 1):
        take(hub, rank, Saved(0, "c0", 1))
    assert [one.ranks for one in hub.ready] == [(0, 1)]


def test_who_comes_after_all_is_told_and_keeps_nobody_waiting() -> None:
    hub = a_hub(3, keep_all=True)
    hub.excuse(LEAVES)
    for rank in (0, 1):
        take(hub, rank, report(0))
        take(hub, rank, files(1, "c1"))
        take(hub, rank, Gather("preemption_info", 0, b"v"))
    late = Gathered("preemption_info", 0, b"v")
    assert take(hub, 2, Gather("preemption_info", 0)) == [(2, late)]
    assert take(hub, 2, report(0)) == []
    to, named = the_only(take(hub, 2, files(1)))
    assert (to, named.n, named.name) == (2, 1, "")
    assert hub.uploading == {0, 1}, "its files are not waited for"
    take(hub, 0, files(2, "c2"))
    take(hub, 2, files(2, "c2"))
    answers = take(hub, 1, report(2))
    assert [rank for rank, _ in answers] == [0, 2], "but what it makes in time counts"


# --- how far they have come ----------------------------------------------------------------------


def test_every_word_of_the_function_is_a_step() -> None:
    hub = a_hub(now=5.0)
    assert hub.progress == Progress((0, 0), 5.0)
    take(hub, 0, Running(), 6.0)
    take(hub, 0, report(0), 7.0)
    take(hub, 0, Gather("barrier", 0), 8.0)
    take(hub, 1, Present("train"), 99.0)
    assert hub.progress == Progress((3, 0), 8.0, running={0})


def test_files_on_their_way_and_who_is_done_are_told() -> None:
    hub = a_hub(1)
    take(hub, 0, files(0, "c1"), 1.0)
    assert hub.progress.uploading
    take(hub, 0, Saved(0, "c1"), 2.0)
    take(hub, 0, Returned(1), 3.0)
    assert hub.progress == Progress((3,), 3.0, returned={0})


# --- collectives ---------------------------------------------------------------------------------


def test_a_collective_ends_when_all_have_come_with_rank_0s_value() -> None:
    hub = a_hub()
    assert take(hub, 0, Gather("broadcast", 0, b"zero")) == []
    answers = take(hub, 1, Gather("broadcast", 0, b"one"))
    assert sorted(rank for rank, _ in answers if rank is not None) == [0, 1]
    assert {told for _, told in answers} == {Gathered("broadcast", 0, b"zero")}


def test_collectives_are_told_apart_by_kind_and_number() -> None:
    hub = a_hub()
    assert take(hub, 0, Gather("barrier", 0)) == []
    assert take(hub, 1, Gather("broadcast", 0)) == []
    assert take(hub, 1, Gather("barrier", 1)) == []
    assert len(take(hub, 1, Gather("barrier", 0))) == 2


def test_only_our_own_collective_does_without_those_who_leave() -> None:
    hub = a_hub()
    hub.excuse(frozenset({1}))
    assert take(hub, 0, Gather("barrier", 0)) == []
    assert the_only(take(hub, 0, Gather("preemption_info", 0, b"v"))) == (
        0,
        Gathered("preemption_info", 0, b"v"),
    )


def test_whoever_waited_too_long_learns_who_never_came() -> None:
    hub = a_hub(3, collective_timeout_s=5.0)
    assert hub.next_late() is None
    take(hub, 1, Gather("barrier", 4), now=10.0)
    assert hub.next_late() == 15.0
    assert hub.late(14.9) == []
    assert hub.late(15.0) == [(1, Gathered("barrier", 4, missing=(0, 2)))]
    assert hub.late(99.0) == [], "told once"


def test_without_a_limit_a_collective_waits_for_ever_and_says_for_whom() -> None:
    hub = a_hub(collective_warn_s=30.0)
    take(hub, 0, Gather("barrier", 0))
    assert hub.late(29.0) == []
    assert hub.late(1e9) == [(0, Overdue("barrier", (1,), 1e9))]
    assert hub.next_late() == 1e9 + 30.0


def test_a_checkpoint_waits_for_the_reports_of_all_as_a_collective_does() -> None:
    hub = a_hub(3, collective_timeout_s=9.0, collective_warn_s=4.0)
    take(hub, 2, report(0))
    take(hub, 0, files(0), now=10.0)
    assert hub.late(14.0) == [(0, Overdue("report", (1,), 4.0))]
    assert hub.late(19.0) == [(0, Gathered("report", 0, missing=(1,)))]
    assert take(hub, 1, report(0)) == [], "too late: nobody waits for a name"
    assert [(one.n, one.checkpoint) for one in hub.told] == [(0, None)]


def test_who_leaves_is_not_missed_where_nobody_waits_for_them() -> None:
    hub = a_hub(3, collective_warn_s=4.0)
    hub.excuse(frozenset({2}))
    take(hub, 0, Gather("preemption_info", 0))
    take(hub, 0, Gather("barrier", 0))
    assert hub.late(4.0) == [
        (0, Overdue("preemption_info", (1,), 4.0)),
        (0, Overdue("barrier", (1, 2), 4.0)),
    ]


def test_ranks_that_wait_for_different_things_are_told_at_once() -> None:
    hub = a_hub()
    take(hub, 0, report(0))
    assert take(hub, 0, Files(1, raw(), blocks=True)) == []
    answers = take(hub, 1, Gather("barrier", 0, blocks=True))
    told = {rank: (frame.kind, frame.missing) for rank, frame in only(Gathered, answers)}
    assert told == {0: ("report", (1,)), 1: ("barrier", (0,))}


def test_a_report_that_nobody_waits_for_holds_nobody_back() -> None:
    hub = a_hub()
    take(hub, 0, report(0))
    assert take(hub, 1, Files(0, raw(), blocks=True))[0][0] == 1, "its name"
    take(hub, 1, Gather("barrier", 0, blocks=True))
    assert len(take(hub, 0, Gather("barrier", 0, blocks=True))) == 2


def test_who_returns_without_it_ends_the_waiting() -> None:
    hub = a_hub(3)
    take(hub, 0, Files(0, raw(), blocks=True))
    take(hub, 2, Gather("barrier", 0))
    answers = only(Gathered, take(hub, 1, Returned(0)))
    assert {rank for rank, _ in answers} == {0, 2}
    assert all("rank 1 returned" in frame.why for _, frame in answers)


def test_who_has_made_the_report_before_it_returned_is_not_missed() -> None:
    hub = a_hub(3)
    take(hub, 1, report(0))
    take(hub, 1, Returned(1))
    assert take(hub, 0, Files(0, raw(), blocks=True)) == []
    assert the_only(take(hub, 2, report(0)))[0] == 0, "its name"


# --- any order -----------------------------------------------------------------------------------


@given(st.integers(1, 4), st.integers(0, 6), st.data())
def test_in_whatever_order_reports_come_each_is_told_once_and_in_order(
    world_size: int, reports: int, data: st.DataObject
) -> None:
    hub = a_hub(world_size, keep_all=True)
    with_files = data.draw(st.sets(st.tuples(st.integers(0, 3), st.integers(0, 5))))
    made = [0] * world_size
    while sum(made) < world_size * reports:
        rank = data.draw(st.sampled_from([r for r in range(world_size) if made[r] < reports]))
        n, made[rank] = made[rank], made[rank] + 1
        frame = files(n, r=rank, step=n) if (rank, n) in with_files else report(n, r=rank, step=n)
        for to, answer in take(hub, rank, frame):
            assert isinstance(answer, Named)
            assert to in answer.ranks
            assert to is not None
            take(hub, to, Saved(answer.n, answer.name))
    assert [one.n for one in hub.told] == list(range(reports))
    for one in hub.told:
        expected = [{"r": rank, "step": one.n} for rank in range(world_size)]
        assert [msgspec.json.decode(body) for body in one.metrics] == expected
    brought = [n for n in range(reports) if any((r, n) in with_files for r in range(world_size))]
    assert [ready.report for ready in hub.ready] == brought


# --- snapshots -----------------------------------------------------------------------------------


def test_a_checkpoint_that_loses_a_part_is_given_up_and_holds_up_nobody() -> None:
    hub = a_hub()
    for n in (0, 1):
        for rank in (0, 1):
            take(hub, rank, files(n, f"c{n}"))
    for rank in (0, 1):
        take(hub, rank, Saved(1, "c1", 5))
    take(hub, 0, Saved(0, "c0", 5))
    assert not hub.ready
    answers = take(hub, 1, Unsaved(0, "the disk is full"))
    assert answers == [(rank, Uncarried(0, "rank 1: the disk is full")) for rank in (0, 1)], (
        "everybody learns of it"
    )
    assert [one.name for one in hub.ready] == ["c1"]
    assert [told.checkpoint for told in hub.told] == [None, "c1"]
    assert hub.given_up == {"c0"}


def test_a_part_that_is_lost_before_all_have_reported_is_remembered() -> None:
    hub = a_hub()
    take(hub, 1, files(0))
    assert take(hub, 1, Unsaved(0, "why")) == []
    answers = take(hub, 0, files(0, "c"))
    assert refused(answers) == dict.fromkeys((0, 1), "rank 1: why")
    assert not hub.saving


def test_it_knows_why_the_last_save_is_no_checkpoint() -> None:
    hub = a_hub(world_size=1)
    for n in range(4):
        take(hub, 0, files(n, f"c{n}"))
    assert hub.unsaved == "", "it may be one yet"
    for frame in (Unsaved(2, "no"), Saved(0, "c0", 1), Unsaved(1, "late")):
        take(hub, 0, frame)
        assert hub.unsaved == "rank 0: no", "those before it change nothing"
    take(hub, 0, Saved(3, "c3", 1))
    assert hub.unsaved == ""


def test_a_snapshot_says_that_it_is_one_and_leaves_metrics_alone_where_it_has_none() -> None:
    hub = a_hub(world_size=1)
    take(hub, 0, report(0, loss=0.5))
    take(hub, 0, msgspec.structs.replace(files(1, "s"), shares=True, why="an epoch has ended"))
    take(hub, 0, Saved(1, "s", 5))
    assert hub.metrics == {"loss": 0.5}
    take(hub, 0, files(2, "own"))
    take(hub, 0, Saved(2, "own", 5))
    told = [(one.name, one.snapshot, one.why) for one in hub.ready]
    assert told == [("s", True, "an epoch has ended"), ("own", False, "")]
    assert hub.metrics == {}


def test_what_may_share_files_is_told_with_whom_and_that_one_is_kept_meanwhile() -> None:
    latest = ["a"]
    hub = a_hub(base_for=lambda: latest[0])
    sharing = msgspec.structs.replace(files(0, "b"), shares=True)
    answers = [answer for rank in (0, 1) for answer in take(hub, rank, sharing)]
    assert {named.base for _, named in only(Named, answers)} == {"a"}
    latest[0] = "x"
    assert hub.bases == {"a"}
    for rank in (0, 1):
        take(hub, rank, Saved(0, "b", 5))
    assert hub.bases == set()
    answers = [answer for rank in (0, 1) for answer in take(hub, rank, files(1, "plain"))]
    assert {named.base for _, named in only(Named, answers)} == {""}


def test_a_snapshot_tells_how_far_it_had_come_once_it_is_brought() -> None:
    hub = a_hub(1)
    take(hub, 0, Files(0, raw(), shares=True))
    take(hub, 0, Saved(0, "made-0", 7, 120))
    assert [(one.snapshot, one.step) for one in hub.ready] == [(True, 120)]


def test_a_snapshot_was_taken_when_the_last_rank_had_and_what_users_save_nobody_knows_when() -> (
    None
):
    hub = a_hub(2)
    for n, shares in enumerate((True, False)):
        for rank in (0, 1):
            take(hub, rank, Files(n, raw(), shares=shares), 10.0 * n + rank)
    for n in (0, 1):
        for rank in (0, 1):
            take(hub, rank, Saved(n, f"made-{n}", 7, 120), 50.0)
    assert [one.taken_at for one in hub.ready] == [1.0, None]


def test_what_a_rank_could_not_read_is_remembered() -> None:
    hub = a_hub()
    take(hub, 1, Damaged("a"))
    assert hub.damaged == {"a"}
