"""Who waits together: they are answered, warned, or told that nobody comes any more."""

from __future__ import annotations

from typing import Any

from spotfit.agent.collectives import Answer, Collectives, Key
from spotfit.model.wire import Gathered, Overdue

BARRIER, BROADCAST = Key("barrier", 0), Key("broadcast", 0)


class Three:
    """Three ranks; whoever has not joined a collective is missing there."""

    def __init__(self, **given: Any) -> None:
        self.waits = Collectives(3, **{"timeout_s": None, "warn_s": 60.0, **given})
        self.returned: set[int] = set()

    def missing(self, key: Key) -> set[int]:
        return {0, 1, 2} - self.waits.here(key)

    def join(self, rank: int, key: Key, now: float = 0.0) -> None:
        self.waits.join(rank, key, now, value=b"%d" % rank, blocks=True)

    def late(self, now: float) -> list[Answer]:
        return self.waits.late(now, self.missing)

    def hopeless(self) -> dict[int | None, Any]:
        return dict(self.waits.hopeless(self.returned, self.missing))


def test_it_knows_who_is_here_until_it_is_over() -> None:
    three = Three()
    three.join(2, BARRIER)
    three.join(0, BARRIER)
    assert three.waits.here(BARRIER) == {0, 2}
    assert three.waits.here(BROADCAST) == set()
    assert three.waits.close(BARRIER) == {0: b"0", 2: b"2"}
    assert (three.waits.here(BARRIER), dict(three.waits.close(BARRIER))) == (set(), {})


# --- time ----------------------------------------------------------------------------------------


def test_the_lowest_rank_is_told_now_and_then_for_whom_they_wait() -> None:
    three = Three(warn_s=10.0)
    three.join(2, BARRIER, now=100.0)
    three.join(1, BARRIER, now=105.0)
    assert three.waits.next_late() == 110.0
    assert three.late(109.9) == []
    assert three.late(110.0) == [(1, Overdue("barrier", (0,), 10.0))]
    assert three.late(111.0) == []
    assert three.waits.next_late() == 120.0
    assert three.late(120.0) == [(1, Overdue("barrier", (0,), 20.0))]


def test_a_time_limit_ends_it_for_all_who_wait() -> None:
    three = Three(timeout_s=5.0)
    three.join(1, BARRIER, now=10.0)
    three.join(2, BARRIER, now=14.0)
    assert three.waits.next_late() == 15.0
    assert three.late(14.9) == []
    told = Gathered("barrier", 0, missing=(0,))
    assert three.late(15.0) == [(1, told), (2, told)]
    assert three.late(99.0) == [], "told once"
    assert three.waits.next_late() is None


# --- nobody comes any more -----------------------------------------------------------------------


def test_as_long_as_somebody_may_come_there_is_hope() -> None:
    three = Three()
    three.join(0, BARRIER)
    three.join(1, BROADCAST)
    assert three.hopeless() == {}, "rank 2 may yet do anything"


def test_when_every_rank_waits_for_something_else_all_are_told_who_is_where() -> None:
    three = Three()
    three.join(0, BARRIER)
    three.join(2, BARRIER)
    three.join(1, BROADCAST)
    told = three.hopeless()
    assert told.keys() == {0, 1, 2}
    assert (told[0].kind, told[0].missing, told[1].missing) == ("barrier", (1,), (0, 2))
    assert told[0].why == (
        "every rank waits, and not for the same: "
        "ranks 0, 2 in barrier (number 1), rank 1 in broadcast (number 1)"
    )


def test_the_same_call_out_of_step_is_told_by_its_number() -> None:
    three = Three()
    three.join(0, Key("barrier", 1))
    three.join(1, BARRIER)
    three.join(2, BARRIER)
    assert "rank 0 in barrier (number 2)" in three.hopeless()[2].why


def test_a_thread_beside_the_training_function_holds_no_rank() -> None:
    three = Three()
    three.join(0, BARRIER)
    three.join(1, BARRIER)
    three.waits.join(2, BROADCAST, 0.0, blocks=False)
    assert three.hopeless() == {}, "rank 2's function goes on, and may come"


def test_who_was_answered_waits_no_more() -> None:
    three = Three()
    for rank in (0, 1, 2):
        three.join(rank, BARRIER)
    three.waits.close(BARRIER)
    three.join(0, BROADCAST)
    assert three.hopeless() == {}


def test_a_rank_that_has_returned_is_not_waited_for() -> None:
    three = Three()
    three.returned = {1}
    three.join(0, BARRIER)
    told = three.hopeless()
    assert told.keys() == {0}
    assert told[0].why == "rank 1 returned from the training function without it"
    three.join(2, BARRIER)
    assert three.hopeless().keys() == {2}, "nor by those who come later"


def test_those_who_wait_for_each_other_while_the_rest_has_returned_are_told() -> None:
    three = Three()
    three.returned = {2}
    three.waits.join(0, Key("report", 0), 0.0, blocks=True)
    three.waits.join(1, Key("report", 1), 0.0, blocks=True)
    told = three.waits.hopeless({2}, lambda key: {1 - key.seq})
    assert [rank for rank, _ in told] == [0, 1]


def test_a_thousand_ranks_are_not_listed_one_by_one() -> None:
    many = Collectives(1000, timeout_s=None, warn_s=60.0)
    for rank in range(999):
        many.join(rank, BARRIER, 0.0, blocks=True)
    many.join(999, BROADCAST, 0.0, blocks=True)
    told = many.hopeless(set(), lambda key: {999} if key == BARRIER else set(range(999)))
    why = dict(told)[0].why  # type: ignore[union-attr]
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 991 more in barrier" in why
