"""What was raised beside the workers is kept as itself, where that can be done."""

from __future__ import annotations

import threading

import pytest

from spotfit.core.errors import TransientStoreError
from spotfit.ship.function import load_pickle
from spotfit.ship.sign import RunKey
from spotfit.store.memory import MemoryStore
from spotfit.testing.builders import RUN
from spotfit.worker.trouble import keep

KEY = RunKey(b"k" * 32, RUN)


def refuse(_key: str, _body: bytes) -> None:
    raise TransientStoreError("no answer")


def test_it_is_kept_as_itself_and_signed() -> None:
    store = MemoryStore()
    name = keep(KeyError("lr"), store, KEY)
    assert name is not None
    assert isinstance(load_pickle(store.get(name), KEY, purpose=name), KeyError)


def test_the_same_again_is_kept_once_and_another_beside_it() -> None:
    store = MemoryStore()
    names = {keep(error, store, KEY) for error in (KeyError("a"), KeyError("a"), KeyError("b"))}
    assert len(names) == 2


@pytest.mark.parametrize("how", ["it cannot be pickled", "the bucket refuses"])
def test_where_it_cannot_be_kept_there_is_nothing(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, error = MemoryStore(), ValueError("odd")
    if how == "it cannot be pickled":
        error.args = (threading.Lock(),)
    else:
        monkeypatch.setattr(store, "put", refuse)
    assert keep(error, store, KEY) is None
