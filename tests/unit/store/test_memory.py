import pickle

import pytest

from spotfit.core.errors import NotFoundError
from spotfit.store.memory import MemoryStore
from spotfit.store.url import RootUrl


def test_one_name_is_one_store() -> None:
    root = RootUrl.parse("memory://shared")
    MemoryStore(root).put("a/b", b"x")
    assert MemoryStore(root.below("a")).get("b") == b"x"


def test_a_store_without_a_name_is_its_own() -> None:
    mine = MemoryStore()
    mine.put("a/b", b"x")
    assert mine.under("a").get("b") == b"x"
    with pytest.raises(NotFoundError):
        MemoryStore().get("a/b")


def test_a_pickled_copy_of_an_own_store_goes_its_own_way() -> None:
    mine = MemoryStore()
    mine.put("a/b", b"x")
    copy = pickle.loads(pickle.dumps(mine.under("a")))
    copy.put("b", b"y")
    assert (mine.get("a/b"), copy.get("b")) == (b"x", b"y")
