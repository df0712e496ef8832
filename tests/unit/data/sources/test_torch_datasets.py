"""PyTorch datasets with `__len__` and `__getitem__`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from spotfit.core.errors import ConfigError
from spotfit.data.formats.column_arrays import column_to_numpy
from spotfit.data.source import Source
from spotfit.data.sources import torch_datasets
from spotfit.data.sources.torch_datasets import TorchSource
from tests.unit.data.sources.source_suite import SourceSuite, rows_of

VALUES = torch.arange(150 * 2, dtype=torch.float32).reshape(150, 2)


class Vectors(Dataset[Any]):
    def __len__(self) -> int:
        return len(VALUES)

    def __getitem__(self, index: int) -> Any:
        return VALUES[index]


class TestTorch(SourceSuite):
    @pytest.fixture
    def source(self) -> Source:
        return TorchSource(Vectors())

    @pytest.fixture
    def expected(self) -> pa.Table:
        return pa.table({"item": pa.FixedShapeTensorArray.from_numpy_ndarray(VALUES.numpy())})


def items_of(dataset: Any) -> Any:
    return column_to_numpy(rows_of(TorchSource(dataset))["item"])


def test_pairs_are_python_objects() -> None:
    labels = torch.arange(150)
    items = items_of(TensorDataset(VALUES, labels))
    assert all(isinstance(item, tuple) for item in items)
    assert torch.equal(torch.stack([vector for vector, _ in items]), VALUES)
    assert [int(label) for _, label in items] == list(range(150))


@pytest.mark.parametrize("items", [[1, 2, 3], ["a", "b"], [b"c"], [np.ones(2), np.ones(3)]])
def test_values_are_not_python_objects(items: list[Any]) -> None:
    source = TorchSource(items)
    column = rows_of(source)["item"]
    assert not isinstance(column.type, pa.BaseExtensionType)
    assert [np.asarray(one).tolist() for one in items] == column.to_pylist()


def test_objects_of_other_types_are_kept() -> None:
    items = [{"a": {1, 2}}, {"a": {3}}]
    assert items_of(items).tolist() == items


def test_a_large_dataset_is_not_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    monkeypatch.setattr(torch_datasets, "MAX_PICKLED_BYTES", 1000)
    with pytest.raises(ConfigError, match="would be sent to every process"):
        pickle.dumps(TorchSource(TensorDataset(VALUES)))


def test_a_dataset_without_items_has_no_units() -> None:
    assert len(TorchSource([]).list_units().unit_rows) == 0
