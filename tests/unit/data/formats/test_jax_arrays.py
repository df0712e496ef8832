"""Batches as arrays of JAX, with the real one on two devices; `make jax` installs it."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from spotfit.core.errors import ConfigError
from spotfit.data import collate_fn
from spotfit.data.formats.jax_arrays import JaxBatchOptions, check_jax_batch_size, jax_converter
from tests.unit.data.batch_cases import jax_calls, numbers_table
from tests.unit.data.recorded_batches import is_as_in_ray, iterator_of

jax: Any = pytest.importorskip("jax", reason="jax is not installed; `make jax`")
DEVICES = "--xla_force_host_platform_device_count=2"
# Read when JAX first looks for devices.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}".strip()

CASES = jax_calls(collate_fn)


def test_the_tests_have_two_devices() -> None:
    assert jax.local_device_count() == 2


@pytest.mark.parametrize("name", CASES)
def test_a_case_has_the_result_of_ray(name: str) -> None:
    assert is_as_in_ray(name, iterator_of(numbers_table()), CASES[name])


def test_the_rows_are_divided_between_the_devices() -> None:
    (batch, *_) = iterator_of(numbers_table()).iter_jax_batches(batch_size=4, drop_last=True)
    shards = [shard.data.tolist() for shard in batch["id"].addressable_shards]
    assert shards == [[0, 1], [2, 3]]


def test_a_plain_function_collates() -> None:
    batches = iterator_of(numbers_table()).iter_jax_batches(
        batch_size=6, drop_last=True, collate_fn=lambda batch: {"y": 2 * batch["id"]}
    )
    assert [batch["y"].tolist() for batch in batches] == [[0, 2, 4, 6, 8, 10]]


def test_the_shares_of_a_global_batch_are_checked_when_they_are_known() -> None:
    batches = iterator_of(numbers_table()).iter_jax_batches(global_batch_size=3)
    with pytest.raises(ConfigError, match="A batch of 3 rows cannot be divided"):
        list(batches)


@pytest.mark.parametrize("batch_size", [None, 3])
def test_a_batch_size_that_cannot_be_divided_is_rejected(batch_size: int | None) -> None:
    with pytest.raises(ConfigError, match="multiple of the 2 JAX devices"):
        check_jax_batch_size(batch_size)


def test_a_column_without_padding_is_rejected_if_rows_are_missing() -> None:
    convert = jax_converter(JaxBatchOptions(batch_size=4, paddings={"a": 7}))
    assert convert({"a": np.arange(2)})["a"].tolist() == [0, 1, 7, 7]
    assert convert({"b": np.arange(4)})["b"].tolist() == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match="no value for the column 'b'"):
        convert({"a": np.arange(2), "b": np.arange(2)})


def test_an_array_without_a_name_has_the_only_dtype() -> None:
    convert = jax_converter(JaxBatchOptions(batch_size=2, dtypes={"x": "int8"}))
    assert convert(np.arange(2)).dtype == np.int8
