"""Recovery: the newest state that is complete anywhere, one for all, from the nearest holder."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from spotfit.core.ids import AgentId
from spotfit.model.holding import Part, Saved
from spotfit.model.world import Round
from spotfit.policy.recovery import Recovery, keepers, recover
from spotfit.testing.builders import a_member, a_round, an_agent

OLD, NEW = Saved(4, 100), Saved(4, 120)


def group(machines: int) -> Round:
    """Agents a0, a1, … with a rank each."""
    return a_round(5, members=map(a_member, range(machines)))


def in_memory(state: Saved, rank: int, holder: int, world_size: int = 2) -> Part:
    return Part(state, rank, world_size, an_agent(holder))


def in_bucket(state: Saved, world_size: int = 2) -> list[Part]:
    return [Part(state, rank, world_size, None) for rank in range(world_size)]


def ways(found: Recovery) -> list[str]:
    return [fetch.way for rank in sorted(found.fetches) for fetch in found.fetches[rank]]


# --- stories -----------------------------------------------------------------------------------


def test_lost_workers_find_their_state_on_their_own_machines() -> None:
    found = recover(group(2), [in_memory(NEW, 0, 0), in_memory(NEW, 1, 1), *in_bucket(OLD)])
    assert found.state == NEW
    assert ways(found) == ["own memory", "own memory"]
    assert found.why == (
        "step 120 of round 4 is the newest that is complete; "
        "of its ranks 2 from their machine's own memory"
    )


def test_a_lost_machines_state_is_with_its_keeper() -> None:
    """a1 is gone, a2 takes its place, a0 has kept a copy."""
    round_ = a_round(5, members=[a_member(0), a_member(2)])
    found = recover(round_, [in_memory(NEW, 0, 0), in_memory(NEW, 1, 0), *in_bucket(OLD)])
    assert found.state == NEW
    assert ways(found) == ["own memory", "peer"]


def test_a_torn_state_is_not_used_and_told() -> None:
    found = recover(group(2), [in_memory(NEW, 0, 0), *in_bucket(OLD)])
    assert found.state == OLD
    assert ways(found) == ["bucket", "bucket"]
    assert "newer, but torn: step 120 of round 4 (1 of 2 parts)" in found.why


def test_what_lies_in_the_bucket_completes_what_is_in_memory() -> None:
    found = recover(group(2), [in_memory(NEW, 0, 0), Part(NEW, 1, 2, None)])
    assert found.state == NEW
    assert ways(found) == ["own memory", "bucket"]


def test_a_later_round_has_left_behind_what_it_did_not_begin_from() -> None:
    resumed = Saved(5, 105)
    parts = [in_memory(resumed, 0, 0), in_memory(resumed, 1, 1), *in_bucket(NEW)]
    assert recover(group(2), parts).state == resumed


def test_another_size_needs_all_parts_at_every_rank() -> None:
    found = recover(group(3), [in_memory(NEW, 0, 0), in_memory(NEW, 1, 1)])
    assert found.state == NEW
    assert [[fetch.part.rank for fetch in found.fetches[rank]] for rank in range(3)] == [[0, 1]] * 3
    assert ways(found) == ["own memory", "peer", "peer", "own memory", "peer", "peer"]


def test_where_every_rank_holds_all_one_copy_is_enough_for_any_size() -> None:
    whole = Part(NEW, 1, 2, an_agent(1), whole=True)
    found = recover(group(3), [whole, *in_bucket(OLD)])
    assert found.state == NEW
    assert ways(found) == ["peer", "own memory", "peer"]


def test_copies_are_asked_for_in_turn() -> None:
    copies = [Part(NEW, rank, 2, an_agent(rank), whole=True) for rank in range(2)]
    found = recover(group(6), copies)
    asked = [found.fetches[rank][0].part.holder for rank in range(2, 6)]
    assert sorted(asked, key=str) == [an_agent(0)] * 2 + [an_agent(1)] * 2


def test_with_nothing_complete_the_training_begins_anew() -> None:
    assert recover(group(2), []) == Recovery(None, {}, "no state is complete: none is held")
    torn = recover(group(2), [in_memory(NEW, 0, 0)])
    assert torn.state is None
    assert "step 120 of round 4 (1 of 2 parts)" in torn.why


def test_each_machine_is_kept_by_the_next_that_stays() -> None:
    places = group(4).places
    a0, a1, a2, a3 = map(an_agent, range(4))
    assert keepers(places) == {a0: a1, a1: a2, a2: a3, a3: a0}
    assert keepers(places, leaving={a2}) == {a0: a1, a1: a3, a2: a3, a3: a0}
    assert keepers(places, leaving={a0, a2, a3}) == {a0: a1, a2: a1, a3: a1}
    assert keepers(group(1).places) == {}


# --- whatever is held --------------------------------------------------------------------------

# What step 3 of a round saves is whole in every part; of other steps all three are needed.
PARTS = st.lists(
    st.builds(
        lambda number, step, rank, holder: Part(Saved(number, step), rank, 3, holder, step == 3),
        st.integers(1, 2),
        st.integers(1, 3),
        st.integers(0, 2),
        st.sampled_from([None, *map(an_agent, range(4))]),
    ),
    max_size=14,
)
GROUPS = st.integers(1, 4).map(group)


def complete(parts: list[Part], state: Saved) -> bool:
    mine = [part for part in parts if part.state == state]
    return any(part.whole for part in mine) or {part.rank for part in mine} == {0, 1, 2}


@given(GROUPS, PARTS)
@settings(max_examples=300)
def test_the_newest_complete_state_wins_and_nobody_gets_another(
    round_: Round, parts: list[Part]
) -> None:
    found = recover(round_, parts)
    states = {part.state for part in parts if complete(parts, part.state)}
    assert found.state == max(states, default=None)
    assert {fetch.part.state for each in found.fetches.values() for fetch in each} <= {found.state}


@given(GROUPS, PARTS)
@settings(max_examples=300)
def test_every_rank_gets_all_it_needs_from_who_holds_it(round_: Round, parts: list[Part]) -> None:
    found = recover(round_, parts)
    if found.state is None:
        return
    assert set(found.fetches) == set(range(round_.world_size))
    for rank, fetches in found.fetches.items():
        assert all(fetch.part in parts for fetch in fetches)
        got = {fetch.part.rank for fetch in fetches}
        needed = {rank} if round_.world_size == 3 else {0, 1, 2}
        assert got == needed or [fetch.part.whole for fetch in fetches] == [True]


@given(GROUPS, PARTS)
def test_no_wire_is_used_for_what_lies_at_hand(round_: Round, parts: list[Part]) -> None:
    found = recover(round_, parts)
    mine = [part for part in parts if part.state == found.state]
    for rank, fetches in found.fetches.items():
        here = round_.holder_of(rank).agent
        for part, way in fetches:
            same = [one.holder for one in mine if part.whole or one.rank == part.rank]
            peers = "peer" if any(same) else "bucket"
            assert way == ("own memory" if here in same else peers) == way_of(part, here)


@given(GROUPS, PARTS, st.data())
def test_the_order_in_which_holders_are_heard_changes_nothing(
    round_: Round, parts: list[Part], data: st.DataObject
) -> None:
    assert recover(round_, data.draw(st.permutations(parts))) == recover(round_, parts)


@given(GROUPS, PARTS, st.integers(0, 13))
def test_a_part_that_turns_out_bad_never_leads_to_a_newer_state(
    round_: Round, parts: list[Part], bad: int
) -> None:
    before, after = recover(round_, parts), recover(round_, parts[:bad] + parts[bad + 1 :])
    assert after.state is None or (before.state is not None and after.state <= before.state)


def way_of(part: Part, agent: AgentId) -> str:
    if part.holder is None:
        return "bucket"
    return "own memory" if part.holder == agent else "peer"
