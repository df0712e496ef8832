"""Preprocessors as JSON: class, parameters, statistics. Pickles only where there is code.

A preprocessor lies in checkpoints, which other people may write. Reading JSON runs none of their
code; a pickle is read only if the caller trusts it.
"""

from __future__ import annotations

import importlib
import json
from typing import Any, TypeAlias

from spotfit.code.function_pickle import pickle_object, unpickle
from spotfit.core.errors import ConfigError
from spotfit.data.preprocessors.json_values import decode_value, encode_value

# A preprocessor; its class is above this module.
AnyPreprocessor: TypeAlias = Any

FORMAT_VERSION = 1
_PACKAGE = "spotfit.data.preprocessors"
_PICKLE_PREFIX = b"CPKL:"
"""The prefix of Ray's pickles, of which only the prefix is the same."""


def dump(preprocessor: AnyPreprocessor) -> str:
    """Return the JSON of a preprocessor. Raises `ConfigError` if it has code."""
    return json.dumps(to_fields(preprocessor))


def load(text: str | bytes) -> AnyPreprocessor:
    """Return the preprocessor of JSON. Raises `ConfigError` if it cannot be read."""
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"The stored preprocessor is not JSON: {error}.", do="Pass the result of to_json()."
        ) from error
    return from_fields(fields)


def to_fields(preprocessor: AnyPreprocessor) -> dict[str, Any]:
    """Return the object whose text is the JSON of a preprocessor."""
    name = type(preprocessor).__name__
    if not is_own_class(type(preprocessor)):
        raise ConfigError(
            f"{name} is a class of your own: JSON cannot contain its code.",
            do="Use serialize(), whose result must be trusted by its reader.",
        )
    parameters = {key: _encode(value) for key, value in preprocessor.parameters().items()}
    return {
        "spotfit_preprocessor": FORMAT_VERSION,
        "class": name,
        "parameters": parameters,
        "statistics": encode_value(preprocessor.stats_),
        "fitted": bool(preprocessor._fitted),  # noqa: SLF001 - the stored form of the class
    }


def from_fields(fields: Any) -> AnyPreprocessor:
    """Return the preprocessor of such an object. Raises `ConfigError` if it cannot be read."""
    version = fields.get("spotfit_preprocessor") if isinstance(fields, dict) else None
    if version != FORMAT_VERSION:
        raise ConfigError(
            f"The stored preprocessor has the format {version!r}; this version of spotfit reads "
            f"{FORMAT_VERSION}.",
            do="Read it with the version of spotfit that wrote it, or a later one.",
        )
    create: Any = _class_named(fields.get("class"))
    try:
        parameters = {name: _decode(value) for name, value in fields["parameters"].items()}
        preprocessor = create.from_parameters(parameters)
        preprocessor.stats_ = dict(decode_value(fields["statistics"]).items())
        preprocessor._fitted = fields["fitted"]  # noqa: SLF001
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"The stored {create.__name__} is damaged: {type(error).__name__}: {error}.",
            do="Fit the preprocessor again, or restore it from another checkpoint.",
        ) from error
    return preprocessor


def serialize(preprocessor: AnyPreprocessor) -> str | bytes:
    """Return JSON; a pickle for a preprocessor with code."""
    try:
        return dump(preprocessor)
    except ConfigError:
        return _PICKLE_PREFIX + pickle_preprocessor(preprocessor)


def deserialize(serialized: str | bytes, *, trusted: bool) -> AnyPreprocessor:
    """Return the preprocessor of `serialize`; `ConfigError` for a pickle that is not trusted."""
    if isinstance(serialized, str) or not serialized.startswith(_PICKLE_PREFIX):
        return load(serialized)
    return unpickle_preprocessor(serialized[len(_PICKLE_PREFIX) :], trusted=trusted)


def pickle_preprocessor(preprocessor: AnyPreprocessor) -> bytes:
    """Return a pickle with the code of `__main__` in it. Raises `ShippingError`."""
    parts = {"preprocessor": preprocessor}
    return pickle_object(preprocessor, labeled_parts=parts, by_value_modules=()).body


def unpickle_preprocessor(body: bytes, *, trusted: bool) -> AnyPreprocessor:
    """Return the preprocessor of a pickle. Raises `ConfigError` unless it is trusted."""
    if not trusted:
        raise ConfigError(
            "The stored preprocessor is a pickle, which runs code when it is read.",
            do="If you trust who wrote it, pass trusted=True.",
        )
    return unpickle(body, description="preprocessor")


def is_own_class(kind: type) -> bool:
    """Whether a class is one of this package, so that JSON needs only its name."""
    return kind.__module__.startswith(f"{_PACKAGE}.")


def _class_named(name: Any) -> Any:
    package = importlib.import_module(_PACKAGE)
    found = getattr(package, name) if name in package.__all__ else None
    if not isinstance(found, type):
        raise ConfigError(
            f"The stored preprocessor is of an unknown class {name!r}.",
            do="Read it with the version of spotfit that wrote it, or a later one.",
        )
    return found


# Parameters of a chain are preprocessors.


def _encode(value: Any) -> Any:
    if is_own_class(type(value)):
        return {"$preprocessor": to_fields(value)}
    return encode_value(value)


def _decode(encoded: Any) -> Any:
    if isinstance(encoded, dict) and "$preprocessor" in encoded:
        return from_fields(encoded["$preprocessor"])
    return decode_value(encoded)
