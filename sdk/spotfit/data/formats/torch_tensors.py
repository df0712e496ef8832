"""Batches as tensors of PyTorch, on the device of the training. torch is imported on use."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from spotfit.core.errors import ConfigError, ConfigTypeError
from spotfit.data.formats.column_arrays import NumpyArray, stack_objects
from spotfit.data.schema import check_columns
from spotfit.host.plugins import require_module

if TYPE_CHECKING:
    import torch

TorchDtypes: TypeAlias = "torch.dtype | Mapping[str, torch.dtype] | None"

_UNFINISHED_BATCHES = 2
"""The next copy waits while the GPU has not reached the last but this many batches of the loop."""


class TensorConversionError(ConfigTypeError, RuntimeError):
    """A column has values that cannot become a tensor: text, times, or lists of several lengths."""


def require_torch() -> Any:
    """Import and return torch. Raises `MissingExtraError`."""
    return require_module("torch", extra="torch")


# --- conversion -----------------------------------------------------------------------------------


def to_tensors(
    batch: Mapping[str, NumpyArray], dtypes: TorchDtypes = None
) -> dict[str, torch.Tensor]:
    """Return one tensor per column, on the CPU, sharing the memory of the arrays where possible.

    `dtypes` is the type of all tensors or a dictionary by column; columns without one keep theirs.
    Lists of equal lengths become a further dimension. Raises `TensorConversionError`, and
    `ConfigError` if `dtypes` names an unknown column.
    """
    by_column = dtypes if isinstance(dtypes, Mapping) else dict.fromkeys(batch, dtypes)
    check_columns("dtypes", by_column, batch)
    return {name: to_tensor(column, by_column.get(name), name) for name, column in batch.items()}


def to_tensor(column: NumpyArray, dtype: torch.dtype | None, name: str) -> torch.Tensor:
    """Return a column as a tensor on the CPU. Raises `TensorConversionError`."""
    values = stack_objects(column)
    if values.dtype.kind not in "biufc":
        raise _conversion_error(name, values)
    tensor: torch.Tensor = require_torch().as_tensor(values, dtype=dtype)
    return tensor


def _conversion_error(name: str, values: NumpyArray) -> TensorConversionError:
    kinds = {"M": "times", "m": "durations", "U": "text", "S": "bytes"}
    content = kinds.get(values.dtype.kind, "lists of different lengths, null values or objects")
    return TensorConversionError(
        f"The column {name!r} cannot become a tensor: it contains {content}.",
        do="Drop it with drop_columns(), convert it with map_batches(), or pass a collate_fn= that "
        "pads lists and encodes text.",
    )


# --- devices --------------------------------------------------------------------------------------


def concrete_device(device: Any) -> torch.device:
    """Return a `torch.device`; "cuda" as the current GPU, which is another one in other threads."""
    library = require_torch()
    resolved: torch.device = library.device(device)
    if str(resolved) == "cuda" and library.cuda.is_available():
        resolved = library.device("cuda", library.cuda.current_device())
    return resolved


def pin_tensors(batch: Any) -> Any:
    """Return the batch with its tensors in page-locked memory, if it consists of tensors only."""
    return map_tensors(batch, lambda tensor: tensor.pin_memory())


class DeviceCopy:
    """Copies batches to a device in the thread that prepares them.

    On a GPU the copies are made on a stream of their own, beside the computation. `hand_over` lets
    the training's stream wait for them. A loop may be many steps ahead of its GPU, which uses the
    batches of all these steps: a copy begins when the GPU is at most a few batches behind.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch = require_torch()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._handed_over: deque[Any] = deque()
        """Events of the training's stream, one per batch, which precede the use of the batch."""

    def start(self, batch: Any) -> tuple[Any, Any]:
        """Begin to copy; return the batch and the event of its completion, None without a GPU.

        Only a tensor, and lists, tuples and dictionaries of tensors, are copied. Sequences of
        tensors within them are joined along the first dimension, as in Ray Data.
        """
        if self._stream is None:
            return self._move(batch), None
        while len(self._handed_over) > _UNFINISHED_BATCHES:
            self._handed_over.popleft().synchronize()
        torch = require_torch()
        with torch.cuda.stream(self._stream):
            return self._move(batch), self._stream.record_event()

    def _move(self, batch: Any) -> Any:
        with require_torch().no_grad():
            return map_tensors(
                _join_sequences(batch), lambda tensor: tensor.to(self._device, non_blocking=True)
            )

    def hand_over(self, copied: tuple[Any, Any]) -> Any:
        """Return the batch for use on the current stream of the calling thread."""
        batch, event = copied
        if event is None:
            return batch
        library = require_torch()
        stream = library.cuda.current_stream(self._device)
        # Blocking: the thread that waits for it leaves the processor to others.
        self._handed_over.append(stream.record_event(library.cuda.Event(blocking=True)))
        stream.wait_event(event)

        def record(tensor: torch.Tensor) -> torch.Tensor:
            # Keeps the allocator from reusing the memory while the training's stream reads it.
            tensor.record_stream(stream)
            return tensor

        return map_tensors(batch, record)


def map_tensors(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the batch with `change` applied to its tensors, if it is a collection of tensors.

    That is a tensor, or lists, tuples and dictionaries of tensors, or of such lists and tuples.
    Other values are returned unchanged, also if they contain tensors among other objects.
    """
    return _map(batch, change) if _is_collection(batch) else batch


def _map(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(batch, Mapping):
        return {name: _map(value, change) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return _like(batch, [_map(value, change) for value in batch])
    return change(batch)


def _like(batch: Any, values: list[Any]) -> Any:
    return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)


def _is_collection(batch: Any) -> bool:
    values = batch.values() if isinstance(batch, Mapping) else batch
    if not isinstance(batch, Mapping | list | tuple):
        return _is_tensor(batch)
    return all(_is_tensor(value) for value in values) or all(map(_is_sequence, values))


def _is_sequence(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(_is_tensor(one) for one in value)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, require_torch().Tensor)


def _join_sequences(batch: Any) -> Any:
    """Join sequences of tensors within a collection. Raises `ConfigError` for different shapes."""
    if not _is_collection(batch) or _is_tensor(batch):
        return batch
    if isinstance(batch, Mapping):
        return {name: _join(value) for name, value in batch.items()}
    return _like(batch, [_join(value) for value in batch])


def _join(value: Any) -> Any:
    if _is_tensor(value) or not value:
        return value
    kinds = {(tensor.dtype, tuple(tensor.shape[1:])) for tensor in value}
    if len(kinds) > 1:
        raise ConfigError(
            f"collate_fn returned a sequence of tensors within a collection: such tensors are "
            f"joined along the first dimension, but have different types or shapes: "
            f"{sorted(map(str, kinds))}.",
            do="Pad them to one shape, or return an object of your own class, which is not moved.",
        )
    return require_torch().cat(list(value))
