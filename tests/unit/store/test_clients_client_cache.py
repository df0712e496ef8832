import os
import sys
from collections.abc import Callable

import pytest

from spotfit.store import clients
from spotfit.store.factory import open_store
from spotfit.store.url import RootUrl
from tests.unit.store.conftest import ScriptedBucket


def in_a_child(function: Callable[[], None]) -> int:
    """Run `function` in a forked child and return its exit code."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            function()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_process_has_one_client_per_root_and_kind(bucket: ScriptedBucket) -> None:
    root = RootUrl.parse(bucket.url)
    assert clients.client_for(root) is clients.client_for(RootUrl.parse(bucket.url))
    assert clients.client_for(root) is not clients.client_for(root, for_transfers=True)


def test_a_forked_child_can_use_the_bucket(bucket: ScriptedBucket) -> None:
    store = open_store(bucket.url)
    store.put("from-parent", b"x")

    def use() -> None:
        assert store.get("from-parent") == b"x"
        store.put("from-child", b"y")

    assert in_a_child(use) == 0
    assert store.get("from-child") == b"y"


def test_children_of_a_forked_child_can_use_the_bucket(bucket: ScriptedBucket) -> None:
    store = open_store(bucket.url)
    store.put("0", b"")

    def use(depth: int) -> None:
        store.get(str(depth))
        store.put(str(depth + 1), b"")
        if depth < 2:
            assert in_a_child(lambda: use(depth + 1)) == 0

    assert in_a_child(lambda: use(0)) == 0
    assert sorted(bucket.objects) == ["/bucket/0", "/bucket/1", "/bucket/2", "/bucket/3"]


def test_a_grandchild_reloads_the_library_though_the_child_did_not(bucket: ScriptedBucket) -> None:
    store = open_store(bucket.url)
    store.put("a", b"")
    assert in_a_child(lambda: _expect(in_a_child(lambda: store.put("b", b"")) == 0)) == 0


def test_a_forked_child_without_requests_does_not_reload_the_library(
    bucket: ScriptedBucket,
) -> None:
    open_store(bucket.url).put("a", b"")
    library = sys.modules["obstore._obstore"]
    assert in_a_child(lambda: _expect(sys.modules["obstore._obstore"] is library)) == 0


def test_errors_of_the_second_copy_are_translated(bucket: ScriptedBucket) -> None:
    store = open_store(bucket.url)
    store.put("a", b"")

    def use() -> None:
        missing_bucket_error = pytest.raises(Exception, match=r"b in .* does not exist")
        with missing_bucket_error:
            store.get("b")

    assert in_a_child(use) == 0


def _expect(holds: bool) -> None:
    assert holds
