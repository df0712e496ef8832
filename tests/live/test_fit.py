"""`fit()` from the user's view: result, content of the bucket, console output."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import spotfit
from spotfit.client.trainer import TorchTrainer
from tests.live.cloud import LiveTestCloud, eventually

Config = dict[str, Any]


def save(step: int, **metrics: Any) -> None:
    """Report a checkpoint with the step and its writer."""
    rank = spotfit.get_context().get_world_rank()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, f"rank{rank}.json").write_text(json.dumps({"step": step}))
        checkpoint = spotfit.Checkpoint.from_directory(folder)
        spotfit.report({"step": step, **metrics}, checkpoint=checkpoint)


def restored() -> int | None:
    """Return the step of the restored checkpoint."""
    checkpoint = spotfit.get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as folder:
        return int(json.loads(Path(folder, "rank0.json").read_text())["step"])


def files_of(checkpoint: spotfit.Checkpoint | None) -> list[str]:
    assert checkpoint is not None
    with checkpoint.as_directory() as folder:
        return sorted(path.name for path in Path(folder).iterdir())


# --- results --------------------------------------------------------------------------------------


def test_fit_returns_the_value_and_last_metrics_of_rank_0(cloud: LiveTestCloud) -> None:
    def train(config: Config) -> str:
        rank = spotfit.get_context().get_world_rank()
        spotfit.report({"loss": 1.0, "rank": rank})
        spotfit.report({"loss": config["loss"], "rank": rank})
        return f"returned by {rank}"

    result = cloud.fit(train, workers=2, config={"loss": 0.5})

    assert result.return_value == "returned by 0"
    assert result.metrics == {"loss": 0.5, "rank": 0}
    assert result.checkpoint is None
    assert result.error is None
    assert result.path == cloud.url()


def test_context_contains_the_ranks_of_every_worker(cloud: LiveTestCloud) -> None:
    def train(config: Config) -> None:
        me = spotfit.get_context()
        result = (
            me.get_world_size(),
            me.get_local_rank(),
            me.get_local_world_size(),
            me.get_node_rank(),
            me.get_experiment_name(),
        )
        Path(config["marks"], str(me.get_world_rank())).write_text(json.dumps(result))

    cloud.fit(train, workers=4, nodes=2, name="places")

    result = [json.loads((cloud.marks / str(rank)).read_text()) for rank in range(4)]
    assert result == [
        [4, 0, 2, 0, "places"],
        [4, 1, 2, 0, "places"],
        [4, 0, 2, 1, "places"],
        [4, 1, 2, 1, "places"],
    ]


def test_checkpoint_contains_files_of_all_ranks_and_metrics_of_rank_0(
    cloud: LiveTestCloud,
) -> None:
    def train(config: Config) -> None:
        save(7, rank=spotfit.get_context().get_world_rank())

    result = cloud.fit(train, workers=3, nodes=2)

    assert files_of(result.checkpoint) == ["rank0.json", "rank1.json", "rank2.json"]
    assert result.metrics == {"step": 7, "rank": 0}
    assert result.checkpoint is not None
    assert Path(result.checkpoint.path).parent == Path(cloud.url())


def test_best_checkpoints_are_kept_and_readable_from_the_path(cloud: LiveTestCloud) -> None:
    def train() -> None:
        for step, score in enumerate([0.1, 0.9, 0.5, 0.2]):
            save(step, score=score)

    keep = spotfit.CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="score")
    result = cloud.fit(train, checkpoint_config=keep)
    again = spotfit.Result.from_path(cloud.url())

    assert result.best_checkpoints is not None
    assert [metrics["score"] for _, metrics in result.best_checkpoints] == [0.5, 0.9]
    assert result.metrics == {"step": 3, "score": 0.2}
    assert again.metrics == result.metrics
    assert again.checkpoint == result.checkpoint
    folders = [path for path in Path(cloud.url()).iterdir() if path.name.startswith("checkpoint")]
    assert len(folders) == 3  # the two best, and the latest


def test_training_does_not_modify_objects_of_the_driver(cloud: LiveTestCloud) -> None:
    seen: list[int] = []
    settings = {"list": [1]}

    def train(config: Config) -> list[int]:
        seen.append(1)
        config["list"].append(2)
        return [*seen, *config["list"]]

    assert cloud.fit(train, config=settings).return_value == [1, 1, 2]
    assert seen == []
    assert settings == {"list": [1]}


@pytest.mark.parametrize("workers", [0, 1])
def test_function_without_required_parameters_is_called_without_arguments(
    cloud: LiveTestCloud, workers: int
) -> None:
    def train(config: Config | None = None) -> Any:
        return config

    assert cloud.fit(train, workers=workers).return_value is None


def test_local_mode_runs_in_this_process_and_raises_unchanged_exceptions(
    cold_cloud: LiveTestCloud,
) -> None:
    calls: list[str] = []

    def train(config: Config) -> None:
        calls.append("called")
        spotfit.report({"loss": 1.0})
        raise KeyError("weights")

    with pytest.raises(KeyError, match="weights"):
        cold_cloud.fit(train, workers=0)
    assert calls == ["called"]
    assert cold_cloud.is_untouched


def test_environment_variable_selects_the_provisioner(
    cloud: LiveTestCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTFIT_PROVISIONER", f"local?nodes=2&root={cloud.root.path}")
    trainer = cloud.trainer(lambda: spotfit.get_context().get_local_world_size(), workers=2)
    trainer.provisioner = None

    assert trainer.fit().return_value == 1


def test_ddp_weights_are_equal_on_all_ranks(cloud: LiveTestCloud) -> None:
    def train(config: Config) -> Any:
        import torch

        import spotfit.torch

        torch.manual_seed(0)
        model = spotfit.torch.prepare_model(torch.nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rank = spotfit.get_context().get_world_rank()
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.full((4, 2), float(rank + 1))).mean().backward()
            optimizer.step()
        gathered = [torch.zeros(1, 2) for _ in range(2)]
        torch.distributed.all_gather(gathered, next(model.parameters()).detach())
        return [weights.tolist() for weights in gathered]

    first, others = cloud.fit(train, workers=2, nodes=2, trainer_type=TorchTrainer).return_value

    assert first == others


# --- reuse of a name ------------------------------------------------------------------------------


def test_same_run_name_resumes_from_the_last_checkpoint(cloud: LiveTestCloud) -> None:
    def train(config: Config) -> int | None:
        started_at = restored()
        save((started_at or 0) + 1)
        return started_at

    first = cloud.fit(train)
    second = cloud.fit(train)

    assert (first.return_value, first.metrics) == (None, {"step": 1})
    assert (second.return_value, second.metrics) == (1, {"step": 2})
    assert second.best_checkpoints is not None
    assert len(second.best_checkpoints) == 2


def test_second_run_without_reports_keeps_the_previous_result(cloud: LiveTestCloud) -> None:
    first = cloud.fit(lambda: save(3))
    second = cloud.fit(lambda: "nothing new")

    assert second.return_value == "nothing new"
    assert second.metrics == {"step": 3}
    assert second.checkpoint == first.checkpoint
    assert second.best_checkpoints is not None
    assert len(second.best_checkpoints) == 1


def test_runs_without_a_name_are_distinct(cloud: LiveTestCloud) -> None:
    paths = {cloud.fit(lambda: save(1), name=None).path for _ in range(2)}
    assert len(paths) == 2


# --- output ---------------------------------------------------------------------------------------


def test_output_of_all_ranks_is_shown_and_stored(
    cloud: LiveTestCloud, capsys: pytest.CaptureFixture[str]
) -> None:
    def train() -> None:
        import subprocess
        import sys

        rank = spotfit.get_context().get_world_rank()
        print("printed by", rank)
        print("complained by", rank, file=sys.stderr)
        subprocess.run(["/bin/echo", "child of", str(rank)], check=True)
        sys.stdout.write("no newline at the end")

    cloud.fit(train, workers=2, nodes=2)

    shown = capsys.readouterr().out.splitlines()
    kept = list(spotfit.attach(cloud.url()).logs())
    for rank in range(2):
        for text in (f"printed by {rank}", f"complained by {rank}", f"child of {rank}"):
            assert f"(rank {rank}) {text}" in shown
            assert f"(rank {rank}) {text}" in kept
        assert f"(rank {rank}) no newline at the end" in kept


def test_log_level_applies_to_log_events_only(
    cloud: LiveTestCloud, capfd: pytest.CaptureFixture[str]
) -> None:
    def train() -> None:
        import logging

        logging.getLogger("user").info("sent by logging")
        logging.getLogger("user").debug("too much")
        spotfit.collective.broadcast_from_rank_zero("x" * 2000)  # logs a warning

    for level, is_logged in (("ERROR", False), ("INFO", True)):
        cloud.fit(train, name=level, logging_config=spotfit.LoggingConfig(level))
        out, stderr = capfd.readouterr()
        assert "(rank 0) INFO user: sent by logging" in out
        assert "too much" not in out
        assert ("worker.large_broadcast" in out) == is_logged
        assert ("run.event: " in stderr) == is_logged, "also in the driver"


def test_output_appears_during_the_run(cloud: LiveTestCloud) -> None:
    driver = cloud.driver("""
        import os, time
        from pathlib import Path
        import spotfit

        def train(config):
            print("at work")
            while not Path(config["marks"], "enough").exists():
                time.sleep(0.01)

        if __name__ == "__main__":
            spotfit.DataParallelTrainer(
                train,
                train_loop_config={"marks": os.environ["MARKS"]},
                run_config=spotfit.RunConfig("run", os.environ["STORAGE"]),
            ).fit()
    """)

    eventually(lambda: "(rank 0) at work" in driver.output)
    cloud.write_mark("enough")
    assert driver.wait() == 0


# --- storage --------------------------------------------------------------------------------------


def test_run_on_s3_survives_a_killed_worker(
    cloud: LiveTestCloud, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3)
    bucket = "s3://runs/prefix"

    def train(config: Config) -> int | None:
        import os

        started_at = restored()
        if started_at is None:
            save(1)
            spotfit.collective.barrier()  # all have saved
            os._exit(9)
        save(started_at + 1)
        return started_at

    result = cloud.fit(train, storage=bucket, workers=2, nodes=2, max_failures=1)

    assert result.return_value == 1
    assert result.path == "runs/prefix/run"
    assert result.metrics == {"step": 2}
    assert files_of(result.checkpoint) == ["rank0.json", "rank1.json"]
    assert spotfit.Result.from_path(f"{bucket}/run").metrics == {"step": 2}


def test_run_on_s3_survives_conflicts_denials_and_throttling(
    cloud: LiveTestCloud, faulty_s3: Counter[str]
) -> None:
    def train(config: Config) -> int | None:
        import os

        started_at = restored()
        if started_at is None:
            save(1)
            spotfit.collective.barrier()  # all have saved
            os._exit(9)
        save(started_at + 1)
        return started_at

    # Another path than in other tests: a process keeps the client of a path and its endpoint.
    result = cloud.fit(train, storage="s3://runs/faulty", workers=2, nodes=2, max_failures=1)

    assert result.return_value == 1, "no refused request was charged to the workers"
    assert spotfit.Result.from_path("s3://runs/faulty/run").metrics == {"step": 2}
    assert set(faulty_s3) == {"ConditionalRequestConflict", "AccessDenied", "SlowDown"}


def test_run_in_a_custom_storage_filesystem(cloud: LiveTestCloud) -> None:
    from pyarrow import fs

    filesystem = fs.SubTreeFileSystem(cloud.storage, fs.LocalFileSystem())
    result = cloud.fit(lambda: save(4), storage="path/runs", storage_filesystem=filesystem)

    assert result.metrics == {"step": 4}
    assert (result.path, result.filesystem) == ("path/runs/run", filesystem)
    assert Path(cloud.storage, "path", "runs", "run", ".spotfit").is_dir()
    assert spotfit.Result.from_path("path/runs/run", filesystem).checkpoint == result.checkpoint


@pytest.mark.parametrize("wrapped", [False, True])
def test_credentials_of_a_filesystem_reach_machines_and_are_not_stored(
    cloud: LiveTestCloud, s3: str, wrapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyarrow import fs

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    filesystem = fs.S3FileSystem(
        endpoint_override=s3.removeprefix("http://"),
        scheme="http",
        region="us-east-1",
        access_key="access-key",
        secret_key="s3cret-value",
    )

    def train() -> str:
        save(4)
        with (
            spotfit.get_context()
            .get_storage()
            .storage_filesystem.open_output_stream(
                f"{spotfit.get_context().get_storage().experiment_fs_path}/note"
            ) as note
        ):
            note.write(b"from a worker")
        return str(spotfit.get_context().get_storage().storage_filesystem)

    storage_filesystem = fs.SubTreeFileSystem("runs", filesystem) if wrapped else filesystem
    storage = "prefix" if wrapped else "runs/prefix"
    listener = spotfit.UserCallback()
    result = cloud.fit(
        train, storage=storage, storage_filesystem=storage_filesystem, callbacks=[listener]
    )

    assert (result.path, result.filesystem) == (f"{storage}/run", storage_filesystem)
    assert files_of(result.checkpoint) == ["rank0.json"]
    assert filesystem.open_input_file("runs/prefix/run/note").readall() == b"from a worker"
    objects = filesystem.get_file_info(fs.FileSelector("runs", recursive=True))
    for one in objects:
        if one.is_file:
            assert b"s3cret-value" not in filesystem.open_input_file(one.path).readall()
