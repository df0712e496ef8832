"""Columns and calls on which batches of spotfit.data are compared with those of Ray Data.

`record_ray_batches.py` runs them with Ray, `test_batches_ray.py` with spotfit; this module needs
neither.
"""

from __future__ import annotations

import datetime
import decimal
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import pyarrow as pa
import torch

Call: TypeAlias = Callable[[Any], Iterable[Any]]
"""A call of a method of a DataIterator."""

ROWS = 5
_START = datetime.datetime(2026, 1, 2, 3, 4, 5, 678901)  # noqa: DTZ001 - of no time zone
_TIMES = [_START + datetime.timedelta(days=n) for n in range(ROWS)]
_NUMBERS = (
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
)


METHODS = (
    *("iter_batches", "iter_torch_batches", "iter_tf_batches", "iter_jax_batches", "iter_rows"),
    *("to_tf", "to_torch", "materialize", "schema", "stats", "get_context"),
)
"""The methods of a DataIterator."""


def parameters(cls: type, method: str) -> dict[str, str]:
    """Return kind and default of each parameter."""
    signature = inspect.signature(getattr(cls, method))
    return {
        name: f"{one.kind.name}{'' if one.default is one.empty else f' = {one.default!r}'}"
        for name, one in signature.parameters.items()
    }


# --- columns --------------------------------------------------------------------------------------


def columns() -> dict[str, pa.Array]:
    """Return one array of `ROWS` values for each type of column."""
    numbers = {name: pa.array(np.arange(ROWS).astype(name)) for name in _NUMBERS}
    return numbers | _columns_with_nulls() | _text_and_times() | _nested_columns()


def _columns_with_nulls() -> dict[str, pa.Array]:
    return {
        "int64 with null": pa.array([0, None, 2, 3, 4], pa.int64()),
        "uint8 with null": pa.array([0, None, 2, 3, 4], pa.uint8()),
        "float32 with null": pa.array([0, None, 2, 3, 4], pa.float32()),
        "bool with null": pa.array([True, None, False, True, False]),
        "string with null": pa.array(["a", None, "", "é", "long"]),
        "binary with null": pa.array([b"a", None, b"", b"\0", b"long"]),
        "timestamp with null": pa.array([_TIMES[0], None, *_TIMES[2:]], pa.timestamp("us")),
        "list with null": pa.array([[1, 2], None, [3, 4], [5, 6], [7, 8]]),
        "list with null item": pa.array([[1, None], [1, 2], [3, 4], [5, 6], [7, 8]]),
        "null": pa.nulls(ROWS),
    }


def _text_and_times() -> dict[str, pa.Array]:
    days = [one.date() for one in _TIMES]
    times = pa.array(_TIMES, pa.timestamp("us"))
    seconds = [datetime.timedelta(seconds=n) for n in range(ROWS)]
    return {
        "bool": pa.array([True, True, False, True, False]),
        "string": pa.array(["a", "b", "", "é", "long"]),
        "large_string": pa.array(["a", "b", "", "é", "long"], pa.large_string()),
        "binary": pa.array([b"a", b"b", b"", b"\0", b"long"]),
        "fixed-size binary": pa.array([b"ab", b"cd", b"ef", b"gh", b"\0\0"], pa.binary(2)),
        "dictionary": pa.array(["a", "b", "a", "b", "a"]).dictionary_encode(),
        "timestamp s": times.cast(pa.timestamp("s"), safe=False),
        "timestamp us": times,
        "timestamp ns UTC": pa.array(_TIMES, pa.timestamp("ns", "UTC")),
        "date32": pa.array(days, pa.date32()),
        "date64": pa.array(days, pa.date64()),
        "time64": pa.array([one.time() for one in _TIMES], pa.time64("us")),
        "duration": pa.array(seconds, pa.duration("ms")),
        "decimal": pa.array([decimal.Decimal(f"{n}.25") for n in range(ROWS)]),
    }


def _nested_columns() -> dict[str, pa.Array]:
    flat = pa.array(np.arange(6 * ROWS, dtype=np.float32))
    lists = pa.FixedSizeListArray.from_arrays(flat, 6)
    tensor = pa.fixed_shape_tensor(pa.float32(), [2, 3])
    pairs = [[[n, 1], [2, 3]] for n in range(ROWS)]
    return {
        "fixed-size list": lists,
        "fixed-size list of fixed-size lists": pa.array(
            pairs, pa.list_(pa.list_(pa.int64(), 2), 2)
        ),
        "tensor": pa.ExtensionArray.from_storage(tensor, lists),
        "list of equal lengths": pa.array([[n, 1, 2] for n in range(ROWS)]),
        "list of different lengths": pa.array([[1], [2, 3], [], [4, 5], [6]]),
        "list of lists of equal lengths": pa.array(pairs),
        "list of lists of different lengths": pa.array([[[1]], [[2, 3], [4]], [], [[5]], [[6]]]),
        "list of strings": pa.array([["a"], ["b", "c"], [], ["d"], ["e"]]),
        "struct": pa.array([{"x": n, "y": str(n)} for n in range(ROWS)]),
        "map": pa.array([[("k", n)] for n in range(ROWS)], pa.map_(pa.string(), pa.int64())),
    }


def outputs() -> dict[str, Any]:
    """Return values of a column for `ROWS` rows, as functions of `map_batches` return them."""
    numbers = np.arange(ROWS)
    images = [np.full((height, 2, 3), height, np.uint8) for height in (1, 2, 1, 2, 1)]
    return {
        "array": numbers.astype(np.float32),
        "array of another byte order": numbers.astype(">i4"),
        "array of booleans": numbers % 2 == 0,
        "array of text": numbers.astype(str),
        "array of times": np.array(_TIMES, "datetime64[us]"),
        "array with dimensions": np.arange(ROWS * 6).reshape(ROWS, 2, 3),
        "array of booleans with dimensions": np.arange(ROWS * 2).reshape(ROWS, 2) > 3,
        "array of objects": np.array(["a", None, "b", "c", "d"], object),
        "array of arrays": np.array([np.zeros(2), np.ones(2), *np.zeros((3, 2))], object),
        "tensor": torch.arange(ROWS * 2).reshape(ROWS, 2),
        "series": pd.Series(numbers, index=list("abcde")),
        "list": [0, 1, 2, 3, 4],
        "list of floats": [0.5, 1, 2, 3, 4],
        "list with None": [0, None, 2, 3, 4],
        "list of NumPy numbers": list(numbers.astype(np.float32)),
        "list of text": ["a", "b", "", "é", "long"],
        "list of bytes": [b"a", b"b", b"", b"\0", b"long"],
        "list of times": _TIMES,
        "list of arrays": list(np.arange(ROWS * 2, dtype=np.float32).reshape(ROWS, 2)),
        "list of tensors": list(torch.arange(ROWS * 2).reshape(ROWS, 2)),
        "list of arrays of different shapes": [np.zeros(n, np.int16) for n in range(ROWS)],
        "list of images of different shapes": images,
        "list of lists": [[1], [2, 3], [], [4], [5]],
        "list of lists of equal lengths": [[n, 1] for n in range(ROWS)],
        "list of tuples": [(n, 1) for n in range(ROWS)],
        "list of dictionaries": [{"a": n} for n in range(ROWS)],
        "list of objects": [{"a": 1}, 2, "x", None, (1, "b")],
        "tuple": (0, 1, 2, 3, 4),
        "number": 3,
        "text": "abcde",
        "dictionary": {"a": 1},
        "None": None,
    }


def output_call(value: Any) -> Call:
    """Return the call that maps all rows of a dataset to a column, and reads it."""
    return lambda dataset: dataset.map_batches(lambda _: {"c": value}).iter_batches(batch_size=None)


def numbers_table() -> pa.Table:
    """Return the table of the calls in `argument_calls`: seven rows of an integer and a float."""
    ids = np.arange(7)
    return pa.table({"id": pa.array(ids), "x": pa.array(ids.astype(np.float32) / 2)})


# --- calls ----------------------------------------------------------------------------------------


def column_calls() -> dict[str, Call]:
    """Return the calls for each column: the formats of batches."""
    return {
        "numpy": lambda it: it.iter_batches(batch_size=3),
        "pandas": lambda it: it.iter_batches(batch_size=3, batch_format="pandas"),
        "pyarrow": lambda it: it.iter_batches(batch_size=3, batch_format="pyarrow"),
        "torch": lambda it: it.iter_torch_batches(batch_size=3),
        "torch float32": lambda it: it.iter_torch_batches(batch_size=3, dtypes=torch.float32),
        "rows": lambda it: it.iter_rows(),
    }


def argument_calls(collate_fn: ModuleType) -> dict[str, Call]:
    """Return calls with other arguments, for `numbers_table`.

    `collate_fn` is the module of the base classes of collate functions.
    """
    calls = _size_calls() | _shuffle_calls() | _dtype_calls() | _collate_calls(collate_fn)
    return calls | _to_torch_calls()


def _size_calls() -> dict[str, Call]:
    return {
        "default sizes": lambda it: it.iter_batches(),
        "batch_size=None": lambda it: it.iter_batches(batch_size=None),
        "batch_size=0": lambda it: it.iter_batches(batch_size=0),
        "batch_size=-1": lambda it: it.iter_batches(batch_size=-1),
        "batch_size of all rows": lambda it: it.iter_batches(batch_size=7, drop_last=True),
        "drop_last": lambda it: it.iter_batches(batch_size=3, drop_last=True),
        "drop_last of all": lambda it: it.iter_batches(batch_size=8, drop_last=True),
        "prefetch_batches=0": lambda it: it.iter_batches(batch_size=4, prefetch_batches=0),
        "prefetch_batches=9": lambda it: it.iter_batches(batch_size=4, prefetch_batches=9),
        "prefetch_batches=-1": lambda it: it.iter_batches(batch_size=4, prefetch_batches=-1),
        "batch_format=None": lambda it: it.iter_batches(batch_format=None),
        "batch_format of another name": lambda it: it.iter_batches(batch_format="polars"),
        "two passes": lambda it: _twice(it.iter_batches(batch_size=4)),
        "two passes of torch": lambda it: _twice(it.iter_torch_batches(batch_size=4)),
        "torch drop_last": lambda it: it.iter_torch_batches(batch_size=4, drop_last=True),
        "torch batch_size=None": lambda it: it.iter_torch_batches(batch_size=None),
    }


def _twice(batches: Iterable[Any]) -> Iterable[Any]:
    return [*batches, *batches]


def _shuffle_calls() -> dict[str, Call]:
    def ids(it: Any, **arguments: Any) -> list[list[int]]:
        batches = [batch["id"].tolist() for batch in it.iter_batches(**arguments)]
        return [[len(batch) for batch in batches], sorted(itertools.chain(*batches))]

    return {
        "local shuffle": lambda it: ids(it, batch_size=3, local_shuffle_buffer_size=6),
        "local shuffle of a batch": lambda it: ids(it, batch_size=3, local_shuffle_buffer_size=3),
        "local shuffle, small buffer": lambda it: ids(
            it, batch_size=3, local_shuffle_buffer_size=2
        ),
        "local shuffle, drop_last": lambda it: it.iter_batches(
            batch_size=8, local_shuffle_buffer_size=9, drop_last=True
        ),
        "local shuffle, batch_size=None": lambda it: ids(
            it, batch_size=None, local_shuffle_buffer_size=6
        ),
    }


def _dtype_calls() -> dict[str, Call]:
    def call(**arguments: Any) -> Call:
        return lambda it: it.iter_torch_batches(batch_size=4, **arguments)

    return {
        "one dtype": call(dtypes=torch.float64),
        "dtypes by column": call(dtypes={"id": torch.int32, "x": torch.float16}),
        "dtypes of some columns": call(dtypes={"x": torch.float16}),
        "dtypes of an unknown column": call(
            dtypes={"id": torch.int32, "x": torch.float16, "y": torch.int8}
        ),
        "device": call(device="cpu"),
        "device object": call(device=torch.device("cpu")),
        "unknown device": call(device="abacus"),
        "pin_memory": call(pin_memory=True),
    }


class Custom:
    """A return value of a collate function that is no collection of tensors."""


def _collate_calls(base: ModuleType) -> dict[str, Call]:
    def call(collate_fn: Any, **arguments: Any) -> Call:
        return lambda it: it.iter_torch_batches(batch_size=4, collate_fn=collate_fn, **arguments)

    def tensor(batch: Mapping[str, Any]) -> torch.Tensor:
        return torch.as_tensor(np.array(batch["id"]))

    def fail(_batch: Any) -> None:
        raise LookupError("of the user")

    def describe_input(batch: Any) -> Any:
        return describe(batch)

    calls = {
        "collate_fn returns a tensor": tensor,
        "collate_fn returns a list": lambda batch: [tensor(batch), tensor(batch)],
        "collate_fn returns a tuple": lambda batch: (tensor(batch), tensor(batch)),
        "collate_fn returns a dictionary": lambda batch: {"a": tensor(batch)},
        "collate_fn returns lists in a dictionary": lambda batch: {"a": [tensor(batch)] * 2},
        "collate_fn returns lists in a tuple": lambda batch: ([tensor(batch)] * 2, [tensor(batch)]),
        "collate_fn returns dictionaries in a list": lambda batch: [{"a": tensor(batch)}],
        "collate_fn returns other objects": lambda batch: {"a": tensor(batch), "n": 1},
        "collate_fn returns an object": lambda batch: Custom(),
        "collate_fn returns None": lambda batch: None,
        "collate_fn fails": fail,
        "collate_fn takes": describe_input,
        "collate_fn is no function": 1,
    }
    named = {name: call(function) for name, function in calls.items()}
    named["collate_fn and dtypes"] = call(tensor, dtypes=torch.int32)
    for name in ("ArrowBatchCollateFn", "NumpyBatchCollateFn", "PandasBatchCollateFn"):
        derived = type(name, (getattr(base, name),), {"__call__": lambda _self, b: describe(b)})
        named[f"{name} takes"] = call(derived())
    return named


def _to_torch_calls() -> dict[str, Call]:
    def call(**arguments: Any) -> Call:
        return lambda it: it.to_torch(batch_size=4, **arguments)

    groups = {"a": ["x"], "b": ["id", "x"]}
    lists = list(groups.values())
    half = torch.float16
    return {
        "to_torch": call(),
        "to_torch of a label": call(label_column="id"),
        "to_torch without unsqueeze": call(
            label_column="id", unsqueeze_label_tensor=False, unsqueeze_feature_tensors=False
        ),
        "to_torch of columns": call(feature_columns=["x", "id"], feature_column_dtypes=half),
        "to_torch of no columns": call(feature_columns=[], label_column="id"),
        "to_torch of lists": call(feature_columns=lists, feature_column_dtypes=half),
        "to_torch of lists, dtypes": call(
            feature_columns=lists, feature_column_dtypes=[half, torch.float64]
        ),
        "to_torch of a dictionary": call(feature_columns=groups, label_column_dtype=half),
        "to_torch of a dictionary, dtypes": call(
            feature_columns=groups, feature_column_dtypes={"a": half, "b": torch.float64}
        ),
        "to_torch, another structure of dtypes": call(
            feature_columns=groups, feature_column_dtypes=[half, half]
        ),
        "to_torch, other keys of dtypes": call(
            feature_columns=groups, feature_column_dtypes={"a": half}
        ),
        "to_torch, too few dtypes": call(feature_columns=lists, feature_column_dtypes=[half]),
        "to_torch, dtypes of one list": call(
            feature_columns=["x", "id"], feature_column_dtypes=[half, half]
        ),
        "to_torch of an empty list": call(
            feature_columns=[[], ["x"]], feature_column_dtypes=[half] * 2
        ),
        "to_torch of an unknown column": call(feature_columns=["y"]),
        "to_torch of an unknown label": call(label_column="y"),
    }


def tensorflow_calls() -> dict[str, Call]:
    """Return calls of `to_tf`, for `tensorflow_table`."""
    import tensorflow as tf

    return {
        "to_tf": lambda it: _with_spec(it.to_tf("x", "id", batch_size=3)),
        "to_tf of lists": lambda it: _with_spec(
            it.to_tf(["x", "t"], ["id"], additional_columns="id", batch_size=3)
        ),
        "to_tf of a ragged column": lambda it: _with_spec(it.to_tf("l", "id", batch_size=3)),
        "to_tf of an unknown column": lambda it: it.to_tf("y", "id"),
        "to_tf with specs": lambda it: _with_spec(
            it.to_tf(
                "x",
                "id",
                batch_size=3,
                feature_type_spec=tf.TensorSpec((None,), tf.float64),
                label_type_spec=tf.TensorSpec((None,), tf.int32),
            )
        ),
    }


def tensorflow_column_calls() -> dict[str, Call]:
    """Return calls of `iter_tf_batches`, for each column of `columns`."""
    import tensorflow as tf

    return {
        "tf": lambda it: it.iter_tf_batches(batch_size=3),
        "tf float32": lambda it: it.iter_tf_batches(batch_size=3, dtypes=tf.float32),
        "tf dtypes": lambda it: it.iter_tf_batches(batch_size=3, dtypes={"c": tf.float32}),
    }


def _with_spec(dataset: Any) -> list[Any]:
    return [str(dataset.element_spec), *dataset]


def jax_calls(collate_fn: ModuleType) -> dict[str, Call]:
    """Return calls of `iter_jax_batches`, for `numbers_table` and two devices."""

    def call(**arguments: Any) -> Call:
        return lambda it: it.iter_jax_batches(**({"batch_size": 4} | arguments))

    derived: Any = type(
        "Collate", (collate_fn.NumpyBatchCollateFn,), {"__call__": lambda _self, batch: batch["x"]}
    )
    return {
        "jax": call(drop_last=True),
        "jax, last batch not divisible": call(),
        "jax, batch_size not divisible": call(batch_size=3),
        "jax, batch_size=0": call(batch_size=0),
        "jax, paddings": call(paddings=-1),
        "jax, paddings by column": call(paddings={"id": -1, "x": 0.5}),
        "jax, one dtype": call(drop_last=True, dtypes="float16"),
        "jax, dtypes by column": call(drop_last=True, dtypes={"id": "int8", "x": "float16"}),
        "jax, collate_fn": call(drop_last=True, collate_fn=derived()),
        "jax, synchronize_batches": call(drop_last=True, synchronize_batches=True),
    }


def tensorflow_table() -> pa.Table:
    """Return seven rows of numbers, tensors and lists of different lengths."""
    tensors = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(14, dtype=np.float32)), 2)
    kind = pa.fixed_shape_tensor(pa.float32(), [2])
    table = numbers_table()
    table = table.append_column("t", pa.ExtensionArray.from_storage(kind, tensors))
    return table.append_column("l", pa.array([list(range(n)) for n in range(7)]))


# --- results --------------------------------------------------------------------------------------


def result_of(call: Call, iterator: Any) -> Any:
    """Return a description of what the call returns, or of its error, in types of JSON."""
    try:
        iterable = call(iterator)
    except Exception as error:  # noqa: BLE001 - any error is a result
        return {"error of the call": built_in_classes(error)}
    try:
        return [describe(batch) for batch in iterable]
    except Exception as error:  # noqa: BLE001 - any error is a result
        return {"error of the iteration": built_in_classes(error)}


def built_in_classes(error: BaseException) -> list[str]:
    """Return the built-in classes of an exception, for which `except` clauses catch it."""
    return [cls.__name__ for cls in type(error).__mro__ if cls.__module__ == "builtins"]


def describe(value: Any) -> Any:
    """Return types, shapes and values of a batch in types of JSON."""
    if isinstance(value, np.ndarray):
        return {"array": str(value.dtype), "shape": list(value.shape), "values": _texts(value)}
    if isinstance(value, torch.Tensor):
        kind = f"{value.dtype} {value.device}"
        return {"tensor": kind, "shape": list(value.shape), "values": _texts(value.numpy())}
    if (module := type(value).__module__.partition(".")[0]) in ("tensorflow", "jaxlib", "jax"):
        return {f"{module} {value.dtype}": describe(_to_numpy(value))}
    if isinstance(value, pd.DataFrame):
        return {
            f"frame column {name}": {
                "dtype": str(value[name].dtype),
                "values": [describe(one) for one in value[name]],
            }
            for name in value.columns
        }
    if isinstance(value, pa.Table):
        types = {name: str(value.schema.field(name).type) for name in value.column_names}
        return {"table": types, "values": [repr(one) for one in value.to_pylist()]}
    if isinstance(value, Mapping):
        return {str(name): describe(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [describe(one) for one in value]}
    return f"{type(value).__name__} {'' if isinstance(value, Custom) else value!r}".strip()


def _to_numpy(value: Any) -> Any:
    return value.to_list() if hasattr(value, "to_list") else np.asarray(value)


def _texts(array: Any) -> list[Any]:
    if array.dtype == object:
        return [describe(one) for one in array]
    return [str(one) for one in array.reshape(-1)]
