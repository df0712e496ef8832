"""Base classes of collate functions."""

from __future__ import annotations

from typing import Any

import pytest

from spotfit.core.errors import ConfigTypeError
from spotfit.data.collate_fn import (
    ArrowBatchCollateFn,
    CollateFn,
    NumpyBatchCollateFn,
    PandasBatchCollateFn,
    collated_format,
)


@pytest.mark.parametrize(
    ("base", "batch_format"),
    [
        (ArrowBatchCollateFn, "pyarrow"),
        (NumpyBatchCollateFn, "numpy"),
        (PandasBatchCollateFn, "pandas"),
    ],
)
def test_an_instance_takes_the_batches_of_its_class(base: Any, batch_format: str) -> None:
    class Collate(base):  # type: ignore[misc]
        def __call__(self, batch: Any) -> Any:
            return batch

    assert collated_format(Collate()) == batch_format


@pytest.mark.parametrize("collate_fn", [None, len, lambda batch: batch])
def test_a_plain_function_takes_numpy_arrays(collate_fn: Any) -> None:
    assert collated_format(collate_fn) == "numpy"


def test_a_class_without_call_cannot_be_instantiated() -> None:
    class Collate(NumpyBatchCollateFn):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Collate()  # type: ignore[abstract]


def test_the_classes_have_one_base() -> None:
    assert {
        base.__bases__[0]
        for base in (ArrowBatchCollateFn, NumpyBatchCollateFn, PandasBatchCollateFn)
    } == {CollateFn}


@pytest.mark.parametrize("collate_fn", [1, "pad", {"a": 1}])
def test_a_value_that_cannot_be_called_is_rejected(collate_fn: Any) -> None:
    with pytest.raises(ConfigTypeError, match="cannot be called"):
        collated_format(collate_fn)
