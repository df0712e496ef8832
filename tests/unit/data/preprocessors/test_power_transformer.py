"""Power transforms against scikit-learn."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest
from sklearn import preprocessing

from spotfit.core.errors import ConfigError
from spotfit.data.preprocessors import PowerTransformer
from tests.unit.data.preprocessors.rows import dataset, output, rows_of


@pytest.mark.parametrize("method", ["yeo-johnson", "box-cox"])
@pytest.mark.parametrize("power", [-1.5, 0, 0.5, 1, 2, 3])
def test_outputs_are_those_of_scikit_learn(method: str, power: float) -> None:
    values = np.random.default_rng(4).normal(size=40)
    values = np.abs(values) + 0.1 if method == "box-cox" else values
    reference = preprocessing.PowerTransformer(method, standardize=False).fit(values[:, None])
    reference.lambdas_ = np.array([float(power)])
    found = output(PowerTransformer(["x"], power, method), {"x": values}, "x")
    np.testing.assert_allclose(found, reference.transform(values[:, None])[:, 0], rtol=1e-9)


def test_missing_values_stay_missing() -> None:
    found = output(PowerTransformer(["x"], 0.5), {"x": [None, 3]}, "x")
    assert found == [None, 2.0]


def test_values_without_transform_are_nan() -> None:
    found = output(PowerTransformer(["x"], 0.5, "box-cox"), {"x": [-1.0, 4.0]}, "x")
    assert math.isnan(found[0])
    assert found[1] == 2.0


def test_32_bit_floats_stay_so_with_box_cox() -> None:
    ds = dataset({"x": pa.array([4.0], pa.float32())})
    kinds = [
        rows_of(PowerTransformer(["x"], 0.5, method).transform(ds)).schema.field("x").type
        for method in ("box-cox", "yeo-johnson")
    ]
    assert kinds == [pa.float32(), pa.float64()]


def test_an_unknown_method_is_rejected() -> None:
    with pytest.raises(ConfigError, match="'log' is not supported"):
        PowerTransformer(["x"], 1, "log")
