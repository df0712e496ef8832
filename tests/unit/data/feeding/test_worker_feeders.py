"""The feeders of one worker: which datasets they transform, and what the leader is sent."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import cloudpickle
import pytest

from spotfit.data.feeding import worker_feeders
from spotfit.data.feeding.worker_feeders import (
    FeederSources,
    WorkerFeeders,
    default_process_count,
)
from spotfit.data.readers import from_items
from spotfit.host import machine
from spotfit.model.topology import FeederAddress
from spotfit.security.run_key import RunKey, make_tls_contexts
from tests.unit.data.feeding.augmented_rows import NAME, RUN_ID, Pass, dataset_of, shipped
from tests.unit.data.feeding.test_local_feeders import read_pass, wait_until

pytestmark = pytest.mark.real_time("starts threads and processes")
DATASET = dataset_of(60)
PLAIN = from_items([{"id": 1}])


class Session:
    """What a worker's session provides."""

    def __init__(self) -> None:
        self.addresses: Sequence[FeederAddress] = ()
        self.reported: list[tuple[float, float]] = []
        self.has_read = threading.Event()

    def read_addresses(self) -> Sequence[FeederAddress]:
        self.has_read.set()
        return self.addresses

    def sources(self) -> FeederSources:
        return FeederSources(
            read_addresses=self.read_addresses,
            report_wait=lambda waited_s, elapsed_s: self.reported.append((waited_s, elapsed_s)),
            make_tls=make_tls,
        )


def make_tls() -> ssl.SSLContext:
    return make_tls_contexts(RunKey(b"k" * 32, RUN_ID).to_text(), RUN_ID).client


@pytest.fixture
def session() -> Session:
    return Session()


@pytest.fixture
def feeders(session: Session, request: pytest.FixtureRequest) -> Iterator[WorkerFeeders]:
    options: dict[str, Any] = {"processes": 0, "max_nodes": 0, **getattr(request, "param", {})}
    created = WorkerFeeders(
        {NAME: DATASET, "plain": PLAIN},
        cloudpickle.dumps(shipped(DATASET)),
        session.sources(),
        workers_of_machine=1,
        **options,
    )
    yield created
    created.close()


@pytest.mark.parametrize("feeders", [{"processes": 1}], indirect=True)
def test_a_dataset_with_user_code_is_transformed_by_processes(feeders: WorkerFeeders) -> None:
    assert feeders.open(NAME, DATASET) is not None
    wait_until(lambda: feeders.pool.feeder_count == 1)
    one_pass = Pass(DATASET)
    assert read_pass(feeders.pool, one_pass) == one_pass.expected
    assert feeders.pool.own_count == 0


def test_a_dataset_without_user_code_needs_no_feeders(feeders: WorkerFeeders) -> None:
    assert feeders.open("plain", PLAIN) is None


def test_a_dataset_that_feeders_do_not_know_is_transformed_by_the_worker(
    feeders: WorkerFeeders,
) -> None:
    assert feeders.open(NAME, DATASET.limit(10)) is None
    assert feeders.open("other", DATASET) is None


def test_without_processes_and_machines_the_worker_executes(feeders: WorkerFeeders) -> None:
    assert feeders.open(NAME, DATASET) is not None
    one_pass = Pass(DATASET)
    assert read_pass(feeders.pool, one_pass) == one_pass.expected


@pytest.mark.parametrize("feeders", [{"max_nodes": 1}], indirect=True)
def test_the_wait_of_the_loop_is_reported_once_it_takes_batches(
    feeders: WorkerFeeders, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_feeders, "_POLL_S", 0.01)
    monkeypatch.setattr(worker_feeders, "_REPORT_S", 0.05)
    waited: list[float | None] = [None]
    feeders.measure_wait(lambda: waited[0])
    feeders.open(NAME, DATASET)
    assert session.has_read.wait(30.0)
    assert session.reported == []
    waited[0] = 5.0
    wait_until(lambda: len(session.reported) >= 1)
    waited[0] = 7.0
    wait_until(lambda: sum(waited_s for waited_s, _ in session.reported) == 2.0)
    assert all(elapsed_s >= 0.05 for _, elapsed_s in session.reported)


@pytest.mark.parametrize(
    ("processors", "workers", "processes"),
    [(1, 1, 1), (4, 1, 3), (16, 4, 3), (96, 8, 8), (2, 8, 1)],
)
def test_the_default_number_of_processes_leaves_one_processor_to_the_loop(
    processors: int, workers: int, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "cpu_count", lambda: processors)
    assert default_process_count(workers) == processes
