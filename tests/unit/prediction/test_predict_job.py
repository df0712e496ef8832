"""`spotfit.predict`: inputs are checked first; finished jobs are not repeated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import spotfit
from spotfit.core.errors import ConfigError, ConfigErrors, IntegrityError, MissingExtraError
from spotfit.prediction import PredictionResult, predict
from spotfit_provisioners.aws_batch.options import AwsBatchOptions

np = pytest.importorskip("numpy")
pd = pytest.importorskip("pandas")

LOCAL = spotfit.ScalingConfig(num_workers=0)


def double(batch: Any) -> Any:
    return {"y": batch["x"] * 2}


@pytest.fixture
def run_config(tmp_path: Path) -> spotfit.RunConfig:
    return spotfit.RunConfig(name="run", storage_path=tmp_path / "runs")


def start(inputs: Any, run_config: spotfit.RunConfig, **options: Any) -> PredictionResult:
    defaults: dict[str, Any] = {"scaling_config": LOCAL, "output_format": "npz"}
    options = defaults | {"rows_per_shard": 10} | options
    return predict(options.pop("predictor", double), inputs, run_config=run_config, **options)


def test_the_default_output_is_in_the_directory_of_the_run(
    run_config: spotfit.RunConfig, tmp_path: Path
) -> None:
    result = start({"x": np.arange(25)}, run_config)
    assert result.url == str(tmp_path / "runs/run/predictions")
    assert (result.rows, len(result.shards)) == (25, 3)
    assert np.array_equal(result.to_numpy()["y"], np.arange(25) * 2)
    assert not Path(result.url, "_inputs").exists()


def test_a_dataframe_is_predicted_as_dataframes(run_config: spotfit.RunConfig) -> None:
    frame = pd.DataFrame({"x": range(25), "text": ["a"] * 25})
    options: dict[str, Any] = {"batch_format": "pandas", "output_format": "parquet"}
    result = start(frame, run_config, predictor=lambda rows: rows.assign(y=rows.x * 2), **options)
    pd.testing.assert_frame_equal(result.to_pandas(), frame.assign(y=frame.x * 2))


def test_a_finished_job_is_returned_without_a_run(run_config: spotfit.RunConfig) -> None:
    first = start({"x": np.arange(25)}, run_config)
    second = start({"x": np.arange(25)}, run_config)
    assert first.result is not None
    assert (second.result, second.shards) == (None, first.shards)


def test_an_output_of_other_inputs_is_refused(run_config: spotfit.RunConfig) -> None:
    start({"x": np.arange(25)}, run_config)
    with pytest.raises(ConfigError, match="another job"):
        start({"x": np.arange(26)}, run_config)


@pytest.mark.parametrize("is_finished", [True, False])
def test_changed_code_continues_the_job_with_a_warning(
    run_config: spotfit.RunConfig, capsys: pytest.CaptureFixture[str], is_finished: bool
) -> None:
    def make(addend: int) -> Any:
        class Add:
            def __call__(self, batch: Any) -> Any:
                return {"y": batch["x"] + addend}

        class Subtract:
            def __call__(self, batch: Any) -> Any:
                return {"y": batch["x"] - addend - 1}

        Subtract.__qualname__ = Add.__qualname__
        return Add, Subtract

    before, after = make(1)
    url = start({"x": np.arange(25)}, run_config, predictor=before).url
    if not is_finished:
        Path(url, "_manifest.json").unlink()
    again = start({"x": np.arange(25)}, run_config, predictor=after)
    assert (again.result is None) == is_finished
    assert "predict.code_changed" in capsys.readouterr().err


def test_predictions_are_opened_by_their_url(run_config: spotfit.RunConfig) -> None:
    result = start({"x": np.arange(25)}, run_config)
    opened = PredictionResult.open(result.url)
    assert (opened.rows, opened.shards) == (25, result.shards)
    assert [len(batch["y"]) for batch in opened.iter_shards()] == [10, 10, 5]


def test_a_changed_file_is_detected(run_config: spotfit.RunConfig) -> None:
    result = start({"x": np.arange(25)}, run_config)
    Path(result.url, "part-00001.npz").write_bytes(b"x")
    with pytest.raises(IntegrityError, match=r"part-00001\.npz"):
        result.to_numpy()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"rows_per_shard": None}, "rows_per_shard=None"),
        ({"batch_format": "arrow"}, "batch_format='arrow'"),
        ({"output_format": "csv"}, "output_format='csv'"),
        ({"output": "ftp://host/out"}, "output= is invalid"),
        ({"predictor": "model"}, "class or a function"),
    ],
)
def test_invalid_arguments_are_refused(
    options: dict[str, Any], reason: str, run_config: spotfit.RunConfig
) -> None:
    with pytest.raises(ConfigError, match=reason):
        start({"x": np.arange(25)}, run_config, **options)


def test_all_invalid_arguments_are_reported_together(run_config: spotfit.RunConfig) -> None:
    with pytest.raises(ConfigErrors) as raised:
        start({"x": np.arange(2)}, run_config, batch_size=0, output_format="csv")
    assert len(raised.value.errors) == 2


def test_a_missing_package_is_reported_before_the_run(
    run_config: spotfit.RunConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"spotfit\[predict\]"):
        start({"x": np.arange(2)}, run_config, output_format="parquet")
    assert not (tmp_path / "runs").exists()


def test_a_directory_that_machines_cannot_read_is_refused(tmp_path: Path) -> None:
    run_config = spotfit.RunConfig(name="run", storage_path="s3://bucket/runs?region=us-east-1")
    with pytest.raises(ConfigError, match=r"output='.*' with provisioner 'aws_batch'"):
        start(
            range(2),
            run_config,
            read=len,
            output=tmp_path / "out",
            scaling_config=spotfit.ScalingConfig(num_workers=1),
            provisioner=AwsBatchOptions(queues=("spot",), image="worker:1"),
        )
    assert not (tmp_path / "out").exists()


def test_an_output_in_memory_is_refused_for_workers(run_config: spotfit.RunConfig) -> None:
    scaling = spotfit.ScalingConfig(num_workers=1)
    with pytest.raises(ConfigError, match="only in this process"):
        start(range(2), run_config, read=len, output="memory://m/out", scaling_config=scaling)


class Model:
    def __init__(self, directory: str) -> None:
        self.files = sorted(path.name for path in Path(directory).iterdir())

    def __call__(self, batch: Any) -> Any:
        return {"y": np.full(len(batch["x"]), len(self.files))}


def test_a_checkpoint_may_be_a_path(run_config: spotfit.RunConfig, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/weights").touch()
    result = start({"x": np.arange(3)}, run_config, predictor=Model, checkpoint=tmp_path / "model")
    assert result.to_numpy()["y"].tolist() == [1, 1, 1]


def test_a_missing_checkpoint_is_reported_before_the_run(
    run_config: spotfit.RunConfig, tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        start({"x": np.arange(3)}, run_config, predictor=Model, checkpoint=tmp_path / "missing")
    assert not (tmp_path / "runs").exists()
