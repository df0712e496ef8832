"""What a round leaves to the next: nothing complete is lost, nothing damaged is shared."""

from __future__ import annotations

import msgspec

from spotfit.agent.hub import Hub
from spotfit.agent.legacy import Legacy
from spotfit.checkpoint.debris import note
from spotfit.checkpoint.manifest import Manifest
from spotfit.core.codec import encode
from spotfit.ledger.run import Ledger
from spotfit.model.view import View
from spotfit.model.wire import Damaged, Files, FromWorker, Saved, Unsaved
from spotfit.store.memory import MemoryStore
from spotfit.store.transfer import FileRecord
from spotfit.testing.builders import RUN, a_commit, a_round, a_view, an_agent
from tests.unit.control.paper import Slow


class House:
    """A bucket, what a leader remembers of its rounds, and the hub of round 3."""

    def __init__(self) -> None:
        self.store, self.errands = MemoryStore(), Slow()
        self.ledger = Ledger(self.store, RUN, an_agent(0))
        self.legacy = Legacy(self.ledger, self.errands)
        self.hub = Hub(3, 1, name_for=lambda n: f"made-{n}", base_for=lambda: "before")

    def uploaded(self, name: str, *, round_number: int = 3, report: int = 0) -> None:
        """A checkpoint of one rank, complete in the bucket."""
        part = Manifest(name, round_number, report, 0, (0,), {}, ())
        self.store.put(part.key, encode(part))

    def say(self, *frames: FromWorker) -> None:
        for frame in frames:
            self.hub.take(0, msgspec.Raw(encode(frame)), 0.0)

    def searched(self, view: View) -> bool:
        assert not self.legacy.search(view, 0.0), "the bucket takes its time"
        self.errands.finish()
        return self.legacy.search(view, 0.0)

    def uncommitted(self, view: View, hub: Hub | None = None) -> list[str]:
        return [one.name for one in self.legacy.uncommitted(view, hub)]


AFTER_3 = a_view(last_round=a_round(3))
SAVE = Files(0, msgspec.Raw(b"{}"), shares=True)


def test_what_was_complete_when_its_round_was_closed_is_committed_after_it() -> None:
    house = House()
    house.say(SAVE, Saved(0, "made-0", 10))
    assert house.uncommitted(AFTER_3, house.hub) == ["made-0"]
    house.legacy.adopt(house.hub)
    assert house.uncommitted(AFTER_3) == ["made-0"]
    house.legacy.committed("made-0")
    assert house.uncommitted(AFTER_3) == []


def test_what_nobody_committed_is_found_in_the_bucket_oldest_first() -> None:
    house = House()
    house.uploaded("later", report=2)
    house.uploaded("sooner", report=1)
    house.uploaded("known", report=0)
    view = a_view(
        last_round=a_round(3), checkpoints=(a_commit("known", round=3),), dropped=("dropped",)
    )
    house.uploaded("dropped", report=3)
    assert house.searched(view)
    assert house.uncommitted(view) == ["sooner", "later"]


def test_what_lacks_files_of_an_earlier_one_that_was_deleted_meanwhile_is_not_committed() -> None:
    """Only the leader in whose term it was saved knew whose files it was to share."""
    house = House()
    for report, shares in enumerate(("kept", "deleted")):
        file = FileRecord("chunk", 1, "", shares, "m")
        part = Manifest(f"c{report}", 3, report, 0, (0,), {}, (file,))
        house.store.put(part.key, encode(part))
    house.store.put("kept/chunk", b"x")
    assert house.searched(AFTER_3)
    assert house.uncommitted(AFTER_3) == ["c0"]


def test_names_that_anything_tells_of_are_gone_or_used() -> None:
    house = House()
    note(house.store, "half", 2, made=False)
    house.uploaded("done", round_number=2)
    house.say(Files(0, msgspec.Raw(b"{}"), "just now"), Files(1, msgspec.Raw(b"{}"), "just now"))
    house.legacy.take(house.hub)
    assert house.searched(AFTER_3)
    names = ("half", "done", "just now", "just now@3-1")
    assert [house.legacy.last_called(name) for name in (*names, "new")] == ["", "", "", "", None]
    for name in ("done", "half@1-0"):
        house.ledger.append(a_commit(name), after=house.ledger.catch_up())
    assert [house.legacy.last_called(name) for name in ("done", "half")] == ["done", "half@1-0"]


def test_a_round_that_begins_leaves_the_rest_behind() -> None:
    house = House()
    house.uploaded("late")
    house.searched(AFTER_3)
    house.legacy.open(4)
    assert house.uncommitted(AFTER_3) == []


def test_what_an_older_round_left_or_is_older_than_what_is_committed_is_debris() -> None:
    house = House()
    house.uploaded("of round 2", round_number=2)
    house.uploaded("first", report=0)
    house.searched(AFTER_3)
    assert house.uncommitted(AFTER_3) == ["first"]
    committed = a_commit("second", round=3, report=1)
    assert house.uncommitted(a_view(last_round=a_round(3), checkpoints=(committed,))) == []
    assert house.uncommitted(a_view()) == [], "of no round at all"


def with_snapshot(name: str, round_number: int) -> View:
    return a_view(checkpoints=(a_commit(name, round=round_number, snapshot=True),))


def test_files_are_shared_with_the_latest_snapshot_of_ones_own_rounds() -> None:
    house = House()
    view = with_snapshot("mine", 3)
    assert house.legacy.base(view, None) == "", "an earlier leader may know that it is damaged"
    house.legacy.open(3)
    house.legacy.open(4)
    assert house.legacy.base(view, house.hub) == "mine"
    assert house.legacy.base(with_snapshot("of another", 2), house.hub) == ""
    plain = a_view(checkpoints=(a_commit("no snapshot", round=3),))
    assert house.legacy.base(plain, house.hub) == ""


def test_what_any_rank_found_damaged_is_never_shared_again() -> None:
    house = House()
    house.legacy.open(3)
    view = with_snapshot("torn", 3)
    house.say(Damaged("torn"))
    assert house.legacy.base(view, house.hub) == ""
    house.legacy.take(house.hub)
    assert house.legacy.base(view, None) == "", "nor in the next round"


def test_what_outlives_its_round_keeps_what_it_shares_files_with() -> None:
    house = House()
    house.say(SAVE)
    house.legacy.take(house.hub)
    assert house.legacy.bases == {"before"}


def test_what_lacks_files_is_never_committed_whatever_is_found_of_it() -> None:
    """The answer to its last manifest was lost, and so it was told to be lost itself."""
    house = House()
    house.uploaded("made-0")
    house.say(SAVE, Unsaved(0, "the bucket did not answer"))
    house.legacy.take(house.hub)
    assert house.searched(AFTER_3)
    assert house.uncommitted(AFTER_3) == []
