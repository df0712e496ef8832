"""Every promise of `Store`, races and forks included, for any store anybody writes.

class TestMyStore(StoreSuite):
    @pytest.fixture
    def store(self) -> Store:
        return MyStore(...)          # empty, and the test's own
"""

from __future__ import annotations

import os
import pickle
import traceback
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import ClassVar

from spotfit.core.errors import (
    AlreadyExistsError,
    ConfigError,
    NotFoundError,
    UntrustworthyStoreError,
)
from spotfit.store.api import Store
from spotfit.store.probe import probe_create
from spotfit.store.transfer import download_tree, upload_tree

AWKWARD_KEYS = (
    "with blank",
    "a+b=c@d,e;f",
    "50%",
    "a%2Fb",
    "what?",
    "sharp#",
    "~tilde",
    "[brackets]",
    "quotes'\"",
    "ünïcode/日本",
    ".hidden",
    "two..dots",
    "...",
    "deep/er/and/deeper/still",
)
IMPOSSIBLE_KEYS = (
    "",
    "/",
    "/lead",
    "trail/",
    "a//b",
    ".",
    "..",
    "../up",
    "a/../b",
    "a/./b",
    "a/..",
    "line\nbreak",
    "nul\x00",
    "half \ud800",
)
BIG_BYTES = 20 * 2**20 + 17


class StoreSuite:
    """Inherit it, and give a fixture `store`."""

    creates: ClassVar[bool] = True
    """Whether the store offers `create`; one that does not must say so, and the probe with it."""

    is_shared: ClassVar[bool] = True
    """Whether other processes see the same objects."""

    # ── objects ──────────────────────────────────────────────────────────────────────────────────

    def test_what_is_put_is_what_is_got(self, store: Store) -> None:
        for body in (b"", b"words", bytes(range(256)) * 999):
            store.put("folder/object", body)
            assert store.get("folder/object") == body

    def test_a_view_of_memory_can_be_put(self, store: Store) -> None:
        store.put("object", memoryview(b"0123456789")[2:5])
        assert store.get("object") == b"234"

    def test_what_is_not_there_is_not_found(self, store: Store, tmp_path: Path) -> None:
        store.put("folder/object", b"")
        _refuses(NotFoundError, lambda: store.get("nothing"))
        _refuses(NotFoundError, lambda: store.get("folder"))
        _refuses(NotFoundError, lambda: store.get_range("folder/nothing", 0, 1))
        _refuses(NotFoundError, lambda: store.get_file("nothing", tmp_path / "file"))
        assert list(tmp_path.iterdir()) == []

    def test_a_range_ends_where_the_object_ends(self, store: Store) -> None:
        store.put("object", b"0123456789")
        assert store.get_range("object", 2, 3) == b"234"
        assert store.get_range("object", 8, 100) == b"89"
        assert store.get_range("object", 2, 0) == b""
        assert store.get_range("object", 10, 1) == b""
        assert store.get_range("object", 99, 1) == b""

    def test_an_object_goes_to_a_place_of_the_callers(self, store: Store) -> None:
        store.put("object", b"0123456789")
        for spare_bytes in (10, 12, 4, 0):
            spare = memoryview(bytearray(b"-" * spare_bytes))
            assert bytes(store.view("object", spare)) == b"0123456789"
            assert bytes(spare[10:]) == b"-" * (spare_bytes - 10)
        _refuses(NotFoundError, lambda: store.view("nothing", memoryview(bytearray(1))))

    def test_delete_may_be_said_twice(self, store: Store) -> None:
        store.put("folder/object", b"x")
        store.delete("folder/object")
        store.delete("folder/object")
        store.delete("never/was")
        _refuses(NotFoundError, lambda: store.get("folder/object"))
        assert list(store.list()) == []

    def test_awkward_keys_come_back_as_they_were(self, store: Store) -> None:
        for key in AWKWARD_KEYS:
            store.put(key, key.encode())
        assert _keys(store) == sorted(AWKWARD_KEYS)
        for key in AWKWARD_KEYS:
            assert store.get(key) == key.encode()
            store.delete(key)
        assert _keys(store) == []

    def test_keys_that_climb_or_cannot_be_are_refused(self, store: Store, tmp_path: Path) -> None:
        file = tmp_path / "file"
        file.write_bytes(b"x")
        for key in IMPOSSIBLE_KEYS:
            for call in (
                lambda key=key: store.get(key),
                lambda key=key: store.get_range(key, 0, 1),
                lambda key=key: store.put(key, b""),
                lambda key=key: store.delete(key),
                lambda key=key: store.put_file(key, file),
                lambda key=key: store.get_file(key, tmp_path / "other"),
                lambda key=key: store.under(key),
            ):
                _refuses(ConfigError, call)
        assert _keys(store) == []

    # ── listings ─────────────────────────────────────────────────────────────────────────────────

    def test_a_listing_is_in_order_and_tells_sizes(self, store: Store) -> None:
        for n, key in enumerate(("b", "a/2", "a.b", "a/10", "ab/1")):
            store.put(key, b"x" * n)
        assert list(store.list()) == [
            ("a.b", 2),
            ("a/10", 3),
            ("a/2", 1),
            ("ab/1", 4),
            ("b", 0),
        ]

    def test_a_prefix_is_a_folder_not_the_beginning_of_a_name(self, store: Store) -> None:
        for key in ("a/1", "a/b/2", "ab/1", "b"):
            store.put(key, b"")
        assert _keys(store, "a") == ["a/1", "a/b/2"]
        assert _keys(store, "a/b") == ["a/b/2"]
        assert _keys(store, "nothing") == []

    def test_a_listing_begins_after_a_key_there_or_not(self, store: Store) -> None:
        for key in ("a/1", "a/2", "a/3", "b"):
            store.put(key, b"")
        assert _keys(store, after="a/2") == ["a/3", "b"]
        assert _keys(store, "a", after="a/1") == ["a/2", "a/3"]
        assert _keys(store, "a", after="a/15") == ["a/2", "a/3"]
        assert _keys(store, after="c") == []

    def test_a_deeper_root_sees_what_is_below_and_nothing_else(self, store: Store) -> None:
        store.put("out", b"")
        store.put("deep/er/in", b"1")
        deeper = store.under("deep").under("er")
        assert _keys(deeper) == ["in"]
        assert _keys(deeper, after="hm") == ["in"]
        deeper.put("new", b"2")
        assert store.get("deep/er/new") == b"2"
        assert deeper.url.endswith("deep/er") or "deep/er" in deeper.url

    # ── files ────────────────────────────────────────────────────────────────────────────────────

    def test_files_small_and_big_travel_whole(self, store: Store, tmp_path: Path) -> None:
        for size_bytes in (0, 1, BIG_BYTES):
            there, back = tmp_path / "there", tmp_path / "back"
            there.write_bytes(_noise(size_bytes))
            store.put_file("files/one", there)
            store.get_file("files/one", back)
            assert back.read_bytes() == there.read_bytes()
        assert sorted(tmp_path.iterdir()) == [tmp_path / "back", tmp_path / "there"]

    def test_a_file_that_is_not_there_is_no_trouble_of_the_store(
        self, store: Store, tmp_path: Path
    ) -> None:
        _refuses(OSError, lambda: store.put_file("file", tmp_path / "nothing"))
        assert _keys(store) == []

    def test_a_directory_goes_there_and_back(self, store: Store, tmp_path: Path) -> None:
        there, back = tmp_path / "there", tmp_path / "back"
        (there / "sub").mkdir(parents=True)
        (there / "small").write_bytes(b"")
        (there / "sub" / "big").write_bytes(_noise(BIG_BYTES))
        records = upload_tree(store, "tree", there)
        download_tree(store, "tree", back, records)
        assert {str(file.relative_to(back)) for file in back.rglob("*")} == {
            "small",
            "sub",
            "sub/big",
        }
        assert (back / "sub" / "big").read_bytes() == (there / "sub" / "big").read_bytes()

    # ── create ───────────────────────────────────────────────────────────────────────────────────

    def test_what_exists_is_not_created_again(self, store: Store) -> None:
        if not self.creates:
            _refuses(UntrustworthyStoreError, lambda: store.create("object", b"first"))
            return
        store.create("object", b"first")
        _refuses(AlreadyExistsError, lambda: store.create("object", b"second"))
        store.put("other", b"first")
        _refuses(AlreadyExistsError, lambda: store.create("other", b"second"))
        assert (store.get("object"), store.get("other")) == (b"first", b"first")

    def test_after_a_delete_it_can_be_created_again(self, store: Store) -> None:
        if not self.creates:
            return
        store.create("folder/object", b"first")
        store.delete("folder/object")
        store.create("folder/object", b"second")
        assert store.get("folder/object") == b"second"

    def test_of_many_threads_that_create_one_wins(self, store: Store) -> None:
        if not self.creates:
            return
        with ThreadPoolExecutor(8) as racers:
            for n in range(12):
                start = Barrier(8)
                won = racers.map(
                    lambda racer, n=n, start=start: _wins(store, f"race/{n}", racer, start),
                    range(8),
                )
                winners = [racer for racer, wins in enumerate(won) if wins]
                assert len(winners) == 1, f"race {n}: {winners}"
                assert store.get(f"race/{n}") == str(winners[0]).encode()

    def test_of_many_processes_that_create_one_wins(self, store: Store) -> None:
        if not (self.creates and self.is_shared):
            return
        store.put("warm", b"")  # the parent has used it: its children must manage nevertheless
        _in_children(4, lambda child: _create_all(store, f"child {child}"))
        owners = [store.get(f"race/{n}") for n in range(12)]
        assert len(_keys(store, "race")) == 12
        claims = b"".join(store.get(f"claims/child {child}") for child in range(4))
        assert sorted(claims.splitlines()) == sorted(
            b"race/%d by %s" % (n, owner) for n, owner in enumerate(owners)
        )

    def test_the_probe_judges_it_rightly(self, store: Store) -> None:
        if self.creates:
            probe_create(store)
        else:
            _refuses(UntrustworthyStoreError, lambda: probe_create(store))
        assert _keys(store) == []

    # ── other places ─────────────────────────────────────────────────────────────────────────────

    def test_it_can_be_pickled(self, store: Store) -> None:
        store.put("object", b"x")
        again = pickle.loads(pickle.dumps(store))  # noqa: S301  # pickled in the same line
        assert again.get("object") == b"x"

    def test_a_child_forked_after_use_can_use_it(self, store: Store) -> None:
        if not self.is_shared:
            return
        store.put("from parent", b"parent")

        def child(_: int) -> None:
            assert store.get("from parent") == b"parent"
            store.put("from child", b"child")
            _in_children(1, lambda _: store.put("from grandchild", store.get("from child")))

        _in_children(1, child)
        assert store.get("from child") == b"child"
        assert store.get("from grandchild") == b"child"


def _refuses(kind: type[BaseException], call: Callable[[], object]) -> None:
    try:
        answer = call()
    except kind:
        return
    raise AssertionError(f"{kind.__name__} was promised, {answer!r} was answered")


def _keys(store: Store, prefix: str = "", *, after: str = "") -> list[str]:
    return [found.key for found in store.list(prefix, after=after)]


def _noise(size_bytes: int) -> bytes:
    block = uuid.uuid4().bytes * 4096
    return (block * (size_bytes // len(block) + 1))[:size_bytes]


def _wins(store: Store, key: str, racer: int, start: Barrier) -> bool:
    start.wait(60)
    try:
        store.create(key, str(racer).encode())
    except AlreadyExistsError:
        return False
    return True


def _create_all(store: Store, me: str) -> None:
    claims = ""
    for n in range(12):
        try:
            store.create(f"race/{n}", me.encode())
        except AlreadyExistsError:
            continue
        claims += f"race/{n} by {me}\n"
    store.put(f"claims/{me}", claims.encode())


def _in_children(count: int, story: Callable[[int], None]) -> None:
    """Run `story` in that many forked children, and expect all of them to end well."""
    children = [_forked(story, n) for n in range(count)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert _all_well(codes), f"children ended with {codes}"


def _forked(story: Callable[[int], None], n: int) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        story(n)
        code = 0
    except BaseException:  # noqa: BLE001  # a child's border: whatever it was, the parent hears of it
        traceback.print_exc()
    finally:
        os._exit(code)


def _all_well(codes: Sequence[int]) -> bool:
    return all(code == 0 for code in codes)
