"""Who uploads for workers: each rank's parcels in order, failures told, the rest brought."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path

import pytest

from spotfit.checkpoint.handle import Checkpoint
from spotfit.checkpoint.manifest import manifests_of
from spotfit.core.errors import ConfigError
from spotfit.model.carrier import Brought, FromCarrier, Lost, Take
from spotfit.store.opening import open_store
from spotfit.worker.carrier import Carrier
from spotfit.worker.parcel import Parcel
from tests.unit.checkpoint.kept import directory, part


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
