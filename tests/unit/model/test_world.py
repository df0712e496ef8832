"""Rounds: who holds which ranks."""

from spotfit.testing.builders import a_member, a_round, an_agent

ROUND = a_round(members=[a_member(0, slots=2), a_member(1, slots=3)])


def test_ranks_are_consecutive_over_the_nodes() -> None:
    assert ROUND.world_size == 5
    assert [ROUND.holder_of(rank).agent for rank in range(5)] == [
        *[an_agent(0)] * 2,
        *[an_agent(1)] * 3,
    ]


def test_who_has_no_place_is_told_so() -> None:
    place = ROUND.place_of(an_agent(1))
    assert place is not None
    assert place.ranks == range(2, 5)
    assert ROUND.place_of(an_agent(9)) is None
