"""Passes of one rank over the shards that are left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spotfit.checkpoint.committed import CheckpointReport
from spotfit.core.clock import Clock
from spotfit.model.topology import Ranks
from spotfit.prediction.predict_loop import PredictionTask, PredictionWorker, run_prediction
from spotfit.prediction.predictor import PredictorSource
from spotfit.prediction.shard_outputs import PredictionJob, ShardOutputs, read_manifest
from spotfit.prediction.shards import FunctionSource, Shard
from spotfit.store.factory import open_store
from spotfit.worker import training_api
from spotfit.worker.local_session import LocalSession

np = pytest.importorskip("numpy")

JOB = PredictionJob(fingerprint="f", code="c", shards=7, output_format="npz")


class SteppedClock(Clock):
    """Advances by `step_s` at each reading."""

    def __init__(self, step_s: float) -> None:
        self.time_s, self.step_s = 0.0, step_s

    def now(self) -> float:
        self.time_s += self.step_s
        return self.time_s

    def wait(self, seconds: float) -> None:
        self.time_s += seconds


class Model:
    created = 0

    def __init__(self) -> None:
        type(self).created += 1

    def __call__(self, batch: Any) -> Any:
        return {"y": batch["data"] * 2}


@pytest.fixture
def session() -> Iterator[LocalSession]:
    session = LocalSession("run")
    with training_api.use_session(session):
        yield session


@pytest.fixture
def task(tmp_path: Path) -> PredictionTask:
    Model.created = 0
    return PredictionTask(
        output_url=str(tmp_path / "output"),
        job=JOB,
        shards=tuple(
            Shard(f"part-{n}", FunctionSource(n, lambda n: np.arange(5) + n)) for n in range(7)
        ),
        predictor=PredictorSource(Model),
        batch_size=2,
        batch_format="numpy",
    )


def run(task: PredictionTask, clock: Clock) -> int:
    with ExitStack() as stack:
        return PredictionWorker(task, stack, clock).run()


@pytest.mark.usefixtures("session")
def test_all_shards_are_written_with_a_manifest(task: PredictionTask) -> None:
    assert run_prediction({"task": task}) == 35
    manifest = read_manifest(open_store(task.output_url))
    assert [shard.name for shard in manifest.shards] == [f"part-{n}" for n in range(7)]
    assert [shard.input for shard in manifest.shards] == [repr(n) for n in range(7)]
    stored = np.load(Path(task.output_url, "part-3.npz"))
    assert stored["y"].tolist() == [6, 8, 10, 12, 14]
    assert Model.created == 1


def test_a_pass_ends_after_its_time_and_commits_the_progress(
    task: PredictionTask, session: LocalSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[Any] = []
    report_checkpoint = session.report_checkpoint

    def record(metrics: dict[str, Any], report: CheckpointReport) -> None:
        reported.append(metrics)
        report_checkpoint(metrics, report)

    monkeypatch.setattr(session, "report_checkpoint", record)
    # The clock is read twice per shard: a shard takes 10 s. The first pass has 15 s, the next one
    # 200 s.
    run(task, SteppedClock(5.0))
    assert [metrics["shards_done"] for metrics in reported] == [2, 7]


@pytest.mark.usefixtures("session")
def test_a_pass_predicts_at_least_one_shard(task: PredictionTask) -> None:
    assert run(replace(task, shards_per_pass=0.0, min_pass_s=0.0), SteppedClock(1.0)) == 35


@pytest.mark.usefixtures("session")
def test_shards_that_a_pass_does_not_reach_are_not_read(task: PredictionTask) -> None:
    read: list[int] = []

    def record(number: int) -> Any:
        read.append(number)
        return np.arange(5)

    shards = tuple(Shard(f"part-{n}", FunctionSource(n, record)) for n in range(7))
    run(replace(task, shards=shards, shards_per_pass=0.0, min_pass_s=0.0), SteppedClock(1.0))
    assert read == list(range(7))


@pytest.mark.usefixtures("session")
def test_recorded_shards_are_not_predicted_again(task: PredictionTask) -> None:
    run_prediction({"task": task})
    Path(task.output_url, "_manifest.json").unlink()
    Path(task.output_url, "_records/part-2.json").unlink()
    before = {path: path.stat().st_mtime_ns for path in Path(task.output_url).glob("part-*")}
    assert run_prediction({"task": task}) == 35
    after = {path: path.stat().st_mtime_ns for path in Path(task.output_url).glob("part-*")}
    assert before == after
    assert Model.created == 2


@pytest.mark.usefixtures("session")
def test_no_model_is_loaded_if_only_the_manifest_is_missing(task: PredictionTask) -> None:
    run_prediction({"task": task})
    Path(task.output_url, "_manifest.json").unlink()
    assert run_prediction({"task": task}) == 35
    assert Model.created == 1


class SecondOfThree:
    """A group in which this process has rank 1, and rank 0 broadcasts these values."""

    ranks = Ranks(world_rank=1, world_size=3, local_rank=1, local_world_size=3)

    def __init__(self, values: list[Any]) -> None:
        self._values = values

    def barrier(self) -> None:
        pass

    def broadcast(self, _value: Any) -> Any:
        return self._values.pop(0)


def test_a_rank_takes_every_nth_shard_of_the_broadcast_list(task: PredictionTask) -> None:
    from spotfit.prediction.predict_loop import _pack

    left = [True, True, False, True, True, True, True]  # part-2 is done
    peers = SecondOfThree([(_pack(left), 100.0), (_pack([False] * 7), 100.0)])
    with training_api.use_session(LocalSession("run", peers)):
        assert run_prediction({"task": task}) == 0  # only rank 0 counts
    outputs = ShardOutputs(open_store(task.output_url), JOB)
    assert outputs.recorded() == {"part-1", "part-5"}


@pytest.mark.usefixtures("session")
def test_an_exception_of_the_predictor_names_the_shard(task: PredictionTask) -> None:
    def fail(_batch: Any) -> Any:
        raise ValueError("no such class")

    with pytest.raises(ValueError, match="no such class") as raised:
        run_prediction({"task": replace(task, predictor=PredictorSource(fail))})
    assert raised.value.__notes__ == ["while shard part-0 was predicted: 0"]


@pytest.mark.usefixtures("session")
def test_an_exception_of_the_reader_names_the_shard(task: PredictionTask) -> None:
    def fail(_item: int) -> Any:
        raise OSError("no such disk")

    shards = (Shard("part-0", FunctionSource(17, fail)),)
    with pytest.raises(OSError, match="no such disk") as raised:
        run_prediction({"task": replace(task, shards=shards)})
    assert raised.value.__notes__ == ["while shard part-0 was read: 17"]
