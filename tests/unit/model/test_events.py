"""What was ever written must load for ever: the golden journal is one of every kind of entry.

Never edit those files. A new event adds a file, a new field one more beside the old.
"""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from spotfit.core.codec import UNREADABLE, decoder, encode
from spotfit.core.ids import AgentId
from spotfit.model.events import Blame, Entry, Event, FitEnded, Taken
from spotfit.model.fold import fold
from spotfit.model.view import View
from spotfit.testing.builders import a_commit

GOLDEN = Path(__file__).parents[2] / "golden" / "ledger" / "v1"
FILES = sorted(GOLDEN.glob("*.json"))


def entries() -> list[Entry]:
    return [decoder(Entry).decode(file.read_bytes()) for file in FILES]


def tags() -> set[str]:
    return {kind.__struct_config__.tag for kind in typing.get_args(Event)}


def test_there_is_one_of_every_kind() -> None:
    assert {msgspec.json.decode(file.read_bytes())["event"]["type"] for file in FILES} == tags()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_nothing_that_was_written_is_lost_on_the_way(file: Path) -> None:
    written = msgspec.json.decode(file.read_bytes())
    again = msgspec.json.decode(encode(decoder(Entry).decode(file.read_bytes())))
    assert_within(written, again)


def test_the_old_journal_still_means_what_it_meant() -> None:
    view = View()
    for entry in entries():
        view = fold(view, entry)
    assert view.next_slot == len(FILES)
    assert view.spec is not None
    assert (view.spec.name, view.spec.limits.worker, view.spec.keep.score) == (
        "digits",
        1,
        "eval/loss",
    )
    assert view.leads(AgentId("a-1"))
    names = [*(f"epoch-{n}" for n in range(2, 7)), "mine@5-5"]
    assert [one.name for one in view.checkpoints] == names
    assert [one.folder for one in view.checkpoints][-2:] == ["epoch-6", "mine"]
    assert view.checkpoints[1].metrics == {"loss": 0.2, "accuracy": 0.9}
    assert (view.unvalidated, view.attempts) == ((), 1)
    assert view.training_ended is not None
    assert view.dropped == ("epoch-1",)
    assert view.failures == {Blame.PREEMPTION: 3, Blame.NETWORK: 1, Blame.WORKER: 1}
    assert (view.endings.all_ended, view.endings.lived_s[3]) == (5, 0.0)
    assert view.last_refusal == "no capacity in this zone"
    assert [token for token, group in view.groups.items() if group.standing] == ["t-9"]
    assert view.lost_agents == frozenset(), "a round was opened since"
    assert view.cancelled == "cancel() was called"
    assert isinstance(view.ended, FitEnded)
    assert view.ended.result_key == ".spotfit/results/1-0.pkl"
    assert view.ended.taken == Taken({"t-1/0": (0, 1)}, 1_767_225_720_000, timed_out=True)


def test_a_name_that_was_used_again_is_called_as_it_was_chosen() -> None:
    again, other = a_commit("last@2-7", round=2, report=7), a_commit("last@2-7", round=3, report=7)
    assert [one.called for one in (again, other)] == ["last", "last@2-7"]


def test_a_field_that_came_later_does_not_stop_an_older_reader() -> None:
    written = msgspec.json.decode(FILES[0].read_bytes())
    written["event"]["spec"]["colour"] = "blue"
    written["weather"] = "fine"
    assert decoder(Entry).decode(encode(written)) == entries()[0]


def test_an_event_nobody_here_knows_is_not_taken_for_another() -> None:
    written = msgspec.json.decode(FILES[0].read_bytes())
    written["event"]["type"] = "moon_landed"
    with pytest.raises(UNREADABLE, match="moon_landed"):
        decoder(Entry).decode(encode(written))


def assert_within(part: Any, whole: Any) -> None:
    """Every field of `part` is in `whole` with the same value; `whole` may know more."""
    if isinstance(part, dict):
        for key, value in part.items():
            assert_within(value, whole[key])
    elif isinstance(part, list):
        assert len(part) == len(whole)
        for one, other in zip(part, whole, strict=True):
            assert_within(one, other)
    else:
        assert part == whole
