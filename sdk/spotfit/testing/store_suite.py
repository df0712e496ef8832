"""Conformance tests of the `Store` protocol, including races and forks, for any store.

class TestMyStore(StoreSuite):
    @pytest.fixture
    def store(self) -> Store:
        return MyStore(...)          # empty, not shared with other tests
"""

from __future__ import annotations

import os
import pickle
import traceback
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import ClassVar

from spotfit.core.errors import (
    AlreadyExistsError,
    AtomicCreateUnsupportedError,
    ConfigError,
    NotFoundError,
    ObjectChangedError,
)
from spotfit.store.api import Store
from spotfit.store.factory import probe_create
from spotfit.store.transfer import download_bytes, download_tree, upload_tree

# Keys that stores must not normalise, encode twice or interpret as patterns.
UNUSUAL_KEYS = (
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
# Keys that would leave the root, or that some store or file system cannot represent.
INVALID_KEYS = (
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
# Several parts of a multipart upload (8 MiB each), with an incomplete last part.
LARGE_FILE_BYTES = 20 * 2**20 + 17


class StoreSuite:
    """Base class of tests of a `Store`. A subclass provides the fixture `store`.

    The fixture returns an empty store that is not shared with other tests.
    """

    supports_create: ClassVar[bool] = True
    """Whether the store offers an atomic `create`; otherwise `create` and the probe must raise."""

    is_shared: ClassVar[bool] = True
    """Whether other processes see the same objects."""

    # ── objects ──────────────────────────────────────────────────────────────────────────────────

    def test_get_returns_what_was_put(self, store: Store) -> None:
        """`put` creates and replaces objects, also empty ones, and `get` returns their bytes."""
        for body in (b"", b"words", bytes(range(256)) * 999):
            store.put("folder/object", body)
            assert store.get("folder/object") == body

    def test_put_accepts_a_memoryview(self, store: Store) -> None:
        """`put` writes a slice of a memoryview, not its whole buffer."""
        store.put("object", memoryview(b"0123456789")[2:5])
        assert store.get("object") == b"234"

    def test_a_missing_object_raises_not_found(self, store: Store, tmp_path: Path) -> None:
        """All reads raise `NotFoundError` and leave no file, also for the prefix of a key."""
        store.put("folder/object", b"")
        _assert_raises(NotFoundError, lambda: store.get("nothing"))
        _assert_raises(NotFoundError, lambda: store.get("folder"))
        _assert_raises(NotFoundError, lambda: store.get_range("folder/nothing", 0, 1))
        _assert_raises(NotFoundError, lambda: store.get_file("nothing", tmp_path / "file"))
        assert list(tmp_path.iterdir()) == []

    def test_a_range_ends_where_the_object_ends(self, store: Store) -> None:
        """`get_range` returns fewer bytes, or none, at the end of the object; it does not raise."""
        store.put("object", b"0123456789")
        assert store.get_range("object", 2, 3) == b"234"
        assert store.get_range("object", 8, 100) == b"89"
        assert store.get_range("object", 2, 0) == b""
        assert store.get_range("object", 10, 1) == b""
        assert store.get_range("object", 99, 1) == b""

    def test_an_object_is_read_into_the_buffer_of_the_caller(self, store: Store) -> None:
        """`get_memoryview` works with a buffer of any size and writes no more than the object."""
        store.put("object", b"0123456789")
        for spare_bytes in (10, 12, 4, 0):
            spare = memoryview(bytearray(b"-" * spare_bytes))
            assert bytes(store.get_memoryview("object", spare)) == b"0123456789"
            assert bytes(spare[10:]) == b"-" * (spare_bytes - 10)
        _assert_raises(
            NotFoundError, lambda: store.get_memoryview("nothing", memoryview(bytearray(1)))
        )

    def test_a_range_of_a_listed_version_is_read(self, store: Store) -> None:
        """`get_range` accepts the version of a listing and of `head`, which are the same."""
        store.put("folder/object", b"0123456789")
        (listed,) = store.list("folder")
        assert store.head("folder/object") == listed
        assert store.get_range("folder/object", 2, 3, version=listed.version) == b"234"
        assert store.get_range("folder/object", 10, 1, version=listed.version) == b""

    def test_a_range_of_a_replaced_version_is_refused(self, store: Store) -> None:
        """`get_range` raises `ObjectChangedError` if the object was replaced."""
        store.put("object", b"0123456789")
        version = store.head("object").version
        store.put("object", b"9876543210-")
        _assert_raises(ObjectChangedError, lambda: store.get_range("object", 2, 3, version=version))
        assert store.head("object").version != version

    def test_head_of_a_missing_object_raises_not_found(self, store: Store) -> None:
        """`head` raises `NotFoundError` for a missing object and for a folder."""
        store.put("folder/object", b"")
        _assert_raises(NotFoundError, lambda: store.head("nothing"))
        _assert_raises(NotFoundError, lambda: store.head("folder"))

    def test_delete_is_idempotent(self, store: Store) -> None:
        """`delete` of a missing object is no error, and a deleted object is not listed."""
        store.put("folder/object", b"x")
        store.delete("folder/object")
        store.delete("folder/object")
        store.delete("never/was")
        _assert_raises(NotFoundError, lambda: store.get("folder/object"))
        assert list(store.list()) == []

    def test_unusual_keys_are_listed_unchanged(self, store: Store) -> None:
        """Keys with blanks, "%" or non-ASCII characters are neither encoded nor normalised."""
        for key in UNUSUAL_KEYS:
            store.put(key, key.encode())
        assert _keys(store) == sorted(UNUSUAL_KEYS)
        for key in UNUSUAL_KEYS:
            assert store.get(key) == key.encode()
            store.delete(key)
        assert _keys(store) == []

    def test_invalid_keys_are_refused(self, store: Store, tmp_path: Path) -> None:
        """Reads, writes, `delete` and `subtree` raise `ConfigError` for keys such as "a//b"."""
        file = tmp_path / "file"
        file.write_bytes(b"x")
        for key in INVALID_KEYS:
            for call in (
                lambda key=key: store.get(key),
                lambda key=key: store.get_range(key, 0, 1),
                lambda key=key: store.put(key, b""),
                lambda key=key: store.delete(key),
                lambda key=key: store.put_file(key, file),
                lambda key=key: store.get_file(key, tmp_path / "other"),
                lambda key=key: store.subtree(key),
            ):
                _assert_raises(ConfigError, call)
        assert _keys(store) == []

    # ── listings ─────────────────────────────────────────────────────────────────────────────────

    def test_a_listing_is_sorted_and_contains_sizes(self, store: Store) -> None:
        """`list()` yields (key, size in bytes) of all objects, sorted by the whole key.

        For example "a.b" before "a/1".
        """
        for n, key in enumerate(("b", "a/2", "a.b", "a/10", "ab/1")):
            store.put(key, b"x" * n)
        sizes = [(found.key, found.size_bytes) for found in store.list()]
        assert sizes == [("a.b", 2), ("a/10", 3), ("a/2", 1), ("ab/1", 4), ("b", 0)]

    def test_a_prefix_matches_whole_path_components(self, store: Store) -> None:
        """`list("a")` yields "a/1" but not "ab/1"."""
        for key in ("a/1", "a/b/2", "ab/1", "b"):
            store.put(key, b"")
        assert _keys(store, "a") == ["a/1", "a/b/2"]
        assert _keys(store, "a/b") == ["a/b/2"]
        assert _keys(store, "nothing") == []

    def test_a_listing_starts_after_an_existing_or_missing_key(self, store: Store) -> None:
        """`list(after=key)` yields only greater keys, whether or not `key` exists."""
        for key in ("a/1", "a/2", "a/3", "b"):
            store.put(key, b"")
        assert _keys(store, after="a/2") == ["a/3", "b"]
        assert _keys(store, "a", after="a/1") == ["a/2", "a/3"]
        assert _keys(store, "a", after="a/15") == ["a/2", "a/3"]
        assert _keys(store, after="c") == []

    def test_a_subtree_contains_only_keys_below_it(self, store: Store) -> None:
        """The keys of `subtree` are relative to it, and it writes below it."""
        store.put("out", b"")
        store.put("deep/er/in", b"1")
        deeper = store.subtree("deep").subtree("er")
        assert _keys(deeper) == ["in"]
        assert _keys(deeper, after="hm") == ["in"]
        deeper.put("new", b"2")
        assert store.get("deep/er/new") == b"2"
        assert deeper.url.endswith("deep/er") or "deep/er" in deeper.url

    # ── files ────────────────────────────────────────────────────────────────────────────────────

    def test_small_and_large_files_are_transferred(self, store: Store, tmp_path: Path) -> None:
        """`put_file` and `get_file` copy files of 0 bytes, 1 byte and several upload parts."""
        # An empty upload is a special case in many APIs; the large one has several parts.
        for size_bytes in (0, 1, LARGE_FILE_BYTES):
            there, back = tmp_path / "there", tmp_path / "back"
            there.write_bytes(_random_bytes(size_bytes))
            store.put_file("files/one", there)
            store.get_file("files/one", back)
            assert back.read_bytes() == there.read_bytes()
        assert sorted(tmp_path.iterdir()) == [tmp_path / "back", tmp_path / "there"]

    def test_a_missing_local_file_raises_an_os_error(self, store: Store, tmp_path: Path) -> None:
        """`put_file` of a missing file raises OSError and creates no object."""
        _assert_raises(OSError, lambda: store.put_file("file", tmp_path / "nothing"))
        assert _keys(store) == []

    def test_a_directory_is_uploaded_and_downloaded(self, store: Store, tmp_path: Path) -> None:
        """`upload_tree` and `download_tree` copy nested directories through the store."""
        there, back = tmp_path / "there", tmp_path / "back"
        (there / "sub").mkdir(parents=True)
        (there / "small").write_bytes(b"")
        (there / "sub" / "big").write_bytes(_random_bytes(LARGE_FILE_BYTES))
        records = upload_tree(store, "tree", there)
        download_tree(store, "tree", back, records)
        assert {str(file.relative_to(back)) for file in back.rglob("*")} == {
            "small",
            "sub",
            "sub/big",
        }
        assert (back / "sub" / "big").read_bytes() == (there / "sub" / "big").read_bytes()

    # ── create ───────────────────────────────────────────────────────────────────────────────────

    def test_create_refuses_an_existing_object(self, store: Store) -> None:
        """`create` raises `AlreadyExistsError` for an existing object and keeps its content.

        It raises `AtomicCreateUnsupportedError` if `supports_create` is False.
        """
        if not self.supports_create:
            _assert_raises(AtomicCreateUnsupportedError, lambda: store.create("object", b"first"))
            return
        store.create("object", b"first")
        _assert_raises(AlreadyExistsError, lambda: store.create("object", b"second"))
        store.put("other", b"first")
        _assert_raises(AlreadyExistsError, lambda: store.create("other", b"second"))
        assert (store.get("object"), store.get("other")) == (b"first", b"first")

    def test_create_succeeds_after_delete(self, store: Store) -> None:
        """`create` succeeds for a deleted key. Checks nothing unless `supports_create`."""
        if not self.supports_create:
            return
        store.create("folder/object", b"first")
        store.delete("folder/object")
        store.create("folder/object", b"second")
        assert store.get("folder/object") == b"second"

    def test_create_refuses_an_existing_large_object(self, store: Store) -> None:
        """`create` of 12 MiB writes the object once. Checks nothing unless `supports_create`."""
        if not self.supports_create:
            return
        first, second = (letter * (12 * 2**20) for letter in (b"1", b"2"))
        store.create("large", first)
        _assert_raises(AlreadyExistsError, lambda: store.create("large", second))
        assert download_bytes(store, "large") == first

    def test_create_has_one_winner_among_threads(self, store: Store) -> None:
        """Of 8 threads that create a key at the same time, one succeeds.

        Checks nothing unless `supports_create`.
        """
        if not self.supports_create:
            return
        with ThreadPoolExecutor(8) as racers:
            # Several races, because the first request of a thread also opens a connection.
            for n in range(12):
                start = Barrier(8)  # all writers of a race start at the same moment

                def race(racer: int, key: str = f"race/{n}", start: Barrier = start) -> bool:
                    start.wait(60)  # limited: a writer that died before must not hang the test
                    return _try_create(store, key, str(racer))

                winners = [racer for racer, won in enumerate(racers.map(race, range(8))) if won]
                assert len(winners) == 1, f"race {n}: {winners}"
                assert store.get(f"race/{n}") == str(winners[0]).encode()

    def test_create_has_one_winner_among_processes(self, store: Store) -> None:
        """Of 4 forked processes that create the same keys, one succeeds per key.

        Checks nothing unless `supports_create` and `is_shared`.
        """
        if not (self.supports_create and self.is_shared):
            return
        store.put("warm", b"")  # forked children inherit a client that was used
        _run_in_forks(4, lambda child: _create_all(store, f"child {child}"))
        owners = [store.get(f"race/{n}") for n in range(12)]
        assert len(_keys(store, "race")) == 12
        # Each child claims what it has created: no object may have two claims, or a false one.
        claims = b"".join(store.get(f"claims/child {child}") for child in range(4))
        assert sorted(claims.splitlines()) == sorted(
            b"race/%d by %s" % (n, owner) for n, owner in enumerate(owners)
        )

    def test_the_probe_detects_whether_create_is_atomic(self, store: Store) -> None:
        """`probe_create` raises only if `supports_create` is False, and leaves no object."""
        if self.supports_create:
            probe_create(store)
        else:
            _assert_raises(AtomicCreateUnsupportedError, lambda: probe_create(store))
        assert _keys(store) == []

    # ── other processes ──────────────────────────────────────────────────────────────────────────

    def test_a_store_can_be_pickled(self, store: Store) -> None:
        """A pickled and unpickled store reads the same objects."""
        store.put("object", b"x")
        again = pickle.loads(pickle.dumps(store))  # noqa: S301  # pickled in the same line
        assert again.get("object") == b"x"

    def test_a_child_forked_after_use_can_use_the_store(self, store: Store) -> None:
        """A used store works in forked children and grandchildren.

        Checks nothing unless `is_shared`.
        """
        if not self.is_shared:
            return
        store.put("from parent", b"parent")

        def child(_: int) -> None:
            assert store.get("from parent") == b"parent"
            store.put("from child", b"child")
            _run_in_forks(1, lambda _: store.put("from grandchild", store.get("from child")))

        _run_in_forks(1, child)
        assert store.get("from child") == b"child"
        assert store.get("from grandchild") == b"child"


def _assert_raises(error_type: type[BaseException], call: Callable[[], object]) -> None:
    try:
        answer = call()
    except error_type:
        return
    raise AssertionError(f"expected {error_type.__name__}, got {answer!r}")


def _keys(store: Store, prefix: str = "", *, after: str = "") -> list[str]:
    return [found.key for found in store.list(prefix, after=after)]


def _random_bytes(size_bytes: int) -> bytes:
    # Fast, and different in every call: equal content could hide a mixed-up file.
    block = uuid.uuid4().bytes * 4096
    return (block * (size_bytes // len(block) + 1))[:size_bytes]


def _try_create(store: Store, key: str, owner: str) -> bool:
    try:
        store.create(key, owner.encode())
    except AlreadyExistsError:
        return False
    return True


def _create_all(store: Store, owner: str) -> None:
    keys = [f"race/{n}" for n in range(12)]
    claims = [f"{key} by {owner}\n" for key in keys if _try_create(store, key, owner)]
    store.put(f"claims/{owner}", "".join(claims).encode())


def _run_in_forks(count: int, body: Callable[[int], None]) -> None:
    """Run `body` in `count` forked children; fail if one of them fails."""
    children = [_fork(body, n) for n in range(count)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert not any(codes), f"children ended with {codes}"


def _fork(body: Callable[[int], None], n: int) -> int:
    child = os.fork()
    if child:
        return child
    # The child must never return into the test runner.
    code = 1
    try:
        body(n)
        code = 0
    except BaseException:  # noqa: BLE001  # the exit code reports any failure to the parent
        traceback.print_exc()
    finally:
        os._exit(code)
