"""Columns of features side by side in tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from spotfit.core.errors import ConfigError, ConfigTypeError
from spotfit.data.formats.batch_formats import to_block
from spotfit.data.formats.torch_features import feature_converter, iterable_dataset, join_columns

BLOCK = to_block({"x": np.arange(2), "y": np.arange(2) * 10, "label": np.ones(2)})


def features(columns: Any, dtypes: Any = None, *, unsqueeze: bool = True) -> Any:
    return feature_converter(columns, dtypes, label="label", unsqueeze=unsqueeze)(BLOCK)


@pytest.mark.parametrize("columns", [None, [], ["x", "y"]])
def test_columns_are_side_by_side(columns: Any) -> None:
    assert features(columns).tolist() == [[0, 0], [1, 10]]


def test_lists_in_a_list_give_a_list_of_tensors() -> None:
    first, second = features([["y"], ["x", "y"]], [torch.float32, torch.int8])
    assert (first.dtype, second.dtype) == (torch.float32, torch.int8)
    assert second.tolist() == [[0, 0], [1, 10]]


def test_a_dictionary_gives_a_dictionary_of_tensors() -> None:
    groups = features({"a": ["y"], "b": ["x"]}, {"b": torch.int8, "a": torch.float32})
    assert {key: tensor.dtype for key, tensor in groups.items()} == {
        "a": torch.float32,
        "b": torch.int8,
    }


def test_one_column_without_unsqueeze_has_one_dimension() -> None:
    assert features(["y"], unsqueeze=False).tolist() == [0, 10]


@pytest.mark.parametrize(
    ("columns", "dtypes"),
    [
        (["x"], [torch.int8]),
        ([["x"]], {"a": torch.int8}),
        ({"a": ["x"]}, [torch.int8]),
        (None, "int8"),
    ],
)
def test_dtypes_of_another_structure_are_rejected(columns: Any, dtypes: Any) -> None:
    with pytest.raises(ConfigTypeError, match="structure of feature_columns"):
        features(columns, dtypes)


@pytest.mark.parametrize(
    ("columns", "dtypes"),
    [([["x"], ["y"]], [torch.int8]), ({"a": ["x"]}, {"b": torch.int8})],
)
def test_dtypes_of_other_groups_are_rejected(columns: Any, dtypes: Any) -> None:
    with pytest.raises(ConfigError, match="one type for each group"):
        features(columns, dtypes)


@pytest.mark.parametrize("columns", [[[], ["x"]], {"a": []}])
def test_an_empty_group_is_rejected(columns: Any) -> None:
    with pytest.raises(ConfigError, match="empty list of columns"):
        features(columns)


def test_a_misspelled_column_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'label'"):
        join_columns(BLOCK, ["labels"], None, unsqueeze=True)


def test_a_dataset_can_be_iterated_repeatedly_by_a_loader() -> None:
    dataset = iterable_dataset([1, 2])
    assert isinstance(dataset, IterableDataset)
    loader = DataLoader(dataset, batch_size=None)
    assert [*loader, *loader] == [1, 2, 1, 2]
