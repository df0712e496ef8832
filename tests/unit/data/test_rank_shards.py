"""The shards of a rank: who reads which rows, and positions in checkpoints."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import spotfit.data
from spotfit.core.errors import ConfigError
from spotfit.data.data_config import DataConfig
from spotfit.data.iteration.shard import ShardGroup
from spotfit.data.rank_shards import DatasetShards, TrainerDatasets
from tests.unit.data.counting_source import CountingSource

ROWS = 24
Positions = dict[str, dict[str, Any]]


def shards_of(
    rank: int = 0,
    world_size: int = 2,
    config: DataConfig | None = None,
    positions: Positions | None = None,
    world_sizes: tuple[int, ...] = (1, 2, 3),
) -> DatasetShards:
    datasets = {"train": spotfit.data.range(ROWS), "valid": spotfit.data.range(4)}
    group = ShardGroup(rank=rank, world_size=world_size, world_sizes=world_sizes, seed=5)
    shipped = pickle.loads(pickle.dumps(TrainerDatasets(datasets, config or DataConfig())))
    return DatasetShards(shipped, group, lambda: positions or {})


def global_batches(
    unit_rows: list[int], num_workers: tuple[int, int], config: DataConfig, step_rows: int
) -> list[list[int]]:
    """The batches of an epoch of a run of the smallest number of workers of `num_workers`."""
    size, largest = num_workers
    dataset = CountingSource(unit_rows).dataset.random_shuffle(seed=7)
    batches: dict[int, list[int]] = {}
    for rank in range(size):
        group = ShardGroup(rank=rank, world_size=size, world_sizes=tuple(range(size, largest + 1)))
        shard = DatasetShards(TrainerDatasets({"train": dataset}, config), group, dict).get("train")
        for number, batch in enumerate(shard.iter_batches(global_batch_size=step_rows)):
            batches.setdefault(number, []).extend(batch["id"].tolist())
    return list(batches.values())


def ids(shards: DatasetShards, name: str, batches: int | None = None) -> list[int]:
    """Read batches of four rows of all ranks; leave the pass after `batches`, before a report."""
    rows: list[int] = []
    for count, batch in enumerate(shards.get(name).iter_batches(global_batch_size=4), 1):
        rows += batch["id"].tolist()
        if count == batches:
            saved.update(shards.positions())
            break
    return rows


saved: Positions = {}


@pytest.fixture(autouse=True)
def _no_saved_positions() -> None:
    saved.clear()


def test_the_ranks_share_the_rows_of_a_dataset() -> None:
    rows = [ids(shards_of(rank), "train") for rank in range(2)]
    assert [len(part) for part in rows] == [ROWS // 2, ROWS // 2]
    assert sorted(rows[0] + rows[1]) == list(range(ROWS))


def test_a_shard_is_the_same_object_on_every_call() -> None:
    shards = shards_of()
    assert shards.get("train") is shards.get("train")


def test_a_dataset_that_is_not_split_is_read_completely_by_each_rank() -> None:
    config = DataConfig(datasets_to_split=["train"])
    assert [ids(shards_of(rank, config=config), "valid") for rank in range(2)] == [[0, 1, 2, 3]] * 2


def test_an_unknown_name_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="Did you mean 'train'"):
        shards_of().get("trian")


@given(
    unit_rows=st.lists(st.integers(1, 9), min_size=1, max_size=30),
    num_workers=st.sampled_from([(1, 1), (1, 6), (2, 2), (2, 3), (3, 8), (4, 4), (6, 9), (12, 12)]),
    chosen_for=st.sampled_from([(1, 4), (2, 8), (4, 4)]),
)
def test_runs_of_any_number_of_workers_train_on_the_same_batches(
    unit_rows: list[int], num_workers: tuple[int, int], chosen_for: tuple[int, int]
) -> None:
    config = DataConfig(num_workers=chosen_for)
    batches = global_batches(unit_rows, num_workers, config, 12)
    expected = global_batches(unit_rows, (1, 1), config, 12)
    # The last step gives each worker the same number of rows.
    assert batches[: sum(unit_rows) // 12] == expected[: sum(unit_rows) // 12]
    assert {row for batch in batches for row in batch} <= set(range(sum(unit_rows)))


def test_without_a_common_range_the_batches_belong_to_the_number_of_workers() -> None:
    one, four = (global_batches([5] * 24, (size, size), DataConfig(), 12)[0] for size in (1, 4))
    assert sorted(one) != sorted(four)


# --- positions ------------------------------------------------------------------------------------


def test_the_end_of_a_resumed_pass_explains_a_stop_iteration() -> None:
    ids(shards_of(), "train", batches=5)
    shards = shards_of(positions=saved)
    assert shards.end_error() is None
    assert len(ids(shards, "train")) == 2
    error = shards.end_error()
    assert error is not None
    assert "'train' than were left of epoch 0, which a restart has resumed at row 20" in str(error)
    assert error.details == {"retryable": False}
    ids(shards, "train")
    assert shards.end_error() is None


def test_only_shards_that_were_iterated_have_positions() -> None:
    shards = shards_of()
    shards.get("valid")
    ids(shards, "train", batches=2)
    assert {name: state["consumed"] for name, state in saved.items()} == {"train": 8}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_another_number_of_ranks_reads_the_rest_of_the_epoch(world_size: int) -> None:
    before = [row for rank in range(2) for row in ids(shards_of(rank), "train", batches=2)]
    after = [
        row
        for rank in range(world_size)
        for row in ids(shards_of(rank, world_size, positions=saved), "train")
    ]
    assert sorted(before + after) == list(range(ROWS))


@pytest.mark.parametrize("sizes", [(2, 4), (4, 1), (1, 3)])
def test_a_run_that_continues_with_another_fixed_number_reads_each_row_once(
    sizes: tuple[int, int],
) -> None:
    def shards_of_fit(size: int, positions: Positions) -> list[DatasetShards]:
        return [
            shards_of(rank, size, positions=positions, world_sizes=(size,)) for rank in range(size)
        ]

    first = shards_of_fit(sizes[0], {})
    before = [row for shards in first for row in ids(shards, "train", batches=2)]
    continued = shards_of_fit(sizes[1], saved)
    after = [row for shards in continued for row in ids(shards, "train")]
    assert sorted(before + after) == list(range(ROWS))
    assert sorted(row for shards in continued for row in ids(shards, "train")) == list(range(ROWS))


def test_the_epoch_begins_again_on_request() -> None:
    ids(shards_of(0, 1), "train", batches=2)
    config = DataConfig(resume="epoch")
    assert ids(shards_of(0, 1, config, saved), "train") == list(range(ROWS))


def test_restored_positions_replace_those_of_the_checkpoint() -> None:
    ids(shards_of(0, 1), "train", batches=2)
    shards = shards_of(0, 1)
    ids(shards, "train", batches=5)
    shards.resume({"train": saved["train"] | {"consumed": 8}})
    assert ids(shards, "train") == list(range(8, ROWS))


def test_shards_without_restored_positions_begin_with_the_first_epoch() -> None:
    shards = shards_of(0, 1)
    ids(shards, "train")
    shards.resume({})
    assert shards.get("train").position.epoch == 0


# --- overridden DataConfig.configure --------------------------------------------------------------


class StreamingSplit(DataConfig):
    """As in the documentation of Ray Train."""

    def configure(
        self,
        datasets: dict[str, Any],
        world_size: int,
        worker_handles: Any,
        worker_node_ids: Any,
        **kwargs: Any,
    ) -> list[dict[str, Any]]:
        assert len(datasets) == 1
        spotfit.data.DataContext.get_current().execution_options = self.default_ingest_options()
        [(name, dataset)] = datasets.items()
        shards = dataset.streaming_split(world_size, equal=True, locality_hints=worker_node_ids)
        return [{name: shard} for shard in shards]


class FirstRows(DataConfig):
    def configure(self, datasets: dict[str, Any], *args: Any, **kwargs: Any) -> list[Any]:
        return [{name: each.limit(3).iterator() for name, each in datasets.items()}] * 2


class NoIterators(DataConfig):
    def configure(self, datasets: dict[str, Any], *args: Any, **kwargs: Any) -> list[Any]:
        return [datasets] * 2


def test_a_configuration_of_the_user_splits_the_dataset() -> None:
    rows = [ids(shards_of(rank, config=StreamingSplit()), "train") for rank in range(2)]
    assert sorted(rows[0] + rows[1]) == list(range(ROWS))
    assert len(rows[0]) == ROWS // 2


def test_the_default_configuration_can_be_called() -> None:
    dataset = spotfit.data.range(4)
    by_rank = DataConfig().configure({"train": dataset}, 2, None, None)
    rows = [row["id"] for part in by_rank for row in part["train"].iter_rows()]
    assert sorted(rows) == [0, 1, 2, 3]


def test_a_configuration_of_the_user_can_limit_the_rows() -> None:
    assert ids(shards_of(config=FirstRows()), "train") == [0, 1, 2]


def test_a_configuration_without_iterators_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"NoIterators\.configure returned a Dataset"):
        shards_of(config=NoIterators()).get("train")


def test_a_configuration_without_an_entry_for_the_rank_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no entry for this rank"):
        shards_of(2, 3, config=FirstRows()).get("train")


def test_positions_of_the_users_shards_belong_to_their_number_of_ranks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ids(shards_of(config=StreamingSplit()), "train", batches=2)
    again = shards_of(config=StreamingSplit(), positions=saved)
    assert len(ids(again, "train")) == ROWS // 2 - 4
    resized = shards_of(0, 1, config=StreamingSplit(), positions=saved)
    assert len(ids(resized, "train")) == ROWS
    assert "data.position_unknown" in capsys.readouterr().err
