"""CallbackDispatcher: calls every callback, restores exceptions, reports errors."""

import math
from pathlib import Path
from typing import Any

import cloudpickle
import msgspec
import pytest

from spotfit.code.function_pickle import load_sealed_pickle
from spotfit.core.errors import WorkerDiedError
from spotfit.ledger import keys
from spotfit.ledger.authenticated_store import AuthenticatedStore
from spotfit.model.reporting import metrics_to_json
from spotfit.protocol.agent_sidecar import (
    CallAfterException,
    CallAfterReport,
    CallbackFinished,
    RankFailureSummary,
)
from spotfit.security.run_key import RunKey
from spotfit.sidecar import callbacks_process
from spotfit.sidecar.callbacks_process import CallbackDispatcher
from spotfit.store.local import MemoryStore
from spotfit.store.url import RootUrl
from spotfit.testing.builders import RUN_ID
from tests.unit.checkpoint.saved_checkpoints import make_manifest, ready_in_store, save_checkpoint

KEY = RunKey(b"k" * 32, RUN_ID)


class RecordingCallback:
    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def after_report(self, **arguments: Any) -> None:
        self.calls.append(arguments)

    def after_exception(self, **arguments: Any) -> None:
        self.calls.append(arguments)


class FailingOnReport:
    def after_report(self, **_: Any) -> None:
        raise ZeroDivisionError("in the callback")


@pytest.fixture
def store(request: pytest.FixtureRequest) -> MemoryStore:
    return MemoryStore(RootUrl.parse(f"memory://callbacks-{request.node.originalname}"))


def test_a_report_is_passed_to_every_callback(store: MemoryStore) -> None:
    callbacks = [RecordingCallback(), RecordingCallback()]
    dispatcher = CallbackDispatcher(callbacks, "context", store, KEY)
    metrics = tuple(msgspec.Raw(b'{"rank":%d}' % rank) for rank in range(2))
    assert dispatcher.dispatch(CallAfterReport(metrics_by_rank=metrics)) == CallbackFinished()
    arguments = {
        "run_context": "context",
        "metrics": [{"rank": 0}, {"rank": 1}],
        "checkpoint": None,
    }
    assert [callback.calls for callback in callbacks] == [[arguments], [arguments]]


def test_a_checkpoint_whose_manifests_were_replaced_is_not_passed(
    store: MemoryStore, tmp_path: Path
) -> None:
    authenticated = AuthenticatedStore(store, KEY)
    save_checkpoint(authenticated, tmp_path / "0", make_manifest(report=0), x="earlier")
    earlier = store.get(keys.manifest("ck", 1, 0))
    save_checkpoint(authenticated, tmp_path / "1", make_manifest(report=1), x="committed")
    [ready] = ready_in_store(authenticated)
    report = CallAfterReport(
        metrics_by_rank=(), checkpoint_name="ck", checkpoint_digest=ready.manifests_digest
    )
    callback = RecordingCallback()
    dispatcher = CallbackDispatcher([callback], None, authenticated, KEY)
    assert dispatcher.dispatch(report) == CallbackFinished()
    store.put(keys.manifest("ck", 1, 0), earlier)
    assert "ck in memory" in (dispatcher.dispatch(report).traceback_text or "")
    assert len(callback.calls) == 1


def test_nan_and_infinity_are_restored(store: MemoryStore) -> None:
    callback = RecordingCallback()
    metrics = metrics_to_json({"loss": float("nan"), "best": [float("inf")]})
    CallbackDispatcher([callback], None, store, KEY).dispatch(
        CallAfterReport(metrics_by_rank=(msgspec.Raw(metrics),))
    )
    (arguments,) = callback.calls[0]["metrics"]
    assert math.isnan(arguments["loss"])
    assert arguments["best"] == [float("inf")]


class UnreadableError(Exception):
    """Cannot be created from its message, like many user-defined exceptions."""

    def __init__(self, *, why: str) -> None:
        super().__init__(why)


@pytest.mark.parametrize(
    ("error", "purpose"),
    [(KeyError("weights"), "f/0"), (UnreadableError(why="odd"), "f/1")],
    ids=["of-another-rank", "not-to-be-loaded"],
)
def test_an_exception_that_cannot_be_loaded_is_replaced_by_its_message(
    store: MemoryStore, error: Exception, purpose: str
) -> None:
    store.put("f/1", KEY.seal(cloudpickle.dumps(error), purpose=purpose))
    callback = RecordingCallback()
    dispatcher = CallbackDispatcher([callback], None, store, KEY)
    assert (
        dispatcher.dispatch(
            CallAfterException(
                failures=(RankFailureSummary(rank=1, message="it raised", pickle_key="f/1"),)
            )
        )
        == CallbackFinished()
    )
    arguments = callback.calls[0]["worker_exceptions"][1]
    assert isinstance(arguments, WorkerDiedError)
    assert "it raised" in str(arguments)


def test_the_original_exception_is_restored(store: MemoryStore) -> None:
    store.put("f/1", KEY.seal(cloudpickle.dumps(KeyError("weights")), purpose="f/1"))
    callback = RecordingCallback()
    dispatcher = CallbackDispatcher([callback], None, store, KEY)
    dispatcher.dispatch(
        CallAfterException(
            failures=(
                RankFailureSummary(rank=0, message="it was killed"),
                RankFailureSummary(rank=1, message="KeyError", pickle_key="f/1"),
            )
        )
    )
    exceptions = callback.calls[0]["worker_exceptions"]
    assert isinstance(exceptions[0], WorkerDiedError)
    assert exceptions[1].args == ("weights",)


def test_an_exception_that_is_never_stored_is_replaced_by_its_message(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callbacks_process, "_PICKLE_READ_ATTEMPTS", 1)
    monkeypatch.setattr(callbacks_process, "_PICKLE_RETRY_S", 0.0)
    callback = RecordingCallback()
    CallbackDispatcher([callback], None, store, KEY).dispatch(
        CallAfterException(
            failures=(RankFailureSummary(rank=0, message="KeyError", pickle_key="f/0"),)
        )
    )
    assert "KeyError" in str(callback.calls[0]["worker_exceptions"][0])


class FailingOnException:
    def after_exception(self, **_: Any) -> None:
        raise ZeroDivisionError("in the other hook")


def test_an_error_in_after_exception_is_reported(store: MemoryStore) -> None:
    calls = CallbackDispatcher([FailingOnException()], None, store, KEY).dispatch(
        CallAfterException(failures=(RankFailureSummary(rank=0, message="it broke"),))
    )
    assert "ZeroDivisionError: in the other hook" in (calls.traceback_text or "")


def test_an_error_in_after_report_is_reported_and_stored(
    store: MemoryStore,
) -> None:
    calls = CallbackDispatcher([FailingOnReport()], None, store, KEY).dispatch(
        CallAfterReport(metrics_by_rank=())
    )
    assert calls.traceback_text is not None
    assert "ZeroDivisionError: in the callback" in calls.traceback_text
    assert "after_report" in calls.traceback_text
    assert calls.pickle_key is not None
    envelope = store.get(calls.pickle_key)
    original = load_sealed_pickle(lambda: envelope, KEY, purpose=calls.pickle_key)
    assert isinstance(original, ZeroDivisionError)
