"""Columns of Python objects, such as the (image, label) pairs of a PyTorch dataset.

The objects are pickled. The type is not registered with Arrow: files and streams from elsewhere
that name it are read as bytes and not unpickled.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import cloudpickle
import pyarrow as pa


class PythonObjectScalar(pa.ExtensionScalar):  # type: ignore[misc]  # pyarrow is untyped
    """An object."""

    def as_py(self, **_options: Any) -> Any:
        """Return the object; None for a null value."""
        return None if self.value is None else pickle.loads(self.value.as_buffer())  # noqa: S301  # pickled by this process or a feeder


class PythonObjectType(pa.ExtensionType):  # type: ignore[misc]
    """The type of a column of pickled objects."""

    def __init__(self) -> None:
        super().__init__(pa.binary(), "spotfit.python_object")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, _storage: pa.DataType, _metadata: bytes) -> PythonObjectType:
        return cls()

    def __arrow_ext_scalar_class__(self) -> type[PythonObjectScalar]:
        return PythonObjectScalar


def object_column(objects: Sequence[Any]) -> pa.Array:
    """Return a column of these objects. Raises what their pickling raises."""
    pickles = [cloudpickle.dumps(one) for one in objects]
    return pa.ExtensionArray.from_storage(PythonObjectType(), pa.array(pickles, pa.binary()))
