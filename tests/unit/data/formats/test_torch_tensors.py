"""Batches as tensors of PyTorch."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from spotfit.core.errors import ConfigError
from spotfit.data.formats.column_arrays import object_array
from spotfit.data.formats.torch_tensors import (
    DeviceCopy,
    TensorConversionError,
    concrete_device,
    map_tensors,
    pin_tensors,
    to_tensor,
    to_tensors,
)

TIMES = np.array(["2026-01-02"], "datetime64[s]")


class Pair(NamedTuple):
    first: Any
    second: Any


def tensor(*values: int) -> torch.Tensor:
    return torch.tensor(values)


# --- conversion -----------------------------------------------------------------------------------


def test_a_tensor_shares_the_memory_of_its_array() -> None:
    array = np.arange(3)
    converted = to_tensor(array, None, "x")
    array[0] = 7
    assert converted.tolist() == [7, 1, 2]


def test_lists_of_equal_lengths_are_one_tensor() -> None:
    converted = to_tensor(object_array([np.arange(2), np.arange(2)]), None, "x")
    assert converted.tolist() == [[0, 1], [0, 1]]


def test_one_dtype_is_that_of_all_columns() -> None:
    converted = to_tensors({"a": np.arange(2), "b": np.ones(2)}, torch.float16)
    assert {one.dtype for one in converted.values()} == {torch.float16}


def test_columns_without_a_dtype_keep_their_type() -> None:
    converted = to_tensors({"a": np.arange(2), "b": np.ones(2)}, {"b": torch.float32})
    assert [one.dtype for one in converted.values()] == [torch.int64, torch.float32]


def test_a_misspelled_column_of_dtypes_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'label'"):
        to_tensors({"label": np.arange(2)}, {"labels": torch.float32})


@pytest.mark.parametrize(
    ("values", "content"),
    [
        (TIMES, "times"),
        (TIMES - TIMES, "durations"),
        (object_array(["a"]), "text"),
        (object_array([b"a"]), "bytes"),
        (object_array([np.arange(1), np.arange(2)]), "lists of different lengths"),
        (object_array([True, None]), "null values"),
    ],
)
def test_the_error_of_a_column_names_it_and_its_content(values: Any, content: str) -> None:
    with pytest.raises(TensorConversionError, match=f"column 'x' .*{content}"):
        to_tensor(values, None, "x")


@pytest.mark.parametrize("kind", [RuntimeError, TypeError, ValueError])
def test_the_error_is_caught_as_those_of_ray(kind: type[Exception]) -> None:
    assert issubclass(TensorConversionError, kind)


# --- devices --------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_a_device_is_a_name_or_an_object(device: Any) -> None:
    assert concrete_device(device) == torch.device("cpu")


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (tensor(1), tensor(-1)),
        ([tensor(1), tensor(2)], [tensor(-1), tensor(-2)]),
        ((tensor(1),), (tensor(-1),)),
        (Pair(tensor(1), tensor(2)), Pair(tensor(-1), tensor(-2))),
        ({"a": tensor(1)}, {"a": tensor(-1)}),
        ({"a": [tensor(1)], "b": (tensor(2),)}, {"a": [tensor(-1)], "b": (tensor(-2),)}),
        ([[tensor(1)], [tensor(2)]], [[tensor(-1)], [tensor(-2)]]),
    ],
    ids=repr,
)
def test_tensors_of_a_collection_are_changed(batch: Any, expected: Any) -> None:
    changed = map_tensors(batch, torch.neg)
    assert type(changed) is type(batch)
    assert repr(changed) == repr(expected)


@pytest.mark.parametrize(
    "batch", [None, 3, "text", {"a": tensor(1), "n": 2}, [tensor(1), None], [{"a": tensor(1)}]]
)
def test_a_batch_with_other_objects_is_not_changed(batch: Any) -> None:
    assert map_tensors(batch, torch.neg) is batch


def test_a_batch_is_returned_without_an_event_on_the_cpu() -> None:
    copy = DeviceCopy(torch.device("cpu"))
    started = copy.start({"a": tensor(1)})
    assert repr(copy.hand_over(started)) == repr({"a": tensor(1)})
    assert started[1] is None


def test_a_batch_is_moved_to_the_device() -> None:
    copy = DeviceCopy(torch.device("meta"))
    batch = copy.hand_over(copy.start([tensor(1), tensor(2)]))
    assert [one.device.type for one in batch] == ["meta", "meta"]


def test_the_copy_has_no_history_of_gradients() -> None:
    copy = DeviceCopy(torch.device("meta"))
    batch, _ = copy.start(torch.ones(2, requires_grad=True))
    assert not batch.requires_grad


def test_sequences_within_a_collection_are_joined() -> None:
    batch, _ = DeviceCopy(torch.device("cpu")).start({"a": [tensor(1, 2), tensor(3)], "b": []})
    assert repr(batch) == repr({"a": tensor(1, 2, 3), "b": []})


@pytest.mark.parametrize("other", [torch.zeros(1, 2), torch.zeros(1)])
def test_sequences_of_different_tensors_are_rejected(other: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match="different types or shapes"):
        DeviceCopy(torch.device("cpu")).start({"a": [tensor(1), other]})


@pytest.mark.gpu
@pytest.mark.parametrize("is_pinned", [False, True])
def test_batches_are_complete_on_the_gpu_when_they_are_handed_over(is_pinned: bool) -> None:
    if not torch.cuda.is_available():
        pytest.skip("this machine has no GPU")
    copy = DeviceCopy(concrete_device("cuda"))
    weights = torch.ones((2_000, 2_000), device="cuda")
    pending = []
    for number in range(100):
        batch = {"x": torch.full((1_000_000,), number)}
        pending.append(copy.start(pin_tensors(batch) if is_pinned else batch))
        if len(pending) < 3:
            continue
        # The stream of the computation is busy, and the allocator reuses the batches' memory.
        weights = weights @ weights / 2_000
        received = copy.hand_over(pending.pop(0))["x"]
        assert received.sum().item() == (number - 2) * 1_000_000
        del received


def test_tensors_are_pinned_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[list[int]] = []

    def pin_memory(self: torch.Tensor) -> torch.Tensor:
        pinned.append(self.tolist())
        return self

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    pin_tensors({"a": tensor(1), "b": tensor(2)})
    pin_tensors({"a": tensor(3), "n": 4})
    assert pinned == [[1], [2]]
