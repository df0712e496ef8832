"""`range` and `from_*`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import spotfit.data
from spotfit.core.errors import ConfigError, ConfigTypeError
from spotfit.data.dataset import Dataset
from spotfit.data.formats.column_arrays import column_to_numpy
from tests.unit.data.sources.source_suite import read_values


def table_of(dataset: Dataset) -> pa.Table:
    return pa.concat_tables(dataset.blocks())


def test_items_that_are_dictionaries_have_a_column_for_each_key() -> None:
    dataset = spotfit.data.from_items([{"a": 1, "x": np.ones(2)}, {"a": None, "b": "c"}])
    assert read_values(dataset) == {"a": [1, None], "x": [[1.0, 1.0], None], "b": [None, "c"]}


def test_arrays_of_one_shape_in_items_are_tensors() -> None:
    column = table_of(spotfit.data.from_items([{"x": np.ones((2, 3))}] * 4))["x"]
    assert isinstance(column.type, pa.FixedShapeTensorType)
    assert column_to_numpy(column).shape == (4, 2, 3)


@pytest.mark.parametrize("items", [[1, 2], ["a", None], [[1], [2, 3]], [(1, "a"), (2, "b")]])
def test_other_items_are_in_one_column(items: list[Any]) -> None:
    assert read_values(spotfit.data.from_items(items)) == {"item": items}


def test_items_without_an_arrow_type_are_python_objects() -> None:
    assert read_values(spotfit.data.from_items([1j, 2j])) == {"item": [1j, 2j]}


def test_dictionaries_among_other_items_are_refused() -> None:
    with pytest.raises(ConfigError, match="dictionaries and other items"):
        spotfit.data.from_items([{"a": 1}, 2])


def test_values_of_dictionaries_without_an_arrow_type_are_refused() -> None:
    with pytest.raises(ConfigTypeError, match="'a' cannot be stored"):
        spotfit.data.from_items([{"a": 1j}])


def test_data_frames_are_read_without_their_index() -> None:
    frame = pd.DataFrame({"a": [1, 2], "b": ["x", None]}, index=[7, 8])
    dataset = spotfit.data.from_pandas([frame, frame])
    assert read_values(dataset) == {"a": [1, 2, 1, 2], "b": ["x", None, "x", None]}
    assert read_values(spotfit.data.from_pandas(frame)) == {"a": [1, 2], "b": ["x", None]}


def test_arrow_tables_are_read() -> None:
    table = pa.table({"a": [1, 2]})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    assert read_values(spotfit.data.from_arrow(table)) == {"a": [1, 2]}
    both = spotfit.data.from_arrow([table, sink.getvalue().to_pybytes()])
    assert read_values(both) == {"a": [1, 2, 1, 2]}


def test_arrays_are_read_as_tensors() -> None:
    dataset = spotfit.data.from_numpy([np.ones((2, 3)), np.zeros((1, 3))])
    assert column_to_numpy(table_of(dataset)["data"]).tolist() == [[1.0] * 3, [1.0] * 3, [0.0] * 3]
    with pytest.raises(ConfigTypeError, match="from_numpy"):
        spotfit.data.from_numpy([1, 2])


def test_tensors_of_numbers_have_the_shape() -> None:
    column = table_of(spotfit.data.range_tensor(3, shape=(2, 2)))["data"]
    assert column_to_numpy(column).tolist() == [[[n, n]] * 2 for n in range(3)]
    with pytest.raises(ConfigError, match="is not a shape"):
        spotfit.data.range_tensor(3, shape=(0,))


def test_a_negative_number_of_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match="number of rows is -1"):
        spotfit.data.range(-1)


@pytest.mark.parametrize("name", ["parallelism", "override_num_blocks", "concurrency"])
def test_arguments_of_scheduling_have_no_effect(name: str) -> None:
    options: Any = {name: 2}
    dataset = spotfit.data.range(3, **options)
    assert read_values(dataset) == {"id": [0, 1, 2]}
    with pytest.raises(ConfigError, match=f"Did you mean '{name}'"):
        spotfit.data.range(3, **{f"{key}s": value for key, value in options.items()})


class HuggingFaceDataset:
    """The part of `datasets.Dataset` that is used: its Arrow format."""

    def with_format(self, kind: str) -> dict[slice, pa.Table]:
        assert kind == "arrow"
        return HuggingFaceTable()


class HuggingFaceTable(dict[slice, pa.Table]):
    def __getitem__(self, rows: slice) -> pa.Table:
        assert rows == slice(None)
        return pa.table({"text": ["a", "b"]})


class IterableDataset:
    """As that of `datasets`."""


class DatasetDict(dict[str, Any]):
    """As that of `datasets`."""


def test_the_rows_of_hugging_face_are_those_of_its_arrow_format() -> None:
    assert read_values(spotfit.data.from_huggingface(HuggingFaceDataset())) == {"text": ["a", "b"]}


@pytest.mark.parametrize(
    ("dataset", "reason"),
    [
        (IterableDataset(), "cannot be resumed at a row"),
        (DatasetDict(train=1, test=2), "a dictionary of datasets: train, test"),
        ("imdb", "has a str"),
    ],
)
def test_other_datasets_of_hugging_face_are_refused(dataset: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        spotfit.data.from_huggingface(dataset)


def test_an_iterable_torch_dataset_is_refused() -> None:
    with pytest.raises(ConfigError, match="without __len__ and __getitem__"):
        spotfit.data.from_torch(iter([1]))
    assert read_values(spotfit.data.from_torch([5, 6])) == {"item": [5, 6]}
