import os
import sys
from collections.abc import Callable

import pytest

from spotfit.store import driver
from spotfit.store.opening import open_store
from spotfit.store.url import RootUrl
from tests.unit.store.conftest import ScriptedBucket


def in_a_child(story: Callable[[], None]) -> int:
    """The exit code of a forked child that did `story`."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            story()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_process_has_one_client_for_a_root_and_a_temper(bucket: ScriptedBucket) -> None:
    root = RootUrl.parse(bucket.url)
    assert driver.client(root) is driver.client(RootUrl.parse(bucket.url))
    assert driver.client(root) is not driver.client(root, insists=True)


def test_a_child_of_a_process_that_used_a_bucket_uses_it_too(bucket: ScriptedBucket) -> None:
    store = open_store(bucket.url)
    store.put("from-parent", b"x")

    def use() -> None:
        assert store.get("from-parent") == b"x"
        store.put("from-child", b"y")

    assert in_a_child(use) == 0
    assert store.get("from-child") == b"y"


def test_so_do_its_children_and_theirs(bucket: ScriptedBucket) -> None:
    store = open_store(bucket.url)
    store.put("0", b"")

    def use(depth: int) -> None:
        store.get(str(depth))
        store.put(str(depth + 1), b"")
        if depth < 2:
            assert in_a_child(lambda: use(depth + 1)) == 0

    assert in_a_child(lambda: use(0)) == 0
    assert sorted(bucket.objects) == ["/bucket/0", "/bucket/1", "/bucket/2", "/bucket/3"]


def test_a_grandchild_knows_though_the_child_used_nothing(bucket: ScriptedBucket) -> None:
    store = open_store(bucket.url)
    store.put("a", b"")
    assert in_a_child(lambda: _expect(in_a_child(lambda: store.put("b", b"")) == 0)) == 0


def test_a_forked_child_that_uses_no_bucket_loads_nothing(bucket: ScriptedBucket) -> None:
    open_store(bucket.url).put("a", b"")
    library = sys.modules["obstore._obstore"]
    assert in_a_child(lambda: _expect(sys.modules["obstore._obstore"] is library)) == 0


def test_errors_of_the_second_copy_are_known_too(bucket: ScriptedBucket) -> None:
    store = open_store(bucket.url)
    store.put("a", b"")

    def use() -> None:
        bucket_says_no = pytest.raises(Exception, match="There is no b")
        with bucket_says_no:
            store.get("b")

    assert in_a_child(use) == 0


def _expect(holds: bool) -> None:
    assert holds
