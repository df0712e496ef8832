"""Passes over a dataset, as older scripts write them."""

from __future__ import annotations

from itertools import islice

import spotfit.data
from spotfit.data.operations.dataset_pipeline import DatasetPipeline

ROWS = spotfit.data.range(4)


def test_each_epoch_is_the_dataset() -> None:
    epochs = ROWS.window(blocks_per_window=2).repeat(3).iter_epochs()
    assert [epoch.count() for epoch in epochs] == [4, 4, 4]


def test_repetition_without_a_number_has_no_end() -> None:
    pipeline = ROWS.repeat()
    assert len(list(islice(pipeline.iter_epochs(), 10))) == 10
    assert len(list(pipeline.iter_epochs(max_epoch=2))) == 2


def test_batches_are_those_of_all_passes() -> None:
    sizes = [len(batch["id"]) for batch in ROWS.repeat(2).iter_batches(batch_size=3)]
    assert sizes == [3, 1, 3, 1]


def test_transforms_apply_to_every_pass() -> None:
    pipeline = ROWS.repeat(2).map_batches(lambda batch: {"x": batch["id"] * 2})
    assert isinstance(pipeline, DatasetPipeline)
    assert [row["x"] for row in pipeline.iter_rows()] == [0, 2, 4, 6] * 2


def test_values_are_those_of_the_dataset() -> None:
    assert ROWS.repeat(2).count() == 4


def test_windows_and_their_shuffle_are_settings_of_the_dataset() -> None:
    pipeline = ROWS.window().rewindow(blocks_per_window=3).random_shuffle_each_window(seed=3)
    (epoch,) = pipeline.iter_datasets()
    assert epoch.shuffle_settings.kind == "rows"
    (epoch,) = ROWS.window().randomize_block_order_each_window().iter_datasets()
    assert epoch.shuffle_settings.kind == "units"


def test_a_function_changes_each_window() -> None:
    pipeline = ROWS.window().foreach_window(lambda dataset: dataset.limit(2))
    assert [dataset.count() for dataset in pipeline.iter_datasets()] == [2]


def test_parts_have_the_same_passes() -> None:
    parts = ROWS.repeat(2).split(2)
    assert [[row["id"] for row in part.iter_rows()] for part in parts] == [[0, 1] * 2, [2, 3] * 2]


def test_a_dataset_has_epochs_itself() -> None:
    assert [epoch.count() for epoch in ROWS.iter_epochs(2)] == [4, 4]
