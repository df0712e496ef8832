"""Batches keep their rows and shapes through every file format."""

from __future__ import annotations

import io
from typing import Any

import pytest

from spotfit.core.errors import ConfigError, IntegrityError
from spotfit.prediction import batches
from spotfit.prediction.batches import FileFormat

np = pytest.importorskip("numpy")
pd = pytest.importorskip("pandas")
pytest.importorskip("pyarrow")


def columns() -> dict[str, Any]:
    return {
        "x": np.arange(5.0),
        "n": np.arange(5),
        "image": np.arange(60, dtype=np.float32).reshape(5, 4, 3),
        "text": np.array(["a", "b", "", "d", "é"]),
    }


@pytest.mark.parametrize("file_format", ["parquet", "npz", "jsonl"])
def test_numpy_columns_are_read_as_they_were_written(file_format: FileFormat) -> None:
    body = batches.encode_file(columns(), file_format)
    read = batches.decode_file(body, file_format, "numpy")
    assert list(read) == list(columns())
    assert read["text"].tolist() == columns()["text"].tolist()
    assert np.array_equal(read["x"], columns()["x"])
    if file_format != "jsonl":  # JSON has no shapes and types
        assert (read["image"].shape, read["image"].dtype) == ((5, 4, 3), np.float32)
        assert np.array_equal(read["image"], columns()["image"])


@pytest.mark.parametrize("file_format", ["parquet", "jsonl"])
def test_a_dataframe_is_read_as_it_was_written(file_format: FileFormat) -> None:
    frame = pd.DataFrame({"x": [1.5, 2.5], "text": ["a", None], "n": [1, 2]})
    body = batches.encode_file(frame, file_format)
    pd.testing.assert_frame_equal(batches.decode_file(body, file_format, "pandas"), frame)


@pytest.mark.parametrize("file_format", ["parquet", "npz", "jsonl"])
def test_equal_batches_give_equal_bytes(file_format: FileFormat) -> None:
    first, second = (batches.encode_file(columns(), file_format) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("file_format", ["parquet", "npz", "jsonl"])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_rows_of_a_file_are_counted(file_format: FileFormat, rows: int) -> None:
    batch = batches.slice_rows(columns(), 0, rows)
    assert batches.count_rows(batches.encode_file(batch, file_format), file_format) == rows


def test_csv_and_json_lines_are_read() -> None:
    for body, file_format in (
        (b"x,y\n1,2\n3,4\n", "csv"),
        (b'{"x":1,"y":2}\n{"x":3,"y":4}', "jsonl"),
    ):
        read = batches.decode_file(body, file_format, "numpy")  # type: ignore[arg-type]
        assert {name: column.tolist() for name, column in read.items()} == {
            "x": [1, 3],
            "y": [2, 4],
        }


def test_nested_lists_of_equal_lengths_are_one_array() -> None:
    read = batches.decode_file(b'{"image": [[1, 2], [3, 4], [5, 6]]}\n' * 2, "jsonl", "numpy")
    assert (read["image"].shape, read["image"].dtype) == ((2, 3, 2), np.int64)


def test_a_numpy_array_becomes_the_column_data() -> None:
    sink = io.BytesIO()
    np.save(sink, np.eye(3))
    assert np.array_equal(batches.decode_file(sink.getvalue(), "npy", "numpy")["data"], np.eye(3))


def test_a_numpy_file_with_pickled_objects_is_refused() -> None:
    sink = io.BytesIO()
    np.save(sink, np.array([{}], dtype=object))
    with pytest.raises(IntegrityError, match="not npy"):
        batches.decode_file(sink.getvalue(), "npy", "numpy")


@pytest.mark.parametrize("file_format", ["parquet", "csv", "npz", "npy"])
def test_a_file_of_another_format_is_refused(file_format: FileFormat) -> None:
    with pytest.raises(IntegrityError, match=f"is not {file_format}"):
        batches.decode_file(b"\x00 no such format", file_format, "numpy")


def test_objects_cannot_be_written_to_npz() -> None:
    with pytest.raises(ConfigError, match="cannot be written as npz"):
        batches.encode_file({"x": np.array([{}], dtype=object)}, "npz")


def test_npz_columns_may_have_names_of_arguments_of_numpy() -> None:
    body = batches.encode_file({"file": np.ones(2), "allow_pickle": np.ones(2)}, "npz")
    assert list(batches.decode_file(body, "npz", "numpy")) == ["file", "allow_pickle"]


def test_times_and_missing_numbers_are_valid_json() -> None:
    frame = pd.DataFrame({"t": pd.to_datetime(["2026-01-31"]), "x": [float("nan")]})
    assert batches.encode_file(frame, "jsonl") == b'{"t":"2026-01-31","x":null}\n'


def test_batches_have_at_most_their_size() -> None:
    parts = list(batches.split_rows(columns(), 2))
    assert [batches.row_count(part) for part in parts] == [2, 2, 1]
    joined = batches.concatenate(parts)
    assert all(np.array_equal(joined[name], column) for name, column in columns().items())


@pytest.mark.parametrize("rows", [0, 5])
def test_a_shard_without_a_batch_size_is_one_batch(rows: int) -> None:
    [part] = batches.split_rows(batches.slice_rows(columns(), 0, rows), None)
    assert batches.row_count(part) == rows


def test_batches_with_different_columns_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"columns \['b'\] after \['a'\]"):
        batches.concatenate([{"a": np.ones(1)}, {"b": np.ones(1)}])


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(ConfigError, match="different lengths"):
        batches.check_batch({"a": np.ones(1), "b": np.ones(2)}, source="The predictor")


@pytest.mark.parametrize("value", [None, 3, "rows", {}])
def test_other_values_are_no_batches(value: Any) -> None:
    with pytest.raises(ConfigError, match="not a batch"):
        batches.check_batch(value, source="The predictor")


def test_formats_are_converted_with_their_shapes() -> None:
    frame = batches.to_batch_format(columns(), "pandas")
    assert isinstance(frame, pd.DataFrame)
    back = batches.to_batch_format(frame, "numpy")
    assert back["image"].shape == (5, 4, 3)


def test_columns_are_selected_from_both_formats() -> None:
    for batch_format in ("numpy", "pandas"):
        batch = batches.to_batch_format(columns(), batch_format)
        assert list(batches.select_columns(batch, ["n", "x"], argument="a=")) == ["n", "x"]
        with pytest.raises(ConfigError, match="a= names z"):
            batches.select_columns(batch, ["z"], argument="a=")


def test_an_unknown_suffix_is_refused() -> None:
    assert batches.file_format("a/b.PARQUET") == "parquet"
    with pytest.raises(ConfigError, match=r"'\.parq'|Did you mean"):
        batches.file_format("a.parq")
