"""Texts as tokens and vectors."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.feature_extraction import text

from spotfit.core.errors import ConfigError
from spotfit.data.preprocessors import (
    CountVectorizer,
    FeatureHasher,
    HashingVectorizer,
    Tokenizer,
)
from tests.unit.data.preprocessors.rows import dataset, output, rows_of

TEXTS = ["a b a", None, "", "b  c"]


def letters(text: str) -> list[str]:
    return list(text.replace(" ", ""))


def bucket(value: str, size: int) -> int:
    return int(hashlib.sha256(value.encode()).hexdigest(), 16) % size


def test_texts_are_split_at_spaces() -> None:
    expected = [["a", "b", "a"], None, [""], ["b", "", "c"]]
    assert output(Tokenizer(["x"]), {"x": TEXTS}, "x") == expected


@given(st.lists(st.one_of(st.none(), st.text(alphabet="ab ", max_size=6)), max_size=10))
def test_tokens_are_those_of_split(texts: list[str | None]) -> None:
    found = output(Tokenizer(["x"]), {"x": pa.array(texts, pa.string())}, "x")
    assert found == [None if text is None else text.split(" ") for text in texts]


def test_a_function_gives_the_tokens() -> None:
    tokenizer = Tokenizer(["x"], letters, output_columns=["y"])
    assert output(tokenizer, {"x": TEXTS}, "y") == [["a", "b", "a"], None, [], ["b", "c"]]


def test_tokens_may_be_numbers() -> None:
    tokenizer = Tokenizer(["x"], lambda text: [ord(letter) for letter in text])
    assert output(tokenizer, {"x": ["ab", None]}, "x") == [[97, 98], None]


def test_categories_are_texts() -> None:
    column = pa.array(["a b", "c"]).dictionary_encode()
    assert output(Tokenizer(["x"]), {"x": column}, "x") == [["a", "b"], ["c"]]


def test_numbers_cannot_be_split() -> None:
    with pytest.raises(ConfigError, match="int64 cannot be split"):
        output(Tokenizer(["x"]), {"x": [1]}, "x")


def test_counts_are_those_of_the_most_frequent_tokens() -> None:
    vectorizer = CountVectorizer(["x"], max_features=2).fit(dataset({"x": TEXTS}, 2))
    assert vectorizer.stats_ == {"token_counts(x)": Counter({"a": 2, "b": 2})}
    table = rows_of(vectorizer.transform(dataset({"x": TEXTS})))
    assert table["x"].to_pylist() == [[2, 1], None, [0, 0], [0, 1]]
    assert table.schema.field("x").type == pa.fixed_shape_tensor(pa.int64(), (2,))


def test_counts_are_those_of_scikit_learn() -> None:
    texts = ["one two two", "three one", "two", ""]
    vectorizer = CountVectorizer(["x"], str.split).fit(dataset({"x": texts}, 1))
    reference = text.CountVectorizer(tokenizer=str.split, token_pattern=None)
    expected = reference.fit_transform(texts).toarray()
    order = [reference.vocabulary_[token] for token in vectorizer.stats_["token_counts(x)"]]
    assert output(vectorizer, {"x": texts}, "x") == expected[:, order].tolist()


def test_a_dataset_without_texts_has_vectors_without_elements() -> None:
    vectorizer = CountVectorizer(["x"]).fit(dataset({"x": pa.nulls(2, pa.string())}))
    assert output(vectorizer, {"x": ["a", None]}, "x") == [[], None]


def test_hashes_of_tokens_are_counted() -> None:
    found = output(HashingVectorizer(["x"], 4), {"x": ["a b a", None]}, "x")
    expected = [0] * 4
    for token in ("a", "b", "a"):
        expected[bucket(token, 4)] += 1
    assert found == [expected, None]


def test_hashing_with_a_function() -> None:
    found = output(HashingVectorizer(["x"], 3, letters), {"x": ["ab"]}, "x")
    assert found == [[[bucket("a", 3), bucket("b", 3)].count(index) for index in range(3)]]


def test_columns_are_added_up_by_the_hash_of_their_name() -> None:
    columns = {"a": [1, 2], "b": [10, 20], "c": [100, 200]}
    found = output(FeatureHasher(["a", "b", "c"], 2, "h"), columns, "h")
    for row, vector in enumerate(found):
        assert vector == [
            sum(columns[name][row] for name in columns if bucket(name, 2) == index)
            for index in range(2)
        ]


def test_missing_floats_are_nan_in_the_sum() -> None:
    table = rows_of(FeatureHasher(["a"], 1, "h").transform(dataset({"a": [1.5, None]})))
    assert table.schema.field("h").type == pa.fixed_shape_tensor(pa.float64(), (1,))
    assert table["h"][0].as_py() == [1.5]
    assert math.isnan(table["h"][1].as_py()[0])


def test_missing_integers_are_refused() -> None:
    with pytest.raises(ConfigError, match="'a' has missing values"):
        output(FeatureHasher(["a"], 1, "h"), {"a": [1, None]}, "h")


@pytest.mark.parametrize(
    "create", [lambda: FeatureHasher(["a"], 0, "h"), lambda: HashingVectorizer(["a"], -1)]
)
def test_a_vector_has_elements(create: Any) -> None:
    with pytest.raises(ConfigError, match="num_features must be"):
        create()
