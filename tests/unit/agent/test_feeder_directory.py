"""FeederDirectory: what workers are sent, and the share of time for which they wait."""

from __future__ import annotations

from typing import Any

import msgspec

from spotfit.agent.feeder_directory import FeederDirectory
from spotfit.agent.round_coordinator import RoundCoordinator
from spotfit.core.codec import encode
from spotfit.model.topology import FeederAddress
from spotfit.protocol.worker_agent import DataWaited, FeedersChanged, FunctionStarted

FEEDER = FeederAddress(address="10.0.0.9:4000", connections=16)
OTHER = FeederAddress(address="10.0.0.8:4000", connections=16)


def a_coordinator(round_number: int = 1, *, started: tuple[int, ...] = (0, 1)) -> RoundCoordinator:
    coordinator = RoundCoordinator(round_number, 2, default_checkpoint_name=str)
    for rank in started:
        send(coordinator, rank, FunctionStarted())
    return coordinator


def send(coordinator: RoundCoordinator, rank: int, message: Any, now: float = 0.0) -> None:
    coordinator.handle_frame(rank, msgspec.Raw(encode(message)), now)


def changed(*feeders: FeederAddress) -> FeedersChanged:
    return FeedersChanged(feeders=feeders)


def test_each_rank_gets_the_list_once_it_trains() -> None:
    directory, coordinator = FeederDirectory(), a_coordinator(started=(0,))
    assert directory.update(coordinator, (FEEDER,), 0.0) == [(0, changed(FEEDER))]
    assert directory.update(coordinator, (FEEDER,), 1.0) == []
    send(coordinator, 1, FunctionStarted())
    assert directory.update(coordinator, (FEEDER,), 2.0) == [(1, changed(FEEDER))]


def test_all_ranks_get_a_changed_list() -> None:
    directory, coordinator = FeederDirectory(), a_coordinator()
    directory.update(coordinator, (FEEDER,), 0.0)
    frames = directory.update(coordinator, (OTHER, FEEDER), 1.0)
    assert frames == [(rank, changed(OTHER, FEEDER)) for rank in (0, 1)]
    assert directory.update(coordinator, (), 2.0) == [(rank, changed()) for rank in (0, 1)]


def test_a_rank_without_feeders_gets_no_message() -> None:
    assert FeederDirectory().update(a_coordinator(), (), 0.0) == []


def test_the_ranks_of_another_round_get_the_list() -> None:
    directory = FeederDirectory()
    directory.update(a_coordinator(1), (FEEDER,), 0.0)
    frames = directory.update(a_coordinator(2), (FEEDER,), 1.0)
    assert frames == [(rank, changed(FEEDER)) for rank in (0, 1)]


def measured(*waits: tuple[float, int, float], until: float) -> float | None:
    """Return the share at `until`, of waits (time, rank, seconds of ten)."""
    directory, coordinator = FeederDirectory(), a_coordinator()
    directory.update(coordinator, (FEEDER,), 0.0)
    for now, rank, waited_s in waits:
        send(coordinator, rank, DataWaited(waited_s=waited_s, elapsed_s=10.0), now)
        directory.update(coordinator, (FEEDER,), now)
    directory.update(coordinator, (FEEDER,), until)
    return directory.wait_share((FEEDER,), until)


def test_the_share_is_that_of_the_rank_that_waits_most() -> None:
    assert measured((50.0, 0, 1.0), (50.0, 1, 4.0), (55.0, 1, 2.0), until=60.0) == 0.3


def test_the_share_is_of_the_last_minute() -> None:
    assert measured((30.0, 0, 9.0), (80.0, 0, 1.0), until=95.0) == 0.1


def test_the_share_does_not_contain_waits_of_a_round_that_has_ended_long_ago() -> None:
    directory, coordinator = FeederDirectory(), a_coordinator()
    directory.update(coordinator, (FEEDER,), 0.0)
    send(coordinator, 0, DataWaited(waited_s=5.0, elapsed_s=10.0))
    directory.update(coordinator, (FEEDER,), 60.0)
    assert directory.wait_share((FEEDER,), 60.0) == 0.5
    assert directory.wait_share((FEEDER,), 121.0) is None


def test_the_share_is_unknown_before_a_minute_and_without_messages() -> None:
    assert measured((50.0, 0, 1.0), until=59.0) is None
    assert measured(until=100.0) is None


def test_the_share_is_unknown_after_a_change_of_the_feeders() -> None:
    directory, coordinator = FeederDirectory(), a_coordinator()
    directory.update(coordinator, (FEEDER,), 0.0)
    send(coordinator, 0, DataWaited(waited_s=1.0, elapsed_s=10.0))
    directory.update(coordinator, (FEEDER,), 60.0)
    assert directory.wait_share((FEEDER,), 60.0) == 0.1
    assert directory.wait_share((FEEDER, OTHER), 60.0) is None
    directory.update(coordinator, (FEEDER, OTHER), 61.0)
    assert directory.wait_share((FEEDER, OTHER), 90.0) is None
    assert directory.measured_s((FEEDER, OTHER), 90.0) == 29.0


def test_a_measured_wait_is_no_progress_of_the_training_function() -> None:
    coordinator = a_coordinator()
    before = coordinator.progress
    send(coordinator, 0, DataWaited(waited_s=1.0, elapsed_s=10.0), 100.0)
    assert coordinator.progress == before
