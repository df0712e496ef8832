"""Encoders of categories."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import preprocessing

from spotfit.core.errors import ConfigError
from spotfit.data.preprocessors import (
    LabelEncoder,
    MultiHotEncoder,
    OneHotEncoder,
    OrdinalEncoder,
)
from spotfit.data.preprocessors.preprocessor_base import PreprocessorNotFittedException
from tests.unit.data.preprocessors.rows import dataset, output, rows_of

LISTS = pa.list_(pa.string())


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=30), st.integers(0, 30))
def test_ordinals_are_those_of_scikit_learn(values: list[int], cut: int) -> None:
    ds = dataset({"x": values}, min(cut, len(values)))
    found = rows_of(OrdinalEncoder(["x"]).fit_transform(ds))["x"].to_pylist()
    expected = preprocessing.OrdinalEncoder().fit_transform([[value] for value in values])
    assert found == [int(row[0]) for row in expected]


@given(st.lists(st.sampled_from(["a", "b", "é"]), min_size=1, max_size=30))
def test_one_hot_vectors_are_those_of_scikit_learn(values: list[str]) -> None:
    found = rows_of(OneHotEncoder(["x"]).fit_transform(dataset({"x": values})))["x"].to_pylist()
    reference = preprocessing.OneHotEncoder(sparse_output=False)
    assert found == reference.fit_transform([[value] for value in values]).tolist()


@pytest.mark.parametrize(
    ("column", "unseen"),
    [
        (pa.array([True, False, True]), pa.array([None], pa.bool_())),
        (pa.array([2.5, 1.5, 2.5]), pa.array([7.5])),
        (pa.array([2, 1, 2], pa.int16()), pa.array([7], pa.int32())),
        (pa.array(["b", "a", "b"], pa.large_string()), pa.array(["z"])),
        (pa.array(["b", "a", "b"]).dictionary_encode(), pa.array(["z"])),
        (pa.array([2, 1, 2], pa.date32()), pa.array([7], pa.date32())),
    ],
)
def test_columns_of_any_type_of_values_are_encoded(column: pa.Array, unseen: pa.Array) -> None:
    encoder = OrdinalEncoder(["x"]).fit(dataset({"x": column}, 1))
    assert output(encoder, {"x": column}, "x") == [1, 0, 1]
    if not unseen.null_count:
        assert output(encoder, {"x": unseen}, "x") == [None]


def test_equal_numbers_of_other_types_have_the_same_code() -> None:
    encoder = OrdinalEncoder(["x"]).fit(dataset({"x": [1, 2, 3]}))
    assert output(encoder, {"x": [3.0, 2.5]}, "x") == [2, None]


def test_lists_are_encoded_by_element_or_as_a_whole() -> None:
    rows = {"x": pa.array([["b", "a"], [], ["b"]], LISTS)}
    by_element = OrdinalEncoder(["x"]).fit(dataset(rows))
    assert output(by_element, {"x": [["a", "z"], []]}, "x") == [[0, None], []]
    whole = OrdinalEncoder(["x"], encode_lists=False).fit(dataset(rows))
    assert whole.stats_["unique_values(x)"] == {(): 0, ("b",): 1, ("b", "a"): 2}
    assert output(whole, {"x": [["b"], ["z"]]}, "x") == [1, None]


def test_a_slice_of_lists_is_encoded_like_the_whole() -> None:
    table = pa.table({"x": pa.array([["a"], ["b", "a"], [], ["b"]], LISTS)})
    for encoder in (OrdinalEncoder(["x"]), MultiHotEncoder(["x"])):
        encoder.fit(dataset(table))
        whole = output(encoder, table, "x")
        assert output(encoder, table.slice(1, 2), "x") == whole[1:3]


def test_unseen_values_have_a_vector_of_zeros() -> None:
    encoder = OneHotEncoder(["x"]).fit(dataset({"x": ["b", "a"]}))
    assert output(encoder, {"x": ["z", "b"]}, "x") == [[0, 0], [0, 1]]


def test_vectors_are_tensors_of_8_bit_integers() -> None:
    ds = OneHotEncoder(["x"]).fit_transform(dataset({"x": ["b", "a"]}))
    assert rows_of(ds).schema.field("x").type == pa.fixed_shape_tensor(pa.uint8(), (2,))


def test_only_the_most_frequent_values_have_an_index() -> None:
    values = {"x": ["c", "c", "b", "a", "a", "d", "b"]}
    encoder = OneHotEncoder(["x"], max_categories={"x": 2}).fit(dataset(values, 3))
    # Of the equally frequent "c", "b" and "a", the first two.
    assert encoder.stats_["unique_values(x)"] == {"b": 0, "c": 1}
    assert output(encoder, {"x": ["a", "b"]}, "x") == [[0, 0], [1, 0]]


@given(
    st.lists(st.lists(st.sampled_from("abc"), max_size=4), min_size=1, max_size=20),
    st.integers(0, 20),
)
def test_multi_hot_vectors_count_the_elements(rows: list[list[str]], cut: int) -> None:
    ds = dataset({"x": pa.array(rows, LISTS)}, min(cut, len(rows)))
    found = rows_of(MultiHotEncoder(["x"]).fit_transform(ds))["x"].to_pylist()
    categories = sorted({element for row in rows for element in row})
    assert found == [[row.count(one) for one in categories] for row in rows]


@pytest.mark.parametrize("encoder", [OrdinalEncoder, OneHotEncoder, MultiHotEncoder])
def test_missing_values_are_refused(encoder: Any) -> None:
    rows = dataset({"x": ["a", None]})
    with pytest.raises(ConfigError, match="contains null values"):
        encoder(["x"]).fit(rows)
    fitted = encoder(["x"]).fit(dataset({"x": ["a"]}))
    with pytest.raises(ConfigError, match=r"Unable to transform columns \['x'\]"):
        rows_of(fitted.transform(rows))


def test_a_missing_element_of_a_list_is_refused() -> None:
    with pytest.raises(ConfigError, match="contains null values"):
        MultiHotEncoder(["x"]).fit(dataset({"x": [["a", None]]}))


@pytest.mark.parametrize("encoder", [OrdinalEncoder, OneHotEncoder, MultiHotEncoder])
def test_a_dataset_without_rows_has_no_categories(encoder: Any) -> None:
    fitted = encoder(["x"]).fit(dataset({"x": pa.array([], pa.string())}))
    assert fitted.stats_ == {"unique_values(x)": {}}
    assert output(fitted, {"x": ["a"]}, "x") in ([None], [[]])


def test_max_categories_of_other_columns_are_rejected() -> None:
    with pytest.raises(ConfigError, match="max_categories has"):
        OneHotEncoder(["x"], max_categories={"y": 1})


def test_labels_are_encoded_and_decoded() -> None:
    encoder = LabelEncoder("word", output_column="label").fit(dataset({"word": ["b", "a", "c"]}))
    ds = encoder.transform(dataset({"word": ["c", "z", "a"]}))
    assert rows_of(ds)["label"].to_pylist() == [2, None, 0]
    assert rows_of(encoder.inverse_transform(ds))["word"].to_pylist() == ["c", None, "a"]


def test_codes_without_label_are_decoded_as_missing() -> None:
    encoder = LabelEncoder("y").fit(dataset({"y": ["a", "b"]}))
    decoded = encoder.inverse_transform(dataset({"y": [1, 2, -1]}))
    assert rows_of(decoded)["y"].to_pylist() == ["b", None, None]


def test_missing_labels_are_refused() -> None:
    with pytest.raises(ConfigError, match="contains null values"):
        LabelEncoder("y").fit(dataset({"y": ["a", None]}))


def test_lists_are_no_labels() -> None:
    encoder = LabelEncoder("y").fit(dataset({"y": ["a"]}))
    with pytest.raises(ConfigError, match="one value in each row"):
        rows_of(encoder.transform(dataset({"y": [["a"]]})))


def test_labels_cannot_be_decoded_before_fit() -> None:
    with pytest.raises(PreprocessorNotFittedException, match="inverse_transform"):
        LabelEncoder("y").inverse_transform(dataset({"y": [0]}))
