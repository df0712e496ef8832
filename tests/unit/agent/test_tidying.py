"""Tidying: what nobody may use any more goes, one by one, and never what is in use again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from spotfit.agent.hub import Hub
from spotfit.agent.tidying import Tidying
from spotfit.checkpoint.debris import note
from spotfit.checkpoint.manifest import Manifest
from spotfit.checkpoint.restore import check_present
from spotfit.core.codec import encode
from spotfit.core.errors import StorePermissionError, TransientStoreError
from spotfit.ledger import keys
from spotfit.model.view import View
from spotfit.model.wire import Files, Named
from spotfit.store.memory import MemoryStore
from spotfit.testing.builders import a_commit, a_view
from tests.unit.checkpoint.kept import part, saved
from tests.unit.control.paper import Slow


class Stubborn(MemoryStore):
    """Deletes nothing while it has trouble."""

    trouble: Exception | None = None

    def delete(self, key: str) -> None:
        if self.trouble is not None:
            raise self.trouble
        super().delete(key)


class House:
    """A bucket, and a leader's broom."""

    def __init__(self) -> None:
        self.store = Stubborn()
        self.errands = Slow()
        self.tidying = Tidying(self.store, self.errands)
        self.now = 0.0

    def save(self, name: str, round_number: int = 1) -> None:
        self.store.put(f"{name}/model", b"weights")
        part = Manifest(name, round_number, 0, 0, (0,), {}, ())
        self.store.put(part.key, encode(part))

    def go_on(self, view: View, *, saving: tuple[str, ...] = (), times: int = 6) -> None:
        """Let errands come back so often, far enough apart for any pause."""
        for _ in range(times):
            self.tidying.go_on(view, saving, self.now)
            self.errands.finish()
            self.now += 5.0
        self.tidying.go_on(view, saving, self.now)

    def busy(self) -> bool:
        return self.tidying.busy

    def holds(self, name: str) -> bool:
        return any(key.startswith(f"{name}/") for key, _ in self.store.list())


def test_what_was_dropped_is_deleted() -> None:
    house = House()
    house.save("c0")
    house.tidying.drop("c0")
    assert house.busy()
    house.go_on(a_view())
    assert not house.busy()
    assert list(house.store.list()) == []


def test_a_name_that_is_in_use_again_stays() -> None:
    house = House()
    for name in ("saved", "committed"):
        house.save(name)
        house.tidying.drop(name)
    house.go_on(a_view(checkpoints=(a_commit("committed"),)), saving=("saved",))
    assert house.holds("saved")
    assert house.holds("committed")
    assert not house.busy()


def test_what_others_share_files_with_goes_once_they_are_saved() -> None:
    house = House()
    for name in ("base", "other"):
        house.save(name)
        house.tidying.drop(name)
    for _ in range(4):
        house.tidying.go_on(a_view(), (), house.now, ("base",))
        house.errands.finish()
    assert house.holds("base")
    assert not house.holds("other"), "and holds up nobody"
    house.go_on(a_view())
    assert not house.holds("base")


def test_a_bucket_that_is_away_is_asked_again_and_one_that_refuses_is_not() -> None:
    house = House()
    house.save("c0")
    house.store.trouble = TransientStoreError("away")
    house.tidying.drop("c0")
    house.go_on(a_view())
    assert house.busy()
    house.store.trouble = StorePermissionError("no")
    house.go_on(a_view())
    assert not house.busy(), "the run must end some day"
    assert house.holds("c0")


def test_what_rounds_before_left_behind_is_found_and_deleted() -> None:
    house = House()
    for name, number in (("old", 1), ("kept", 1), ("new", 2)):
        note(house.store, name, number, made=True)
        house.save(name, number)
    view = a_view(checkpoints=(a_commit("kept"),))
    house.tidying.search(view, before=2)
    house.go_on(view)
    assert [house.holds(name) for name in ("old", "kept", "new")] == [False, True, True]
    assert not house.busy()


def test_what_a_leader_before_dropped_and_did_not_delete_goes_wherever_it_lies() -> None:
    house = House()
    house.store.put("models/best/x", b"1")
    part = Manifest("c0", 1, 0, 0, (0,), {}, (), at="models/best")
    house.store.put(part.key, encode(part))
    view = a_view(dropped=("c0",))
    house.tidying.search(view, before=9)
    house.go_on(view)
    assert list(house.store.list()) == []


def test_what_leaders_before_dropped_is_looked_for_once_where_no_round_follows() -> None:
    house = House()
    for name in ("c0", "kept", "later"):
        note(house.store, name, 1, made=True)
        house.save(name)
    house.tidying.inherit(a_view(dropped=("c0", "gone")))
    assert house.busy()
    house.go_on(a_view(dropped=("c0", "gone")))
    assert [house.holds(name) for name in ("c0", "kept")] == [False, True]
    house.tidying.inherit(a_view(dropped=("later",)))
    assert not house.busy(), "that one it has dropped itself"


def test_what_was_looked_for_before_a_round_is_not_looked_for_after_it() -> None:
    house = House()
    house.tidying.search(a_view(), before=2)
    house.go_on(a_view())
    house.tidying.inherit(a_view(dropped=("c0",)))
    assert not house.busy()


def test_a_note_is_left_for_every_name_that_is_given() -> None:
    house = House()
    house.tidying.given("c0", 3, made=True)
    house.tidying.given("step-1", 3, made=False)
    house.go_on(a_view())
    left = {key for key, _ in house.store.list()}
    assert left == {keys.begun("c0", 3, made=True), keys.begun("step-1", 3, made=False)}


def test_who_leads_no_more_deletes_nothing_more() -> None:
    house = House()
    leads = iter([True, False])
    deposed = Tidying(house.store, house.errands, lambda: next(leads))
    house.save("c0")
    house.save("c0", 2)
    deposed.drop("c0")
    deposed.go_on(a_view(), (), 0.0)
    house.errands.finish()
    assert not house.holds("c0")
    assert house.holds(".spotfit"), "its manifests"


class Interrupted(MemoryStore):
    """Something happens just before the second object is deleted."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        super().__init__()
        self.deleted = 0
        self.meanwhile = meanwhile

    def delete(self, key: str) -> None:
        self.deleted += 1
        if self.deleted == 2:
            self.meanwhile()
        super().delete(key)


def test_a_former_leader_that_still_deletes_a_name_harms_nobody_who_uses_it_again(
    tmp_path: Path,
) -> None:
    """It may not know that it leads no more. Its successor knows that the name was dropped."""
    named: list[str] = []

    def use_it_again() -> None:
        hub = Hub(2, 1, name_for=str, last_called=a_view(dropped=("best",)).last_called)
        ((_, frame),) = hub.take(0, msgspec.Raw(encode(Files(0, msgspec.Raw(b"{}"), "best"))), 0.0)
        assert isinstance(frame, Named)
        named.append(frame.name)
        again = part(frame.name, round_number=2)
        saved(store, tmp_path / "new", again, **{f"f{n}": "new" for n in range(5)})

    store = Interrupted(use_it_again)
    saved(store, tmp_path / "old", part("best"), **{f"f{n}": "old" for n in range(5)})
    errands = Slow()
    former = Tidying(store, errands)
    former.drop("best")
    former.go_on(a_view(dropped=("best",)), (), 0.0)
    errands.finish()
    assert named == ["best@2-0"]
    check_present(store, "best@2-0")
    assert {key.partition("/")[0] for key, _ in store.list()} == {".spotfit", "best@2-0"}
