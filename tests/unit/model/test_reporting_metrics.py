"""Encoding of metrics as JSON."""

from __future__ import annotations

import math
from collections import OrderedDict
from types import MappingProxyType
from typing import Any

import msgspec
import numpy
import pytest
import torch

from spotfit.core.errors import ConfigError
from spotfit.model.reporting import MAX_METRICS_DEPTH, metrics_from_json, metrics_to_json


def round_trip(metrics: Any) -> Any:
    return metrics_from_json(msgspec.json.decode(metrics_to_json(metrics)))


def test_json_metrics_round_trip() -> None:
    metrics = {"loss": 0.25, "step": 3, "done": False, "tag": "a", "none": None, "in": {"b": [1]}}
    assert round_trip(metrics) == metrics


def test_numpy_scalars_are_encoded_as_numbers() -> None:
    metrics = {"a": numpy.float32(0.5), "b": numpy.int64(3), "c": [numpy.bool_(True)]}
    assert round_trip(metrics) == {"a": 0.5, "b": 3, "c": [True]}


def test_nan_and_infinity_round_trip() -> None:
    metrics = {"a": math.nan, "b": [None, -math.inf, (numpy.float64("inf"),)]}
    message = round_trip(metrics)
    assert math.isnan(message["a"])
    assert message["b"] == [None, -math.inf, [math.inf]]


def test_subclasses_of_json_types_are_accepted() -> None:
    assert round_trip(OrderedDict(a=MappingProxyType({"b": 1}))) == {"a": {"b": 1}}


@pytest.mark.parametrize(
    ("metrics", "where", "why"),
    [
        ({"a": {"b": [1, torch.ones(1)]}}, r"metrics\['a'\]\['b'\]\[1\]", "torch tensors"),
        ({"a": torch.tensor(1.0)}, r"metrics\['a'\]", "torch tensors"),
        ({"a": numpy.ones(2)}, r"metrics\['a'\]", "ndarray"),
        ({"a": [object()]}, r"metrics\['a'\]\[0\]", "object"),
        ({"a": "\udc00"}, r"metrics\['a'\]", "surrogates"),
    ],
)
def test_an_unencodable_value_is_named_by_its_path(metrics: Any, where: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"{where} cannot be reported: .*{why}"):
        metrics_to_json(metrics)


def test_a_cyclic_value_raises() -> None:
    cyclic: dict[str, Any] = {}
    cyclic["again"] = cyclic
    with pytest.raises(
        ValueError, match=r"metrics\['again'\] cannot be reported: it is nested too"
    ):
        metrics_to_json(cyclic)


@pytest.mark.parametrize("depth", [MAX_METRICS_DEPTH, 500])
def test_deeply_nested_metrics_are_named_with_their_depth(depth: int) -> None:
    nested: Any = {}
    for _ in range(depth - 1):
        nested = [nested]
    text = rf"metrics\['tree'\] cannot be reported: it is nested {depth + 1} levels deep"
    with pytest.raises(ConfigError, match=text):
        metrics_to_json({"loss": "[" * 200, "tree": nested})


def test_large_metrics_are_named_with_their_size() -> None:
    text = (
        r"as JSON they have 9.0 MiB, of which metrics\['image'\] has 9.0 MiB; the limit is 8.0 MiB"
    )
    with pytest.raises(ConfigError, match=text):
        metrics_to_json({"loss": 1, "image": "x" * (9 * 2**20)})


def test_metrics_must_be_a_dictionary() -> None:
    with pytest.raises(ValueError, match="must be a dictionary, not int"):
        metrics_to_json(5)
