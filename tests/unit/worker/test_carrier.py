"""Who uploads for workers: each rank's parcels in order, failures told, the rest brought."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from spotfit.checkpoint.bring import SnapshotParcel, packed
from spotfit.checkpoint.handle import Checkpoint
from spotfit.checkpoint.manifest import manifests_of
from spotfit.core.errors import ConfigError
from spotfit.model.carrier import Brought, FromCarrier, Lost, Take
from spotfit.store.api import Store
from spotfit.store.budget import PATIENT, Budget
from spotfit.store.opening import open_store
from spotfit.worker.carrier import Carrier
from spotfit.worker.parcel import Parcel
from tests.unit.checkpoint.kept import directory, part
from tests.unit.checkpoint.snapshots import filled


class Agent:
    """Hears what a carrier says."""

    def __init__(self) -> None:
        self.heard: list[FromCarrier] = []
        self._more = threading.Condition()

    def hear(self, message: FromCarrier) -> None:
        with self._more:
            self.heard.append(message)
            self._more.notify()

    def hears(self, count: int) -> list[FromCarrier]:
        with self._more:
            assert self._more.wait_for(lambda: len(self.heard) >= count, 60)
        return self.heard


@pytest.fixture
def agent() -> Agent:
    return Agent()


def take(serial: int, run: Path, where: Path, name: str, *, delete: bool = False) -> Take:
    parcel = Parcel(Checkpoint.from_directory(where), part(name, report=serial), delete=delete)
    return Take(serial, 0, str(run), parcel.packed())


def test_parcels_of_a_rank_are_brought_in_order(agent: Agent, tmp_path: Path) -> None:
    carrier = Carrier(agent.hear)
    for n in range(5):
        there = directory(tmp_path / str(n), model="w" * n)
        carrier.take(take(n, tmp_path / "run", there, f"c{n}", delete=True))
    assert agent.hears(5) == [Brought(n, n) for n in range(5)]
    store = open_store(tmp_path / "run")
    assert [manifests_of(store, f"c{n}")[0].size_bytes for n in range(5)] == list(range(5))
    assert not (tmp_path / "1").exists(), "it was to be deleted"


def test_one_that_fails_tells_why_and_stops_nobody(agent: Agent, tmp_path: Path) -> None:
    carrier = Carrier(agent.hear)
    carrier.take(take(0, tmp_path / "run", tmp_path / "gone", "c0", delete=True))
    carrier.take(take(1, tmp_path / "run", directory(tmp_path / "here", model="w"), "c1"))
    lost, brought = agent.hears(2)
    assert isinstance(lost, Lost)
    assert "gone is not there" in lost.told
    assert isinstance(pickle.loads(lost.value), ConfigError), "the original error"
    assert brought == Brought(1, 1)
    assert (tmp_path / "here").exists()


def test_it_insists_for_as_long_as_a_worker_would(
    agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Budget | None] = []

    def opening(url: str, budget: Budget | None = None) -> Store:
        opened.append(budget)
        return open_store(url, budget)

    monkeypatch.setattr("spotfit.worker.carrier.open_store", opening)
    carrier = Carrier(agent.hear)
    for n in range(2):
        carrier.take(take(n, tmp_path / "run", directory(tmp_path / str(n), model="w"), f"c{n}"))
    agent.hears(2)
    assert opened == [PATIENT]


def test_a_snapshot_that_is_long_on_its_way_is_told_of(
    agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    @contextmanager
    def telling(name: str) -> Iterator[None]:
        told.append(name)
        yield

    monkeypatch.setattr("spotfit.worker.carrier.told_while_slow", telling)
    segment = filled(tmp_path / "0-0-1.segment", [b"w"])
    parcel = packed(SnapshotParcel(str(segment), part("c0")))
    Carrier(agent.hear).take(Take(0, 0, str(tmp_path / "run"), parcel))
    assert isinstance(agent.hears(1)[0], Brought)
    assert told == ["c0"]
