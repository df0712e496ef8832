"""Every epoch trains on the rows of the dataset once, whatever happens to workers and feeders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any

import pyarrow as pa
import pytest

from spotfit.data.caching import cache_files
from spotfit.data.caching.cache_files import CacheFiles
from spotfit.data.caching.row_cache import RowCache
from spotfit.data.iteration import pass_reader, shard
from spotfit.data.iteration.shard import ShardGroup, ShardPosition
from spotfit.data.loading import loader, slices
from spotfit.data.order import EpochOrder, LaneRange, OrderSettings
from spotfit.data.rank_shards import DatasetShards
from spotfit.model.events import GroupPlanned, NodeLost
from spotfit_localsim.traces import CapacityTrace
from spotfit_localsim.virtual.scenario import Scenario
from spotfit_localsim.virtual.scenario_library import (
    dataset_scenario,
    feeders_of_a_dataset,
    resizes_within_an_epoch,
)
from spotfit_localsim.virtual.workload import CacheFaults
from tests.sim.results import simulated
from tests.sim.test_mutants import SimulationCase, check_production, find_violation


def test_every_epoch_has_all_rows_once_in_random_scenarios(seeds: range) -> None:
    results = [simulated(dataset_scenario(seed), seed) for seed in range(len(seeds) // 2)]
    assert any(result.slices_of_feeders for result in results)


def test_a_cache_file_that_is_empty_already_can_be_damaged_again() -> None:
    """Found by a random schedule."""
    simulated(dataset_scenario(740102), 740102)


@pytest.mark.parametrize("seed", range(3))
def test_group_resizes_from_4_to_2_3_and_8_ranks_within_one_epoch(seed: int) -> None:
    """The simulation compares every global batch with that of one undisturbed rank."""
    sizes = simulated(resizes_within_an_epoch, seed).world_sizes_by_epoch
    assert [size for size, _ in groupby(sizes[0])] == [4, 2, 3, 8]


def test_batches_are_equal_with_feeders_on_machines_that_are_lost(seeds: range) -> None:
    results = [simulated(feeders_of_a_dataset, seed) for seed in range(len(seeds) // 2)]
    for result in results:
        assert result.slices_of_feeders > 100
        assert len(result.world_sizes_by_epoch) == 9
    lost = set()
    for entry in (entry for result in results for entry in result.entries):
        match entry.event:
            case GroupPlanned(request=request) if request.role == "feed":
                lost.add(request.token)
    assert any(
        isinstance(entry.event, NodeLost) and entry.event.token in lost
        for result in results
        for entry in result.entries
    )


@pytest.mark.parametrize("scenario", [resizes_within_an_epoch, feeders_of_a_dataset])
@pytest.mark.parametrize("cache", [CacheFaults(0, 3000, 0.3), CacheFaults(2000, 10**6, 0.3)])
def test_batches_are_equal_with_caches_whose_files_are_damaged(
    scenario: Scenario, cache: CacheFaults
) -> None:
    assert simulated(with_cache(scenario, cache), 1).violation is None


def with_cache(scenario: Scenario, cache: CacheFaults) -> Scenario:
    """The same training, on rows that each machine keeps."""
    assert scenario.workload.dataset is not None
    dataset = replace(scenario.workload.dataset, cache=cache)
    workload = replace(scenario.workload, dataset=dataset)
    return replace(scenario, name=f"{scenario.name} with {cache}", workload=workload)


# --- mutants --------------------------------------------------------------------------------------


SHRINKS_IN_EPOCH = replace(
    resizes_within_an_epoch,
    num_workers=4,
    market=replace(
        resizes_within_an_epoch.market, capacity=CapacityTrace("4, 2", ((0.0, 4), (15.0, 2)))
    ),
    workload=replace(resizes_within_an_epoch.workload, steps=30),
)


def dataset_cases() -> list[SimulationCase]:
    storms = [(dataset_scenario(seed), seed) for seed in range(10)]
    cached = with_cache(feeders_of_a_dataset, CacheFaults(0, 10**6, 0.5))
    return [(SHRINKS_IN_EPOCH, 0), (feeders_of_a_dataset, 0), (cached, 0), *storms]


def count_read_ahead(*arguments: Any) -> Iterator[tuple[Any, int]]:
    """Count also the next step, which was only read ahead."""
    steps = list(WITH_POSITIONS(*arguments))
    for (block, _), (_, taken) in zip(steps, [*steps[1:], *steps[-1:]], strict=True):
        yield block, taken


WITH_POSITIONS = pass_reader._with_positions


def begin_epoch_again(self: DatasetShards, name: str) -> Mapping[str, Any]:
    """Resume the epoch, but not the position in it."""
    return {"epoch": self._read_positions().get(name, {}).get("epoch", 0)}


def ignore_snapshot(self: DatasetShards, positions: Mapping[str, Mapping[str, Any]]) -> None:
    """Begin with the first row after a restore."""


def skip_a_batch(self: ShardPosition) -> dict[str, Any]:
    """Save a position that is a row too late."""
    state = STATE(self)
    return {**state, "consumed": state["consumed"] + 1} if state else state


STATE = ShardPosition.state


def share_rows_of_rank_1(
    self: EpochOrder, first: int, count: int, world_size: int, rank: int, **options: Any
) -> list[LaneRange]:
    """Give rank 0 the rows of rank 1 in groups of two."""
    return RANK_ROWS(self, first, count, world_size, max(rank, world_size == 2), **options)


RANK_ROWS = EpochOrder.rank_rows


def choose_by_world_size(
    dataset: Any, group: ShardGroup, step_rows: int, *options: Any
) -> OrderSettings:
    """Choose the order for the present number of ranks."""
    sizes = (group.world_size,)
    settings = CHOOSE_ORDER(dataset, ShardGroup(world_sizes=sizes, seed=group.seed), step_rows)
    return settings._replace(seed=group.seed)


CHOOSE_ORDER = shard.choose_order


def call_unseeded(function: Any, block: Any, _key: int) -> Any:
    """Do not seed the generators that user code draws from."""
    return function(block)


def call_seeded_by_dataset(function: Any, block: Any, _key: int) -> Any:
    """Seed the generators of all slices alike, in the worker only."""
    return slices.call_seeded(function, block, 7)


def decode_unverified(self: CacheFiles, _name: str, body: Any) -> Any:
    """Read whatever a file contains."""
    return pa.ipc.open_stream(body[cache_files._HEADER.size :]).read_all()


def put_shifted(self: RowCache, name: str, table: Any) -> None:
    """Keep other rows than those that were computed."""
    PUT(self, name, table.take(list(range(table.num_rows))[::-1]))


PUT = RowCache.put


@pytest.mark.parametrize(
    ("target", "name", "mutant"),
    [
        (pass_reader, "_with_positions", count_read_ahead),
        (DatasetShards, "_position_of", begin_epoch_again),
        (DatasetShards, "resume", ignore_snapshot),
        (ShardPosition, "state", skip_a_batch),
        (EpochOrder, "rank_rows", share_rows_of_rank_1),
        (shard, "choose_order", choose_by_world_size),
        (slices, "call_seeded", call_unseeded),
        (loader, "call_seeded", call_seeded_by_dataset),
        (CacheFiles, "_decode", decode_unverified),
        (RowCache, "put", put_shifted),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_wrong_readers_are_detected(
    target: Any, name: str, mutant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(target, name, mutant)
        case, violation = find_violation(dataset_cases())
    assert "trains on wrong rows" in violation
    check_production(case)
