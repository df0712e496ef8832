"""The cases for which the outputs of Ray are recorded: preprocessors and tables.

Runs with `ray.data.preprocessors` and with `spotfit.data.preprocessors`; imports neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa

TRAIN = pa.table(
    {
        "ints": pa.array([3, 1, 2, 3, -5, 1, 7, 7], pa.int64()),
        "small": pa.array([3, 1, 2, 3, 0, 1, 7, 7], pa.int32()),
        "ints_missing": pa.array([3, None, 2, 3, -5, None, 7, 7], pa.int64()),
        "floats": pa.array([0.5, -1.25, 3.0, 2.0, 0.0, 10.5, -7.75, 1.0], pa.float64()),
        "floats_missing": pa.array([0.5, None, 3.0, 2.0, None, 10.5, -7.75, 1.0], pa.float64()),
        "single": pa.array([0.5, -1.25, 3.0, 2.0, 0.0, 10.5, -7.75, 1.0], pa.float32()),
        "positive": pa.array([0.5, 1.25, 3.0, 2.0, 0.25, 10.5, 7.75, 1.0], pa.float64()),
        "constant": pa.array([4.0] * 8, pa.float64()),
        "nothing": pa.nulls(8, pa.float64()),
        "flags": pa.array([True, False, True, True, False, False, True, False]),
        "words": ["pear", "fig", "apple", "fig", "fig", "pear", "fig", "apple"],
        "words_missing": ["pear", None, "apple", "fig", None, "pear", "fig", "pear"],
        "lists": [["b", "a"], ["a"], [], ["c", "a", "c"], ["b"], ["a"], ["b", "b"], ["c"]],
        "texts": ["a b a", "b", "", "c  c", "a", "d a", "b b b", "a c"],
        "texts_missing": ["a b a", None, "", "c  c", "a", None, "b b b", "a c"],
    }
)
TEST = pa.table(
    {
        "ints": pa.array([3, 1, 9, -8], pa.int64()),
        "small": pa.array([3, 1, 9, -8], pa.int32()),
        "ints_missing": pa.array([3, None, 9, -8], pa.int64()),
        "floats": pa.array([0.5, 11.5, -9.0, 0.0], pa.float64()),
        "floats_missing": pa.array([0.5, None, -9.0, 0.0], pa.float64()),
        "single": pa.array([0.5, 11.5, -9.0, 0.0], pa.float32()),
        "positive": pa.array([0.5, 11.5, 9.0, 0.125], pa.float64()),
        "constant": pa.array([4.0, 5.0, 4.0, 3.0], pa.float64()),
        "nothing": pa.array([None, 1.0, None, 2.0], pa.float64()),
        "flags": pa.array([True, False, True, True]),
        "words": ["pear", "kiwi", "apple", "fig"],
        "words_missing": ["pear", None, "kiwi", "fig"],
        "lists": [["b", "z"], ["a"], [], ["c", "a", "c"]],
        "texts": ["a b a", "z", "", "d  c"],
        "texts_missing": ["a b a", None, "", "d  c"],
    }
)
FIRST_BLOCK_ROWS = 5
"""Rows of the first of two blocks of `TRAIN`."""


class Case(NamedTuple):
    """A preprocessor that is fitted to `TRAIN`, and the columns of the output to compare."""

    create: Callable[[Any], Any]
    outputs: tuple[str, ...]


def letters(text: str) -> list[str]:
    """Return the letters of a text, as an example of a tokenization function."""
    return [letter for letter in text if letter != " "]


_NUMBERS = ["ints", "small", "floats", "floats_missing", "single", "constant", "nothing"]
_GRADES = pd.CategoricalDtype(["low", "high"], ordered=True)
_FRUIT = pd.CategoricalDtype(["fig", "pear"])


def _case(create: Callable[[Any], Any], *outputs: str) -> Case:
    return Case(create, outputs)


CASES: dict[str, Case] = {
    "StandardScaler": _case(
        lambda p: p.StandardScaler([*_NUMBERS, "ints_missing"]), *_NUMBERS, "ints_missing"
    ),
    "StandardScaler output_columns": _case(
        lambda p: p.StandardScaler(["ints", "floats"], output_columns=["x", "ints"]),
        "x",
        "ints",
        "floats",
    ),
    "MinMaxScaler": _case(lambda p: p.MinMaxScaler(_NUMBERS), *_NUMBERS),
    "MinMaxScaler missing integers": _case(
        lambda p: p.MinMaxScaler(["ints_missing"]), "ints_missing"
    ),
    "MaxAbsScaler": _case(lambda p: p.MaxAbsScaler(_NUMBERS), *_NUMBERS),
    "RobustScaler": _case(lambda p: p.RobustScaler(_NUMBERS), *_NUMBERS),
    "RobustScaler range": _case(
        lambda p: p.RobustScaler(["floats"], quantile_range=(0.1, 0.9), quantile_precision=100),
        "floats",
    ),
    "OrdinalEncoder": _case(
        lambda p: p.OrdinalEncoder(["words", "ints", "flags"]), "words", "ints", "flags"
    ),
    "OrdinalEncoder lists": _case(lambda p: p.OrdinalEncoder(["lists"]), "lists"),
    "OrdinalEncoder whole lists": _case(
        lambda p: p.OrdinalEncoder(["lists"], encode_lists=False, output_columns=["code"]), "code"
    ),
    "OrdinalEncoder missing": _case(lambda p: p.OrdinalEncoder(["words_missing"]), "words_missing"),
    "OneHotEncoder": _case(lambda p: p.OneHotEncoder(["words", "ints"]), "words", "ints"),
    "OneHotEncoder limited": _case(
        lambda p: p.OneHotEncoder(["words"], max_categories={"words": 2}, output_columns=["code"]),
        "code",
        "words",
    ),
    "OneHotEncoder lists": _case(lambda p: p.OneHotEncoder(["lists"]), "lists"),
    "OneHotEncoder missing": _case(lambda p: p.OneHotEncoder(["words_missing"]), "words_missing"),
    "MultiHotEncoder": _case(lambda p: p.MultiHotEncoder(["lists", "words"]), "lists", "words"),
    "MultiHotEncoder limited": _case(
        lambda p: p.MultiHotEncoder(["lists"], max_categories={"lists": 2}), "lists"
    ),
    "LabelEncoder": _case(
        lambda p: p.LabelEncoder("words", output_column="label"), "label", "words"
    ),
    "LabelEncoder missing": _case(lambda p: p.LabelEncoder("words_missing"), "words_missing"),
    "Categorizer": _case(
        lambda p: p.Categorizer(["words", "words_missing"]), "words", "words_missing"
    ),
    "Categorizer dtypes": _case(
        lambda p: p.Categorizer(["words"], dtypes={"words": _FRUIT}), "words"
    ),
    "SimpleImputer mean": _case(
        lambda p: p.SimpleImputer(["floats_missing", "ints_missing", "single"]),
        "floats_missing",
        "ints_missing",
        "single",
    ),
    "SimpleImputer most_frequent": _case(
        lambda p: p.SimpleImputer(["words_missing", "floats_missing"], "most_frequent"),
        "words_missing",
        "floats_missing",
    ),
    "SimpleImputer constant": _case(
        lambda p: p.SimpleImputer(["words_missing", "new"], "constant", "?"), "words_missing", "new"
    ),
    "SimpleImputer nothing": _case(lambda p: p.SimpleImputer(["nothing"]), "nothing"),
    "UniformKBinsDiscretizer": _case(
        lambda p: p.UniformKBinsDiscretizer(["ints", "floats", "constant"], 3),
        "ints",
        "floats",
        "constant",
    ),
    "UniformKBinsDiscretizer left": _case(
        lambda p: p.UniformKBinsDiscretizer(
            ["ints", "floats"], {"ints": 2, "floats": 4}, right=False
        ),
        "ints",
        "floats",
    ),
    "UniformKBinsDiscretizer dtypes": _case(
        lambda p: p.UniformKBinsDiscretizer(["floats"], 2, dtypes={"floats": _GRADES}), "floats"
    ),
    "UniformKBinsDiscretizer nothing": _case(
        lambda p: p.UniformKBinsDiscretizer(["nothing"], 2), "nothing"
    ),
    "CustomKBinsDiscretizer": _case(
        lambda p: p.CustomKBinsDiscretizer(["ints", "floats_missing"], [-5, 0, 0.5, 11]),
        "ints",
        "floats_missing",
    ),
    "CustomKBinsDiscretizer lowest": _case(
        lambda p: p.CustomKBinsDiscretizer(["floats"], [-9, 0, 5, 11.5], include_lowest=True),
        "floats",
    ),
    "CustomKBinsDiscretizer left": _case(
        lambda p: p.CustomKBinsDiscretizer(["floats"], {"floats": [-9, 0, 5, 12]}, right=False),
        "floats",
    ),
    "CustomKBinsDiscretizer dtypes": _case(
        lambda p: p.CustomKBinsDiscretizer(["floats"], [-10, 0, 20], dtypes={"floats": _GRADES}),
        "floats",
    ),
    "CustomKBinsDiscretizer duplicates": _case(
        lambda p: p.CustomKBinsDiscretizer(["floats"], [0, 0, 20], duplicates="drop"), "floats"
    ),
    "Tokenizer": _case(lambda p: p.Tokenizer(["texts", "texts_missing"]), "texts", "texts_missing"),
    "Tokenizer function": _case(lambda p: p.Tokenizer(["texts"], letters), "texts"),
    "CountVectorizer": _case(lambda p: p.CountVectorizer(["texts"]), "texts"),
    "CountVectorizer limited": _case(
        lambda p: p.CountVectorizer(["texts"], letters, 2, output_columns=["counts"]), "counts"
    ),
    "CountVectorizer missing": _case(
        lambda p: p.CountVectorizer(["texts_missing"]), "texts_missing"
    ),
    "HashingVectorizer": _case(
        lambda p: p.HashingVectorizer(["texts", "texts_missing"], 5), "texts", "texts_missing"
    ),
    "FeatureHasher": _case(lambda p: p.FeatureHasher(["ints", "small"], 4, "hashed"), "hashed"),
    "FeatureHasher floats": _case(
        lambda p: p.FeatureHasher(["ints", "floats_missing"], 4, "hashed"), "hashed"
    ),
    "Normalizer l1": _case(lambda p: p.Normalizer(["ints", "floats"], "l1"), "ints", "floats"),
    "Normalizer l2": _case(
        lambda p: p.Normalizer(["ints", "floats_missing"]), "ints", "floats_missing"
    ),
    "Normalizer max": _case(
        lambda p: p.Normalizer(["ints", "floats"], norm="max"), "ints", "floats"
    ),
    "Normalizer single": _case(lambda p: p.Normalizer(["single"]), "single"),
    "PowerTransformer": _case(
        lambda p: p.PowerTransformer(["ints", "floats_missing", "single"], 0.5),
        "ints",
        "floats_missing",
        "single",
    ),
    "PowerTransformer 0": _case(lambda p: p.PowerTransformer(["floats"], 0), "floats"),
    "PowerTransformer 2": _case(lambda p: p.PowerTransformer(["floats"], 2), "floats"),
    "PowerTransformer box-cox": _case(
        lambda p: p.PowerTransformer(["positive"], 0.5, method="box-cox"), "positive"
    ),
    "PowerTransformer box-cox 0": _case(
        lambda p: p.PowerTransformer(["positive"], 0, method="box-cox"), "positive"
    ),
    "Concatenator": _case(
        lambda p: p.Concatenator(["floats", "ints", "small"]), "concat_out", "words"
    ),
    "Concatenator integers": _case(lambda p: p.Concatenator(["small", "ints"], "x"), "x"),
    "Concatenator missing": _case(
        lambda p: p.Concatenator(["floats_missing", "ints"]), "concat_out"
    ),
    "Concatenator dtype": _case(
        lambda p: p.Concatenator(["floats", "ints"], output_column_name="x", dtype=np.float32), "x"
    ),
    "Concatenator no column": _case(lambda p: p.Concatenator(["floats", "new"]), "concat_out"),
    "Chain": _case(
        lambda p: p.Chain(
            p.SimpleImputer(["floats_missing"]),
            p.StandardScaler(["floats_missing", "floats"]),
            p.LabelEncoder("words"),
            p.Concatenator(["floats_missing", "floats"], "x"),
        ),
        "x",
        "words",
    ),
    "Chain flatten": _case(
        lambda p: p.Chain(
            p.OneHotEncoder(["words"]), p.Concatenator(["words", "floats"], "x", flatten=True)
        ),
        "x",
    ),
}
