"""Callbacks are called again for reports whose calls were lost with a leader."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from spotfit.agent.callback_delivery import CallbackDelivery
from spotfit.agent.report_matching import MatchedReport, ReportSink
from spotfit.control.background_calls import SynchronousCalls
from spotfit.core.errors import TransientStoreError
from spotfit.core.ids import AgentId
from spotfit.ledger import keys
from spotfit.ledger.authenticated_store import AuthenticatedStore
from spotfit.ledger.journal import Ledger
from spotfit.model.events import (
    FailureCause,
    FitStarted,
    LeaderElected,
    RoundClosed,
    RoundOpened,
)
from spotfit.model.topology import Round
from spotfit.model.view import View
from spotfit.store.api import Store
from spotfit.store.factory import open_store
from spotfit.store.local import MemoryStore
from spotfit.testing.builders import RUN_ID, RUN_KEY, a_committed_checkpoint, a_spec
from tests.unit.agent.simulated_cluster import FakeCallbackRunner

LOST, NEXT = AgentId("a-lost"), AgentId("a-next")


def a_report(index: int, checkpoint: str | None = None) -> MatchedReport:
    metrics = tuple(msgspec.Raw(b'{"n":%d,"rank":%d}' % (index, rank)) for rank in (0, 1))
    return MatchedReport(index, metrics, checkpoint)


@pytest.fixture
def store() -> MemoryStore:
    """A run whose round 1 is open."""
    store = MemoryStore()
    start_run(store)
    return store


def start_run(store: Store) -> None:
    ledger = Ledger(store, RUN_ID, LOST)
    events = (
        FitStarted(spec=a_spec()),
        LeaderElected(leader=LOST, epoch=1, coordinator_address=None, reason=""),
        RoundOpened(round=Round(number=1, assignments=())),
    )
    for event in events:
        ledger.append(event, after=ledger.catch_up())


def store_reports(store: Store, *reports: MatchedReport) -> None:
    """Store each as a chunk of the lost leader."""
    sink = ReportSink(Ledger(store, RUN_ID, LOST, wall_ms=lambda: 0), SynchronousCalls())
    for report in reports:
        sink.add(1, report)
        sink.flush(0.0, force=True)


def store_progress(store: MemoryStore, index: int) -> None:
    store.put(keys.callback_progress(LOST), b'{"round":1,"report_index":%d}' % index)


class Harness:
    """The callbacks of the next leader."""

    def __init__(self, store: Store) -> None:
        self.runner = FakeCallbackRunner()
        self.ledger = Ledger(store, RUN_ID, NEXT)
        view = self.ledger.catch_up()
        assert isinstance(view, View)
        self.view = view
        self.callbacks = CallbackDelivery(self.runner, self.ledger, SynchronousCalls())

    def advance(self, now: float = 0.0, *, are_commits_known: bool = True) -> None:
        self.callbacks.advance(self.view, now, are_commits_known=are_commits_known)

    @property
    def called(self) -> list[tuple[int, str | None]]:
        return [(metrics[0]["n"], checkpoint) for metrics, checkpoint in self.runner.reports]


def test_without_progress_the_reports_of_the_last_round_are_repeated(store: MemoryStore) -> None:
    store_reports(store, a_report(0), a_report(1))
    harness = Harness(store)
    harness.advance()
    assert harness.runner.reports == [
        ([{"n": n, "rank": 0}, {"n": n, "rank": 1}], None) for n in (0, 1)
    ]


def test_without_progress_the_reports_of_all_rounds_of_the_fit_are_repeated(
    store: MemoryStore,
) -> None:
    """The leader of round 2 was lost before it had repeated those of round 1."""
    store_reports(store, a_report(0))
    ledger = Ledger(store, RUN_ID, LOST)
    closed = RoundClosed(round_number=1, cause=FailureCause.PREEMPTION, reason="")
    for event in (closed, RoundOpened(round=Round(number=2, assignments=()))):
        ledger.append(event, after=ledger.catch_up())
    harness = Harness(store)
    harness.advance()
    assert harness.called == [(0, None)]


def test_only_reports_after_the_progress_are_repeated(store: MemoryStore) -> None:
    store_reports(store, *(a_report(n) for n in range(4)))
    store_progress(store, 1)
    harness = Harness(store)
    harness.advance()
    assert harness.called == [(2, None), (3, None)]


def test_errors_of_the_store_repeat_no_read_that_has_succeeded(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_reports(store, *(a_report(n) for n in range(9)))
    harness = Harness(store)
    requests, get = itertools.count(1), store.get

    def get_or_fail(key: str) -> bytes:
        if next(requests) % 3 == 0:
            raise TransientStoreError("The connection was reset.", do="Retry.")
        return get(key)

    monkeypatch.setattr(store, "get", get_or_fail)
    for n in range(9):
        harness.advance(10.0 * n)
    assert len(harness.called) == 9


def test_only_chunks_with_later_reports_are_read(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_reports(store, *(a_report(n) for n in range(9)))
    store_progress(store, 7)
    harness = Harness(store)
    read: list[str] = []
    get = store.get

    def record(key: str) -> bytes:
        read.append(key)
        return get(key)

    monkeypatch.setattr(store, "get", record)
    harness.advance()
    assert [key for key in read if key.startswith(keys.REPORTS)] == [
        keys.reports(LOST, 8),
        keys.reports(LOST, 7),
    ]


def test_new_reports_wait_for_the_repeated_ones(store: MemoryStore) -> None:
    store_reports(store, a_report(0))
    harness = Harness(store)
    harness.callbacks.send_report(2, a_report(7))
    harness.advance(are_commits_known=False)
    assert harness.called == []
    assert not harness.callbacks.is_idle
    harness.advance()
    assert harness.called == [(0, None), (7, None)]
    assert harness.callbacks.is_idle


def test_a_checkpoint_that_was_not_committed_is_left_out(store: MemoryStore) -> None:
    store_reports(store, a_report(0, "c0"), a_report(1, "c1"))
    harness = Harness(store)
    harness.view = replace(harness.view, checkpoints=(a_committed_checkpoint("c0"),))
    harness.advance()
    assert harness.called == [(0, "c0"), (1, None)]


def test_a_checkpoint_is_passed_with_the_digest_of_its_commit(store: MemoryStore) -> None:
    harness = Harness(store)
    commit = a_committed_checkpoint("c0", manifests_digest="of the commit")
    harness.ledger.append(commit, after=harness.view)
    for report in (a_report(0, "c0"), a_report(1)):
        harness.callbacks.send_report(1, report)
    harness.advance()
    assert harness.runner.digests == ["of the commit", ""]


@pytest.mark.parametrize("folder", [keys.CALLBACKS, keys.REPORTS])
def test_a_key_that_spotfit_does_not_write_delays_no_callback(tmp_path: Path, folder: str) -> None:
    store = open_store(tmp_path)
    start_run(store)
    store_reports(store, a_report(0))
    (tmp_path / folder / "x").mkdir(parents=True)
    (tmp_path / folder / "x" / "Icon\r").write_bytes(b"")
    harness = Harness(store)
    harness.advance()
    assert harness.called == [(0, None)]
    assert harness.callbacks.is_idle


def test_forged_reports_and_progress_of_a_lost_leader_are_ignored() -> None:
    plain = MemoryStore()
    store = AuthenticatedStore(plain, RUN_KEY)
    start_run(store)
    store_reports(store, a_report(0), a_report(1))
    body = plain.get(keys.reports(LOST, 0))
    plain.put(keys.reports(LOST, 0), body.replace(b'"n"', b'"m"'))
    store_progress(plain, 1)
    harness = Harness(store)
    harness.advance()
    assert harness.called == [(1, None)]


def test_reports_that_were_damaged_on_the_way_are_read_again(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_reports(store, a_report(0))
    harness = Harness(store)
    bodies = [b'{"round', store.get(keys.reports(LOST, 0))]
    monkeypatch.setattr(store, "get", lambda _key: bodies.pop(0))
    harness.advance()
    assert harness.called == [(0, None)]


def test_the_progress_is_stored_once_a_second(store: MemoryStore) -> None:
    harness = Harness(store)
    stored: list[Any] = []
    for now, index in ((0.0, 0), (0.5, 1), (1.0, 2)):
        harness.callbacks.send_report(2, a_report(index))
        harness.advance(now)
        stored.append(msgspec.json.decode(store.get(keys.callback_progress(NEXT))))
    assert [one["report_index"] for one in stored] == [0, 0, 2]
    assert not harness.callbacks.has_unwritten


def test_a_call_that_has_not_returned_is_no_progress(store: MemoryStore) -> None:
    harness = Harness(store)
    harness.runner.is_stuck = True
    harness.callbacks.send_report(2, a_report(0))
    harness.advance()
    assert not harness.callbacks.has_unwritten


def test_errors_of_the_store_are_retried(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_reports(store, a_report(0))
    harness = Harness(store)

    def fail(*_: Any, **__: Any) -> Any:
        raise TransientStoreError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(store, "list", fail)
        harness.advance()
    assert harness.called == []
    harness.advance(60.0)
    assert harness.called == [(0, None)]


def test_the_first_leader_of_a_fit_repeats_nothing(store: MemoryStore) -> None:
    store_reports(store, a_report(0))
    ledger = Ledger(store, RUN_ID, LOST)
    ledger.append(FitStarted(spec=a_spec()), after=ledger.catch_up())
    harness = Harness(store)
    harness.advance()
    assert harness.called == []
    assert harness.callbacks.is_idle


def test_unreadable_reports_are_skipped(store: MemoryStore) -> None:
    store_reports(store, a_report(0), a_report(1))
    store.put(keys.reports(LOST, 1), b"no report")
    harness = Harness(store)
    harness.advance()
    assert harness.callbacks.is_idle
