"""Recovery: the newest state that is complete anywhere, one for all, from the nearest holder."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from spotfit.model.holding import Part, State
from spotfit.model.view import View
from spotfit.model.watch import Seat
from spotfit.model.world import Round
from spotfit.policy.recovery import (
    Holder,
    Memory,
    Recovery,
    from_memory,
    keepers,
    recover,
    sources,
)
from spotfit.testing.builders import a_commit, a_member, a_round, a_seat, a_view, an_agent

OLD, NEW = State(4, 100), State(4, 120)
Held = dict[Holder, list[Part]]


def group(machines: int) -> Round:
    """Agents a0, a1, … with a rank each."""
    return a_round(5, members=map(a_member, range(machines)))


def parts(state: State, *ranks: int) -> list[Part]:
    """Of a group of two."""
    return [Part(state, rank, 2) for rank in ranks]


def ways(found: Recovery) -> list[list[str]]:
    return [[fetch.way for fetch in found.fetches[rank]] for rank in sorted(found.fetches)]


A0, A1, A2, A3 = map(an_agent, range(4))

# --- stories -----------------------------------------------------------------------------------


def test_lost_workers_find_their_state_on_their_own_machine() -> None:
    alone = a_round(5, members=[a_member(0, slots=2)])
    found = recover(alone.places, {A0: parts(NEW, 0, 1), None: parts(OLD, 0, 1)})
    assert found.state == NEW
    assert ways(found) == [["own memory", "own memory"]] * 2
    assert found.why == (
        "step 120 of round 4 is the newest that is complete; "
        "of its parts lie 4 on the machines that read them"
    )


def test_a_lost_machines_state_is_with_its_keeper() -> None:
    """a1 is gone, a2 takes its place, a0 has kept a copy."""
    round_ = a_round(5, members=[a_member(0), a_member(2)])
    found = recover(round_.places, {A0: parts(NEW, 0, 1), None: parts(OLD, 0, 1)})
    assert found.state == NEW
    assert ways(found) == [["own memory", "own memory"], ["peer", "peer"]]


def test_a_torn_state_is_not_used_and_told() -> None:
    found = recover(group(2).places, {A0: parts(NEW, 0), None: parts(OLD, 0, 1)})
    assert found.state == OLD
    assert ways(found) == [["bucket", "bucket"]] * 2
    assert "newer, but torn: step 120 of round 4 (1 of 2 parts)" in found.why


def test_what_lies_in_the_bucket_completes_what_is_in_memory() -> None:
    found = recover(group(2).places, {A0: parts(NEW, 0), None: parts(NEW, 1)})
    assert found.state == NEW
    assert ways(found) == [["own memory", "bucket"], ["peer", "bucket"]]


def test_a_later_round_has_left_behind_what_it_did_not_begin_from() -> None:
    resumed = State(5, 105)
    held: Held = {A0: parts(resumed, 0), A1: parts(resumed, 1), None: parts(NEW, 0, 1)}
    assert recover(group(2).places, held).state == resumed


def test_another_size_reads_the_same_parts() -> None:
    found = recover(group(3).places, {A0: parts(NEW, 0), A1: parts(NEW, 1)})
    assert found.state == NEW
    assert [[one.part.rank for one in found.fetches[rank]] for rank in range(3)] == [[0, 1]] * 3


def test_copies_are_asked_for_in_turn() -> None:
    both = parts(NEW, 0, 1)
    found = recover(group(6).places, {A0: both, A1: both})
    asked = [one.holder for rank in range(2, 6) for one in found.fetches[rank]]
    assert sorted(asked, key=str) == [A0] * 4 + [A1] * 4


def test_with_nothing_complete_there_is_nothing_to_begin_from() -> None:
    assert recover(group(2).places, {}) == Recovery(None, {}, "no state is complete: none is held")
    torn = recover(group(2).places, {A0: parts(NEW, 0)})
    assert torn.state is None
    assert "step 120 of round 4 (1 of 2 parts)" in torn.why


def test_each_machine_is_kept_by_the_next_that_stays() -> None:
    places = group(4).places
    assert keepers(places) == {A0: A1, A1: A2, A2: A3, A3: A0}
    assert keepers(places, leaving={A2}) == {A0: A1, A1: A3, A2: A3, A3: A0}
    assert keepers(places, leaving={A0, A2, A3}) == {A0: A1, A2: A1, A3: A1}
    assert keepers(group(1).places) == {}


# --- from memory alone -------------------------------------------------------------------------


def a_group_of(*held: list[Part], vaults: bool = True) -> tuple[Round, list[Seat]]:
    """a0, a1, … with a rank each, that hold those parts."""
    members = [a_member(n, vault=f"10.0.0.{n}:9" if vaults else "") for n in range(len(held))]
    seated = zip(members, held, strict=True)
    sitting = [a_seat(n, member=one, held=tuple(its)) for n, (one, its) in enumerate(seated)]
    return a_round(5, members=members), sitting


def begins_from(view: View, *held: list[Part], vaults: bool = True) -> Memory | None:
    round_, sitting = a_group_of(*held, vaults=vaults)
    return from_memory(view, round_.places, sitting)


def test_memory_is_enough_where_all_of_a_state_is_there() -> None:
    assert begins_from(a_view(), parts(NEW, 0, 1)) == Memory(NEW, ((A0,), (A0,)))
    assert begins_from(a_view(), parts(NEW, 0), parts(NEW, 1)) == Memory(NEW, ((A0,), (A1,)))
    assert begins_from(a_view(), parts(NEW, 0), parts(NEW, 0)) is None


def test_nobody_is_asked_who_cannot_answer() -> None:
    assert begins_from(a_view(), parts(NEW, 0), parts(NEW, 1), vaults=False) is None
    both = parts(NEW, 0, 1)
    assert begins_from(a_view(), both, both, vaults=False) == Memory(NEW, ((A0, A1), (A0, A1)))


def test_what_a_machine_holds_that_has_no_place_is_left_out() -> None:
    round_, sitting = a_group_of(parts(NEW, 0), parts(NEW, 1))
    assert from_memory(a_view(), round_.places[:1], sitting) is None


@pytest.mark.parametrize(("committed_in", "found"), [(3, True), (4, True), (5, False)])
def test_a_checkpoint_of_a_later_round_is_newer(committed_in: int, found: bool) -> None:
    """One of the same round was a snapshot first, and memory keeps the last of them."""
    view = a_view(checkpoints=(a_commit(round=committed_in),))
    assert (begins_from(view, parts(NEW, 0, 1)) is not None) == found


@pytest.mark.parametrize(("step", "found"), [(119, True), (120, True), (121, False), (None, True)])
def test_what_is_committed_since_is_newer_than_what_is_left_in_memory(
    step: int | None, found: bool
) -> None:
    """Saves of seed 1000: a machine died with its part of what had just been committed, and a copy
    of the snapshot before lay with its peer."""
    view = a_view(checkpoints=(a_commit(round=NEW.round, step=step),))
    assert (begins_from(view, parts(NEW, 0, 1)) is not None) == found


def test_each_machine_learns_whom_to_ask_for_what_it_does_not_hold() -> None:
    round_, _ = a_group_of([], [], [])
    round_ = replace(round_, memory=NEW, holders=((A0, A1), (A1,)))
    assert sources(round_, A0) == ("", "10.0.0.1:9")
    assert sources(round_, A1) == ("", "")
    assert sources(round_, A2) in (("10.0.0.0:9", "10.0.0.1:9"), ("10.0.0.1:9", "10.0.0.1:9"))


# --- whatever is held --------------------------------------------------------------------------

HELD = st.lists(
    st.tuples(
        st.sampled_from([None, A0, A1, A2, A3]),
        st.builds(
            lambda number, step, rank: Part(State(number, step), rank, 3),
            st.integers(1, 2),
            st.integers(1, 3),
            st.integers(0, 2),
        ),
    ),
    max_size=16,
)
GROUPS = st.integers(1, 4).map(group)


def by_holder(pairs: list[tuple[Holder, Part]]) -> Held:
    held: Held = defaultdict(list)
    for holder, part in pairs:
        held[holder].append(part)
    return held


@given(GROUPS, HELD)
@settings(max_examples=200)
def test_the_newest_complete_state_wins_and_nobody_gets_another(
    round_: Round, pairs: list[tuple[Holder, Part]]
) -> None:
    found = recover(round_.places, by_holder(pairs))
    ranks: dict[State, set[int]] = defaultdict(set)
    for _, part in pairs:
        ranks[part.state].add(part.rank)
    complete = [state for state, there in ranks.items() if there == {0, 1, 2}]
    assert found.state == max(complete, default=None)
    assert {one.part.state for each in found.fetches.values() for one in each} <= {found.state}


@given(GROUPS, HELD)
@settings(max_examples=200)
def test_every_rank_is_told_the_nearest_holder_of_every_part(
    round_: Round, pairs: list[tuple[Holder, Part]]
) -> None:
    found = recover(round_.places, by_holder(pairs))
    assert set(found.fetches) == (set(range(round_.world_size)) if found.state else set())
    for rank, fetches in found.fetches.items():
        here = round_.holder_of(rank).agent
        assert [one.part.rank for one in fetches] == [0, 1, 2]
        for part, holder, way in fetches:
            having = {who for who, one in pairs if one == part}
            assert holder in having
            peers = "peer" if having - {None} else "bucket"
            assert way == ("own memory" if here in having else peers)
            assert (holder == here) == (way == "own memory")


@given(GROUPS, HELD, st.data())
def test_the_order_in_which_holders_are_heard_changes_nothing(
    round_: Round, pairs: list[tuple[Holder, Part]], data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(pairs))
    before, after = (recover(round_.places, by_holder(one)) for one in (pairs, shuffled))
    assert before == after


@given(GROUPS, HELD, st.integers(0, 15))
def test_a_part_that_turns_out_bad_never_leads_to_a_newer_state(
    round_: Round, pairs: list[tuple[Holder, Part]], bad: int
) -> None:
    before = recover(round_.places, by_holder(pairs))
    after = recover(round_.places, by_holder(pairs[:bad] + pairs[bad + 1 :]))
    assert after.state is None or (before.state is not None and after.state <= before.state)
