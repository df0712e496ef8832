"""Batches are those of Ray Data, as record_ray_batches.py has recorded them."""

from __future__ import annotations

import pyarrow as pa
import pytest

import spotfit.data
from spotfit.data import collate_fn
from spotfit.data.iteration.data_iterator import DataIterator
from tests.unit.data.batch_cases import (
    METHODS,
    ROWS,
    Call,
    argument_calls,
    column_calls,
    columns,
    numbers_table,
    output_call,
    outputs,
    parameters,
)
from tests.unit.data.recorded_batches import RECORDED, is_as_in_ray, iterator_of

CASES: dict[str, tuple[pa.Table, Call]] = {
    f"{column}: {name}": (pa.table({"c": array}), call)
    for column, array in columns().items()
    for name, call in column_calls().items()
} | {name: (numbers_table(), call) for name, call in argument_calls(collate_fn).items()}

OUTPUTS = {f"output: {name}": value for name, value in outputs().items()}

# docs/guides/data_batches.md lists them for users.
FIXED = "rows of fixed-size lists are the rows of an array; Ray has an array of arrays"
RETURNED = "a column that a function may return, too"
RECTANGULAR = "lists of lists of equal lengths are an array with two dimensions"
EARLY = "raised by the call instead of the first iteration"
DIFFERENCES = {
    "fixed-size list: numpy": FIXED,
    "fixed-size list of fixed-size lists: numpy": FIXED,
    "fixed-size list of fixed-size lists: torch": FIXED,
    "fixed-size list of fixed-size lists: torch float32": FIXED,
    "list of lists of equal lengths: numpy": RECTANGULAR,
    "list of lists of equal lengths: torch": RECTANGULAR,
    "list of lists of equal lengths: torch float32": RECTANGULAR,
    "list of lists of different lengths: numpy": RECTANGULAR,
    "batch_size=0": "an error; Ray returns no batch",
    "batch_size=-1": "an error; Ray returns no batch",
    "prefetch_batches=-1": "an error; Ray does not prefetch",
    "local shuffle, small buffer": "an error; Ray enlarges the buffer to a batch",
    "dtypes of some columns": "other columns keep their types; Ray raises KeyError",
    "dtypes of an unknown column": "an error; Ray ignores it",
    "to_torch, dtypes of one list": EARLY,
    "output: array of another byte order": "an array of numbers; Ray has one of objects",
    "output: tuple": RETURNED,
}


@pytest.mark.parametrize("name", CASES)
def test_a_case_has_the_result_of_ray(name: str) -> None:
    table, call = CASES[name]
    assert is_as_in_ray(name, iterator_of(table), call) == (name not in DIFFERENCES)


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_returned_column_has_the_type_of_ray(name: str) -> None:
    is_equal = is_as_in_ray(name, spotfit.data.range(ROWS), output_call(OUTPUTS[name]))
    assert is_equal == (name not in DIFFERENCES)


def test_every_difference_is_a_case() -> None:
    assert set(DIFFERENCES) <= {*CASES, *OUTPUTS}


@pytest.mark.parametrize("method", METHODS)
def test_a_method_has_the_parameters_and_defaults_of_ray(method: str) -> None:
    found = parameters(DataIterator, method)
    found.pop("global_batch_size", None)
    assert found == RECORDED["methods"][method]


def test_the_recorded_ray_is_the_one_of_the_documentation() -> None:
    assert RECORDED["ray"] == "2.60.0"
