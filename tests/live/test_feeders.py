"""Datasets that further machines transform for the workers, some of which are lost."""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest

import spotfit
import spotfit.data
from spotfit.core.ids import Token
from spotfit.model.events import GroupPlanned, GroupsReleased, GroupSubmitted, NodeLost
from spotfit_localsim.clouds.provisioner import SimProvisioner
from tests.live.cloud import LiveTestCloud, events_of, eventually
from tests.live.test_datasets import GLOBAL_BATCH

Config = dict[str, Any]
ROWS = 1200
Record = tuple[int, float, bool]
"""Position after the step, id of a row, and the random numbers of its augmentation."""
WAIT_S = 120.0


def augment(batch: dict[str, np.ndarray], marks: str) -> dict[str, np.ndarray]:
    """Add random numbers, and mark feeder processes that do so."""
    if Path("/proc/self/comm").read_text().strip() == "spotfit-feeder":
        Path(marks, f"fed-{os.getpid()}-{os.getpgrp()}").touch()
    count = len(batch["id"])
    flips = np.array([random.random() < 0.5 for _ in range(count)])
    return {**batch, "noise": np.random.normal(size=count), "flip": flips}


def rows_to_augment(cloud: LiveTestCloud) -> spotfit.data.Dataset:
    rows = spotfit.data.from_items([{"id": number} for number in range(ROWS)])
    return rows.random_shuffle(seed=7).map_batches(augment, fn_kwargs={"marks": str(cloud.marks)})


def train(config: Config) -> None:
    """Save the rows of all steps with each step."""
    rows: list[Record] = []
    rank = spotfit.get_context().get_world_rank()
    checkpoint = spotfit.get_checkpoint()
    if checkpoint is not None:
        rows = rows_in(checkpoint, rank)
    elif config.get("feeders"):
        read_until_fed(config["marks"], config["feeders"])
    shard = spotfit.get_dataset_shard("train")
    for batch in shard.iter_batches(global_batch_size=GLOBAL_BATCH):
        noise, flips = batch["noise"].tolist(), batch["flip"].tolist()
        rows += zip(batch["id"].tolist(), noise, flips, strict=True)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, f"rows-{rank}.json").write_text(json.dumps(rows))
            spotfit.report({}, checkpoint=spotfit.Checkpoint.from_directory(folder))
        for mark in config.get("wait_for", {}).get(str(shard.position.consumed), ()):
            while not Path(config["marks"], mark).exists():
                time.sleep(0.05)


def read_until_fed(marks: str, processes: int) -> None:
    """Read another dataset until that many feeder processes have transformed a part of it."""
    while len(list(Path(marks).glob("fed-*"))) < processes:
        for _ in spotfit.get_dataset_shard("other").iter_batches(batch_size=10):
            pass


def rows_in(checkpoint: spotfit.Checkpoint, rank: int) -> list[Record]:
    with checkpoint.as_directory() as folder:
        return [tuple(row) for row in json.loads(Path(folder, f"rows-{rank}.json").read_text())]


def result_rows(result: spotfit.Result) -> list[list[Record]]:
    assert result.checkpoint is not None
    return [rows_in(result.checkpoint, rank) for rank in range(2)]


def feeder_groups(cloud: LiveTestCloud) -> list[Token]:
    return [
        token
        for token, group in cloud.view("fed").groups.items()
        if group.role == "feed" and group.handle is not None and group.active_nodes
    ]


def fed_processes(cloud: LiveTestCloud) -> set[str]:
    return {path.name for path in cloud.marks.glob("fed-*")}


def test_results_are_equal_with_feeders_on_machines_that_are_lost(cloud: LiveTestCloud) -> None:
    expected = cloud.fit(train, workers=2, nodes=2, datasets={"train": rows_to_augment(cloud)})
    assert not fed_processes(cloud)

    trainer = cloud.trainer(
        train,
        name="fed",
        workers=2,
        nodes=2,
        max_failures=-1,
        config={"feeders": 2, "wait_for": {"120": ["feeder lost"], "600": ["worker lost"]}},
        datasets={"train": rows_to_augment(cloud), "other": rows_to_augment(cloud)},
    )
    trainer.data_feeders = spotfit.data.Feeders(nodes=2, cpus=1, processes=0)
    handle = trainer.submit()
    eventually(lambda: len(fed_processes(cloud)) >= 2, within_s=WAIT_S)

    killed = feeder_groups(cloud)[0]
    nodes = {str(node.group.token): node for node in cloud.reclaimer.running_nodes()}
    cloud.reclaimer.kill(nodes[killed])
    cloud.write_mark("feeder lost")
    eventually(
        lambda: (
            killed not in cloud.view("fed").groups
            or not cloud.view("fed").groups[killed].active_nodes
        )
    )
    cloud.reclaimer.kill(cloud.node_of_rank(1, "fed"))
    cloud.write_mark("worker lost")

    assert result_rows(handle.result(WAIT_S)) == result_rows(expected)
    events = cloud.events("fed")
    planned = [
        one for one in events if isinstance(one, GroupPlanned) and one.request.role == "feed"
    ]
    assert len(planned) >= 3
    lost = {one.token for one in events if isinstance(one, NodeLost)}
    released = {
        token
        for one in events
        if isinstance(one, GroupsReleased)
        for token in (one.token, *one.other_tokens)
    }
    assert killed in lost
    assert {one.request.token for one in planned} <= released


def train_with_feeders(config: Config) -> None:
    """Read until both feeder processes have worked, then once more after each mark of the test."""
    read_until_fed(config["marks"], config["feeders"])
    for mark in config["wait_for"]:
        while not Path(config["marks"], mark).exists():
            for _ in spotfit.get_dataset_shard("other").iter_batches(batch_size=100):
                pass
    spotfit.report({})


def aws_batch(root: Path, queue: str, instance_type: str, usd_per_hour: float) -> str:
    """A queue of a simulated AWS Batch with machines of that type at that price."""
    prices = {instance_type: {"spot": usd_per_hour, "on_demand": 3 * usd_per_hour}}
    options = {
        "root": str(root),
        "boot_s": 0.1,
        "queues": json.dumps([queue]),
        "instance_types": json.dumps([instance_type]),
        "prices": json.dumps(prices),
    }
    return f"sim://aws_batch?{urlencode(options)}"


def test_feeders_are_machines_of_a_second_type_in_the_same_run(tmp_path: Path) -> None:
    root, marks = tmp_path / "cloud", tmp_path / "marks"
    marks.mkdir()
    rows = spotfit.data.from_items([{"id": number} for number in range(ROWS)])
    dataset = rows.map_batches(augment, fn_kwargs={"marks": str(marks)})
    trainer = spotfit.DataParallelTrainer(
        train_with_feeders,
        train_loop_config={"marks": str(marks), "feeders": 2, "wait_for": ["feeder replaced"]},
        datasets={"train": dataset, "other": dataset},
        data_feeders=spotfit.data.Feeders(
            nodes=2,
            cpus=1,
            processes=0,
            provisioner=aws_batch(root, "other", "c6i.large", 0.04),
        ),
        scaling_config=spotfit.ScalingConfig(num_workers=1),
        run_config=spotfit.RunConfig(name="run", storage_path=str(tmp_path / "runs")),
        provisioner=aws_batch(root, "spot", "g5.xlarge", 0.5),
    )
    sim = SimProvisioner.with_options(cloud="aws_batch", root=str(root), boot_s=0.1)
    try:
        handle = trainer.submit()
        eventually(lambda: len(fed_by(marks)) >= 2, within_s=WAIT_S)
        # The youngest machine is one for feeders.
        sim.call_simulator("reclaim", {"notice": False})
        eventually(lambda: len(fed_by(marks)) >= 3, within_s=WAIT_S)
        Path(marks, "feeder replaced").touch()
        cost = handle.result(WAIT_S).cost
        eventually(lambda: all(one["state"] == "over" for one in sim.call_simulator("machines")))
    finally:
        sim.call_simulator("leave", {"machines": True})

    events = events_of(handle.url)
    roles = {one.request.token: one.request.role for one in events if isinstance(one, GroupPlanned)}
    workers, feeders = "aws_batch/sim-east-1/spot/spot", "aws_batch/sim-east-1/other/spot#feeders"
    offers = {
        (roles[one.token], one.handle.offer) for one in events if isinstance(one, GroupSubmitted)
    }
    assert offers == {("train", workers), ("feed", feeders)}
    hours = {one.offer: one.machine_s / 3600 for one in cost.offers}
    usd = {one.offer: one.usd for one in cost.offers}
    assert usd == {
        workers: pytest.approx(0.5 * hours[workers]),
        feeders: pytest.approx(0.04 * hours[feeders]),
    }
    assert cost.on_demand_usd == pytest.approx(3 * sum(filter(None, usd.values())))


def fed_by(marks: Path) -> set[str]:
    return {path.name for path in marks.glob("fed-*")}
