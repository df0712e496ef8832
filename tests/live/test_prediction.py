"""Predictions with killed workers and machines: each output is written once, with equal bytes."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import spotfit
from spotfit.model.events import FailureCause
from spotfit.prediction import PredictionResult, predict
from spotfit.prediction.batches import encode_file
from spotfit.prediction.predict_job import _describe_job
from spotfit.prediction.predict_loop import PredictionTask, run_prediction
from spotfit.prediction.predictor import PredictorSource
from spotfit.prediction.shards import plan_work
from spotfit.store.factory import open_store
from spotfit_provisioners.local.state_dir import LocalNode
from tests.live.cloud import LiveTestCloud, eventually

np = pytest.importorskip("numpy")

SHARDS = 60
KILLED_SHARDS = (5, 10, 19)  # of ranks 1, 2 and 3 of 4


class Shards:
    """Generates the rows of a shard; waits before that until the mark 'fast' exists."""

    def __init__(self, marks: Path, wait_s: float = 0.0) -> None:
        self.marks = marks
        self.wait_s = wait_s

    def __call__(self, number: int) -> Any:
        if not (self.marks / "fast").exists():
            time.sleep(self.wait_s)
        return {"x": np.random.default_rng(number).random(50), "shard": np.full(50, number)}


class Model:
    """Multiplies by a number of the checkpoint. Kills its process once for each shard of `kills`,
    and waits in the shard `waits` for the mark 'resume'."""

    def __init__(self, directory: str, marks: Path, kills: tuple[int, ...], waits: int) -> None:
        self.factor = float(Path(directory, "factor").read_text())
        self.marks, self.kills, self.waits = marks, kills, waits

    def __call__(self, batch: Any) -> Any:
        number = int(batch["shard"][0])
        mark = self.marks / f"killed-{number}"
        if number in self.kills and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if number == self.waits and not (self.marks / "resume").exists():
            (self.marks / "waiting").touch()
            eventually((self.marks / "resume").exists)
        with (self.marks / "predicted").open("a") as log:
            log.write(f"{number}\n")
        return {"y": batch["x"] * self.factor, "shard": batch["shard"]}


@pytest.fixture
def checkpoint(tmp_path: Path) -> spotfit.Checkpoint:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/factor").write_text("3")
    return spotfit.Checkpoint.from_directory(tmp_path / "model")


def start(
    cloud: LiveTestCloud,
    checkpoint: spotfit.Checkpoint,
    output: str,
    *,
    kills: tuple[int, ...] = (),
    waits: int = -1,
) -> PredictionResult:
    return predict(
        Model,
        range(SHARDS),
        read=Shards(cloud.marks),
        output=cloud.folder / output,
        checkpoint=checkpoint,
        fn_constructor_kwargs={"marks": cloud.marks, "kills": kills, "waits": waits},
        batch_size=20,
        output_format="npz",
        scaling_config=spotfit.ScalingConfig(num_workers=4),
        run_config=spotfit.RunConfig(
            name=output,
            storage_path=cloud.storage,
            failure_config=spotfit.FailureConfig(max_failures=len(kills)),
        ),
        provisioner=cloud.options(nodes=2),
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("part-*"))}


def node_of_rank_zero(cloud: LiveTestCloud, run: str) -> LocalNode | None:
    """Return None between two rounds."""
    try:
        return cloud.node_of_rank(0, run)
    except (AssertionError, StopIteration):
        return None


def test_outputs_after_kills_equal_those_of_an_undisturbed_run(
    cloud: LiveTestCloud, checkpoint: spotfit.Checkpoint
) -> None:
    undisturbed = start(cloud, checkpoint, "undisturbed")
    (cloud.marks / "predicted").unlink()

    def kill_a_machine() -> None:
        cloud.wait_for_mark("waiting")
        node = eventually(lambda: node_of_rank_zero(cloud, "disturbed"))
        assert node is not None
        cloud.reclaimer.kill(node)
        cloud.write_mark("resume")

    killer = threading.Thread(target=kill_a_machine)
    killer.start()
    disturbed = start(cloud, checkpoint, "disturbed", kills=KILLED_SHARDS, waits=40)
    killer.join()

    outputs = contents(cloud.folder / "disturbed")
    assert len(outputs) == SHARDS
    assert outputs == contents(cloud.folder / "undisturbed")
    assert disturbed.shards == undisturbed.shards
    assert disturbed.rows == SHARDS * 50
    assert {one.name for one in cloud.marks.glob("killed-*")} == {
        f"killed-{number}" for number in KILLED_SHARDS
    }
    causes = [closed.cause for closed in cloud.rounds_closed("disturbed")]
    assert FailureCause.PREEMPTION in causes
    assert FailureCause.WORKER in causes
    # Per closed round each of 4 workers repeats one shard at most, in batches of 20 of 50 rows.
    predicted = (cloud.marks / "predicted").read_text().split()
    assert set(map(int, predicted)) == set(range(SHARDS))
    assert len(predicted) <= 3 * (SHARDS + 4 * len(causes))


def test_a_finished_prediction_is_not_repeated(
    cloud: LiveTestCloud, checkpoint: spotfit.Checkpoint
) -> None:
    first = start(cloud, checkpoint, "once")
    journal = [path.name for path in Path(cloud.storage, "once/.spotfit/journal").iterdir()]
    written = {path: path.stat().st_mtime_ns for path in (cloud.folder / "once").rglob("*")}
    predicted = (cloud.marks / "predicted").read_text()

    second = start(cloud, checkpoint, "once")

    assert (second.shards, second.result) == (first.shards, None)
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert (cloud.marks / "predicted").read_text() == predicted
    assert [path.name for path in Path(cloud.storage, "once/.spotfit/journal").iterdir()] == journal
    assert np.array_equal(np.unique(second.to_numpy()["shard"]), np.arange(SHARDS))


def test_inputs_and_outputs_may_be_in_a_bucket(cloud: LiveTestCloud, s3: str) -> None:
    bucket = open_store(f"s3://runs?endpoint_url={s3}&region=us-east-1")
    for number in range(3):
        body = encode_file({"x": np.arange(5) + number}, "npz")
        bucket.put(f"in/{number}.npz", body)
    result = predict(
        lambda batch: {"y": batch["x"] * 2},
        bucket.subtree("in").url,
        output=bucket.subtree("out").url,
        output_format="jsonl",
        scaling_config=spotfit.ScalingConfig(num_workers=2),
        run_config=spotfit.RunConfig(name="run", storage_path=bucket.subtree("runs").url),
        provisioner=cloud.options(),
    )
    assert [info.key for info in bucket.list("out")] == [
        "out/_job.json",
        "out/_manifest.json",
        *(f"out/_records/part-0000{n}.json" for n in range(3)),
        *(f"out/part-0000{n}.jsonl" for n in range(3)),
    ]
    assert result.to_numpy()["y"].tolist() == [(n + k) * 2 for k in range(3) for n in range(5)]


def test_an_unpicklable_predictor_is_refused_before_machines_are_rented(
    cloud: LiveTestCloud,
) -> None:
    lock = threading.Lock()
    with pytest.raises(spotfit.SpotfitError, match="cannot be pickled"):
        predict(
            lambda batch: lock and batch,
            range(2),
            read=Shards(cloud.marks),
            output=cloud.folder / "output",
            output_format="npz",
            run_config=spotfit.RunConfig(name="run", storage_path=cloud.storage),
            provisioner=cloud.options(),
        )
    assert not list(Path(cloud.storage).rglob("journal/*")), "no run was started"
    assert not list((cloud.folder / "output").iterdir())


def test_an_elastic_prediction_grows_between_passes(
    cloud: LiveTestCloud, checkpoint: spotfit.Checkpoint
) -> None:
    output = open_store(cloud.folder / "elastic")
    arguments = {"marks": cloud.marks, "kills": (), "waits": -1}
    source = PredictorSource(Model, checkpoint, arguments)
    read = Shards(cloud.marks, wait_s=1.0)  # a minute for the second machine
    work = plan_work(range(SHARDS), read=read, rows_per_shard=1, output=output)
    task = PredictionTask(
        output_url=output.url,
        job=_describe_job(source, work, ("numpy", "npz"), read=None),
        shards=work.shards,
        predictor=source,
        batch_size=None,
        batch_format="numpy",
        shards_per_pass=0.0,
        min_pass_s=0.0,
    )
    handle = cloud.submit(
        run_prediction,
        config={"task": task},
        workers=(1, 2),
        nodes=2,
        local_options={"capacity": 1},
        scaling_options={"elastic_resize_monitor_interval_s": 0.2},
    )
    eventually((cloud.marks / "predicted").exists)
    cloud.reclaimer.set_capacity(2)
    eventually(lambda: (one := cloud.view().round) is not None and one.world_size == 2)
    cloud.write_mark("fast")

    assert handle.result(60).return_value == SHARDS * 50
    assert [opened.round.world_size for opened in cloud.rounds_opened()] == [1, 2]
    assert [closed.cause for closed in cloud.rounds_closed()] == [FailureCause.RESIZE]
    assert len(PredictionResult.open(output.url).shards) == SHARDS
