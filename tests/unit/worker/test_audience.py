"""The callbacks' own process: everybody is told, originals come back, a mistake is kept."""

import math
from typing import Any

import cloudpickle
import msgspec
import pytest

from spotfit.core.errors import WorkerDiedError
from spotfit.model.audience import Failed, Heard, RankTold, Reported
from spotfit.model.metrics import metrics_to_json
from spotfit.ship.function import load_pickle
from spotfit.ship.sign import RunKey
from spotfit.store.memory import MemoryStore
from spotfit.store.url import RootUrl
from spotfit.testing.builders import RUN
from spotfit.worker import audience
from spotfit.worker.audience import Audience

KEY = RunKey(b"k" * 32, RUN)


class Listener:
    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []

    def after_report(self, **told: Any) -> None:
        self.heard.append(told)

    def after_exception(self, **told: Any) -> None:
        self.heard.append(told)


class Clumsy:
    def after_report(self, **_: Any) -> None:
        raise ZeroDivisionError("in the callback")


@pytest.fixture
def store(request: pytest.FixtureRequest) -> MemoryStore:
    return MemoryStore(RootUrl.parse(f"memory://audience-{request.node.originalname}"))


def test_every_callback_hears_of_a_report(store: MemoryStore) -> None:
    both = [Listener(), Listener()]
    house = Audience(both, "context", store, KEY)
    metrics = tuple(msgspec.Raw(b'{"rank":%d}' % rank) for rank in range(2))
    assert house.hear(Reported(metrics)) == Heard()
    told = {"run_context": "context", "metrics": [{"rank": 0}, {"rank": 1}], "checkpoint": None}
    assert [listener.heard for listener in both] == [[told], [told]]


def test_numbers_that_json_does_not_know_arrive_as_numbers(store: MemoryStore) -> None:
    listener = Listener()
    metrics = metrics_to_json({"loss": float("nan"), "best": [float("inf")]})
    Audience([listener], None, store, KEY).hear(Reported((msgspec.Raw(metrics),)))
    (told,) = listener.heard[0]["metrics"]
    assert math.isnan(told["loss"])
    assert told["best"] == [float("inf")]


class UnreadableError(Exception):
    """Cannot be made again from its text, as many exceptions of users."""

    def __init__(self, *, why: str) -> None:
        super().__init__(why)


@pytest.mark.parametrize(
    ("error", "purpose"),
    [(KeyError("weights"), "f/0"), (UnreadableError(why="odd"), "f/1")],
    ids=["of-another-rank", "not-to-be-loaded"],
)
def test_one_whose_pickle_cannot_be_had_is_told_in_words_and_no_trouble(
    store: MemoryStore, error: Exception, purpose: str
) -> None:
    store.put("f/1", KEY.seal(cloudpickle.dumps(error), purpose=purpose))
    listener = Listener()
    house = Audience([listener], None, store, KEY)
    assert house.hear(Failed((RankTold(1, "it raised", "f/1"),))) == Heard()
    told = listener.heard[0]["worker_exceptions"][1]
    assert isinstance(told, WorkerDiedError)
    assert "it raised" in str(told)


def test_the_original_exception_comes_back_where_there_is_one(store: MemoryStore) -> None:
    store.put("f/1", KEY.seal(cloudpickle.dumps(KeyError("weights")), purpose="f/1"))
    listener = Listener()
    house = Audience([listener], None, store, KEY)
    house.hear(Failed((RankTold(0, "it was killed"), RankTold(1, "KeyError", "f/1"))))
    exceptions = listener.heard[0]["worker_exceptions"]
    assert isinstance(exceptions[0], WorkerDiedError)
    assert exceptions[1].args == ("weights",)


def test_one_whose_pickle_never_comes_is_told_in_words(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audience, "_PICKLE_TRIES", 1)
    monkeypatch.setattr(audience, "_PICKLE_PAUSE_S", 0.0)
    listener = Listener()
    Audience([listener], None, store, KEY).hear(Failed((RankTold(0, "KeyError", "f/0"),)))
    assert "KeyError" in str(listener.heard[0]["worker_exceptions"][0])


class Nervous:
    def after_exception(self, **_: Any) -> None:
        raise ZeroDivisionError("in the other hook")


def test_one_that_raises_over_a_failure_is_told_as_well(store: MemoryStore) -> None:
    heard = Audience([Nervous()], None, store, KEY).hear(Failed((RankTold(0, "it broke"),)))
    assert "ZeroDivisionError: in the other hook" in (heard.trouble or "")


def test_a_callback_that_raises_is_told_with_its_traceback_and_as_itself(
    store: MemoryStore,
) -> None:
    heard = Audience([Clumsy()], None, store, KEY).hear(Reported(()))
    assert heard.trouble is not None
    assert "ZeroDivisionError: in the callback" in heard.trouble
    assert "after_report" in heard.trouble
    assert heard.pickle_key is not None
    original = load_pickle(store.get(heard.pickle_key), KEY, purpose=heard.pickle_key)
    assert isinstance(original, ZeroDivisionError)
