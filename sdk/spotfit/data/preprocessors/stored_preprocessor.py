"""The preprocessor in the metadata of a checkpoint, so that predictors find it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spotfit.core.errors import ConfigError
from spotfit.data.preprocessors import preprocessor_json
from spotfit.data.preprocessors.preprocessor_base import Preprocessor

_JSON_KEY = "preprocessor"
_PICKLE_KEY = "preprocessor_pkl"
"""The key of Ray, and of `FrameworkCheckpoint`."""


def checkpoint_metadata(preprocessor: Preprocessor) -> dict[str, Any]:
    """Return the metadata for `Checkpoint.update_metadata` that contains a preprocessor.

    It is JSON; a preprocessor with code is pickled, in hexadecimal digits. Raises `ShippingError`
    if its code cannot be pickled.
    """
    try:
        return {_JSON_KEY: preprocessor_json.to_fields(preprocessor), _PICKLE_KEY: None}
    except ConfigError:
        body = preprocessor_json.pickle_preprocessor(preprocessor)
        return {_JSON_KEY: None, _PICKLE_KEY: body.hex()}


def preprocessor_of_metadata(
    metadata: Mapping[str, Any], *, trusted: bool = False
) -> Preprocessor | None:
    """Return the preprocessor of a checkpoint's metadata, or None if it has none.

    A pickle runs code when it is read: it is refused (`ConfigError`) unless `trusted`. Raises
    `ConfigError` also if the metadata is damaged or of a later version.
    """
    found: Preprocessor | None = None
    if (fields := metadata.get(_JSON_KEY)) is not None:
        found = preprocessor_json.from_fields(fields)
    elif (encoded := metadata.get(_PICKLE_KEY)) is not None:
        found = preprocessor_json.unpickle_preprocessor(bytes.fromhex(encoded), trusted=trusted)
    return found
