"""`BatchPredictor` selects columns and translates the arguments of Ray AIR."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import spotfit
from spotfit.core.errors import ConfigError
from spotfit.prediction import BatchPredictor, Predictor, batch_predictor
from spotfit.prediction.batch_predictor import ColumnPredictor
from spotfit.prediction.predict_job import predict

np = pytest.importorskip("numpy")
pd = pytest.importorskip("pandas")


class Power(Predictor):
    def __init__(self, exponent: float, *, use_gpu: bool = False) -> None:
        super().__init__()
        self.exponent, self.use_gpu = exponent, use_gpu

    @classmethod
    def from_checkpoint(
        cls, checkpoint: spotfit.Checkpoint, *, use_gpu: bool = False, **_kwargs: Any
    ) -> Power:
        with checkpoint.as_directory() as directory:
            return cls(float(Path(directory, "exponent").read_text()), use_gpu=use_gpu)

    def predict_batch(self, data: Any, *, plus: float = 0.0) -> Any:
        assert list(data) == ["x"]
        powers = data["x"] ** self.exponent + plus
        return pd.DataFrame({"y": powers}) if isinstance(data, pd.DataFrame) else {"y": powers}


@pytest.fixture
def checkpoint(tmp_path: Path) -> spotfit.Checkpoint:
    (tmp_path / "exponent").write_text("2")
    return spotfit.Checkpoint.from_directory(tmp_path)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of `predict`, which runs in this process."""
    calls: list[dict[str, Any]] = []

    def predict_locally(*args: Any, **options: Any) -> Any:
        calls.append(options)
        return predict(*args, **options | {"scaling_config": spotfit.ScalingConfig(num_workers=0)})

    monkeypatch.setattr(batch_predictor, "predict", predict_locally)
    return calls


@pytest.mark.parametrize("batch_format", ["numpy", "pandas"])
def test_columns_are_selected_and_kept(
    batch_format: str, checkpoint: spotfit.Checkpoint, tmp_path: Path, calls: list[dict[str, Any]]
) -> None:
    frame = pd.DataFrame({"id": range(25), "x": np.arange(25.0)}, index=range(100, 125))
    result = BatchPredictor.from_checkpoint(checkpoint, Power).predict(
        frame,
        feature_columns=["x"],
        keep_columns=["id"],
        batch_size=7,
        output=tmp_path / "output",
        run_config=spotfit.RunConfig(name="run", storage_path=tmp_path / "runs"),
        predict_options={"batch_format": batch_format, "rows_per_shard": 10},
        plus=1.0,
    )
    want = pd.DataFrame({"id": range(25), "y": np.arange(25.0) ** 2 + 1})
    pd.testing.assert_frame_equal(result.to_pandas(), want)
    assert calls[0]["batch_size"] == 7


@pytest.mark.parametrize(
    ("arguments", "num_workers", "resources", "use_gpu"),
    [
        ({}, (1, 4), None, False),
        ({"min_scoring_workers": 3, "max_scoring_workers": 3}, 3, None, False),
        ({"max_scoring_workers": 9, "num_cpus_per_worker": 2}, (1, 9), {"CPU": 2}, False),
        ({"num_gpus_per_worker": 1}, (1, 4), {"GPU": 1}, True),
    ],
)
def test_workers_and_resources_are_those_of_the_arguments(
    arguments: dict[str, Any],
    num_workers: Any,
    resources: Any,
    use_gpu: bool,
    checkpoint: spotfit.Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(batch_predictor, "predict", lambda *_args, **options: calls.append(options))
    BatchPredictor(checkpoint, Power).predict("s3://bucket/rows", **arguments)
    scaling = calls[0]["scaling_config"]
    assert (scaling.num_workers, scaling.resources_per_worker) == (num_workers, resources)
    assert scaling.use_gpu == use_gpu
    assert calls[0]["fn_constructor_kwargs"]["arguments"] == ({"use_gpu": True} if use_gpu else {})


def test_a_class_that_is_no_predictor_is_refused(checkpoint: spotfit.Checkpoint) -> None:
    with pytest.raises(ConfigError, match="not a subclass"):
        BatchPredictor.from_checkpoint(checkpoint, dict)  # type: ignore[arg-type]


def test_the_arguments_of_the_predictor_are_compared_as_its_class_defines() -> None:
    class Other(Predictor):
        @classmethod
        def identity_arguments(cls, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
            return {"names": sorted(arguments)}

    arguments = {"predictor_cls": Other, "arguments": {"model": object()}, "keep_columns": ["id"]}
    assert ColumnPredictor.identity_arguments(arguments) == {
        "predictor_cls": Other,
        "arguments": {"names": ["model"]},
        "keep_columns": ["id"],
    }


class Halve:
    """A preprocessor."""

    def transform_batch(self, batch: Any) -> Any:
        return {name: column / 2 for name, column in batch.items()}


def test_a_preprocessor_replaces_that_of_the_checkpoint(
    checkpoint: spotfit.Checkpoint, tmp_path: Path, calls: list[dict[str, Any]]
) -> None:
    predictor = BatchPredictor.from_checkpoint(checkpoint, Power)
    assert predictor.get_preprocessor() is None
    predictor.set_preprocessor(Halve())
    result = predictor.predict({"x": np.array([2.0, 4.0])}, output=tmp_path / "out")
    assert result.to_numpy()["y"].tolist() == [1.0, 4.0]
    assert isinstance(predictor.get_preprocessor(), Halve)
    assert "preprocessor" in calls[0]["fn_constructor_kwargs"]


@pytest.mark.parametrize(
    ("call", "do"),
    [
        (
            lambda predictor: predictor.predict([], ray_remote_args={"max_retries": 3}),
            "num_cpus_per_worker",
        ),
        (lambda predictor: predictor.predict_pipelined([], blocks_per_window=2), "Call predict()"),
        (lambda predictor: predictor.from_pandas_udf(print), "spotfit.predict(function"),
        (lambda predictor: predictor.predict(DatasetOfRay()), "write_parquet(url)"),
    ],
)
def test_what_is_not_supported_is_refused_with_the_way_out(
    checkpoint: spotfit.Checkpoint, tmp_path: Path, call: Any, do: str
) -> None:
    class Fixed(BatchPredictor):
        def predict(self, data: Any, **options: Any) -> Any:
            return super().predict(data, output=tmp_path / "out", **options)

    with pytest.raises(ConfigError) as raised:
        call(Fixed.from_checkpoint(checkpoint, Power))
    assert do in raised.value.do


class DatasetOfRay:
    def write_parquet(self, path: str) -> None: ...
