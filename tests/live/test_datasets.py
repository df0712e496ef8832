"""Datasets of a trainer: every row is trained on once per epoch, through kills and resizes."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import spotfit
import spotfit.data
from spotfit.data.caching import cache_directories
from tests.live.cloud import LiveTestCloud, eventually

Config = dict[str, Any]
ROWS = 1000
EPOCHS = 2
LONG_S = 600.0
"""Longer than the timeout of any test."""
GLOBAL_BATCH = 60
Record = tuple[int, int, int]
"""Epoch, position after the step, and id of a row."""


def shuffled_rows() -> spotfit.data.Dataset:
    rows = [{"id": number, "x": number / ROWS} for number in range(ROWS)]
    return spotfit.data.from_items(rows).random_shuffle(seed=7)


def train(config: Config) -> None:
    """Save the rows of all steps with each step; after a kill the next round continues."""
    me = spotfit.get_context()
    before, first_epoch = records_before()
    rows: list[Record] = before if me.get_world_rank() == 0 else []
    shard = spotfit.get_dataset_shard("train")
    # A script for Ray Train: it knows epochs only.
    for epoch in range(first_epoch, EPOCHS):
        for batch in shard.iter_batches(global_batch_size=GLOBAL_BATCH):
            step = shard.position.consumed // GLOBAL_BATCH
            rows += [(epoch, step, int(row)) for row in batch["id"]]
            save(rows, epoch)
            interrupt(config)
        save(rows, epoch + 1)


def save(rows: list[Record], epoch: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        rank = spotfit.get_context().get_world_rank()
        Path(folder, f"rows-{rank}.json").write_text(json.dumps(rows))
        Path(folder, "epoch.json").write_text(json.dumps(epoch))
        checkpoint = spotfit.Checkpoint.from_directory(folder)
        spotfit.report({"epoch": epoch}, checkpoint=checkpoint)


def records_of(checkpoint: spotfit.Checkpoint) -> list[Record]:
    with checkpoint.as_directory() as folder:
        parts = [json.loads(path.read_text()) for path in Path(folder).glob("rows-*.json")]
    return [tuple(record) for part in parts for record in part]


def records_before() -> tuple[list[Record], int]:
    checkpoint = spotfit.get_checkpoint()
    if checkpoint is None:
        return [], 0
    with checkpoint.as_directory() as folder:
        epoch = json.loads(Path(folder, "epoch.json").read_text())
    return records_of(checkpoint), epoch


def interrupt(config: Config) -> None:
    """Kill a worker after three steps of a round, as often as `config` says.

    With "resizes", four workers wait after three steps of the first epoch until machines are lost,
    and two continue slowly, so that the group grows again within the epoch.
    """
    me = spotfit.get_context()
    is_last_rank = me.get_world_rank() == me.get_world_size() - 1
    kills = Path(config["marks"], "kills")
    count = len(kills.read_text()) if kills.exists() else 0
    position = spotfit.get_dataset_shard("train").position
    if position.consumed < 3 * GLOBAL_BATCH or position.epoch > 0:
        return
    if is_last_rank and count < config.get("kills", 0):
        kills.write_text("x" * (count + 1))
        os.kill(os.getpid(), signal.SIGKILL)
    if config.get("resizes"):
        is_first_round = not Path(config["marks"], "lost").exists()
        time.sleep(LONG_S if is_first_round else 0.5 if me.get_world_size() == 2 else 0)


def assert_each_row_once_per_epoch(result: spotfit.Result) -> None:
    assert result.checkpoint is not None
    counts = Counter((epoch, row) for epoch, _, row in records_of(result.checkpoint))
    # A last step of 1000 - 16 * 60 rows is shared equally by all numbers of ranks in these tests.
    assert counts == Counter((epoch, row) for epoch in range(EPOCHS) for row in range(ROWS))


def steps_of(result: spotfit.Result) -> dict[tuple[int, int], set[int]]:
    assert result.checkpoint is not None
    steps: dict[tuple[int, int], set[int]] = {}
    for epoch, step, row in records_of(result.checkpoint):
        steps.setdefault((epoch, step), set()).add(row)
    return steps


def test_killed_workers_continue_at_the_next_row(cloud: LiveTestCloud) -> None:
    result = cloud.fit(
        train,
        workers=4,
        nodes=2,
        max_failures=-1,
        config={"kills": 3},
        datasets={"train": shuffled_rows()},
    )
    assert (cloud.marks / "kills").read_text() == "xxx"
    assert_each_row_once_per_epoch(result)

    # Another number of workers trains on the same global batches.
    other = cloud.fit(train, workers=1, name="alone", datasets={"train": shuffled_rows()})
    assert steps_of(result) == steps_of(other)


def train_on_cached_rows(config: Config) -> None:
    directory = cache_directories._RunDirectory.path
    Path(config["marks"], f"cache-{os.getpid()}").write_text(str(directory))
    train(config)


def test_restarted_workers_read_the_cache_of_their_machine(cloud: LiveTestCloud) -> None:
    calls = cloud.marks / "calls"
    calls.mkdir()
    cloud.marks.joinpath("rows").mkdir()
    table = pa.table({"id": range(ROWS), "x": [number / ROWS for number in range(ROWS)]})
    pq.write_table(table, cloud.marks / "rows" / "0.parquet", row_group_size=20)

    def record_call(batch: dict[str, Any]) -> dict[str, Any]:
        with (calls / str(os.getpid())).open("a") as file:
            file.write(f"{batch['id'][0]}\n")
        return batch

    rows = spotfit.data.read_parquet(str(cloud.marks / "rows")).map_batches(record_call)
    result = cloud.fit(
        train_on_cached_rows,
        workers=2,
        max_failures=-1,
        config={"kills": 2},
        datasets={"train": rows.cache(disk_bytes=2**24).random_shuffle(seed=7)},
    )
    assert_each_row_once_per_epoch(result)
    (calls / str(os.getpid())).unlink()  # of the client
    assert len(list(calls.iterdir())) > 1
    count = sum(len(path.read_text().splitlines()) for path in calls.iterdir())
    # Two ranks may compute a unit at the same time. Without a cache there are two epochs of 50.
    assert 50 <= count < 60
    directories = {path.read_text() for path in cloud.marks.glob("cache-*")}
    assert len(directories) == 1
    eventually(lambda: not Path(*directories).exists())


def test_a_resized_group_trains_on_the_rest_of_the_epoch(cloud: LiveTestCloud) -> None:
    handle = cloud.submit(
        train,
        workers=(2, 4),
        nodes=4,
        config={"resizes": True},
        datasets={"train": shuffled_rows()},
        scaling_options={"elastic_resize_monitor_interval_s": 0.2},
    )
    eventually(lambda: len(cloud.view().checkpoints) >= 3)
    cloud.write_mark("lost")
    cloud.lose_ranks(2, 3)
    cloud.wait_for_saves_of(2)
    cloud.reclaimer.set_capacity(None)
    cloud.wait_for_saves_of(4)
    assert_each_row_once_per_epoch(handle.result(60))


def read_all(config: Config) -> None:
    frame = pd.concat(
        spotfit.get_dataset_shard("valid").iter_batches(batch_size=300, batch_format="pandas")
    )
    spotfit.report({"rows": len(frame), "sum": int(frame["id"].sum())})


def test_every_worker_reads_a_dataset_that_is_not_split(cloud: LiveTestCloud) -> None:
    trainer = cloud.trainer(read_all, workers=2, datasets={"valid": shuffled_rows()})
    trainer.dataset_config = spotfit.DataConfig(datasets_to_split=[])
    result = trainer.fit()
    assert result.metrics == {"rows": ROWS, "sum": sum(range(ROWS))}


def test_an_unknown_dataset_is_a_key_error_of_the_worker(cloud: LiveTestCloud) -> None:
    def read() -> None:
        spotfit.get_dataset_shard("trian")

    with pytest.raises(spotfit.WorkerGroupError, match="Did you mean 'train'"):
        cloud.fit(read, workers=1, datasets={"train": shuffled_rows()})
