"""Copies go to the neighbour save by save, and stay there until a later save is whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotfit.agent.copies import Copy, Due, Line, Shelf, expendable, is_late


def due(report: int, rank: int, *, to: str = "a", round_: int = 3) -> Due:
    return Due(Copy(round_, report, rank), Path(), (), (0, 1), to)


def line(*dues: Due) -> Line:
    made = Line()
    for one in dues:
        made.add(one)
    return made


def taken(line: Line) -> list[tuple[int, int]]:
    """All that is left, by report and rank."""
    found = []
    while (one := line.take()) is not None:
        found.append((one.copy.report, one.copy.rank))
    return found


def test_what_was_begun_is_sent_to_its_end() -> None:
    dues = line(due(0, 1), due(0, 0))
    first = dues.take()
    assert first is not None
    assert first.copy.rank == 0
    dues.add(due(1, 0))
    dues.add(due(1, 1))
    assert taken(dues) == [(0, 1), (1, 0), (1, 1)]


def test_who_is_told_of_last_goes_with_its_save_all_the_same() -> None:
    dues = line(due(0, 0))
    dues.take()
    dues.add(due(1, 0))
    dues.add(due(0, 1))
    assert taken(dues) == [(0, 1), (1, 0)]


def test_who_is_told_of_last_takes_no_later_save_s_place() -> None:
    dues = line(due(0, 0))
    dues.take()
    dues.add(due(2, 0))
    dues.add(due(1, 1))
    dues.add(due(2, 1))
    assert taken(dues) == [(2, 0), (2, 1)]
    dues.add(due(1, 1))
    assert taken(dues) == [], "its fellow is there no more"
    dues = line(due(2, 0), due(1, 0, round_=4), due(3, 1))
    assert taken(dues) == [(1, 0)], "a later round is later"
    dues = line(due(0, 0))
    dues.take()
    dues.add(due(2, 0))
    dues.add(due(1, 0, to="b"))
    assert taken(dues) == [(1, 0)], "the vault before is there no more"


def test_of_what_waits_the_last_save_is_sent() -> None:
    dues = line(due(0, 0))
    dues.take()
    for report in range(1, 40):
        for rank in (0, 1):
            dues.add(due(report, rank))
    assert taken(dues) == [(39, 0), (39, 1)]


def test_nothing_of_a_save_is_sent_once_a_part_of_it_is_lost() -> None:
    dues = line(due(0, 0), due(0, 1))
    lost = dues.take()
    assert lost is not None
    dues.add(due(1, 0))
    dues.lose(lost)
    dues.add(due(0, 2))
    assert taken(dues) == [(1, 0)]


def test_what_is_begun_late_gives_way_to_what_is_new() -> None:
    """Its segment will be written anew before all ranks' are sent, as the last one's was."""
    dues = line(due(0, 0), due(0, 1))
    lost = dues.take()
    assert lost is not None
    dues.add(due(1, 0))
    dues.add(due(1, 1))
    dues.lose(lost)
    late = dues.take()
    assert late is not None
    assert (late.copy.report, dues.is_needless(late)) == (1, False)
    dues.add(due(2, 0))
    assert dues.is_needless(late)
    dues.lose(late)
    dues.add(due(2, 1))
    begun = dues.take()
    assert begun is not None
    dues.add(due(3, 0))
    assert (begun.copy.report, dues.is_needless(begun)) == (2, False)
    assert taken(dues) == [(2, 1), (3, 0)]


def test_what_is_begun_late_does_not_give_way_to_an_earlier_save() -> None:
    dues = line(due(0, 0))
    lost = dues.take()
    assert lost is not None
    dues.add(due(2, 0))
    dues.add(due(2, 1))
    dues.lose(lost)
    late = dues.take()
    assert late is not None
    dues.add(due(1, 1))
    assert not dues.is_needless(late)
    assert taken(dues) == [(2, 1)]


def test_another_vault_waits_for_what_it_lacks_only() -> None:
    dues = line(due(0, 0), due(0, 1))
    failed = dues.take()
    assert failed is not None
    for rank in (0, 1):
        dues.add(due(0, rank, to="b"))
    dues.lose(failed)
    found = [dues.take(), dues.take(), dues.take()]
    assert [one and (one.to, one.copy.rank) for one in found] == [("b", 0), ("b", 1), None]


@pytest.mark.parametrize(
    ("lies", "late"),
    [
        (Copy(3, 9, 0), False),
        (Copy(4, 0, 1), False),
        (Copy(4, 9, 0), True),
        (Copy(4, 7, 0), False),
        (Copy(4, 9, 1), False),
        (Copy(5, 0, 1), True),
    ],
)
def test_a_copy_comes_too_late(lies: Copy, late: bool) -> None:
    assert is_late(Copy(4, 8, 0), [lies]) is late


def test_the_last_whole_save_is_kept_until_a_later_one_is() -> None:
    saves = [Copy(3, report, rank) for report, rank in [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0)]]
    found = expendable(Copy(3, 4, 0), (0, 1), saves)
    assert list(found) == [Copy(3, 1, 0), Copy(3, 1, 1), Copy(3, 3, 0)]


def test_what_other_machines_have_here_stays() -> None:
    lying = [Copy(3, 1, 0), Copy(3, 2, 0), Copy(3, 1, 5), Copy(2, 9, 5)]
    assert list(expendable(Copy(3, 3, 0), (0,), lying)) == [Copy(3, 1, 0), Copy(2, 9, 5)]


def on(folder: Path, *copies: Copy) -> Shelf:
    folder.mkdir(exist_ok=True)
    for copy in copies:
        (folder / copy.name).touch()
    return Shelf(folder)


def test_reports_are_numbers(tmp_path: Path) -> None:
    shelf = on(tmp_path, *(Copy(3, report, 0) for report in (9, 10, 11)))
    assert shelf.make_room(Copy(3, 12, 0), (0,))
    assert list(shelf.lying) == [Copy(3, 11, 0)]
    assert not shelf.make_room(Copy(2, 13, 0), (0,))


def test_what_was_taken_back_lies_here_no_more_nor_comes_again(tmp_path: Path) -> None:
    lying = Copy(2, 9, 0), Copy(3, 4, 0), Copy(3, 5, 1), Copy(3, 6, 0)
    shelf = on(tmp_path / "copies", *lying)
    shelf.take_back(Copy(3, 6, 0))
    assert list(shelf.lying) == [Copy(3, 6, 0)], "that one was saved since"
    coming = tmp_path / "coming"
    coming.touch()
    assert not shelf.make_room(Copy(3, 5, 1), (0, 1))
    assert not shelf.put(coming, Copy(3, 5, 1)), "it was on its way"
    shelf.take_back(Copy(3, 0, 0))
    assert not shelf.put(coming, Copy(3, 5, 1)), "nor where an earlier word comes late"
    assert shelf.put(coming, Copy(3, 6, 1))
