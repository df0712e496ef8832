"""Preprocessors as JSON and as pickles."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotfit.core.errors import ConfigError
from spotfit.data import preprocessors
from spotfit.data.preprocessors import (
    BatchMapper,
    Chain,
    Concatenator,
    CountVectorizer,
    LabelEncoder,
    OrdinalEncoder,
    RobustScaler,
    StandardScaler,
    Tokenizer,
    UniformKBinsDiscretizer,
)
from spotfit.data.preprocessors.preprocessor_base import Preprocessor
from tests.unit.data.preprocessors.ray_cases import CASES, TEST, TRAIN
from tests.unit.data.preprocessors.rows import dataset, rows_of

ERRORS = {
    "OrdinalEncoder missing", "OneHotEncoder missing", "LabelEncoder missing",
    "UniformKBinsDiscretizer nothing", "SimpleImputer nothing", "Concatenator no column",
}  # fmt: skip
WITH_CODE = {"Tokenizer function", "CountVectorizer limited"}


class Own(Preprocessor):
    """A class of a user."""

    _is_fittable = False


@pytest.mark.parametrize("name", sorted(set(CASES) - ERRORS - WITH_CODE))
def test_every_preprocessor_comes_back_from_json(name: str) -> None:
    preprocessor = CASES[name].create(preprocessors)
    preprocessor.fit(dataset(TRAIN))
    restored = Preprocessor.from_json(preprocessor.to_json())
    assert type(restored) is type(preprocessor)
    assert repr(restored) == repr(preprocessor)
    assert restored.to_json() == preprocessor.to_json()
    assert restored.fit_status() is preprocessor.fit_status()
    found, expected = (rows_of(one.transform(dataset(TEST))) for one in (restored, preprocessor))
    assert found.schema == expected.schema
    assert repr(found.to_pydict()) == repr(expected.to_pydict())


@pytest.mark.parametrize("name", sorted(WITH_CODE))
def test_functions_have_no_json(name: str) -> None:
    preprocessor = CASES[name].create(preprocessors).fit(dataset(TRAIN))
    with pytest.raises(ConfigError, match="function cannot be stored as JSON"):
        preprocessor.to_json()


def test_a_preprocessor_that_is_not_fitted_comes_back() -> None:
    restored = Preprocessor.from_json(StandardScaler(["x"]).to_json())
    assert restored.fit_status() is Preprocessor.FitStatus.NOT_FITTED


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=9))
def test_statistics_keep_their_bits(values: list[float]) -> None:
    for preprocessor in (StandardScaler(["x"]), RobustScaler(["x"])):
        preprocessor.fit(dataset({"x": values}))
        restored = Preprocessor.from_json(preprocessor.to_json())
        for key, value in preprocessor.stats_.items():
            found = restored.stats_[key]
            assert found == value or (math.isnan(found) and math.isnan(value))


@given(
    st.one_of(
        st.lists(st.integers(-9, 9), min_size=1),
        st.lists(st.floats(-9, 9, width=16), min_size=1),
        st.lists(st.booleans(), min_size=1),
        st.lists(st.text(max_size=3), min_size=1),
        st.lists(st.binary(max_size=3), min_size=1),
        st.lists(st.dates(), min_size=1),
        st.lists(st.decimals(-9, 9, places=2), min_size=1),
    )
)
def test_categories_keep_their_type(values: list[Any]) -> None:
    encoder = OrdinalEncoder(["x"]).fit(dataset({"x": values}))
    restored = Preprocessor.from_json(encoder.to_json())
    keys = [list(one.stats_["unique_values(x)"]) for one in (encoder, restored)]
    assert [(type(key), key) for key in keys[0]] == [(type(key), key) for key in keys[1]]


def test_edges_keep_their_bits() -> None:
    discretizer = UniformKBinsDiscretizer(["x"], 7).fit(dataset({"x": [0.1, 0.7]}))
    restored = Preprocessor.from_json(discretizer.to_json())
    assert restored.stats_["x"].tobytes() == discretizer.stats_["x"].tobytes()


def test_a_chain_contains_its_parts() -> None:
    chain = Chain(Chain(StandardScaler(["x"])), LabelEncoder("y"), Concatenator(["x"], dtype="f4"))
    chain.fit(dataset({"x": [1, 2], "y": ["b", "a"]}))
    restored = Preprocessor.from_json(chain.to_json())
    assert repr(restored) == repr(chain)
    assert restored.fit_status() is Preprocessor.FitStatus.FITTED


def test_serialize_gives_json_where_there_is_no_code() -> None:
    scaler = StandardScaler(["x"]).fit(dataset({"x": [1.0]}))
    serialized = scaler.serialize()
    assert isinstance(serialized, str)
    assert Preprocessor.deserialize(serialized).stats_ == scaler.stats_


@pytest.mark.parametrize(
    "preprocessor",
    [
        Tokenizer(["t"], lambda text: [text]),
        Chain(CountVectorizer(["t"], str.split)),
        BatchMapper(lambda batch: batch),
        Own(),
    ],
)
def test_a_pickle_is_read_only_if_it_is_trusted(preprocessor: Preprocessor) -> None:
    serialized = preprocessor.serialize()
    assert isinstance(serialized, bytes)
    with pytest.raises(ConfigError, match="trusted=True"):
        Preprocessor.deserialize(serialized)
    assert type(Preprocessor.deserialize(serialized, trusted=True)) is type(preprocessor)


def test_a_restored_function_works() -> None:
    tokenizer = Tokenizer(["t"], lambda text: text.split("-"))
    restored = Preprocessor.deserialize(tokenizer.serialize(), trusted=True)
    found = restored.transform_batch({"t": np.array(["a-b"])})
    assert found["t"][0].tolist() == ["a", "b"]


def test_own_classes_have_no_json() -> None:
    with pytest.raises(ConfigError, match="Own is a class of your own"):
        Own().to_json()


def changed(**fields: Any) -> str:
    stored = json.loads(StandardScaler(["x"]).fit(dataset({"x": [1.0]})).to_json())
    return json.dumps({**stored, **fields})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "format None"),
        ("{}", "format None"),
        (changed(spotfit_preprocessor=2), "format 2"),
        (changed(**{"class": "Preprocessor"}), "unknown class 'Preprocessor'"),
        (changed(**{"class": "os.system"}), "unknown class"),
        (changed(**{"class": None}), "unknown class"),
        (changed(**{"class": "checkpoint_metadata"}), "unknown class"),
        (changed(**{"class": ["StandardScaler"]}), "unknown class"),
        (changed(parameters={"rows": ["x"]}), "damaged"),
        (changed(parameters=[]), "damaged"),
        (changed(statistics={"$set": []}), "unknown type"),
        (changed(statistics={"$array": ["O", [1], [1]]}), "damaged"),
        (changed(statistics=[]), "damaged"),
    ],
)
def test_damaged_texts_are_rejected(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Preprocessor.from_json(text)
