"""Identity of the inputs and the code of a prediction: equal in every process for equal ones.

A job that is called again continues in its output folder only if both are those of the first call.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from io import BytesIO
from os import PathLike, fspath
from types import MethodType
from typing import Any

from spotfit.checkpoint.checkpoint_dir import Checkpoint
from spotfit.code.fingerprint import fingerprint_function, stable_repr
from spotfit.core.errors import ConfigError


def digest_of(texts: Iterable[str]) -> str:
    """Return 32 hex digits that identify the texts in their order."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:32]


def identity_of(value: Any) -> str:
    """Return a text that is equal for equal arguments of a prediction in every process.

    Functions and classes are identified by name, checkpoints and files by path, arrays and tensors
    by their elements, other objects by the hash of their pickle. Raises `ConfigError` for an
    object that cannot be pickled.
    """
    if isinstance(value, partial):
        return f"{identity_of(value.func)}({identity_of([value.args, value.keywords])})"
    if isinstance(value, Mapping):
        return identity_of([[str(key), value[key]] for key in sorted(value, key=str)])
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(identity_of, value))}]"
    if (name := _reference_identity(value)) is not None:
        return name
    if (array := _array_identity(value)) is not None:
        return array
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return stable_repr(value)
    return _pickle_identity(value)


def _reference_identity(value: Any) -> str | None:
    """Return the identity of what is never pickled by value; None for other objects."""
    if isinstance(value, Checkpoint):
        return value.path
    if isinstance(value, PathLike):
        return repr(fspath(value))
    if isinstance(value, (set, frozenset)):
        # Sorted: the iteration order of a set of strings depends on the process's hash seed.
        return f"{{{','.join(sorted(map(identity_of, value)))}}}"
    if isinstance(value, MethodType):
        return f"{identity_of(value.__self__)}.{value.__name__}"
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return _tensor_identity(value) if hasattr(value, "detach") else None


def _tensor_identity(tensor: Any) -> str | None:
    import torch

    if not isinstance(tensor, torch.Tensor):
        return None
    # Not its pickle, which has addresses. As bytes: numpy lacks types such as bfloat16.
    elements = tensor.detach().cpu().flatten().view(torch.uint8).numpy()
    return f"{tensor.dtype}{list(tensor.shape)}{_hash_bytes(elements.tobytes())}"


def _array_identity(value: Any) -> str | None:
    """Return the identity of an array or scalar of numpy or a similar library, else None."""
    if not all(hasattr(value, name) for name in ("dtype", "shape", "item", "tobytes")):
        return None
    if value.shape == () and type(item := value.item()) is not type(value):
        return identity_of(item)
    if value.dtype.hasobject:  # its bytes are addresses
        return f"{value.dtype}{list(value.shape)}{identity_of(value.tolist())}"
    return f"{value.dtype}{list(value.shape)}{_hash_bytes(value.tobytes())}"


class _IdentityPickler(pickle.Pickler):
    """Pickles equal objects to equal bytes in every process."""

    def __init__(self, file: BytesIO) -> None:
        super().__init__(file, protocol=5)
        # Without the memo, which distinguishes two equal strings from one that is used twice.
        self.fast = True

    def persistent_id(self, value: Any) -> str | None:
        # Not cloudpickle: it gives the classes of a script a random identifier in each process.
        return _reference_identity(value)


def _pickle_identity(value: Any) -> str:
    body = BytesIO()
    try:
        _IdentityPickler(body).dump(value)
    except Exception as error:  # of any type: the object's own methods are called
        raise ConfigError(
            f"An argument or input of the prediction cannot be compared with those of an earlier "
            f"call: a {type(value).__qualname__} cannot be pickled ({error}).",
            do="Pass plain data, such as a file name, from which the function or class creates it.",
        ) from error
    return f"{type(value).__qualname__}:{_hash_bytes(body.getvalue())}"


def _hash_bytes(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def code_fingerprint(*definitions: Any) -> str:
    """Return a fingerprint of the code of functions and of the methods of classes."""
    return digest_of(text for one in definitions for text in _code_texts(one))


def _code_texts(definition: Any) -> Iterator[str]:
    if isinstance(definition, partial):
        yield from _code_texts(definition.func)
    elif isinstance(definition, type):
        for name in sorted(vars(definition)):
            if callable(vars(definition)[name]):
                yield fingerprint_function(vars(definition)[name])
    elif callable(definition):
        yield fingerprint_function(definition)
