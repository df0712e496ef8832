import pickle

import pytest

from spotfit.core.errors import NotFoundError
from spotfit.store.local import MemoryStore
from spotfit.store.url import RootUrl


def test_stores_of_one_name_share_objects() -> None:
    root = RootUrl.parse("memory://shared")
    MemoryStore(root).put("a/b", b"x")
    assert MemoryStore(root.join("a")).get("b") == b"x"


def test_a_store_without_a_name_is_private() -> None:
    store = MemoryStore()
    store.put("a/b", b"x")
    assert store.subtree("a").get("b") == b"x"
    with pytest.raises(NotFoundError):
        MemoryStore().get("a/b")


def test_a_pickled_private_store_is_a_copy() -> None:
    store = MemoryStore()
    store.put("a/b", b"x")
    copy = pickle.loads(pickle.dumps(store.subtree("a")))
    copy.put("b", b"y")
    assert (store.get("a/b"), copy.get("b")) == (b"x", b"y")
